"""How many tokens a verifier may decide beyond what is durable and taken by the client."""

from __future__ import annotations

from math import ceil

from specwire.core.shares import MOST_WINDOW

# Beyond this a fast target far away pauses for credit: what is decided for a client that has gone is bounded by it.
MOST_BUFFER = 1024


def buffer_for(round_trip_us: float, step_us: float, least: int) -> int:
    """The least buffer with which a verifier `round_trip_us` away never waits for credit; a plain step takes `step_us`.

    What the largest steps decide during a round trip, twice: credit is raised when half of the buffer is used.
    """
    if not step_us > 0:
        raise ValueError(f"step_us: must be positive, not {step_us}")
    decided = ceil(round_trip_us / step_us * (MOST_WINDOW + 1))
    return max(least, min(MOST_BUFFER, 2 * decided))
