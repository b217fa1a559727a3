"""A verifier over real gRPC: its tokens, its statuses, and what it survives."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire.core.law.sampling import Sampling
from specwire.core.messages import Verdict
from specwire.core.text import hash_of
from specwire.lm import LanguageModel, load_model
from specwire.rpc.convert import verdict_to_wire
from specwire.rpc.decoding import LONG_BYTES, PARTS_AT_ONCE
from specwire.rpc.errors import retry_after
from specwire.rpc.server_options import ModelServiceOptions
from specwire.v1 import common_pb2, verify_pb2
from tests.verify_service.peer import connected, open_message, serving, stub_of
from tests.verify_service.rig import oracle
from verify_service import service
from verify_service.engine import scoring
from verify_service.engine.messages import Command
from verify_service.engine.session_manager import FAILED
from verify_service.server import start
from verify_service.service import VerifyServicer

MODEL = "scripted:7"
PROMPT = [3, 1, 4, 1, 5]
COUPLED = Sampling(temperature=0.9, seed=1 << 60)


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return load_model(MODEL, slots=1)


def proposal(
    handle: int, number: int, text: Sequence[int], tokens: Sequence[int], **changes: Any
) -> common_pb2.Proposal:
    fields = {"handle": handle, "chain": number, "base": len(text), "prefix_hash": hash_of(text), **changes}
    return common_pb2.Proposal(tokens=tokens, **fields)


async def test_decides_what_the_target_alone_would(target: LanguageModel) -> None:
    async with serving(MODEL) as running, connected(running) as peer:
        await peer.open(1, PROMPT)
        await peer.open(2, PROMPT, COUPLED)
        await peer.until_finished(1, 2)
        assert peer.opened == [1, 2]
        assert peer.tokens[1] == oracle(target, PROMPT, 40)
        assert peer.tokens[2] == oracle(target, PROMPT, 40, COUPLED)
        assert peer.finished == {1: common_pb2.FINISH_REASON_LENGTH, 2: common_pb2.FINISH_REASON_LENGTH}


async def test_a_long_message_is_taken_in_portions_and_a_long_part_beside_the_event_loop(
    target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of opens, of one orchestrator of several, held the links of all, and their steps."""
    threads: list[tuple[int, bool]] = []
    whole, own = service.tick_from_wire, threading.current_thread()

    def noting(link: int, message: verify_pb2.ConnectVerifyRequest, *more: Any) -> Any:
        threads.append((len(message.opens), threading.current_thread() is own))
        return whole(link, message, *more)

    monkeypatch.setattr(service, "tick_from_wire", noting)
    async with serving(MODEL) as running, connected(running) as peer:
        none = verify_pb2.Open(session_id="x" * 20, vocabulary_fingerprint="none")
        await peer.send(opens=[none] * 6001)
        await peer.send(opens=[verify_pb2.Open(session_id="x" * LONG_BYTES)])
        await peer.send(opens=[open_message(7001, PROMPT, peer.info)])
        await peer.until_finished(7001)
        assert peer.tokens[7001] == oracle(target, PROMPT, 40)
    portions, rest = divmod(6001, PARTS_AT_ONCE)
    assert threads[: portions + 3] == [*[(PARTS_AT_ONCE, True)] * portions, (rest, True), (1, False), (1, True)]


async def test_verdicts_say_whose_draft_tokens_were_tested_and_who_answered(target: LanguageModel) -> None:
    """The second source reaches farther and is wrong from its second token on; the first goes on where it stops."""
    truth = oracle(target, PROMPT, 40)
    wrong = [truth[0], *((token + 1) % 64 for token in truth[1:16])]
    async with serving("scripted:7:delay_ms=2") as running, connected(running) as peer:
        await peer.send(
            opens=[open_message(1, PROMPT, peer.info)],
            proposals=[proposal(1, 0, PROMPT, truth[:10], source=1), proposal(1, 0, PROMPT, wrong, source=2)],
        )
        verdicts: list[verify_pb2.Verdict] = []
        while 1 not in peer.finished:
            verdicts += (await peer.receive()).verdicts
            if len(verdicts) == 1:
                text = [*PROMPT, *peer.tokens[1]]
                late = proposal(1, 1, text, truth[len(peer.tokens[1]) :][:4], source=3)
                await peer.send(proposals=[late])
        assert peer.tokens[1] == truth
        tested = [(verdict.source, verdict.kind) for verdict in verdicts if verdict.tested]
        assert {2, 1} <= {source for source, _ in tested}
        assert all(kind == common_pb2.SOURCE_KIND_DRAFTER for source, kind in tested if source)
        assert all(verdict.source == 0 for verdict in verdicts if not verdict.tested)


