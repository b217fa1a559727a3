"""A drafter over real gRPC: chains, rollback, run-ahead, several sessions and links, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.dialler import Dialler, DiallingDrafter
from draft_service.server import load, start
from specwire.core.law.sampling import Sampling, with_rule
from specwire.core.text import hash_of
from specwire.rpc.server_options import ModelServiceOptions
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.draft_service.peer import GREEDY, LIMIT_S, Peer, connected, pace, serving, tokens_of
from tests.orchestrator.stack import plain

MODEL = "scripted:7"
PROMPT = [3, 1, 4, 1, 5]
COUPLED = Sampling(temperature=0.7, seed=11)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
async def test_a_drafter_of_the_targets_mind_proposes_the_targets_text(sampling: Sampling) -> None:
    expected = plain(MODEL, PROMPT, 12, sampling)
    async with serving(MODEL) as running, connected(running) as peer:
        await peer.open(1, PROMPT, pace(4, 12), sampling)
        chunks = [await peer.proposal(1) for _ in range(3)]
        assert [tokens_of(chunk) for chunk in chunks] == [expected[:4], expected[4:8], expected[8:]]
        assert [(chunk.chain, chunk.base, chunk.offset) for chunk in chunks] == [(0, 5, 0), (0, 5, 4), (0, 5, 8)]
        assert chunks[0].prefix_hash == hash_of(PROMPT)
        assert not chunks[1].HasField("prefix_hash")
        assert peer.opened == [1]


async def test_a_contradiction_starts_a_new_chain_from_the_decided_text() -> None:
    """The scripted model's logits depend on every token that it holds: a wrong rollback shows."""
    async with serving(MODEL) as running, connected(running) as peer:
        await peer.open(1, PROMPT, pace(4, 4))
        first = tokens_of(await peer.proposal(1))
        other = (first[1] + 1) % 64
        await peer.advance(1, 5, [first[0], other])
        text = [*PROMPT, first[0], other]
        proposal = await peer.proposal(1)
        assert tokens_of(proposal) == plain(MODEL, text, 4)
        assert (proposal.chain, proposal.base, proposal.offset) == (1, 7, 0)
        assert proposal.prefix_hash == hash_of(text)


async def test_the_run_ahead_is_never_exceeded_and_an_advance_frees_it() -> None:
    expected = plain(MODEL, PROMPT, 8)
    async with serving(MODEL) as running, connected(running) as peer:
        await peer.open(1, PROMPT, pace(2, 3))
        assert tokens_of(await peer.proposal(1)) == expected[:2]
        assert tokens_of(await peer.proposal(1)) == expected[2:3]
        assert await peer.quiet(1)
        await peer.advance(1, 5, expected[:2], pace(2, 3))
        assert tokens_of(await peer.proposal(1)) == expected[3:5]
        assert await peer.quiet(1)


async def test_a_pause_ends_with_an_advance_that_only_changes_the_pace() -> None:
    """Also one that comes with the opening, in one message."""
    async with serving(MODEL) as running, connected(running) as peer:
        await peer.open(1, PROMPT, pace(1, 0))
        assert await peer.quiet(1)
        await peer.advance(1, 5, [], pace(1, 1))
        assert tokens_of(await peer.proposal(1)) == plain(MODEL, PROMPT, 1)
        both = draft_pb2.ConnectDraftRequest(
            opens=[peer.opening(2, PROMPT, pace(1, 0))],
            advances=[draft_pb2.Advance(handle=2, position=5, tokens=[2], pace=pace(1, 1))],
        )
        await peer.send(both)
        assert tokens_of(await peer.proposal(2)) == plain(MODEL, [*PROMPT, 2], 1)


async def test_opening_an_open_handle_replaces_its_session_with_newer_chains() -> None:
    async with serving(MODEL, slots=2) as running, connected(running) as peer:
        await peer.open(1, PROMPT)
        first = await peer.proposal(1)
        await peer.open(1, [8, 8])
        second = await peer.proposal(1)
        assert tokens_of(second) == plain(MODEL, [8, 8], 4)
        assert second.chain > first.chain


async def test_a_full_context_ends_the_drafting_and_sends_what_there_is() -> None:
    async with serving(MODEL, context=8) as running, connected(running) as peer:
        await peer.open(1, PROMPT, pace(16, 16))
        assert tokens_of(await peer.proposal(1)) == plain(MODEL, PROMPT, 3)
        assert await peer.quiet(1)
        await peer.open(2, [1] * 20)
        assert await peer.quiet(2)


