"""When a drafter that does not pay is tried out again, and how.

A probe ends with the verdict that its answer met, or after so many. A drafter with hardware of its own takes no time
from the verifier, so it streams for a while and nobody waits: one comparison in 128 verdicts would teach nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from specwire.core.drafting import Pace
from specwire.core.plan import Discipline, Plan, in_turns

# Not more often than after so many verdicts, and for this share of the time.
PROBE_EVERY = 128
PROBE_SHARE = 0.005
PROBE_VERDICTS = 4
PROBE_WINDOW = 2
STREAMED_PROBE, STREAMED_PROBE_PACE = 16, Pace(1, 8)


@dataclass(slots=True)
class Probing:
    """When a drafter that does not pay is tried out, and what that costs.

    Where the verifier's host also drafts, a probe's price is what the verifier may have waited: the drafter first feeds
    all that was decided since it last heard. Elsewhere nobody waits.

    verdicts: since the last probe began. left: of the probe under way. price_us: of the last one.
    ended: one did, with the last verdict.
    """

    verdicts: int = 0
    left: int = 0
    price_us: float = 0.0
    ended: bool = False

    def verdict(self, answered: bool, price_us: float) -> None:
        """One came. answered: it met what the probe had drafted, which took `price_us`."""
        self.verdicts += 1
        under_way = self.left > 0
        if under_way:
            self.left = 0 if answered else self.left - 1
            self.price_us = price_us if answered else self.price_us
        self.ended = under_way and self.left == 0

    def plan(self, shared_host: bool, plain_us: float) -> Plan | None:
        """The probe that is under way or begins now; None: this is no time for one.

        plain_us: time of a verdict's forward without a window.
        """
        lasts = PROBE_VERDICTS if shared_host else STREAMED_PROBE
        if not self.left and not self._begins(plain_us, lasts):
            return None
        if shared_host:
            return in_turns(PROBE_WINDOW, "probe")
        return Plan(Discipline.STREAM, STREAMED_PROBE_PACE, 0, "probe")

    def _begins(self, plain_us: float, lasts: int) -> bool:
        if self.verdicts < PROBE_EVERY or PROBE_SHARE * self.verdicts * plain_us < self.price_us:
            return False
        self.verdicts, self.left = 0, lasts
        return True