async def test_timings_and_description_are_told() -> None:
    async with serving(MODEL) as running, stub_of(running) as stub, connected(running) as peer:
        info = await stub.GetModelInfo(common_pb2.GetModelInfoRequest())
        assert [each.rows for each in info.forward_times][:3] == [1, 2, 3]
        assert (info.vocabulary, info.slots, info.context) == (64, 4, 512)
        assert info.tokenizer_json
        known = common_pb2.GetModelInfoRequest(known_tokenizer_hash=info.tokenizer_hash)
        assert not (await stub.GetModelInfo(known)).tokenizer_json
        await peer.open(1, PROMPT)
        await peer.until_finished(1)
        steps = [each.step for each in peer.timings]
        assert steps == sorted(set(steps))
        ended = [each.forward_ended_ns for each in peer.timings]
        assert ended == sorted(ended)


INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
BAD_OPENS: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
    ({"session_id": ""}, INVALID, "session_id"),
    ({"session_id": "x" * 257}, INVALID, "session_id"),
    ({"tokens": []}, INVALID, "tokens"),
    ({"tokens": [1] * 512}, INVALID, "tokens"),
    ({"tokens": [1, 64]}, INVALID, "tokens: token id 64"),
    ({"prompt_length": 0}, INVALID, "prompt_length"),
    ({"prompt_length": 6}, INVALID, "prompt_length"),
    ({"sampling": None}, INVALID, "seed"),
    ({"sampling": common_pb2.Sampling(temperature=float("nan"), seed=1)}, INVALID, "temperature"),
    ({"sampling": common_pb2.Sampling(temperature=-1, seed=1)}, INVALID, "temperature"),
    ({"sampling": common_pb2.Sampling(top_p=0.0, seed=1)}, INVALID, "top_p"),
    ({"sampling": common_pb2.Sampling(rule="magic", seed=1)}, INVALID, "rule"),
    ({"sampling": common_pb2.Sampling(rule="coupled", seed=1)}, INVALID, "rule"),
    ({"stopping": None}, INVALID, "max_tokens"),
    ({"stopping": common_pb2.Stopping(max_tokens=1, stop_ids=[64])}, INVALID, "stop_ids"),
    ({"progress": None}, INVALID, "progress"),
    ({"cache_scope": b"x" * 65}, INVALID, "cache_scope"),
    ({"vocabulary_fingerprint": "ab" * 32}, PRECONDITION, "abababababab"),
    ({"vocabulary_fingerprint": ""}, PRECONDITION, "vocabulary_fingerprint"),
]


async def test_bad_opens_are_refused_with_their_fields_and_nothing_else_ends() -> None:
    async with serving(MODEL) as running, connected(running) as peer:
        for changes, code, named in BAD_OPENS:
            await peer.send(opens=[open_message(**{"handle": 1, "tokens": PROMPT, "info": peer.info, **changes})])
            refused = await peer.refusal()
            assert (refused.handle, refused.code) == (1, code.value[0])
            assert named in refused.message
        await peer.open(2, PROMPT)
        await peer.until_finished(2)


async def test_garbage_of_every_kind_leaves_the_verifier_alive(target: LanguageModel) -> None:
    truth = oracle(target, PROMPT, 40)
    async with serving("scripted:7:delay_ms=1") as running, connected(running) as peer:
        await peer.open(1, PROMPT)
        top = (1 << 32) - 1
        for round_ in range(30):
            await peer.send(
                proposals=[
                    proposal(1, round_, PROMPT, [top]),
                    proposal(1, round_, PROMPT, [1] * 1000),
                    proposal(77, round_, PROMPT, [1]),
                    common_pb2.Proposal(handle=1),
                    common_pb2.Proposal(handle=1, chain=(1 << 64) - 1, base=top, offset=top, tokens=[1]),
                ],
                progress=[
                    verify_pb2.Progress(handle=99, credit=top),
                    verify_pb2.Progress(handle=1, credit=top),
                ],
                closes=[common_pb2.Close(handle=1234)],
            )
        await peer.until_finished(1)
        assert peer.tokens[1] == truth


async def test_deadline_and_close() -> None:
    async with serving("scripted:7:delay_ms=2", context=None) as running, connected(running) as peer:
        long = common_pb2.Stopping(max_tokens=4000)
        await peer.open(1, PROMPT, deadline_ms=50, stopping=long)
        await peer.open(2, PROMPT, stopping=long)
        await peer.until_finished(1)
        assert peer.finished[1] == common_pb2.FINISH_REASON_DEADLINE
        await peer.send(closes=[common_pb2.Close(handle=2)])
        await peer.open(3, PROMPT)
        await peer.until_finished(3)
        assert 2 not in peer.finished