async def test_links_have_handles_of_their_own_and_a_lost_one_frees_its_slots() -> None:
    async with serving(MODEL, slots=2) as running, connected(running) as peer:
        async with connected(running) as other:
            await peer.open(1, PROMPT)
            await other.open(1, [9, 9])
            assert tokens_of(await peer.proposal(1)) == plain(MODEL, PROMPT, 4)
            assert tokens_of(await other.proposal(1)) == plain(MODEL, [9, 9], 4)
            await peer.open(2, PROMPT)
            assert (await peer.refused(2)).code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            other.call.cancel()
            await other.call.code()
        async with connected(running) as third:
            await third.open(1, [7], pace(1, 1))
            await third.proposal(1)


async def test_closing_frees_the_slot() -> None:
    async with serving(MODEL, slots=1) as running, connected(running) as peer:
        for handle in range(1, 5):
            await peer.open(handle, PROMPT)
            await peer.proposal(handle)
            await peer.close(handle)


async def test_the_model_is_described_once() -> None:
    async with serving(MODEL) as running, connected(running) as peer:
        info = await peer.info()
        assert (info.vocabulary, info.context, info.slots, info.architecture) == (64, 4096, 4, "Scripted")
        assert info.tokenizer_json
        short = await peer.info(info.tokenizer_hash)
        assert not short.tokenizer_json
        assert short.tokenizer_hash == info.tokenizer_hash


# What is refused


Spoil = Callable[[draft_pb2.OpenDraft], object]
INVALID, FAILED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
# What is done to an opening, and what it is then refused for.
SPOILT: list[tuple[Spoil, grpc.StatusCode, str]] = [
    (lambda opening: opening.ClearField("tokens"), INVALID, "tokens: must not be empty"),
    (lambda opening: opening.tokens.append(64), INVALID, "tokens: token id 64 is outside 0..63"),
    (lambda opening: opening.tokens.append((1 << 32) - 1), INVALID, "tokens: token id 4294967295 is outside 0..63"),
    (lambda opening: opening.ClearField("pace"), INVALID, "pace.chunk: must be at least 1, not 0"),
    (lambda opening: opening.sampling.ClearField("seed"), INVALID, "seed: is required"),
    (lambda opening: setattr(opening.sampling, "temperature", float("nan")), INVALID, "temperature: must be a finite"),
    (lambda opening: setattr(opening.sampling, "rule", "wishful"), INVALID, "rule: must be one of greedy, coupled, "),
    (lambda opening: opening.sampling.logit_bias.update({64: 1.0}), INVALID, "logit_bias: token id 64 is outside"),
    (
        lambda opening: setattr(opening, "prompt_length", 6),
        INVALID,
        "prompt_length: must be at most the 5 tokens, not 6",
    ),
    (
        lambda opening: opening.ClearField("vocabulary_fingerprint"),
        FAILED,
        "vocabulary_fingerprint: the verifier's vocabulary is (none)..., this drafter's is ",
    ),
    (
        lambda opening: setattr(opening, "vocabulary_fingerprint", "deadbeefdeadbeef"),
        FAILED,
        "vocabulary_fingerprint: the verifier's vocabulary is deadbeefdead..., this drafter's",
    ),
]


async def test_a_bad_open_is_refused_and_the_link_goes_on() -> None:
    async with serving(MODEL) as running, connected(running) as peer:
        for handle, (spoil, code, message) in enumerate(SPOILT, 1):
            opening = peer.opening(handle, PROMPT, pace())
            spoil(opening)
            await peer.send(draft_pb2.ConnectDraftRequest(opens=[opening]))
            refused = await peer.refused(handle)
            assert refused.code == code.value[0], message
            assert refused.message.startswith(message)
        await still_drafts(peer)


async def test_a_bad_advance_drops_its_session_alone() -> None:
    async with serving(MODEL, slots=1) as running, connected(running) as peer:
        for handle, (advance, code, message) in enumerate(
            [
                ((9, [1]), FAILED, "position: advance at 9, but only 5 positions are known as decided"),
                ((5, [64]), INVALID, "tokens: token id 64 is outside 0..63"),
                ((0, list[int]()), INVALID, "position: 0 without tokens leaves no text"),
            ]
        ):
            await peer.open(handle, PROMPT)
            await peer.proposal(handle)
            await peer.advance(handle, *advance)
            refused = await peer.refused(handle)
            assert (refused.code, refused.message) == (code.value[0], message)
        await still_drafts(peer)


