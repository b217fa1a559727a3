"""A session's driver against peers that refuse, fail, or come too late."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from orchestrator.options import OrchestratorOptions
from orchestrator.peers.peer import MOST_RELAYED, DrafterPeer, VerifierPeer
from orchestrator.pool import chosen_drafter
from orchestrator.session import appender, output
from orchestrator.session import driver as driver_module
from orchestrator.session import verifier as verifying
from orchestrator.session.driver import SessionDriver, SessionHost, SessionNotice
from orchestrator.session.output import SessionFailure
from orchestrator.store import AppendReply, SessionRecord
from orchestrator.store.sqlite import SqliteStore
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Append, FinishReason
from specwire.core.placement import PlacementRequest
from specwire.core.session import Session, State
from specwire.core.text import Stopping, hash_of
from specwire.rpc.errors import code_number
from specwire.rpc.link import Link
from specwire.v1 import common_pb2, draft_pb2, verify_pb2
from tests.core.script import LetterScanner
from tests.orchestrator.test_store import UnsteadyStore
from tests.wait import until

PROMPT = (1, 2)
FULL = common_pb2.Refused(handle=1, code=code_number(grpc.StatusCode.RESOURCE_EXHAUSTED), message="full")


class SilentLink(Link):  # type: ignore[type-arg]  # a link of any kind
    """Up, and keeps what is sent."""

    def __init__(self) -> None:
        super().__init__("nowhere", None)  # type: ignore[arg-type]  # it never connects
        self.sent: list[Message] = []

    @property
    def up(self) -> bool:
        return True

    def send(self, part: Message) -> None:
        self.sent.append(part)


class Scene:
    """One session with a verifier and drafters that a test plays. options: of the orchestrator."""

    def __init__(self, store: SqliteStore, fence: int, record: SessionRecord, **options: Any) -> None:
        known = OrchestratorOptions(("nowhere:1",), **options)
        self.store = store
        self.verifier = VerifierPeer(SilentLink(), lambda: None, lambda _: None)
        self.peers = [
            DrafterPeer(SilentLink(), lambda: None, lambda _: None) for _ in range(known.drafters_per_session)
        ]
        for name, peer in zip("ab", self.peers, strict=False):
            peer.info = common_pb2.GetModelInfoResponse(model=name, weights_fingerprint=name)
        self.drafter = self.peers[0]
        self.placed = 0
        self.notices: list[SessionNotice] = []
        self.driver = SessionDriver(record, fence, LetterScanner(()), SessionHost(store, known, self.hear))
        self.driver.verifying.wait()
        self.place(self.driver)

    def hear(self, driver: SessionDriver, notice: SessionNotice) -> None:
        if notice is SessionNotice.UNPLACED:
            self.place(driver)
        else:
            self.notices.append(notice)

    def place(self, driver: SessionDriver) -> None:
        self.placed += 1
        if driver.session.state is State.WAITING and driver.verifying.peer is None:
            driver.use_verifier(self.verifier)
        for _ in range(driver.drafters.missing):
            free = [peer for peer in self.peers if not driver.drafters.has(peer)]
            peer = chosen_drafter(free, driver.drafters.refusals, PlacementRequest("", ""))
            if peer is not None:
                driver.drafters.add(peer)

    async def decide(self, *tokens: int) -> None:
        """Open the session and decide `tokens`; returns once they are emitted."""
        session = self.driver.session
        expected = len(self.driver.view.output.tokens) + len(tokens)
        self.driver.verifying.on_opened(verify_pb2.Opened(attach=session.attach, position=len(session.text)))
        outcomes = [common_pb2.OUTCOME_DIRECT] * len(tokens)
        self.driver.verifying.on_verdict(
            verify_pb2.Verdict(attach=session.attach, position=len(session.text), tokens=tokens, outcomes=outcomes),
            verify_pb2.StepTimings(),
            0,
        )
        await until(lambda: len(self.driver.view.output.tokens) >= expected or self.driver.view.output.end is not None)


async def scene(verifier_wait: float = 30.0) -> Scene:
    record = SessionRecord("s", PROMPT, Sampling(), Stopping(100))
    store = SqliteStore()
    return Scene(store, await store.create(record, 60.0), record, verifier_wait=verifier_wait)


@pytest.fixture
async def played() -> AsyncIterator[Scene]:
    made = await scene()
    yield made
    await made.driver.close()


async def test_only_what_others_had_fed_counts_as_cached(played: Scene) -> None:
    """Opened again before its first token, the session finds its own prompt fed."""
    session, verifying = played.driver.session, played.driver.verifying
    verifying.on_opened(verify_pb2.Opened(attach=session.attach, position=2, cached=1))
    assert played.driver.view.stats.cached_tokens == 1
    verifying.on_lost()
    played.place(played.driver)
    verifying.on_opened(verify_pb2.Opened(attach=session.attach, position=2, cached=2, resumed=True))
    assert (played.driver.view.stats.cached_tokens, played.driver.view.stats.reopens) == (1, 1)


@pytest.mark.parametrize("claimed", [False, True])
async def test_own_work_is_no_cache(played: Scene, claimed: bool) -> None:
    """Where the first answer was lost, or the session was claimed."""
    if claimed:
        played.driver.let_go()
        played.driver.drive(played.driver.fence + 1, LetterScanner(()), 60.0)
    attach = played.driver.session.attach
    opened = verify_pb2.Opened(attach=attach, position=2, cached=2, resumed=not claimed)
    played.driver.verifying.on_opened(opened)
    assert played.driver.view.stats.cached_tokens == 0


async def test_verdicts_of_one_message_are_appended_together(played: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    appended = list[tuple[int, ...]]()
    append = played.store.append

    async def watched(session_id: str, fence: int, effect: Append) -> AppendReply:
        appended.append(effect.tokens)
        return await append(session_id, fence, effect)

    monkeypatch.setattr(played.store, "append", watched)
    (handle,) = played.verifier.subjects
    session = played.driver.session
    opened = verify_pb2.Opened(handle=handle, attach=session.attach, position=2)
    outcomes = [common_pb2.OUTCOME_DIRECT]
    verdicts = [
        verify_pb2.Verdict(handle=handle, attach=session.attach, position=at, tokens=[1], outcomes=outcomes)
        for at in (2, 3, 4)
    ]
    played.verifier.on_message(verify_pb2.ConnectVerifyResponse(opened=[opened], verdicts=verdicts))
    await until(lambda: len(played.driver.view.output.tokens) == 3)
    assert appended == [(1, 1, 1)]


async def test_what_a_stall_held_back_is_relayed_in_part_and_is_no_flood(played: Scene) -> None:
    await played.decide(1)
    verifying, drafting = played.verifier.link, played.drafter.link
    assert isinstance(verifying, SilentLink)
    assert isinstance(drafting, SilentLink)
    handle = next(iter(played.drafter.subjects))
    for _ in range(300):
        played.driver.drafters._by_source[1]._ask(128)
    for chain in range(1, 301):
        late = common_pb2.Proposal(handle=handle, chain=chain, base=3, tokens=[1] * 15)
        played.drafter.on_message(draft_pb2.ConnectDraftResponse(proposals=[late]))
    sent = [part for part in verifying.sent if isinstance(part, verify_pb2.ConnectVerifyRequest)]
    relayed = sum(len(proposal.tokens) for part in sent for proposal in part.proposals)
    assert 0 < relayed <= MOST_RELAYED
    assert not drafting._was_cut
    flood = common_pb2.Proposal(handle=handle, chain=301, base=3, tokens=[1] * (300 * 128))
    played.drafter.on_message(draft_pb2.ConnectDraftResponse(proposals=[flood]))
    assert drafting._was_cut


@pytest.mark.parametrize(("above", "believed"), [(0, True), (1, True), (1 << 60, False)])
async def test_a_verifier_that_names_ever_newer_fences_is_given_up(played: Scene, above: int, believed: bool) -> None:
    """An equal one is another owner's, too: both claimed where the log had lost a claim. What can be no fence is not
    believed.
    """
    driver, claims = played.driver, []

    def claim(fenced: SessionDriver, notice: SessionNotice) -> None:
        if notice is not SessionNotice.FENCED:
            return
        claims.append(fenced.view.newest_fence)
        fenced.drive(fenced.view.newest_fence + 1, LetterScanner(()), 60.0)
        fenced.verifying.wait()
        played.place(fenced)

    driver._host = replace(driver._host, notice=claim)
    for _ in range(10):
        if driver.session.state is State.OPENING:
            named = driver.fence + above
            driver.verifying.on_refused(
                common_pb2.Refused(code=code_number(grpc.StatusCode.FAILED_PRECONDITION), message="old", fence=named)
            )
    await until(lambda: driver.view.output.end is not None)
    assert len(claims) == (verifying.MOST_LOSSES if believed else 0)
    assert driver.view.failure == SessionFailure(grpc.StatusCode.FAILED_PRECONDITION, "old")
    await driver.close()


async def test_a_session_with_output_waits_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "RETRY_VERIFIER", 0.01)
    played = await scene(verifier_wait=0.2)
    await played.decide(1, 2)
    played.driver.verifying.on_lost()
    played.place(played.driver)
    placed = played.placed
    while played.driver.view.output.end is None:  # it opens, is refused, and after its patience fails
        if played.driver.session.state is State.OPENING:
            played.driver.verifying.on_refused(FULL)
        await asyncio.sleep(0.005)
    assert played.placed > placed + 1
    assert played.driver.view.failure is not None
    assert played.driver.view.failure[0] is grpc.StatusCode.UNAVAILABLE


async def test_those_that_find_no_slot_come_back_at_different_moments(
    played: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sooner than they were told; else all sessions of a verifier that was lost would come again at once."""
    waits: list[float] = []
    monkeypatch.setattr(verifying.SessionVerifier, "_try_again", lambda _, seconds: waits.append(seconds))
    await played.decide(1)
    played.driver.verifying.on_lost()
    played.place(played.driver)
    for _ in range(20):
        played.driver.verifying.on_refused(
            common_pb2.Refused(handle=1, code=FULL.code, message="full", retry_after_ms=2000)
        )
    assert len(set(waits)) == 20
    assert 2.0 <= min(waits) < max(waits) <= 2.0 * verifying.SCATTER


