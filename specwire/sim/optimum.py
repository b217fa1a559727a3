"""The best fixed setting of a cell, found by a sweep: what the planner is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from specwire.core.messages import parse_plan
from specwire.sim.simulation import Cell, Policy, Result, fixed, simulate, textbook

WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
CHUNKS = (1, 2, 4, 8)
RUN_AHEADS = (4, 8, 16, 32, 64)
DUES = (0, 1, 2, 3, 4, 6, 8, 12)
FINALISTS = 8
# Where waiting for draft tokens leaves so little of the speed of not waiting, waiting for more of them is not tried.
LEAST_OF_STREAMS = 0.7
BRANCHES = (4, 16)


class Best(NamedTuple):
    """A setting and its result."""

    policy: Policy
    result: Result


class BestOfAll(NamedTuple):
    """A setting and its speed over several sessions: all their tokens in all their time."""

    policy: Policy
    tokens_per_second: float


def optimum(cell: Cell) -> Best:
    """The fastest of off, lockstep:K, and stream:CHUNK,RUN_AHEAD,DUE: the optimum of chains. None of them branches."""
    return _found(cell, optimum_over((cell,)))


def optimum_of_trees(cell: Cell, chains: Best) -> Best:
    """The fastest with branches of the stream that is `chains`, the optimum of chains, or of the best one.

    Only a few are tried, so the planner may be faster.
    """
    stream = chains.policy if _streaming(chains.policy) else _streamed(cell)[0].policy
    return _alone(cell, _branched(stream))


def optimum_over(cells: Sequence[Cell], branching: bool = False) -> BestOfAll:
    """The one setting that is fastest over sessions which differ in what is guessed right.

    The whole sweep is over the first session; the others decide between the FINALISTS. branching: the fastest of these
    that streams is tried with branches, too; which, half a session decides, as these take long to simulate.
    """
    swept = sorted(_swept(cells[0]), key=_speed, reverse=True)
    found = swept if len(cells) == 1 else [_over(cells, each.policy) for each in swept[:FINALISTS]]
    if branching:
        ordered = (*sorted(found, key=_speed, reverse=True), *swept)
        stream = next(each.policy for each in ordered if _streaming(each.policy))
        half = replace(cells[0], tokens=(cells[0].tokens + 1) // 2)
        found = [*found, _over(cells, _best((half,), _branched(stream)).policy)]
    return max(found, key=_speed)


def _streaming(policy: Policy) -> bool:
    return policy.name.startswith("stream:")


def _branched(policy: Policy) -> Iterator[Policy]:
    """The same stream, whose drafter may extend several tokens in a forward; and with the longest run-ahead."""
    plan = parse_plan(policy.plan)
    if plan is None:
        raise ValueError(f"{policy.name}: is no fixed plan")
    pace, due = plan.pace, plan.due
    for ahead, branches in product(sorted({pace.run_ahead, RUN_AHEADS[-1]}), BRANCHES):
        yield fixed(f"stream:{pace.chunk},{ahead},{due},{branches}")


def _swept(cell: Cell) -> Iterator[BestOfAll]:
    """Streaming is searched in two sweeps, not over the whole grid: run-ahead and chunk without waiting, then what is
    worth waiting for at the best two run-aheads.
    """
    yield _over((cell,), fixed("off"))
    yield from (_over((cell,), fixed(f"lockstep:{k}")) for k in WINDOWS)
    streams = _streamed(cell)
    yield from streams
    yield from _waits(cell, streams)


def _streamed(cell: Cell) -> list[BestOfAll]:
    """Streams without waiting, the fastest first."""
    return sorted((_over((cell,), policy) for policy in _streams()), key=_speed, reverse=True)


def best_textbook(cell: Cell) -> Best:
    """The best k of drafting k tokens, sending them and waiting."""
    return _alone(cell, (textbook(k) for k in WINDOWS))


def _streams() -> Iterator[Policy]:
    return (fixed(f"stream:{chunk},{ahead},0") for chunk in CHUNKS for ahead in RUN_AHEADS if chunk <= ahead)


def _waits(cell: Cell, streams: list[BestOfAll]) -> Iterator[BestOfAll]:
    aheads = {plan.pace.run_ahead for best in streams[:2] if (plan := parse_plan(best.policy.plan))}
    for ahead, chunk in product(sorted(aheads), CHUNKS):
        for due in DUES:
            if 0 < due <= ahead and chunk <= ahead:
                found = _over((cell,), fixed(f"stream:{chunk},{ahead},{due}"))
                yield found
                if _speed(found) < LEAST_OF_STREAMS * _speed(streams[0]):
                    break


def _alone(cell: Cell, policies: Iterable[Policy]) -> Best:
    return _found(cell, _best((cell,), policies))


def _found(cell: Cell, best: BestOfAll) -> Best:
    return Best(best.policy, simulate(cell, best.policy))


def _best(cells: Sequence[Cell], policies: Iterable[Policy]) -> BestOfAll:
    return max((_over(cells, policy) for policy in policies), key=_speed)


def _over(cells: Sequence[Cell], policy: Policy) -> BestOfAll:
    results = [simulate(cell, policy) for cell in cells]
    return BestOfAll(policy, sum(one.tokens for one in results) / sum(one.elapsed_us for one in results) * 1e6)


def _speed(best: BestOfAll) -> float:
    return best.tokens_per_second
