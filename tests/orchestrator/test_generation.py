"""GenerationService end to end: whatever happens beside it, the client's text is the target's."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from functools import partial

import grpc
import pytest

from orchestrator.session.driver import SessionDriver
from specwire.client import AsyncClient, Chunk, Finished, SpecwireError, Started, Stats
from specwire.client.requests import RequestOptions
from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason, Outcome
from specwire.core.session import State
from specwire.rpc.link import Link
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, TARGET, Stack, plain, stack
from tests.wait import asked


def check_sources(stats: Stats) -> None:
    """Accepted <= tested <= proposed, of all and of each source, and the sources' sums are the whole."""
    drafters = [(each.proposed, each.tested, each.accepted) for each in stats.drafters]
    ngram = stats.proposed_ngram, stats.tested_ngram, stats.accepted_ngram
    prediction = stats.proposed_prediction, stats.tested_prediction, stats.accepted_prediction
    whole = stats.proposed, stats.tested, stats.accepted
    head = stats.proposed_head, stats.tested_head, stats.accepted_head
    sources = [*drafters, ngram, prediction, head]
    assert all(proposed >= tested >= accepted >= 0 for proposed, tested, accepted in (whole, *sources))
    assert tuple(map(sum, zip(*sources, strict=True))) == whole
    assert stats.tested == stats.accepted + stats.recovered
    assert stats.forwards_saved == stats.output_tokens - stats.target_forwards >= 0


@pytest.mark.parametrize("drafts", [(), (DRAFT,), ("scripted:99:vocab=64",)], ids=["alone", "drafted", "misled"])
async def test_greedy_text_is_the_targets(drafts: tuple[str, ...]) -> None:
    async with stack(SLOW_TARGET, *drafts) as running:
        done = await running.client.complete(PROMPT, max_tokens=60, ignore_eos=True)
    assert list(done.tokens) == plain(TARGET, PROMPT, 60)
    assert done.text == " ".join(map(str, done.tokens))
    assert done.finish_reason is FinishReason.LENGTH
    stats = done.stats
    assert stats.accepted + stats.recovered + stats.bonus + stats.direct == stats.output_tokens == 60
    assert [done.outcomes.count(o) for o in Outcome] == [stats.accepted, stats.recovered, stats.bonus, stats.direct]
    check_sources(stats)


@pytest.mark.parametrize("temperature", [0.0, 0.3])
async def test_a_text_that_repeats_is_guessed_from_itself(temperature: float) -> None:
    """Drafters and the text, each alone, both, none: one text, and figures by source."""
    target, drawn = f"{TARGET}:memory=1:delay_ms=4", Sampling(temperature=temperature, seed=11)
    _, drafters, ngram, off = range(4)
    done = []
    async with stack(target, "scripted:99:vocab=64") as running:
        for drafting, guessing in ((True, True), (True, False), (False, True), (False, False)):
            wish = RequestOptions(drafting=drafting, ngram=guessing, max_tokens=240, ignore_eos=True)
            wish["temperature"], wish["seed"] = temperature, 11
            ask = partial(running.client.complete, PROMPT, **wish)
            # Whether a guess pays is measured: where the machine is busy, in the next text.
            done.append(await asked(ask, lambda told: told.stats.accepted_ngram) if guessing else await ask())
    expected = plain(f"{TARGET}:memory=1", PROMPT, 240, drawn)
    assert [list(each.tokens) for each in done] == [expected] * 4
    for each in done:
        check_sources(each.stats)
    assert done[ngram].stats.accepted == done[ngram].stats.accepted_ngram
    assert done[ngram].stats.proposed == done[ngram].stats.proposed_ngram >= done[ngram].stats.accepted_ngram
    assert done[drafters].stats.proposed_ngram == done[off].stats.proposed_ngram == 0
    assert done[off].stats.target_forwards == 240 > done[ngram].stats.target_forwards


async def test_a_deadline_ends_the_session_and_the_log_says_so() -> None:
    """The stream either ends with the reason, or the deadline passes on the wire first: the log says the same."""

    async def begun(client: AsyncClient) -> str:
        """The session's id; none where the deadline passed before it was begun."""
        session_id = ""
        with suppress(SpecwireError):
            async for event in client.generate(PROMPT, max_tokens=4000, ignore_eos=True, timeout=0.5):
                session_id = event.session_id if isinstance(event, Started) else session_id
                assert not isinstance(event, Finished) or event.reason is FinishReason.DEADLINE
        return session_id

    async with stack(SLOW_TARGET) as running:
        session_id = await asked(lambda: begun(running.client), bool)
        await ended_in_log(running.client, session_id, FinishReason.DEADLINE)


