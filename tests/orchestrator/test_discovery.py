"""How an orchestrator's peers follow the registry: what is dialled, what is believed, what is given up."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest

from orchestrator.peers.discovery import Place, RegistryFeed, SessionAffinity, newest
from orchestrator.peers.peer import GIVEN_UP_S, STALE_S, AnyPeer, PeerReport, VerifierPeer
from specwire.core.invalid import InvalidParameter
from specwire.registry.directory import Directory, Listing
from specwire.registry.entry import Load, Role, ServiceEntry, ServiceState
from specwire.v1 import common_pb2
from tests.orchestrator.test_driver import SilentLink

ONE, TWO = "1" * 32, "2" * 32
AT = "10.0.0.1:50061"
VERIFIER = ServiceEntry(ONE, Role.VERIFIER, AT, slots=4, started=100.0, beat=1)
PLACE: Place = (Role.VERIFIER, AT)


class FakeLink(SilentLink):
    """Up until a test says otherwise."""

    lives = True

    @property
    def up(self) -> bool:
        return self.lives


class Rig:
    """A feed whose looks a test asks for. `peers`: those that were dialled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)
        self.named: dict[Place, AnyPeer] = {}
        self.peers: dict[Place, AnyPeer] = {}
        self.unsafe = ""
        nowhere = cast(Directory, None)  # a test says what it lists
        self.feed = RegistryFeed(nowhere, SessionAffinity(), self.named.get, self._dial, self._drop, lambda _: None)

    def _dial(self, place: Place) -> AnyPeer:
        if place[1] == self.unsafe:
            raise InvalidParameter("token", "is not sent unencrypted")
        self.peers[place] = VerifierPeer(FakeLink(), lambda: None, lambda _: None)
        return self.peers[place]

    def _drop(self, peer: AnyPeer) -> None:
        self.peers = {place: each for place, each in self.peers.items() if each is not peer}

    def look(self, *entries: ServiceEntry, ignored: Counter[str] | None = None) -> None:
        self.feed._take(Listing(entries, ignored or Counter()))


def cut(peer: AnyPeer) -> None:
    assert isinstance(peer.link, FakeLink)
    peer.link.lives = False


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


async def test_who_was_named_is_not_dialled_again(rig: Rig) -> None:
    rig.named[PLACE] = VerifierPeer(FakeLink(), lambda: None, lambda _: None)
    rig.look(replace(VERIFIER, load=Load(3, 1, 0)))
    assert rig.peers == {}
    assert rig.named[PLACE].sessions == 4
    cut(rig.named[PLACE])
    rig.look()
    rig.now += GIVEN_UP_S + 1
    rig.look()
    assert rig.named[PLACE].report == PeerReport()  # as if it had never been registered; its operator has named it


async def test_orchestrators_are_counted_and_not_dialled(rig: Rig) -> None:
    here = replace(VERIFIER, role=Role.ORCHESTRATOR)
    rig.look(here)
    assert (rig.peers, rig.feed.orchestrators) == ({}, (here,))
    rig.look(here, replace(here, id=TWO, state=ServiceState.DRAINING))
    assert [each.id for each in rig.feed.orchestrators] == [ONE, TWO]


async def test_of_two_at_one_address_the_newer_one_counts(rig: Rig) -> None:
    """A service was killed and is back: its former life has not expired yet."""
    again = replace(VERIFIER, id=TWO, started=200.0, load=Load(1, 0, 3))
    assert newest([again, VERIFIER]) == newest([VERIFIER, again]) == {PLACE: again}
    rig.look(again, replace(VERIFIER, load=Load(9, 9, 0)))
    assert rig.peers[PLACE].sessions == 1


async def test_others_sessions_are_what_is_not_ours(rig: Rig) -> None:
    rig.look(VERIFIER)
    peer = rig.peers[PLACE]
    peer.subjects = cast(Any, {1: None, 2: None})  # how many there are is what counts
    rig.look(replace(VERIFIER, beat=2, load=Load(4, 1, 0)))
    assert (peer.report.others, peer.sessions) == (3, 5)
    peer.subjects = {}
    assert peer.sessions == 3
    rig.look(replace(VERIFIER, beat=2, load=Load(4, 1, 0)))  # the same heartbeat, seen again, tells nothing new
    assert peer.sessions == 3


async def test_a_successor_does_not_drain_because_its_predecessor_did(rig: Rig) -> None:
    """Its connection is there before the registry knows of it."""
    rig.look(replace(VERIFIER, state=ServiceState.DRAINING))
    peer = rig.peers[PLACE]
    assert isinstance(peer, VerifierPeer)
    peer.on_up(common_pb2.GetModelInfoResponse())
    assert peer.takes_sessions
    rig.look(replace(VERIFIER, state=ServiceState.DRAINING))  # the same heartbeat still
    assert peer.takes_sessions
    rig.look(replace(VERIFIER, id=TWO, started=200.0))
    assert peer.takes_sessions


async def test_an_old_heartbeat_is_noticed(rig: Rig) -> None:
    rig.look(VERIFIER)
    rig.now += STALE_S
    rig.look(VERIFIER)
    assert rig.peers[PLACE].report.fresh
    rig.now += 0.1
    rig.look(VERIFIER)
    assert not rig.peers[PLACE].report.fresh
    rig.look(replace(VERIFIER, beat=2))
    assert rig.peers[PLACE].report.fresh


async def test_who_is_not_registered_any_more_stays_as_long_as_it_is_connected(rig: Rig) -> None:
    rig.look(VERIFIER)
    peer = rig.peers[PLACE]
    rig.look()
    assert not peer.report.fresh
    rig.now += GIVEN_UP_S + 1
    rig.look()
    assert rig.peers == {PLACE: peer}
    rig.look(replace(VERIFIER, beat=2))  # the registry had forgotten it for a moment
    assert peer.report.fresh
    assert peer.report.missing_since is None
    rig.look()
    cut(peer)
    rig.look()
    assert rig.peers == {PLACE: peer}  # it may be back in a moment
    rig.now += GIVEN_UP_S + 1
    rig.look()
    assert rig.peers == {}
    rig.look(VERIFIER)
    assert rig.peers[PLACE] is not peer


async def test_who_must_not_be_dialled_is_counted(rig: Rig) -> None:
    rig.unsafe = AT
    rig.look(VERIFIER, ignored=Counter(newer=2))
    assert (rig.peers, rig.feed.ignored) == ({}, {"unsafe": 1, "newer": 2})


async def test_not_everything_is_dialled(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.peers.discovery.MOST_DIALLED", 2)
    rig.look(*(replace(VERIFIER, address=f"10.0.0.1:{port}") for port in range(1, 5)))
    assert len(rig.peers) == 2
    assert rig.feed.ignored == {"too many": 2}
