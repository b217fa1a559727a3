"""The best fixed setting of a cell, found by sweep: what the controller is held to, which has to find it running."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from specwire.sim.cell import Cell, Result, simulate
from specwire.sim.policy import Policy, fixed, stream_wait, textbook

WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
CHUNKS = (1, 2, 4, 8)
RUN_AHEADS = (4, 8, 16, 32, 64)
DUES = (0, 1, 2, 3, 4, 6, 8, 12)


class Best(NamedTuple):
    """A setting and what it came to."""

    policy: Policy
    result: Result


def optimum(cell: Cell) -> Best:
    """The fastest of off, lockstep:K, and stream:CHUNK,RUN_AHEAD,DUE.

    Streaming is searched in two sweeps, not over the whole grid: run-ahead and chunk without waiting, then what is
    worth waiting for at the best two run-aheads.
    """
    first = _best(cell, (fixed("off"), *(fixed(f"lockstep:{k}") for k in WINDOWS)))
    streams = sorted((Best(p, simulate(cell, p)) for p in _streams()), key=_speed, reverse=True)
    waiting = _best(cell, _waits(streams))
    return max(first, streams[0], waiting, key=_speed)


def best_textbook(cell: Cell) -> Best:
    """The best k of drafting k tokens, sending them and waiting."""
    return _best(cell, (textbook(k) for k in WINDOWS))


def best_stream_wait(cell: Cell) -> Best:
    """The best streaming with a verifier that never runs without a live draft token."""
    return _best(cell, (stream_wait(chunk, ahead) for chunk in CHUNKS[:3] for ahead in RUN_AHEADS))


def _streams() -> Iterator[Policy]:
    return (fixed(f"stream:{chunk},{ahead},0") for chunk in CHUNKS for ahead in RUN_AHEADS if chunk <= ahead)


def _waits(streams: list[Best]) -> Iterator[Policy]:
    aheads = {best.policy.plan.pace.run_ahead for best in streams[:2] if best.policy.plan}
    for ahead in sorted(aheads):
        for chunk in CHUNKS:
            yield from (fixed(f"stream:{chunk},{ahead},{due}") for due in DUES if 0 < due <= ahead and chunk <= ahead)


def _best(cell: Cell, policies: Iterable[Policy]) -> Best:
    return max((Best(policy, simulate(cell, policy)) for policy in policies), key=_speed)


def _speed(best: Best) -> float:
    return best.result.tokens_per_second
