"""Keeps an orchestrator's peers equal to what is registered, and remembers which verifier decided a session last."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from orchestrator.peers.peer import AnyPeer, PeerReport
from specwire.core.invalid import InvalidParameter
from specwire.registry.directory import SCATTER, Directory, Listing, RegistryUnavailable
from specwire.registry.entry import Role, ServiceEntry
from specwire.registry.service import RemoteDirectory

# ----------------------------------------------------------------------------------------------------------------------
# Which verifier decided a session last: its keys and values may still be there for the conversation's next turn.

REMEMBERED = 4096


class SessionAffinity:
    """The addresses of the latest sessions' verifiers. Forgetting one costs a prefill, nothing else.

    `fresh`: notes since it was last emptied; they are told to other orchestrators.
    """

    def __init__(self) -> None:
        self.fresh: dict[str, str] = {}
        self._of: OrderedDict[str, str] = OrderedDict()
        self._learnt: set[str] = set()

    def note(self, session_id: str, address: str) -> None:
        """The session is decided there from now on."""
        self._put(session_id, address)
        self._learnt.discard(session_id)
        if len(self.fresh) < REMEMBERED:
            self.fresh[session_id] = address

    def learn(self, session_id: str, address: str) -> None:
        """Another orchestrator had the session decided there."""
        self._put(session_id, address)
        self._learnt.add(session_id)

    def _put(self, session_id: str, address: str) -> None:
        self._of[session_id] = address
        self._of.move_to_end(session_id)
        if len(self._of) > REMEMBERED:
            forgotten, _ = self._of.popitem(last=False)
            self._learnt.discard(forgotten)

    def of(self, session_id: str) -> str:
        """The address of the session's verifier; "" if that is unknown."""
        return self._of.get(session_id, "")

    def held(self, session_id: str) -> str:
        """The same for a session that was not placed here yet: it may still be there, and needs no slot."""
        return self.of(session_id) if session_id in self._learnt else ""


# ----------------------------------------------------------------------------------------------------------------------
# Keeps an orchestrator's peers equal to what is registered, while services come and go.

logger = logging.getLogger(__name__)

# Seconds between two looks.
LOOK_S = 1.0
# Seconds for a look-up that a request waits for.
ASK_S = 0.5
# How many are dialled at most.
MOST_DIALLED = 1024

Place = tuple[Role, str]


class RegistryFeed:
    """Polls the registry. What was known stays in use while the registry does not answer.

    Args:
        directory: owned from now on.
        find: the known peer at a place, however it became known; None where there is none.
        dial: a new one, for a place that can be dialled; InvalidParameter if it must not be.
        drop: one that `dial` made, whose service has gone.
        looked: is called after each poll, with the time by the loop's clock.

    `services`: how many were there at the last look, by role. `orchestrators`: those of them that place sessions, this
    one included. `ignored`: entries that were refused then, by reason. `trouble`: why the last poll failed; "" if it
    did not.
    """

    def __init__(
        self,
        directory: Directory | RemoteDirectory,
        affinity: SessionAffinity,
        find: Callable[[Place], AnyPeer | None],
        dial: Callable[[Place], AnyPeer],
        drop: Callable[[AnyPeer], None],
        looked: Callable[[float], None],
    ) -> None:
        self.services: Counter[Role] = Counter()
        self.orchestrators: tuple[ServiceEntry, ...] = ()
        self.ignored: Counter[str] = Counter()
        self._answered = asyncio.get_running_loop().time()
        self.trouble = "the registry has not answered yet"
        self._warned = False
        self._directory = directory
        self._affinity = affinity
        self._find = find
        self._dial = dial
        self._drop = drop
        self._looked = looked
        self._known: dict[Place, AnyPeer] = {}
        self._dialled: set[Place] = set()
        self._random = random.Random()  # libraries seed the global one, all replicas alike

    @property
    def shared(self) -> bool:
        """Whether others place sessions at the same verifiers; of who asks a cloud that is not told."""
        return len(self.orchestrators) > 1 or isinstance(self._directory, RemoteDirectory)

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer, or since the start."""
        return asyncio.get_running_loop().time() - self._answered

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        while True:
            try:
                listing = await self._directory.listing()
                self._note("")
                self._take(listing)
                await self._tell_homes()
            except RegistryUnavailable as error:
                self._note(str(error))
            except Exception:  # a failure of our own: peers that are known go on
                logger.exception("a look at the registry failed")
            await asyncio.sleep(LOOK_S * self._random.uniform(1 - SCATTER, 1))

    async def learn_home(self, session_id: str) -> None:
        """Ask at which verifier another orchestrator had the session. Gives up soon."""
        if self.trouble or self._affinity.of(session_id):
            return
        try:
            async with asyncio.timeout(ASK_S):
                address = await self._directory.affinity_of(session_id)
        except (RegistryUnavailable, TimeoutError):
            return
        if address is not None:
            self._affinity.learn(session_id, address)

    async def close(self) -> None:
        await self._directory.close()

    async def _tell_homes(self) -> None:
        noted, self._affinity.fresh = self._affinity.fresh, {}
        if noted:
            await self._directory.note_affinity(noted)

    def _note(self, trouble: str) -> None:
        if trouble and not self._warned:
            logger.warning("%s; what is known stays in use", trouble)
        elif self._warned and not trouble:
            logger.warning("the registry answers again")
        self.trouble, self._warned = trouble, bool(trouble)

    def _take(self, listing: Listing) -> None:
        now = self._answered = asyncio.get_running_loop().time()
        self.ignored = Counter(listing.ignored)
        self.services = Counter(entry.role for entry in listing.entries)
        self.orchestrators = tuple(entry for entry in listing.entries if entry.role is Role.ORCHESTRATOR)
        present = newest(listing.entries)
        for place, entry in present.items():
            peer = self._peer_at(place)
            if peer is not None:
                peer.report.hear(entry, len(peer.subjects), now)
        for place in self._known.keys() - present.keys():
            self._miss(place, now)
        self._looked(now)

    def _peer_at(self, place: Place) -> AnyPeer | None:
        if place not in self._known:
            peer = self._find(place) or self._dialled_at(place)
            if peer is None:
                return None
            self._known[place] = peer
        return self._known[place]

    def _dialled_at(self, place: Place) -> AnyPeer | None:
        if len(self._dialled) >= MOST_DIALLED:
            self.ignored["too many"] += 1
            return None
        try:
            peer = self._dial(place)
        except InvalidParameter as error:
            self.ignored["unsafe"] += 1
            logger.warning("the %s at %s is not dialled: %s", *place, error)
            return None
        logger.info("%s at %s has come", *place)
        self._dialled.add(place)
        return peer

    def _miss(self, place: Place, now: float) -> None:
        peer = self._known[place]
        peer.report.miss(now)
        if peer.link.up or not peer.report.is_given_up(now):
            return
        del self._known[place]
        peer.report = PeerReport()
        if place in self._dialled:
            logger.info("%s at %s has gone", *place)
            self._dialled.remove(place)
            self._drop(peer)


def newest(entries: Sequence[ServiceEntry]) -> dict[Place, ServiceEntry]:
    """Verifiers and drafters by address; of several at one address, the one that started last."""
    found: dict[Place, ServiceEntry] = {}
    for entry in sorted(entries, key=lambda each: (each.started, each.id)):
        if entry.role is not Role.ORCHESTRATOR:
            found[entry.role, entry.address] = entry
    return found
