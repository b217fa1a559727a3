"""Drafters and verifiers as an orchestrator knows them: what a drafter may say, who is expected back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.peers import peer as peer_module
from orchestrator.peers.peer import ANSWERS, MOST_RELAYED, MOST_STRAYS, DrafterPeer, Quota, VerifierPeer
from orchestrator.pool import chosen_drafter
from specwire.core.draft import DraftSession
from specwire.core.messages import Pace
from specwire.core.placement import PlacementRequest
from specwire.v1 import common_pb2, draft_pb2, verify_pb2
from tests.orchestrator.test_driver import SilentLink

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


def test_a_line_that_stalls_for_long_owes_what_was_asked() -> None:
    quota = Quota()
    for _ in range(300):
        quota.ask(128)
    sizes = [15] * 300
    assert sum(sizes) > MOST_RELAYED
    assert all(quota.take(size) for size in sizes)


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