@pytest.mark.parametrize("read_elsewhere", [True, False])
async def test_a_session_goes_on_while_somebody_reads_it_anywhere(
    played: Scene, read_elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "ELSEWHERE", 3600.0 if read_elsewhere else 0.0)
    await played.store.note_reader("s")
    with played.driver.view.readers.reading():
        pass
    if read_elsewhere:
        await until(lambda: played.driver.view.timers.left("detached") is not None)
        await until(lambda: (played.driver.view.timers.left("detached") or 0.0) > 60.0)
        await played.decide(1)
        assert played.driver.view.output.end is None
        return
    await played.driver.view.ended(60.0)
    assert played.driver.view.output.end is not None
    assert played.driver.view.output.end.reason is FinishReason.CANCELLED


@pytest.mark.parametrize("read_elsewhere", [True, False])
async def test_while_the_log_is_silent_readers_elsewhere_cannot_speak(read_elsewhere: bool) -> None:
    record, store = SessionRecord("s", PROMPT, Sampling(), Stopping(100)), UnsteadyStore()
    played = Scene(store, await store.create(record, 60.0), record)
    if read_elsewhere:
        await store.note_reader("s")
    await played.decide(1)
    appender_of = played.driver.log._appender
    assert (appender_of.read_s < 60.0) is read_elsewhere
    if read_elsewhere:
        appender_of._read = appender_of._now() - 3600.0
    store.silent = {"append"}
    with played.driver.view.readers.reading():
        pass
    await until(lambda: played.driver.session.state is State.ENDING or appender_of.read_s < 60.0)
    assert (played.driver.session.state is State.RUNNING) is read_elsewhere
    store.silent.clear()
    await played.driver.close()


