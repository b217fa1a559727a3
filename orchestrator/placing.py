"""Which of an orchestrator's peers a session gets: peers as candidates (`specwire.core.placement`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from orchestrator.driver import SessionDriver
from orchestrator.feed import RegistryFeed
from orchestrator.homes import Homes
from orchestrator.link import Info
from orchestrator.models import identity_of
from orchestrator.peers import DrafterPeer, VerifierPeer
from specwire.core.placement import TWO, PlacementCandidate, PlacementRequest, Reason, place

NOBODY = Info()


def verifier_candidate(peer: VerifierPeer) -> PlacementCandidate:
    info = peer.info or NOBODY
    return PlacementCandidate(
        peer.link.address,
        "" if peer.identity is None else peer.identity.digest,
        up=peer.up and not peer.draining,
        draining=peer.report.draining,
        fresh=peer.report.fresh,
        slots=info.slots,
        sessions=peer.sessions,
        region=info.region,
        context=info.context,
    )


def drafter_candidate(peer: DrafterPeer, refusals: int) -> PlacementCandidate:
    """refusals: of the session."""
    info = peer.info or NOBODY
    return PlacementCandidate(
        peer.link.address,
        info.vocabulary_fingerprint,
        up=peer.up and not peer.report.draining,
        fresh=peer.report.fresh,
        slots=info.slots,
        sessions=peer.sessions,
        region=info.region,
        refusals=refusals,
    )


def chosen_drafter(
    peers: Sequence[DrafterPeer], refusals: Counter[DrafterPeer], wish: PlacementRequest
) -> DrafterPeer | None:
    """What refuses everything has no sessions, and would be asked first for ever: so refusals count before load."""
    choice = place([drafter_candidate(each, refusals[each]) for each in peers], wish)
    return None if choice is None else peers[choice.index]


class Placing:
    """Changes nothing but what it remembers.

    Args:
        homes: where sessions were placed last, by whichever orchestrator.
        feed: knows whether other orchestrators place sessions; None where nobody looks.
        region: of this orchestrator.

    `placed`: how many verifiers it chose, by why.
    """

    def __init__(self, homes: Homes, feed: RegistryFeed | None, region: str) -> None:
        self.placed: Counter[Reason] = Counter()
        self._homes = homes
        self._feed = feed
        self._region = region

    def verifier_for(
        self, driver: SessionDriver, verifiers: Sequence[VerifierPeer], drafters: Sequence[DrafterPeer]
    ) -> VerifierPeer | None:
        """The one that was lost a moment ago, while it is expected back; or the one that suits best."""
        record, former = driver.record, driver.verifying.former
        identity = identity_of(record)
        if former is not None and not former.serves(identity, record.end):
            former = None  # it is back with another model
        if former is not None and former.takes_sessions:
            return self._placed(driver, former, Reason.HOLDER)
        if former is not None and former.expected_back:
            return None
        drafter = self.drafter_for(driver, drafters) if driver.drafters_missing else None
        wish = PlacementRequest(
            record.session_id,
            identity.digest,
            held_by=self._homes.held(record.session_id),
            parent_at=self._homes.of(record.parent),
            near=self._near(drafter),
            draws=self._draws,
            context=record.end,
        )
        choice = place([verifier_candidate(each) for each in verifiers], wish)
        return None if choice is None else self._placed(driver, verifiers[choice.index], choice.reason)

    def drafter_for(self, driver: SessionDriver, drafters: Sequence[DrafterPeer]) -> DrafterPeer | None:
        """One more for the session, if there is one."""
        record, refusals = driver.record, driver.drafters.refusals
        near = self._near(driver.verifying.peer)
        wish = PlacementRequest(record.session_id, record.vocabulary_fingerprint, near=near, draws=self._draws)
        free = [drafter for drafter in drafters if not driver.drafters.has(drafter)]
        return chosen_drafter(free, refusals, wish)

    def _placed(self, driver: SessionDriver, peer: VerifierPeer, reason: Reason) -> VerifierPeer:
        self.placed[reason] += 1
        self._homes.note(driver.record.session_id, peer.link.address)
        return peer

    def _near(self, other: VerifierPeer | DrafterPeer | None) -> tuple[str, ...]:
        """Regions: the orchestrator's, through which all passes, then that of the session's other peer."""
        there = other.info.region if other is not None and other.info is not None else ""
        return tuple(dict.fromkeys(region for region in (self._region, there) if region))

    @property
    def _draws(self) -> int:
        """Of as many the one with the least load is taken; 0: of all."""
        return TWO if self._feed is not None and len(self._feed.orchestrators) > 1 else 0
