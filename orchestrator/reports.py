"""What the registry says of a peer, for choosing among peers. Whether it can be used its connection says."""

from __future__ import annotations

from dataclasses import dataclass

from specwire.registry.entry import ServiceEntry, ServiceState
from specwire.registry.registrar import HEARTBEAT_S

# Two heartbeats and a bit without a new one.
STALE_S = 2.5 * HEARTBEAT_S
# A service that is not registered any more, and not connected, is dialled for so long still.
GIVEN_UP_S = 10.0


@dataclass(slots=True)
class PeerReport:
    """Of one peer; as it is made, of one that was named and not looked up.

    others: sessions that it has for other orchestrators, as it said last. started: Unix time in seconds.
    fresh: its latest heartbeat came in time. missing_since: since when it is not registered; None where it is.
    """

    others: int = 0
    started: float = 0.0
    draining: bool = False
    fresh: bool = True
    missing_since: float | None = None
    beat: tuple[str, int] = ("", 0)
    beat_at: float = 0.0

    def hear(self, entry: ServiceEntry, own: int, now: float) -> None:
        """own: sessions that this orchestrator has there."""
        self.missing_since = None
        if (entry.id, entry.beat) != self.beat:
            self.beat, self.beat_at = (entry.id, entry.beat), now
            self.others = max(0, entry.load.running + entry.load.waiting - own)
            self.started = entry.started
            self.draining = entry.state is ServiceState.DRAINING
        self.fresh = now - self.beat_at <= STALE_S

    def miss(self, now: float) -> None:
        """It is not registered. Its connection, as long as there is one, says that it is there all the same."""
        if self.missing_since is None:
            self.missing_since = now
        self.fresh = False

    def is_given_up(self, now: float) -> bool:
        return self.missing_since is not None and now - self.missing_since > GIVEN_UP_S
