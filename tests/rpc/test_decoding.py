"""Messages of many small parts are refused before any part is made, large ones are decoded beside the event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given
from hypothesis import strategies as st

from specwire.core.invalid import MOST_NUMBERS, MOST_PARTS, InvalidParameter
from specwire.rpc.decoding import PARTS_AT_ONCE, SMALL_BYTES, check_parts, message_type, portions
from specwire.rpc.errors import readable, reading
from specwire.v1 import common_pb2, generation_pb2_grpc, verify_pb2
from specwire.v1 import generation_pb2 as pb
from tests.orchestrator.stack import PROMPT, stack
from tests.wait import raised

REQUEST = cast("Descriptor", pb.GenerateRequest.DESCRIPTOR)
MANY = MOST_PARTS + 1
HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty messages of a chat": lambda: pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage()] * MANY)
    ).SerializeToString(),
    "empty stop strings": lambda: pb.GenerateRequest(stop=[""] * MANY).SerializeToString(),
    "a map": lambda: pb.GenerateRequest(
        sampling=common_pb2.Sampling(logit_bias=dict.fromkeys(range(MANY // 3 + 1), 1.0))
    ).SerializeToString(),
    "unknown fields": lambda: b"\xf8\x7f\x00" * MANY,
    "unknown fields within": lambda: (
        pb.GenerateRequest(chat=pb.Chat()).SerializeToString()[:-1]
        + b"\x80\x80\x10"
        + b"\xf8\x7f\x00" * 87381
        + b"\x00"
    ),
    "groups": lambda: b"\xfb\x7f\xfc\x7f" * MANY,
    "a field said again and again": lambda: b"\x68\x01" * MANY,
    "numbers that are not packed": lambda: _within("tokens", b"\x08\x01" * MANY),
}


def _within(field: str, content: bytes) -> bytes:
    number, size = REQUEST.fields_by_name[field].number, len(content)
    return bytes([number << 3 | 2]) + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + content


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_has_too_many_parts_is_never_made(name: str) -> None:
    data = HOSTILE[name]()
    assert len(data) > SMALL_BYTES

    def made(_: bytes) -> object:
        raise AssertionError("was decoded")

    decode = reading(made, REQUEST)
    assert decode is not None
    await raised(InvalidParameter, readable(decode(data)), f"^request: has more than {MOST_PARTS} parts$")


@pytest.mark.parametrize("count", [MOST_NUMBERS, MOST_NUMBERS + 1])
def test_numbers_in_lists_are_bounded(count: int) -> None:
    data = pb.GenerateRequest(tokens=pb.TokenIds(ids=[300] * count)).SerializeToString()
    if count == MOST_NUMBERS:
        check_parts(data, REQUEST)
        return
    with pytest.raises(InvalidParameter, match=f"^request: has more than {MOST_NUMBERS} numbers in lists$"):
        check_parts(data, REQUEST)


def test_no_message_below_the_size_has_too_many_parts() -> None:
    """Whatever it is made of: nothing has less than a tag and a byte."""
    for data in (b"\x68\x01", b"\x62\x00", b"\xf3\x7f\xf4\x7f"):
        check_parts(data * (SMALL_BYTES // 2 // len(data)), REQUEST)


@pytest.mark.parametrize("data", [b"\x07", b"\xff" * 30, b"\x80", b"\x68\x01" * MANY + b"\x07"])
def test_what_is_no_message_is_never_made(data: bytes) -> None:
    """The decoder would make all of it up to where it breaks off."""
    with pytest.raises(InvalidParameter, match="^request: (is no message|has more)"):
        check_parts(data, REQUEST)


@given(
    st.lists(st.text(max_size=5), max_size=5),
    st.lists(st.integers(0, 2**32 - 1), max_size=20),
    st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-1, 1), max_size=4),
)
def test_parts_are_counted_as_they_are_encoded(stop: list[str], ids: list[int], bias: dict[int, float]) -> None:
    """A list of numbers is one; each entry of a map is one, with its key and its value."""
    message = pb.GenerateRequest(
        stop=stop, tokens=pb.TokenIds(ids=ids), sampling=common_pb2.Sampling(logit_bias=bias, top_k=3)
    )
    parts = len(stop) + 1 + bool(ids) + 2 + sum(1 + 2 for _ in bias)
    check_parts(message.SerializeToString(), REQUEST, parts)
    with pytest.raises(InvalidParameter):
        check_parts(message.SerializeToString(), REQUEST, parts - 1)


def test_every_method_s_request_is_known() -> None:
    for described in (pb.DESCRIPTOR, verify_pb2.DESCRIPTOR):
        for service in described.services_by_name.values():
            for method in service.methods:
                assert message_type(f"/{service.full_name}/{method.name}") is method.input_type
    assert message_type("/nobody.Knows/This") is None


async def test_a_caller_is_told_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large message is counted and decoded by another thread than the event loop's."""
    threads: set[int] = set()

    def counted(data: bytes, kind: Descriptor, most: int) -> None:
        threads.add(threading.get_ident())
        check_parts(data, kind, most)

    monkeypatch.setattr("specwire.rpc.errors.check_parts", counted)
    async with stack() as parts, grpc.aio.insecure_channel(parts.orchestrator.address) as channel:
        call = channel.unary_stream("/specwire.v1.GenerationService/Generate", None, pb.GenerateResponse.FromString)
        told = await raised(grpc.aio.AioRpcError, anext(aiter(call(HOSTILE["empty messages of a chat"]()))))
        assert told.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert told.details() == f"request: has more than {MOST_PARTS} parts"
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        text = pb.TextPart(text="word " * SMALL_BYTES)
        asking = stub.ScoreText(pb.ScoreTextRequest(prefix=text, continuations=[pb.ScoredText(parts=[text])]))
        await raised(grpc.aio.AioRpcError, asking, "prefix")
        assert len((await parts.client.complete(PROMPT, max_tokens=3)).tokens) == 3
    assert threads
    assert threading.get_ident() not in threads


Response = verify_pb2.ConnectVerifyResponse


def test_the_portions_of_a_long_message_say_the_same_and_are_short() -> None:
    verdicts = [verify_pb2.Verdict(handle=handle) for handle in range(2 * PARTS_AT_ONCE + 1)]
    timings = verify_pb2.StepTimings(sessions=7)
    message = Response(draining=True, timings=timings, verdicts=verdicts, refused=[common_pb2.Refused(handle=3)])
    taken = list(portions(message, ("refused", "verdicts")))
    assert [(len(each.refused), len(each.verdicts)) for each in taken] == [(1, 0), *[(0, PARTS_AT_ONCE)] * 2, (0, 1)]
    assert all(each.draining and each.timings == timings for each in taken)
    whole = Response()
    for each in taken:
        whole.MergeFrom(each)
    assert whole == message


def test_a_short_message_is_taken_as_it_is() -> None:
    message = Response(verdicts=[verify_pb2.Verdict()] * PARTS_AT_ONCE)
    assert [each is message for each in portions(message)] == [True]
