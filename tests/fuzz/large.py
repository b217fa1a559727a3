"""Messages of which one field is as large as it can be: each field of what each method is asked, or answers, and of
each HTTP route's body. Whoever sends them must not have a neighbour wait.
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from specwire.core.invalid import MOST_PARTS
from specwire.core.law.sampling import Sampling
from specwire.v1 import common_pb2, draft_pb2, generation_pb2, registry_pb2, verify_pb2
from tests.faults.streams import PROMPT
from tests.fuzz.http import HEALTH, answer_of
from tests.fuzz.messages import METHODS, Values, path_of
from tests.fuzz.numbers import deciding, drafting
from tests.fuzz.requests import POSTED, Raw, written
from tests.fuzz.services import LIMIT_S, Services

# Parts of a field that has nothing but these; a bit less than a message may have, beside what else is in it.
PARTS = MOST_PARTS - 4096
TEXT_BYTES = 4 << 20
# How deep fields of messages in messages are made large.
MOST_NESTED = 4
HANDLE, DIRECT = 1, common_pb2.OUTCOME_DIRECT


def beside(fingerprint: str) -> Mapping[str, Message]:
    """By kind, what a message says beside the field that is large: what services of this vocabulary take."""
    ids = generation_pb2.TokenIds(ids=PROMPT)
    text = generation_pb2.TextPart(tokens=ids)
    stopping, sampling = common_pb2.Stopping(max_tokens=2), common_pb2.Sampling()
    model = common_pb2.GetModelInfoResponse(vocabulary=64, vocabulary_fingerprint=fingerprint, context=64, slots=1)
    verdict = verify_pb2.Verdict(handle=HANDLE, attach=1, position=len(PROMPT), tokens=[1], outcomes=[DIRECT])
    whole: list[Message] = [
        generation_pb2.GenerateRequest(tokens=ids, stopping=stopping, sampling=sampling),
        generation_pb2.ScoreTextRequest(prefix=text, continuations=[generation_pb2.ScoredText(parts=[text])]),
        generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="5 6")]),
        generation_pb2.ChatTool(name="f"),
        generation_pb2.ToolCall(id="c", name="f", arguments="{}"),
        deciding(fingerprint, HANDLE, "large", Sampling()),
        drafting(fingerprint, HANDLE),
        verify_pb2.ScoreRequest(tokens=[1, 2, 3], from_position=1, top=1, others=[{"tokens": [2]}]),
        draft_pb2.JoinRequest(model=model),
        registry_pb2.FollowRequest(role=registry_pb2.SERVICE_ROLE_VERIFIER),
        verify_pb2.ConnectVerifyResponse(
            opened=[verify_pb2.Opened(handle=HANDLE, attach=1, position=len(PROMPT))], verdicts=[verdict]
        ),
        common_pb2.Refused(handle=HANDLE, code=13),
        draft_pb2.ConnectDraftResponse(opened=[draft_pb2.OpenedDraft(handle=HANDLE)]),
    ]
    known: dict[str, Message] = {}
    for each in whole:
        _learn(known, each)
    return known


def _learn(known: dict[str, Message], message: Message) -> None:
    """It and its parts; the first of a kind counts."""
    known.setdefault(message.DESCRIPTOR.name, message)
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else [value]:
                _learn(known, part)


# Texts of what is walked character by character, word by word, or as JSON; they fill a text by being repeated.
TEXTS = ("5 6 7 ", "x", '{"a":[', "\u00e9", " ")
# A chat's history in which the model called functions, of many arguments each.
CALLED = {"name": "f", "arguments": json.dumps({f"a{number}": number for number in range(40)})}
HISTORY = [
    {"role": "user", "content": "5"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": CALLED}]},
    {"role": "tool", "tool_call_id": "c", "content": "5"},
]
# Values of a body's field.
VALUES: tuple[Any, ...] = (
    ["5"] * PARTS,
    [{}] * PARTS,
    [[5]] * (PARTS // 2),
    [5] * 1_000_000,
    {str(number): number for number in range(PARTS // 2)},
    [{"role": "user", "content": "5"}] * (PARTS // 5),
    [{"type": "message", "role": "user", "content": "5"}] * (PARTS // 7),
    [{"type": "function", "function": {"name": f"f{number}"}} for number in range(PARTS // 8)],
    HISTORY * 400,
    "5 6 7 " * (TEXT_BYTES // 6),
    " " * TEXT_BYTES,
)


@dataclass(frozen=True, slots=True)
class Large:
    """name: of what is large. method: of METHODS, or a path of HTTP's. make: its bytes, as they are sent."""

    name: str
    method: str
    make: Callable[[], bytes]

    def __repr__(self) -> str:
        return f"{self.method} with {self.name}"


def large_messages(method: str, known: Mapping[str, Message], answer: bool = False) -> Iterator[Large]:
    """What the method is asked, or answers: one of each field, in each way that it can be large.

    known: see `beside`.
    """
    kind = METHODS[method].output_type if answer else METHODS[method].input_type
    for name, make in _large(kind, known, MOST_NESTED):
        yield Large(f"{kind.name}.{name}", method, make)