async def test_who_reads_elsewhere_takes_what_is_durable(played: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads here: the credit is used up, and the text would stand still."""
    monkeypatch.setattr(appender, "RENEW_S", 0.0)
    while played.driver.session.has_credit:
        await played.decide(1)
    await played.driver.log.renew()
    assert not played.driver.session.has_credit
    await played.store.note_reader("s")
    await played.driver.log.renew()
    assert played.driver.session.has_credit


async def test_a_session_that_is_lost_twice_at_once_is_followed_once(
    played: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orchestrator that was asleep wakes up with a sign of life and an append under way."""
    monkeypatch.setattr(appender, "RENEW_S", 0.0)
    answer = asyncio.Event()
    append = played.store.append

    async def late(*arguments: Any) -> AppendReply:
        await answer.wait()
        return await append(*arguments)

    monkeypatch.setattr(played.store, "append", late)
    await played.store.claim("s", "another")
    played.driver.follow(played.driver.log.renew())
    await asyncio.sleep(0)
    deciding = asyncio.create_task(played.decide(3))
    await until(lambda: len(played.driver._tasks) == 2)
    answer.set()
    await until(lambda: not played.driver._tasks)
    assert played.notices == [SessionNotice.FENCED]
    deciding.cancel()
    await asyncio.wait({deciding})


async def test_a_failure_after_the_end_does_not_change_it(played: Scene) -> None:
    played.driver.end(FinishReason.CANCELLED)
    await played.driver.view.ended(5.0)
    played.driver.on_broken(RuntimeError("too late"))
    assert played.driver.view.output.end is not None
    assert played.driver.view.output.end.reason is FinishReason.CANCELLED
    assert played.driver.view.failure is None


async def test_one_broken_session_leaves_the_others_their_link(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, sound = await scene(), await scene()
    link = broken.verifier
    sound.driver.verifying.on_lost()
    sound.driver.use_verifier(link)
    first, second = link.subjects

    def check(session: Session) -> None:
        if session is broken.driver.session:
            raise AssertionError("an invariant")

    monkeypatch.setattr(Session, "check", check)
    opened = [verify_pb2.Opened(handle=h, attach=a, position=2) for h, a in ((first, 1), (second, 2))]
    link.on_message(verify_pb2.ConnectVerifyResponse(opened=opened))
    assert broken.driver.view.failure is not None
    assert broken.driver.view.failure[0] is grpc.StatusCode.INTERNAL
    assert broken.driver.view.output.end is not None
    assert sound.driver.session.state is State.RUNNING
    assert list(link.subjects.values()) == [sound.driver.verifying]
    await sound.driver.close()


async def test_a_session_that_ends_every_verifier_is_ended_itself(played: Scene) -> None:
    """Each takes it in and is gone before it decides a token."""
    for _ in range(verifying.MOST_LOSSES + 1):
        assert played.driver.view.failure is None
        session = played.driver.session
        played.driver.verifying.on_opened(verify_pb2.Opened(attach=session.attach, position=len(session.text)))
        played.verifier.on_down()
        played.place(played.driver)
    await until(lambda: played.driver.view.output.end is not None)
    assert played.driver.view.failure is not None
    assert played.driver.view.failure[0] is grpc.StatusCode.UNAVAILABLE


async def test_verifiers_that_never_took_the_session_in_are_not_ended_by_it(played: Scene) -> None:
    """One that stops ends each link as soon as it is there; the session waits for it to be gone (seed 8573)."""
    for _ in range(2 * verifying.MOST_LOSSES):
        assert played.driver.session.state is State.OPENING
        played.verifier.on_down()
        played.place(played.driver)
    assert played.driver.view.failure is None
    await played.decide(1)


async def test_verifiers_that_decide_something_may_be_lost_as_often_as_they_like(played: Scene) -> None:
    for _ in range(2 * verifying.MOST_LOSSES):
        await played.decide(1)
        played.verifier.on_down()
        played.place(played.driver)
    assert played.driver.view.failure is None


async def test_a_long_prompt_is_hashed_once_for_all_its_sessions_and_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[threading.Thread] = []

    def noted(tokens: Sequence[int]) -> int:
        hashed.append(threading.current_thread())
        return hash_of(tokens)

    monkeypatch.setattr(driver_module, "hash_of", noted)
    long, short = tuple(range(driver_module.LONG_PROMPT)), (1, 2, 3)
    for prompt in (long, long, short):
        await driver_module.hash_beside(prompt)
    assert driver_module.hash_of_prompt(long) == hash_of(long)
    assert driver_module.hash_of_prompt(short) == hash_of(short)
    assert [thread is threading.main_thread() for thread in hashed] == [False, True]
