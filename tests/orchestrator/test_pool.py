"""What an orchestrator waits for at its start, and which peer a session is given."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import orchestrator.server
import verify_service.server
from orchestrator import pool as pool_module
from orchestrator.options import OrchestratorOptions
from orchestrator.peers import peer as peer_module
from orchestrator.peers.discovery import RegistryFeed, SessionAffinity
from orchestrator.peers.peer import ANSWERS, MOST_RELAYED, MOST_STRAYS, DrafterPeer, Quota, VerifierPeer
from orchestrator.pool import Pool, StartError, chosen_drafter
from orchestrator.session.driver import SessionDriver
from orchestrator.store import SessionRecord
from specwire.client import AsyncClient
from specwire.core.draft import DraftSession
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Pace
from specwire.core.placement import PlacementRequest, Reason
from specwire.core.text import Stopping
from specwire.registry.options import RegistryOptions
from specwire.rpc.server_options import ModelServiceOptions
from specwire.v1 import common_pb2, draft_pb2, verify_pb2
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, plain, stack
from tests.orchestrator.test_driver import SilentLink
from tests.ports import free_address
from tests.wait import asked, limits

OTHER = "scripted:8"


def pool(options: OrchestratorOptions) -> Pool:
    return Pool(options, list)


async def written(by: orchestrator.server.RunningOrchestrator, model: str = "") -> list[int]:
    """A short text; it is stopped then."""
    try:
        async with AsyncClient(by.address) as client:
            return list((await client.complete(PROMPT, model=model, max_tokens=20, ignore_eos=True)).tokens)
    finally:
        await by.stop(0.0)


async def test_a_verifier_that_is_refused_leaves_another_to_be_waited_for() -> None:
    known = pool(OrchestratorOptions(("a:1", "b:1")))
    known.verifiers[0].refusal = "serves other weights"
    ready = asyncio.create_task(known.until_ready())
    await asyncio.sleep(0)
    assert not ready.done()
    known.verifiers[1].link.distrusted = True
    known.verifiers[1].link.trouble = "b:1 is not trusted"
    known.verifiers[1].on_unreachable()
    with pytest.raises(StartError, match="a:1: serves other weights"):
        async with asyncio.timeout(60.0):
            await ready


async def test_a_drafter_that_is_refused_is_not_waited_for() -> None:
    known = pool(OrchestratorOptions(("a:1",), ("c:1",)))
    known.drafters[0].refusal = "vocabulary mismatch"
    with pytest.raises(StartError, match="c:1: vocabulary mismatch"):
        async with asyncio.timeout(60.0):
            await known.until_ready()


@pytest.mark.parametrize(("moment_s", "start_timeout"), [(0.2, 120.0), (10.0, 0.5)])
async def test_a_drafter_that_is_not_there_is_waited_for_but_a_moment(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dead_address: str,
    moment_s: float,
    start_timeout: float,
) -> None:
    monkeypatch.setattr(pool_module, "OTHERS_WITHIN_S", moment_s)
    async with stack(SLOW_TARGET) as running:
        verifiers = running.orchestrator.orchestrator.options.verifiers
        waits = limits(start_timeout)

        async def start() -> orchestrator.server.RunningOrchestrator | None:
            try:
                options = OrchestratorOptions(verifiers, (dead_address,), start_timeout=next(waits))
                return await orchestrator.server.start(options)
            except StartError:  # a busy machine's verifier was not there in time
                return None

        started = await asked(start, lambda answer: answer)
        assert started is not None
        assert await written(started) == plain(SLOW_TARGET, PROMPT, 20)
    (told,) = (each for each in caplog.messages if each.startswith("until drafters come, sessions run plainly: "))
    assert dead_address in told


async def test_a_request_right_after_the_start_finds_every_verifier_that_was_named() -> None:
    late = free_address()
    async with stack(SLOW_TARGET) as running:
        verifiers = (*running.orchestrator.orchestrator.options.verifiers, late)
        starting = asyncio.create_task(orchestrator.server.start(OrchestratorOptions(verifiers)))
        await asyncio.sleep(
            0.5
        )  # the first is known by then, unless the machine is busy, where it may as well be later
        verifier = await verify_service.server.start(ModelServiceOptions(OTHER, late))
        started = await starting
        assert await written(started, OTHER) == plain(OTHER, PROMPT, 20)
        await verifier.stop(0.0)


async def test_a_verifier_that_is_not_there_is_waited_for_but_a_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dead_address: str
) -> None:
    monkeypatch.setattr(pool_module, "OTHERS_WITHIN_S", 0.2)
    async with stack(SLOW_TARGET) as running:
        verifiers = (dead_address, *running.orchestrator.orchestrator.options.verifiers)
        started = await orchestrator.server.start(OrchestratorOptions(verifiers))
        assert await written(started) == plain(SLOW_TARGET, PROMPT, 20)
    (told,) = (
        each for each in caplog.messages if each.startswith("models of verifiers that are not there are refused: ")
    )
    assert dead_address in told


# ----------------------------------------------------------------------------------------------------------------------
# Which peer a session is given: what an orchestrator knows of its peers, turned into a wish and candidates.

OLD, NEW, WORDS, TEXT = "aa", "bb", "cc", "dd"


def described(weights: str = OLD, **more: Any) -> common_pb2.GetModelInfoResponse:
    known = {"vocabulary_fingerprint": WORDS, "eos_ids": [0], "tokenizer_hash": TEXT, "slots": 4, "context": 11}
    return common_pb2.GetModelInfoResponse(weights_fingerprint=weights, **{**known, **more})


def verifier(name: str, weights: str = OLD, **more: Any) -> VerifierPeer:
    peer = VerifierPeer(SilentLink(), lambda: None, lambda _: None)
    peer.link.address = name
    peer.on_up(described(weights, **more))
    return peer


def drafter(name: str, vocabulary: str = WORDS, region: str = "") -> DrafterPeer:
    link = SilentLink()
    link.address = name
    peer = DrafterPeer(link, lambda: None, lambda _: None)
    peer.on_up(common_pb2.GetModelInfoResponse(vocabulary_fingerprint=vocabulary, region=region, slots=4))
    return peer


class Session:
    """As much of a session as placing looks at."""

    def __init__(self, parent: str = "") -> None:
        record = SessionRecord(
            "session",
            (1, 2),
            Sampling(),
            Stopping(9),
            weights_fingerprint=OLD,
            vocabulary_fingerprint=WORDS,
            tokenizer_fingerprint=TEXT,
            eos_ids=(0,),
            parent=parent,
        )
        self.view = SimpleNamespace(record=record)
        self.verifying = SimpleNamespace(peer=None, former=None, refusals=Counter())
        self.drafters = SimpleNamespace(refusals=Counter(), has=lambda _: False, missing=1)

    @property
    def driver(self) -> SessionDriver:
        return cast(SessionDriver, self)


@pytest.fixture
async def placing() -> Pool:
    return Pool(OrchestratorOptions(("a:1",), registration=RegistryOptions(region="here")), list)


# In each respect in which a verifier may not be equal: what another one says.
UNEQUAL = [
    {"weights_fingerprint": NEW},
    {"vocabulary_fingerprint": NEW},
    {"tokenizer_hash": NEW},
    {"eos_ids": [2]},
    {"eos_ids": [0, 2]},
    {"eos_ids": []},
    {"context": 10},
]
# In which it may differ all the same.
EQUAL = [
    {"context": 12},
    {"eos_ids": [0, 0]},
    {"model": "other"},
    {"dtype": "float16", "device": "cuda:0", "runtime": "openvino"},
    {"deterministic": True, "slots": 9, "host_id": "there", "chat_template": "{{ messages }}"},
]


@pytest.mark.parametrize("unequal", UNEQUAL)
def test_a_session_goes_back_to_its_former_verifier_unless_that_is_another_model_now(
    placing: Pool, unequal: dict[str, Any]
) -> None:
    session, former, other = Session(), verifier("former"), verifier("other")
    session.verifying.former = former
    assert placing.verifier_for(session.driver, [other, former]) is former
    assert placing.affinity.of("session") == "former"
    former.on_down()
    changed = described()
    changed.ClearField(next(iter(unequal)))
    changed.MergeFrom(common_pb2.GetModelInfoResponse(**unequal))
    former.on_up(changed)
    assert placing.verifier_for(session.driver, [former, other]) is other
    assert placing.affinity.of("session") == "other"


@pytest.mark.parametrize("unequal", UNEQUAL)
def test_nobody_will_do_who_is_not_equal(placing: Pool, unequal: dict[str, Any]) -> None:
    weights = unequal.get("weights_fingerprint", OLD)
    rest = {name: value for name, value in unequal.items() if name != "weights_fingerprint"}
    assert placing.verifier_for(Session().driver, [verifier("new", weights, **rest)]) is None


@pytest.mark.parametrize("equal", EQUAL)
def test_whoever_only_rounds_otherwise_will_do(placing: Pool, equal: dict[str, Any]) -> None:
    other = verifier("other", **equal)
    assert placing.verifier_for(Session().driver, [other]) is other


def test_what_another_orchestrator_has_told_counts_once(placing: Pool) -> None:
    """Where a session was held it needs no room; once it has been placed here, its home is a home like any other."""
    full, free = verifier("full", slots=1), verifier("free")
    full.report.others = 1
    placing.affinity.learn("session", "full")
    session = Session()
    assert placing.verifier_for(session.driver, [free, full]) is full
    assert placing.verifier_for(session.driver, [free, full]) is free


def test_a_turn_goes_to_its_parent_where_there_is_room(placing: Pool) -> None:
    home, other = verifier("home", slots=1), verifier("other")
    placing.affinity.note("parent", "home")
    assert placing.verifier_for(Session("parent").driver, [other, home]) is home
    home.report.others = 1
    assert placing.verifier_for(Session("parent").driver, [other, home]) is other


def test_near_here_then_near_the_drafter_then_anywhere(placing: Pool) -> None:
    here, there, far = (verifier(name, region=name) for name in ("here", "there", "far"))
    remote = drafter("remote", region="there")
    placing.drafters = [remote]
    assert placing.verifier_for(Session().driver, [far, there, here]) is here
    assert placing.verifier_for(Session().driver, [far, there]) is there
    placing.drafters = []
    assert placing.verifier_for(Session().driver, [far, there]) is far
    assert placing.placed == {Reason.NEAR: 2, Reason.LOAD: 1}


def test_a_drafter_of_the_vocabulary_near_here_or_near_the_verifier(placing: Pool) -> None:
    session = Session()
    session.verifying.peer = verifier("v", region="there")
    wrong, far = drafter("wrong", "dd", "here"), drafter("far", region="far")
    there, here = drafter("there", region="there"), drafter("here", region="here")
    placing.drafters = [wrong, far, there, here]
    assert placing.drafter_for(session.driver) is here
    placing.drafters = [wrong, far, there]
    assert placing.drafter_for(session.driver) is there
    placing.drafters = [wrong, far]
    assert placing.drafter_for(session.driver) is far
    placing.drafters = [wrong]
    assert placing.drafter_for(session.driver) is None


def test_two_are_drawn_where_others_place_too(placing: Pool) -> None:
    feed: Any = SimpleNamespace(orchestrators=("one", "other"), shared=True)
    verifiers = [verifier(f"10.0.0.{number}:1") for number in range(8)]
    placing.feed = cast(RegistryFeed, feed)
    chosen = placing.verifier_for(Session().driver, verifiers)
    feed.shared = False
    placing.affinity = SessionAffinity()
    alone = placing.verifier_for(Session().driver, verifiers)
    assert alone is verifiers[0]
    assert chosen is not None
    assert chosen is not verifiers[0]  # by the session's and the services' names


# ----------------------------------------------------------------------------------------------------------------------
# Drafters and verifiers as an orchestrator knows them: what a drafter may say, who is expected back.

Proposal = common_pb2.Proposal
ANY = PlacementRequest("", "")


class Line:
    """Keeps what is sent, and why it was cut."""

    address = "a drafter"
    up = True

    def __init__(self) -> None:
        self.sent: list[draft_pb2.ConnectDraftRequest] = []
        self.reason = ""

    def send(self, part: draft_pb2.ConnectDraftRequest) -> None:
        self.sent.append(part)

    def cut(self, reason: str) -> None:
        self.reason = reason


class HearingSession:
    """Hears its drafter."""

    def __init__(self) -> None:
        self.heard: list[Proposal] = []

    def on_broken(self, error: Exception) -> None:
        raise error

    def on_lost(self) -> None: ...

    def on_proposal(self, proposal: Proposal) -> None:
        self.heard.append(proposal)

    def on_refused(self, refused: common_pb2.Refused) -> None: ...


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def peer(line: Line) -> DrafterPeer:
    return DrafterPeer(line, lambda: None, lambda _: None)


def said(handle: int, tokens: int) -> draft_pb2.ConnectDraftResponse:
    return draft_pb2.ConnectDraftResponse(proposals=[Proposal(handle=handle, tokens=[1] * tokens)])


def test_a_proposal_for_a_session_that_never_was_is_a_flood(line: Line, peer: DrafterPeer) -> None:
    session = HearingSession()
    handle = peer.attach(session)
    peer.on_message(said(handle, 4))
    assert (len(session.heard), line.reason) == (1, "")
    peer.on_message(said(handle + 1, ANSWERS + 1))
    assert line.reason == "the drafter sent replies for sessions that it was not asked for"


def test_what_crosses_a_close_is_no_flood_until_it_is_too_much(line: Line, peer: DrafterPeer) -> None:
    session = HearingSession()
    handle = peer.attach(session)
    peer.close(handle, 0)
    assert [close.handle for part in line.sent for close in part.closes] == [handle]
    peer.on_message(said(handle, MOST_RELAYED))
    assert (session.heard, line.reason) == ([], "")
    peer.on_message(said(handle, ANSWERS + 1))
    assert line.reason != ""


def test_what_a_closed_session_still_owed_may_come(line: Line, peer: DrafterPeer) -> None:
    handle = peer.attach(HearingSession())
    peer.close(handle, 3 * MOST_RELAYED)
    peer.on_message(said(handle, 3 * MOST_RELAYED))
    assert line.reason == ""


NOBODY = common_pb2.Refused(handle=4_000_000)
FLOODS = {
    "refused": draft_pb2.ConnectDraftResponse(refused=[NOBODY] * (ANSWERS + 1)),
    "opened": draft_pb2.ConnectDraftResponse(opened=[draft_pb2.OpenedDraft(handle=1)] * (ANSWERS + 1)),
    "beside a proposal": draft_pb2.ConnectDraftResponse(
        opened=[draft_pb2.OpenedDraft(handle=1)] * (ANSWERS + 1), proposals=[Proposal(handle=1, tokens=[1])]
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_other_replies_can_be_a_flood_too(line: Line, peer: DrafterPeer, flood: str) -> None:
    session = HearingSession()
    assert peer.attach(session) == 1
    peer.on_message(draft_pb2.ConnectDraftResponse(opened=[draft_pb2.OpenedDraft(handle=1)]))
    assert line.reason == ""
    peer.on_message(FLOODS[flood])
    assert line.reason != ""
    assert session.heard == []


def test_empty_messages_can_be_a_flood_too(line: Line, peer: DrafterPeer) -> None:
    peer.attach(HearingSession())
    for _ in range(ANSWERS):
        peer.on_message(draft_pb2.ConnectDraftResponse())
    assert line.reason == ""
    peer.on_message(draft_pb2.ConnectDraftResponse())
    assert line.reason != ""


def test_refusals_do_not_save_up_a_flood(line: Line, peer: DrafterPeer) -> None:
    for _ in range(100):
        peer.on_message(
            draft_pb2.ConnectDraftResponse(refused=[common_pb2.Refused(handle=peer.attach(HearingSession()))])
        )
    assert line.reason == ""
    peer.on_message(said(1, MOST_STRAYS + 1))
    assert line.reason != ""


def test_one_that_refuses_is_asked_after_the_others() -> None:
    first, second = (DrafterPeer(Line(), lambda: None, lambda _: None) for _ in range(2))
    refusals: Counter[DrafterPeer] = Counter()
    second.attach(HearingSession())
    assert chosen_drafter([first, second], refusals, ANY) is first
    refusals[first] += 1
    assert chosen_drafter([first, second], refusals, ANY) is second
    assert chosen_drafter([first], refusals, ANY) is first
    refusals[second] += 1
    assert chosen_drafter([first, second], refusals, ANY) is first


def test_many_sessions_may_close_at_once(line: Line, peer: DrafterPeer) -> None:
    handles = [peer.attach(HearingSession()) for _ in range(60)]
    for handle in handles:
        peer.close(handle, 0)
    for handle in handles:
        peer.on_message(said(handle, 256))
    assert line.reason == ""


# ----------------------------------------------------------------------------------------------------------------------
# A drafter that keeps to the protocol never exceeds its quota; one that does not is found out.

paces = st.builds(Pace, st.integers(1, 5), st.integers(0, 12))
# How far an advance goes back, what it decides (0: what the drafter guessed), the pace, and tokens drafted after it.
advances = st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=6), paces, st.integers(0, 15))


def draft(session: DraftSession, most: int) -> list[int]:
    """Draft up to `most` tokens; the sizes of the proposals that this brings."""
    sizes = []
    for _ in range(most):
        while (proposal := session.take_proposal()) is not None:
            sizes.append(len(proposal.tokens))
        if session.wants_token:
            session.drafted(0)
    return sizes


@given(paces, st.lists(advances, max_size=20))
def test_an_honest_drafter_stays_within_it(pace: Pace, events: list[tuple[int, list[int], Pace, int]]) -> None:
    quota, session = Quota(), DraftSession((0,) * 4, pace, 0, 1000)
    quota.ask(pace.run_ahead)
    for back, tokens, wanted, drafted in events:
        assert all(quota.take(size) for size in draft(session, drafted))
        quota.ask(wanted.run_ahead)
        session.advance(max(1, session.decided - back), tokens, wanted)
    assert all(quota.take(size) for size in draft(session, 50))


def test_more_than_was_asked_for_is_refused_and_not_charged() -> None:
    quota = Quota()
    assert not quota.take(1)
    quota.ask(4)
    assert [quota.take(size) for size in (5, 3, 0, 0)] == [False, True, True, False]


def test_a_silent_drafter_does_not_save_up_a_flood() -> None:
    quota = Quota(100)
    for _ in range(100):
        quota.ask(32)
    assert quota.take(100)
    assert not quota.take(1)


# ----------------------------------------------------------------------------------------------------------------------
# Which verifier a session waits for: the one that was lost a moment ago may still have it.

INFO = common_pb2.GetModelInfoResponse()


class Clock:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr("orchestrator.peers.peer.time.monotonic", lambda: self.now)


def lost_peer() -> VerifierPeer:
    """Up once, then lost; the link says so and is about to dial."""
    peer = VerifierPeer(SilentLink(), lambda: None, lambda _: None)
    peer.on_up(INFO)
    peer.on_down()
    peer.on_unreachable()
    return peer


def test_it_is_expected_back_until_dialling_has_failed_twice_and_is_lost_anew_with_every_link() -> None:
    assert not VerifierPeer(SilentLink(), lambda: None, lambda _: None).expected_back  # it was never there
    peer = lost_peer()
    assert peer.expected_back
    peer.on_unreachable()
    assert peer.expected_back
    peer.on_unreachable()
    assert not peer.expected_back
    peer.on_up(INFO)
    assert not peer.expected_back  # it is back
    peer.on_down()
    peer.on_unreachable()
    assert peer.expected_back


def test_it_is_expected_back_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    peer = lost_peer()
    clock.now += peer_module.PREFERENCE - 0.01
    assert peer.expected_back
    clock.now += 0.01
    assert not peer.expected_back


def test_one_that_said_that_it_stops_is_not_waited_for() -> None:
    peer = VerifierPeer(SilentLink(), lambda: None, lambda _: None)
    peer.on_up(INFO)
    peer.on_message(verify_pb2.ConnectVerifyResponse(draining=True))
    peer.on_down()
    assert not peer.expected_back
    peer.on_up(INFO)  # another process at the same address
    peer.on_down()
    assert peer.expected_back