def _large(kind: Descriptor, known: Mapping[str, Message], depth: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Messages of a kind, one field large, with its name; others as is known."""
    made = GetMessageClass(kind)
    said = known.get(kind.name, made()).SerializeToString()
    for field in kind.fields:
        inner = field.message_type
        if inner is None:
            for way, value in _values(field):
                yield f"{field.name} ({way})", partial(_with, said, made, field.name, value)
            continue
        if inner.GetOptions().map_entry:
            is_text = inner.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
            yield f"{field.name} (many)", partial(_with, said, made, field.name, partial(_entries, is_text))
            continue
        if field.is_repeated:
            yield f"{field.name} (empty)", partial(_joined, said, _tagged(field.number, b""), PARTS)
            if inner.name in known:
                one = _tagged(field.number, known[inner.name].SerializeToString())
                yield f"{field.name} (whole)", partial(_joined, said, one, PARTS // _parts(known[inner.name]))
        if depth:
            for name, make in _large(inner, known, depth - 1):
                yield f"{field.name}.{name}", partial(_around, said, field.number, make)


def _parts(message: Message) -> int:
    """That it counts as within another one."""
    parts = 1
    for field, value in message.ListFields():
        inner = value if field.is_repeated and field.message_type is not None else [value]
        parts += sum(_parts(each) if isinstance(each, Message) else 3 for each in inner)
    return parts


def _with(beside: bytes, made: type[Message], field: str, value: Callable[[], Any]) -> bytes:
    return beside + made(**{field: value()}).SerializeToString()


def _joined(beside: bytes, one: bytes, count: int) -> bytes:
    return beside + one * count


def _around(beside: bytes, number: int, make: Callable[[], bytes]) -> bytes:
    return beside + _tagged(number, make())


def _entries(is_text: bool) -> dict[Any, Any]:
    numbers = range(PARTS // 3)
    return dict.fromkeys(map(str, numbers), "x") if is_text else dict.fromkeys(numbers, 1.0)


def _values(field: FieldDescriptor) -> Iterator[tuple[str, Callable[[], Any]]]:
    is_text = field.type == field.TYPE_STRING
    if field.is_repeated:
        yield "many", lambda: ["5"] * PARTS if is_text else [1] * 1_000_000
    elif field.type == field.TYPE_BYTES:
        yield "long", lambda: b"5" * TEXT_BYTES
    elif is_text:
        for text in TEXTS:
            yield repr(text), partial(operator.mul, text, TEXT_BYTES // len(text.encode()))


def _tagged(number: int, data: bytes) -> bytes:
    """As a message within another one."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def large_bodies() -> Iterator[Large]:
    """Of each route that takes one: each of its fields with each of VALUES, as far as a body may be as long."""
    needed: dict[str, Any] = {"prompt": list(PROMPT), "messages": [{"role": "user", "content": "5"}], "input": "5"}
    for path, (own, beside) in POSTED.items():
        for field in sorted({*own, *beside}):
            for number, value in enumerate(VALUES):
                body = {name: needed[name] for name in own if name in needed} | {"max_tokens": 1, field: value}
                yield Large(f"{field} ({number})", path, partial(_posted, path, body))


def _posted(path: str, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(data)}"]
    return written(head) + data


# Seconds for which a stream is read that goes on for ever where nothing of it is refused.
FOLLOWED, FOLLOWED_S = "RegistryService.Follow", 2.0


def requests(fingerprint: str) -> Values:
    """Any of them."""
    known = beside(fingerprint)
    return st.sampled_from([*(each for method in METHODS for each in large_messages(method, known)), *large_bodies()])


def tell_large(services: Services, asked: Large) -> tuple[Counter[str], float]:
    """How it is answered, and for how many seconds of computing a neighbour's /health waited at most.

    AssertionError where it is our own failure, or the neighbour was refused.
    """
    data = asked.make()
    with services.watched() as watch, ThreadPoolExecutor(1) as pool:
        told = pool.submit(_told, services, asked, data)
        while True:
            found = answer_of(services.http, Raw(HEALTH, whole=True))
            assert found is not None, f"{asked}: a neighbour was not answered"
            assert found[0] == 200, f"{asked}: a neighbour was answered {found[0]}"
            if told.done():
                break
    logged = services.failures.take()
    assert not logged, f"{asked}: {logged}"
    return Counter({told.result(): 1}), max(0.0, watch.turn)


def _told(services: Services, asked: Large, data: bytes) -> str:
    if asked.method.startswith("/"):
        answer = answer_of(services.http, Raw(data, whole=True))
        return "CLOSED" if answer is None else str(answer[0])
    method, limit_s = METHODS[asked.method], FOLLOWED_S if asked.method == FOLLOWED else LIMIT_S
    services.pardon()
    with services.channel(services.address_of(asked.method)) as channel:
        sent = iter([data]) if method.client_streaming else data
        make = channel.stream_stream if method.client_streaming else channel.unary_stream  # unary: a stream of one
        call: Any = make(path_of(asked.method), bytes, bytes)
        try:
            list(call(sent, timeout=limit_s))
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"