async def test_a_lost_link_s_session_is_taken_over_with_what_it_decided(target: LanguageModel) -> None:
    truth = oracle(target, PROMPT, 40)
    credit = len(PROMPT) + 8
    async with serving(MODEL) as running:
        async with connected(running) as peer:
            await peer.open(1, PROMPT, progress=verify_pb2.Progress(credit=credit))
            await peer.receive()
        async with connected(running) as peer:
            await peer.open(4, PROMPT, session_id="session-1", attach=2, progress=verify_pb2.Progress(credit=credit))
            opened = (await peer.receive()).opened[0]
            assert (opened.handle, opened.attach, opened.position, opened.resumed) == (4, 2, len(PROMPT), True)
            assert {(verdict.handle, verdict.attach) for verdict in opened.tail} <= {(4, 2)}
            delivered = [token for verdict in opened.tail for token in verdict.tokens]
            assert delivered == truth[: len(delivered)]
            await peer.send(progress=[verify_pb2.Progress(handle=4, credit=1 << 20)])
            await peer.until_finished(4)
            assert delivered + peer.tokens[4] == truth


async def test_scopes_priorities_and_what_is_forgotten_travel() -> None:
    long = [index % 50 + 3 for index in range(40)]
    async with serving(MODEL) as running, connected(running) as peer:
        cached = []
        for handle, scope in ((1, b"a"), (2, b"a"), (3, b"b"), (4, b"a")):
            if handle == 4:
                await peer.send(forgotten=["session-1", "session-2"])
            await peer.open(handle, long, cache_scope=scope, priority=-handle)
            while handle not in peer.opened:
                cached += [opened.cached for opened in (await peer.receive()).opened]
            await peer.until_finished(handle)
            await peer.send(closes=[common_pb2.Close(handle=handle)])
    assert cached == [0, 38, 0, 0]


async def test_score(target: LanguageModel) -> None:
    async with serving(MODEL) as running, stub_of(running) as stub:
        tokens = [*PROMPT, *oracle(target, PROMPT, 3)]
        scores = (await stub.Score(verify_pb2.ScoreRequest(tokens=tokens, from_position=5))).log_probabilities
        assert len(scores) == 3
        assert all(-10 < score < 0 for score in scores)


async def test_a_full_verifier_says_when_to_ask_for_a_score_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "RETRY_MS", 2500)
    async with serving(MODEL, slots=1) as running, connected(running) as peer, stub_of(running) as stub:
        await peer.open(1, PROMPT, progress=verify_pb2.Progress(credit=6))
        await peer.receive()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Score(verify_pb2.ScoreRequest(tokens=PROMPT, from_position=1))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_after(raised.value) == 2.5


@pytest.mark.parametrize(
    ("tokens", "from_position", "named"),
    [
        ([1], 1, "tokens"),
        ([1, 2], 0, "from_position"),
        ([1, 2], 2, "from_position"),
        ([1, 99], 1, "99"),
        ([1] * 513, 1, "512"),
    ],
)
async def test_bad_score_is_an_invalid_argument(tokens: list[int], from_position: int, named: str) -> None:
    async with serving(MODEL) as running, stub_of(running) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Score(verify_pb2.ScoreRequest(tokens=tokens, from_position=from_position))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in str(raised.value.details())


@pytest.mark.parametrize(
    ("others", "named"),
    [([[1]] * 64, "others: at most 63"), ([[]], "from 1 to 510"), ([[1] * 511], "from 1 to 510"), ([[99]], "99")],
)
async def test_a_bad_continuation_is_an_invalid_argument(others: list[list[int]], named: str) -> None:
    more = [verify_pb2.Continuation(tokens=each) for each in others]
    async with serving(MODEL) as running, stub_of(running) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Score(verify_pb2.ScoreRequest(tokens=[1, 2, 3], from_position=2, others=more))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in str(raised.value.details())


async def test_health_says_serving() -> None:
    async with serving(MODEL) as running, grpc.aio.insecure_channel(running.address) as channel:
        request = health_pb2.HealthCheckRequest(service="specwire.v1.VerifyService")
        response = await health_pb2_grpc.HealthStub(channel).Check(request)
        assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_stopping_drains_and_then_tells_unavailable() -> None:
    """The grace is over when its last session is closed, here long before its time."""
    running = await start(ModelServiceOptions("scripted:7:delay_ms=2", slots=2))
    async with connected(running) as peer, asyncio.timeout(60):
        await peer.open(1, PROMPT)
        await peer.receive()
        stopping = asyncio.create_task(running.stop(3600.0))
        await peer.until_finished(1)
        assert not stopping.done()
        await peer.send(closes=[common_pb2.Close(handle=1)])
        with contextlib.suppress(grpc.aio.AioRpcError):
            await peer.call.read()
        assert await peer.call.code() is grpc.StatusCode.UNAVAILABLE
        await stopping


