"""Where sessions were decided last: their keys and values may still be there for the conversation's next turn."""

from __future__ import annotations

from collections import OrderedDict

from orchestrator.peers import VerifierPeer

REMEMBERED = 4096


class Homes:
    """The latest sessions' verifiers. Forgetting one costs a prefill, nothing else."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, VerifierPeer] = OrderedDict()

    def note(self, session_id: str, peer: VerifierPeer) -> None:
        self._of[session_id] = peer
        self._of.move_to_end(session_id)
        if len(self._of) > REMEMBERED:
            self._of.popitem(last=False)

    def of(self, session_id: str) -> VerifierPeer | None:
        """The verifier that a session's next turn should go to; None if that is unknown, away or full."""
        peer = self._of.get(session_id)
        return peer if peer is not None and peer.takes_sessions and peer.has_room else None