async def ended_in_log(client: AsyncClient, session_id: str, reason: FinishReason) -> None:
    """The log says that the session ended, and why. It is polled: a reader would keep the session alive."""
    found = await asked(lambda: client.get_session(session_id), lambda state: state.finish_reason is not None)
    assert found.finish_reason is reason


async def test_without_a_verifier_a_session_fails_in_time() -> None:
    async with stack(SLOW_TARGET, verifier_wait=0.5) as running:
        await running.verifier.stop(0.0)
        with pytest.raises(SpecwireError) as lost:
            await running.client.complete(PROMPT, max_tokens=10)
    assert lost.value.code is grpc.StatusCode.UNAVAILABLE


# ----------------------------------------------------------------------------------------------------------------------
# What an orchestrator keeps for a client that does not read, counted where it is kept; the others read on.

LENGTH, READ_FIRST, FURTHER = 4000, 16, 20
LIMIT_S = 120.0
STILL_S = 1.0


async def still(parts: Stack) -> SessionDriver:
    """The one session, once it gets no further."""
    before = -1
    for _ in range(round(LIMIT_S / STILL_S)):
        await asyncio.sleep(STILL_S)
        drivers = list(parts.orchestrator.orchestrator.sessions.values())
        now = len(drivers[0].session.text) if drivers else -1
        if now == before >= READ_FIRST:
            return drivers[0]
        before = now
    raise AssertionError("it did not stand still")


def check_bounded(parts: Stack, driver: SessionDriver) -> None:
    """Nothing waits but the text itself; of that no more was decided than the client has room for."""
    session, peers = driver.session, parts.orchestrator.orchestrator.pool
    assert session.state is State.RUNNING
    assert session.durable == session.emitted == len(session.text) <= session.credit
    assert session.credit <= session.taken + session.buffer
    assert len(session.text) - session.taken <= session.buffer
    assert session.in_flight is None
    assert len(driver.view.output.tokens) == session.emitted - session.prompt_length
    for link in (*(peer.link for peer in peers.verifiers), *(peer.link for peer in peers.drafters)):
        assert isinstance(link, Link)
        assert (link.up, link.queued) == (True, 0)


async def test_who_does_not_read_over_grpc() -> None:
    async with stack(TARGET, DRAFT) as parts, AsyncClient(parts.orchestrator.address) as client:
        events = client.generate([5, 6, 7], max_tokens=LENGTH, ignore_eos=True, logprobs=5, timeout=2 * LIMIT_S)
        read = 0
        while read < READ_FIRST:
            event = await anext(events)
            read += len(event.tokens) if isinstance(event, Chunk) else 0
        driver = await still(parts)
        check_bounded(parts, driver)
        assert len(driver.view.output.tokens) < LENGTH
        others = [event async for event in client.generate(PROMPT, max_tokens=40, ignore_eos=True, timeout=LIMIT_S)]
        told = [token for event in others if isinstance(event, Chunk) for token in event.tokens]
        assert told == plain(TARGET, PROMPT, 40)
        stood = len(driver.view.output.tokens)
        while read < stood + FURTHER:
            event = await anext(events)
            read += len(event.tokens) if isinstance(event, Chunk) else 0
        assert len(driver.view.output.tokens) > stood  # it goes on where its client does
        await events.aclose()


@pytest.mark.parametrize("details", [False, True], ids=["text", "details"])
async def test_who_does_not_read_over_http(details: bool) -> None:
    async with stack(TARGET, DRAFT, http="127.0.0.1:0") as parts:
        assert parts.orchestrator.http is not None
        host, _, port = parts.orchestrator.http.removeprefix("http://").rpartition(":")
        # With log-probabilities a token is long: without, a busy machine joins so many in an event that all of the text
        # fits into the sockets.
        asked = {"prompt": [5, 6, 7], "max_tokens": LENGTH, "ignore_eos": True, "logprobs": 5}
        asked |= {"stream": True, "details": details}
        body = json.dumps(asked).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            slow.sendall(head.encode() + body)
            driver = await still(parts)
            check_bounded(parts, driver)
            assert len(driver.view.output.tokens) < LENGTH
