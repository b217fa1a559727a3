"""What a drafter may say of sessions that are over, and what it may not."""

from __future__ import annotations

import pytest

from orchestrator.peers import DrafterPeer
from orchestrator.quota import MOST_OWED
from specwire.v1 import common_pb2, draft_pb2

Proposal = common_pb2.Proposal


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

    def on_drafter_lost(self) -> None: ...

    def on_proposal(self, proposal: Proposal) -> None:
        self.heard.append(proposal)

    def on_refused_by_drafter(self, refused: common_pb2.Refused) -> None: ...


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
    peer.on_message(said(handle + 1, 1))
    assert line.reason == "the drafter sent proposals for sessions that it was not asked for"


def test_what_crosses_a_close_is_no_flood_until_it_is_too_much(line: Line, peer: DrafterPeer) -> None:
    session = Session()
    handle = peer.attach(session)
    peer.close(handle)
    assert [close.handle for part in line.sent for close in part.closes] == [handle]
    peer.on_message(said(handle, MOST_OWED))
    assert (session.heard, line.reason) == ([], "")
    peer.on_message(said(handle, 1))
    assert line.reason != ""


def test_many_sessions_may_close_at_once(line: Line, peer: DrafterPeer) -> None:
    handles = [peer.attach(Session()) for _ in range(60)]
    for handle in handles:
        peer.close(handle)
    for handle in handles:
        peer.on_message(said(handle, 256))
    assert line.reason == ""
