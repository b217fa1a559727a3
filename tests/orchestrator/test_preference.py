"""Which verifier a session waits for: the one that was lost a moment ago may still have it."""

from __future__ import annotations

import pytest

from orchestrator.peers import peer as module
from orchestrator.peers.peer import VerifierPeer
from specwire.v1 import common_pb2, verify_pb2
from tests.orchestrator.test_driver import SilentLink

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


def test_one_that_was_never_there_is_not_waited_for() -> None:
    assert not VerifierPeer(SilentLink(), lambda: None, lambda _: None).expected_back


def test_it_is_expected_back_until_dialling_has_failed_twice() -> None:
    peer = lost_peer()
    assert peer.expected_back
    peer.on_unreachable()
    assert peer.expected_back
    peer.on_unreachable()
    assert not peer.expected_back


def test_it_is_expected_back_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    peer = lost_peer()
    clock.now += module.PREFERENCE - 0.01
    assert peer.expected_back
    clock.now += 0.01
    assert not peer.expected_back


def test_it_is_lost_anew_with_every_link() -> None:
    peer = lost_peer()
    peer.on_unreachable()
    peer.on_unreachable()
    peer.on_up(INFO)
    assert not peer.expected_back  # it is back
    peer.on_down()
    peer.on_unreachable()
    assert peer.expected_back


def test_one_that_said_that_it_stops_is_not_waited_for() -> None:
    peer = VerifierPeer(SilentLink(), lambda: None, lambda _: None)
    peer.on_up(INFO)
    peer.on_message(verify_pb2.ConnectVerifyResponse(draining=True))
    peer.on_down()
    assert not peer.expected_back
    peer.on_up(INFO)  # another process at the same address
    peer.on_down()
    assert peer.expected_back
