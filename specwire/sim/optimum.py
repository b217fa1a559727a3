"""The best fixed setting of a cell, found by a sweep: what the controller is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from specwire.sim.simulation import Cell, Policy, Result, fixed, simulate, stream_wait, textbook

WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
CHUNKS = (1, 2, 4, 8)
RUN_AHEADS = (4, 8, 16, 32, 64)
DUES = (0, 1, 2, 3, 4, 6, 8, 12)
FINALISTS = 8


class Best(NamedTuple):
    """A setting and its result."""

    policy: Policy
    result: Result


class BestOfAll(NamedTuple):
    """A setting and its speed over several sessions: all their tokens in all their time."""

    policy: Policy
    tokens_per_second: float


def optimum(cell: Cell) -> Best:
    """The fastest of off, lockstep:K, and stream:CHUNK,RUN_AHEAD,DUE."""
    policy = optimum_over((cell,)).policy
    return Best(policy, simulate(cell, policy))


def optimum_over(cells: Sequence[Cell]) -> BestOfAll:
    """The one setting that is fastest over sessions which differ in what is guessed right.

    The whole sweep is over the first session; the others decide between the FINALISTS.
    """
    swept = sorted((_over(cells[:1], policy) for policy in _swept(cells[0])), key=_speed, reverse=True)
    return _best(cells, (each.policy for each in swept[:FINALISTS]))


def _swept(cell: Cell) -> Iterator[Policy]:
    """Streaming is searched in two sweeps, not over the whole grid: run-ahead and chunk without waiting, then what is
    worth waiting for at the best two run-aheads.
    """
    yield fixed("off")
    yield from (fixed(f"lockstep:{k}") for k in WINDOWS)
    streams = sorted((_over((cell,), policy) for policy in _streams()), key=_speed, reverse=True)
    yield from (each.policy for each in streams[:FINALISTS])
    yield from _waits(streams)


def best_textbook(cell: Cell) -> Best:
    """The best k of drafting k tokens, sending them and waiting."""
    return _alone(cell, (textbook(k) for k in WINDOWS))


def best_stream_wait(cell: Cell) -> Best:
    """The best streaming with a verifier that never runs without a live draft token."""
    return _alone(cell, (stream_wait(chunk, ahead) for chunk in CHUNKS[:3] for ahead in RUN_AHEADS))


def _streams() -> Iterator[Policy]:
    return (fixed(f"stream:{chunk},{ahead},0") for chunk in CHUNKS for ahead in RUN_AHEADS if chunk <= ahead)


def _waits(streams: list[BestOfAll]) -> Iterator[Policy]:
    aheads = {best.policy.plan.pace.run_ahead for best in streams[:2] if best.policy.plan}
    for ahead in sorted(aheads):
        for chunk in CHUNKS:
            yield from (fixed(f"stream:{chunk},{ahead},{due}") for due in DUES if 0 < due <= ahead and chunk <= ahead)


def _alone(cell: Cell, policies: Iterable[Policy]) -> Best:
    policy = _best((cell,), policies).policy
    return Best(policy, simulate(cell, policy))


def _best(cells: Sequence[Cell], policies: Iterable[Policy]) -> BestOfAll:
    return max((_over(cells, policy) for policy in policies), key=_speed)


def _over(cells: Sequence[Cell], policy: Policy) -> BestOfAll:
    results = [simulate(cell, policy) for cell in cells]
    return BestOfAll(policy, sum(one.tokens for one in results) / sum(one.elapsed_us for one in results) * 1e6)


def _speed(best: BestOfAll) -> float:
    return best.tokens_per_second
