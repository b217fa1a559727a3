"""What the simulator says of a row: the same pool of emulated devices, and software that takes no time."""

from __future__ import annotations

from bench.cluster.settings import AGREE, DRAFT_MS, FLOOD, PROMPT, SLOPE, SLOTS, V_MS, WIDE, Row
from specwire import sim

# All at once, nearly: the simulator's sessions arrive by chance.
ARRIVALS_PER_SECOND = 10_000.0


def simulated(row: Row) -> float | None:
    """Tokens per second; None where the devices are not what limits it."""
    if row == FLOOD:
        return None
    fleet = sim.Fleet(
        sessions=row.at_once,
        verifiers=row.verifiers,
        drafters=1,
        V_us=1000 * V_MS,
        slope=0.0 if row in WIDE else SLOPE,
        draft_us=1000 * DRAFT_MS,
        arrivals_per_second=ARRIVALS_PER_SECOND,
        rtts_us=(0.0,),
        acceptance=AGREE,
        prompt=PROMPT,
        tokens=row.tokens,
        slots=row.at_once if row in WIDE else SLOTS,
    )
    return sim.simulate_fleet(fleet, sim.AUTO if row.drafting else sim.PLAIN).tokens_per_second
