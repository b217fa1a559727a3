"""Peers as candidates for a session (`specwire.core.placement`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from orchestrator.link import Info
from orchestrator.peers import DrafterPeer, VerifierPeer
from specwire.core.placement import Candidate, Wish, place

NOBODY = Info()


def verifier_candidate(peer: VerifierPeer) -> Candidate:
    info = peer.info or NOBODY
    return Candidate(
        peer.link.address,
        info.weights_fingerprint,
        up=peer.up,
        draining=peer.draining or peer.report.draining,
        fresh=peer.report.fresh,
        slots=info.slots,
        sessions=peer.sessions,
        region=info.region,
    )


def drafter_candidate(peer: DrafterPeer, refusals: int) -> Candidate:
    """refusals: of the session."""
    info = peer.info or NOBODY
    return Candidate(
        peer.link.address,
        info.vocabulary_fingerprint,
        up=peer.up,
        draining=peer.report.draining,
        fresh=peer.report.fresh,
        slots=info.slots,
        sessions=peer.sessions,
        region=info.region,
        refusals=refusals,
    )


def chosen_drafter(peers: Sequence[DrafterPeer], refusals: Counter[DrafterPeer], wish: Wish) -> DrafterPeer | None:
    """One that refuses everything has no sessions, and would be asked first for ever: so refusals count."""
    choice = place([drafter_candidate(each, refusals[each]) for each in peers], wish)
    return None if choice is None else peers[choice.index]


def regions(*names: str) -> tuple[str, ...]:
    """Those that were told, the nearest first."""
    return tuple(dict.fromkeys(name for name in names if name))