async def test_a_handle_that_is_opened_again_while_it_stops_holds_nothing() -> None:
    running = await start(ModelServiceOptions("scripted:7", slots=2))
    async with connected(running) as peer, asyncio.timeout(60):
        await peer.open(1, PROMPT, progress=verify_pb2.Progress(credit=len(PROMPT) + 4))
        await peer.receive()
        stopping = asyncio.create_task(running.stop(3600.0))
        while not (await peer.receive()).draining:
            pass
        await peer.open(1, PROMPT, session_id="another")
        refused = await peer.refusal()
        assert (refused.handle, refused.code) == (1, grpc.StatusCode.UNAVAILABLE.value[0])
        await stopping


async def test_stop_is_idempotent() -> None:
    running = await start(ModelServiceOptions(MODEL))
    await running.stop()
    await running.stop()


class Idle:
    """An engine's thread that does nothing; it has room once `free` is set."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.asked = asyncio.Event()
        self.sent: list[Command] = []
        self.on_reports: object = None

    def send(self, command: Command) -> None:
        self.sent.append(command)

    async def room(self) -> None:
        self.asked.set()
        await self.free.wait()


async def endless() -> AsyncIterator[verify_pb2.ConnectVerifyRequest]:
    while True:
        yield verify_pb2.ConnectVerifyRequest()
        await asyncio.sleep(0)


async def test_peer_that_floods_is_not_read_until_the_engine_has_caught_up() -> None:
    thread = Idle()
    servicer = VerifyServicer(thread, common_pb2.GetModelInfoResponse())  # type: ignore[arg-type]  # stands in for the real one
    reading = asyncio.ensure_future(servicer._read(endless(), 0, None))  # type: ignore[arg-type]  # what is left out is not used
    await asyncio.wait_for(thread.asked.wait(), 120.0)
    await asyncio.sleep(0.01)
    assert len(thread.sent) == 1
    thread.asked.clear()
    thread.free.set()
    await asyncio.wait_for(thread.asked.wait(), 120.0)
    assert len(thread.sent) > 1
    reading.cancel()


class Deaf:
    """A context whose peer does not read."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()

    async def write(self, _: object) -> None:
        self.writing.set()
        await asyncio.Event().wait()


async def test_link_that_is_over_is_forgotten_before_its_last_words_are_written() -> None:
    thread = Idle()
    thread.free.set()
    servicer = VerifyServicer(thread, common_pb2.GetModelInfoResponse())  # type: ignore[arg-type]  # stands in for the real one
    context = Deaf()

    async def requests() -> AsyncIterator[verify_pb2.ConnectVerifyRequest]:
        yield verify_pb2.ConnectVerifyRequest(opens=[verify_pb2.Open(vocabulary_fingerprint="another")])
        await context.writing.wait()

    connecting = asyncio.ensure_future(servicer.Connect(requests(), context))  # type: ignore[arg-type]  # stands in for the real one
    await context.writing.wait()
    await servicer._wait_until_empty(120.0)
    assert not servicer._links
    assert not connecting.done()
    connecting.cancel()
    await asyncio.wait({connecting}, timeout=120.0)


async def test_a_report_that_cannot_be_written_ends_the_session_that_it_is_of(
    target: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a number of its own does not fit into its field; the others of its link are told theirs."""

    def written(verdict: Verdict, handle: int, attach: int) -> verify_pb2.Verdict:
        if handle == 2 and verdict.position == len(PROMPT) + 3:
            raise ValueError("a number out of range, put there by the test")
        return verdict_to_wire(verdict, handle, attach)

    async with serving("scripted:7:delay_ms=2") as running, connected(running) as peer:
        monkeypatch.setattr(service, "verdict_to_wire", written)
        await peer.send(opens=[open_message(1, PROMPT, peer.info, COUPLED), open_message(2, PROMPT, peer.info)])
        await peer.until_finished(1)
        assert peer.tokens[1] == oracle(target, PROMPT, 40, COUPLED)
        assert peer.tokens[2][:3] == oracle(target, PROMPT, 3)  # a step under way may have decided one more
        assert [(each.handle, each.code, each.message) for each in peer.refused] == [(2, 13, FAILED)]
        monkeypatch.undo()
        await peer.open(2, PROMPT)
        await peer.until_finished(2)
        assert peer.tokens[2][-40:] == oracle(target, PROMPT, 40)
    assert "a number out of range" in caplog.text
