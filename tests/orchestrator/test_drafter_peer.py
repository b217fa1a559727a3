"""What a drafter may say of sessions that are over, and what it may not."""

from __future__ import annotations

from collections import Counter

import pytest

from orchestrator.peers.peer import ANSWERS, MOST_RELAYED, MOST_STRAYS, DrafterPeer
from orchestrator.pool import chosen_drafter
from specwire.core.placement import PlacementRequest
from specwire.v1 import common_pb2, draft_pb2

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


class Session:
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
    session = Session()
    handle = peer.attach(session)
    peer.on_message(said(handle, 4))
    assert (len(session.heard), line.reason) == (1, "")
    peer.on_message(said(handle + 1, ANSWERS + 1))
    assert line.reason == "the drafter sent replies for sessions that it was not asked for"


def test_what_crosses_a_close_is_no_flood_until_it_is_too_much(line: Line, peer: DrafterPeer) -> None:
    session = Session()
    handle = peer.attach(session)
    peer.close(handle, 0)
    assert [close.handle for part in line.sent for close in part.closes] == [handle]
    peer.on_message(said(handle, MOST_RELAYED))
    assert (session.heard, line.reason) == ([], "")
    peer.on_message(said(handle, ANSWERS + 1))
    assert line.reason != ""


def test_what_a_closed_session_still_owed_may_come(line: Line, peer: DrafterPeer) -> None:
    handle = peer.attach(Session())
    peer.close(handle, 3 * MOST_RELAYED)
    peer.on_message(said(handle, 3 * MOST_RELAYED))
    assert line.reason == ""


def test_what_crosses_a_refusal_is_no_flood(line: Line, peer: DrafterPeer) -> None:
    handle = peer.attach(Session())
    refused = common_pb2.Refused(handle=handle)
    peer.on_message(draft_pb2.ConnectDraftResponse(refused=[refused]))
    peer.on_message(said(handle, MOST_RELAYED))
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
    session = Session()
    assert peer.attach(session) == 1
    peer.on_message(draft_pb2.ConnectDraftResponse(opened=[draft_pb2.OpenedDraft(handle=1)]))
    assert line.reason == ""
    peer.on_message(FLOODS[flood])
    assert line.reason != ""
    assert session.heard == []


def test_empty_messages_can_be_a_flood_too(line: Line, peer: DrafterPeer) -> None:
    peer.attach(Session())
    for _ in range(ANSWERS):
        peer.on_message(draft_pb2.ConnectDraftResponse())
    assert line.reason == ""
    peer.on_message(draft_pb2.ConnectDraftResponse())
    assert line.reason != ""


def test_refusals_do_not_save_up_a_flood(line: Line, peer: DrafterPeer) -> None:
    for _ in range(100):
        peer.on_message(draft_pb2.ConnectDraftResponse(refused=[common_pb2.Refused(handle=peer.attach(Session()))]))
    assert line.reason == ""
    peer.on_message(said(1, MOST_STRAYS + 1))
    assert line.reason != ""


def test_one_that_refuses_is_asked_after_the_others() -> None:
    first, second = (DrafterPeer(Line(), lambda: None, lambda _: None) for _ in range(2))
    refusals: Counter[DrafterPeer] = Counter()
    second.attach(Session())
    assert chosen_drafter([first, second], refusals, ANY) is first
    refusals[first] += 1
    assert chosen_drafter([first, second], refusals, ANY) is second
    assert chosen_drafter([first], refusals, ANY) is first
    refusals[second] += 1
    assert chosen_drafter([first, second], refusals, ANY) is first


def test_many_sessions_may_close_at_once(line: Line, peer: DrafterPeer) -> None:
    handles = [peer.attach(Session()) for _ in range(60)]
    for handle in handles:
        peer.close(handle, 0)
    for handle in handles:
        peer.on_message(said(handle, 256))
    assert line.reason == ""