async def test_rules_that_look_at_draft_tokens_take_chains_alone_in_an_opening_and_in_an_advance() -> None:
    bad = pace(branches=2)
    async with serving(MODEL) as running, connected(running) as peer:
        for rule in ("rejection", "block", "threshold(0.3)", "typical(0.3,0.3)"):
            sampling = with_rule(COUPLED, rule)
            message = f"pace.branches: must be at most 1 under {sampling.rule}, which takes chains only, not 2"
            await peer.open(1, PROMPT, bad, sampling)
            await peer.open(2, PROMPT, pace(), sampling)
            await peer.proposal(2)
            await peer.advance(2, len(PROMPT), [1], bad)
            for handle in (1, 2):
                refused = await peer.refused(handle)
                assert refused.code == INVALID.value[0]
                assert refused.message.startswith(message)
        await still_drafts(peer)


async def test_advances_and_closes_of_unknown_sessions_are_ignored() -> None:
    async with serving(MODEL) as running, connected(running) as peer:
        await peer.advance(77, 5, [1])
        await peer.close(78)
        await peer.send(draft_pb2.ConnectDraftRequest())
        await still_drafts(peer)


async def still_drafts(peer: Peer) -> None:
    await peer.open(50, PROMPT)
    assert tokens_of(await peer.proposal(50)) == plain(MODEL, PROMPT, 4)


async def test_a_health_watch_does_not_keep_it_from_stopping() -> None:
    running = await start(ModelServiceOptions(MODEL))
    async with grpc.aio.insecure_channel(running.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.timeout(60):
            await running.stop(3600.0)


async def test_who_waits_for_one_that_dials_in_may_give_up(dead_address: str) -> None:
    running = DiallingDrafter(await load(ModelServiceOptions(MODEL)), dead_address, None)
    waiting = [asyncio.create_task(running.join()), asyncio.create_task(running.failed())]
    for _ in range(5):  # of the event loop: both wait by then
        await asyncio.sleep(0)
    for wait in waiting:
        wait.cancel()
    await asyncio.wait(waiting, timeout=120.0)
    assert all(wait.cancelled() for wait in waiting)
    async with asyncio.timeout(60.0):
        await running.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_one_that_dials_in_stops_though_grpc_keeps_the_cancellation_to_itself(
    dead_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where a call fails while it begins."""

    async def talk_once(_: Dialler) -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return f"{dead_address} is not there"

    monkeypatch.setattr(Dialler, "_talk_once", talk_once)
    running = DiallingDrafter(await load(ModelServiceOptions(MODEL)), dead_address, None)
    await asyncio.sleep(0)
    async with asyncio.timeout(60.0):
        await running.stop()


# As a process


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "draft_service", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def silence(over: threading.Event) -> Iterator[object]:
    """Requests of a peer that stays connected and says nothing."""
    over.wait(LIMIT_S)
    yield from ()


def test_an_open_link_does_not_keep_it_from_ending() -> None:
    with process(MODEL, "--json") as drafter:
        assert drafter.stdout is not None
        ready = json.loads(drafter.stdout.readline())
        assert ready["model"] == MODEL
        with grpc.insecure_channel(ready["address"]) as channel:
            over = threading.Event()
            call = draft_pb2_grpc.DraftServiceStub(channel).Connect(silence(over), timeout=LIMIT_S)
            draft_pb2_grpc.DraftServiceStub(channel).GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=LIMIT_S)
            drafter.send_signal(signal.SIGINT)
            with pytest.raises(grpc.RpcError) as raised:
                next(call)
            over.set()
            _, err = drafter.communicate(timeout=LIMIT_S)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert drafter.returncode == 0
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [(["/no/such/model"], 1, "there is no such directory"), ([], 2, "the following arguments are required: MODEL")],
)
def test_errors_are_one_line_and_have_their_code(arguments: list[str], code: int, message: str) -> None:
    with process(*arguments) as drafter:
        out, err = drafter.communicate(timeout=LIMIT_S)
    assert (drafter.returncode, out) == (code, "")
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err
