"""Where time goes beside the target's forwards: from the end of one to the start of the next, and to the client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.harness.interval import Estimate, estimate, percentile
from bench.harness.runs import Arrival, Run, Sample
from specwire.client import Timings

Parts = dict[str, float]  # milliseconds by name; "total" is their sum

BETWEEN = "end of a forward to the start of the next"
DELIVERY = "end of a forward to the client holding its tokens"


@dataclass(frozen=True, slots=True)
class Figure:
    """A duration in milliseconds: the median over repeats of each repeat's p50, and the p95 of all."""

    path: str
    part: str
    row: str
    p50: Estimate
    p95: float
    count: int


def between_forwards(run: Run) -> Iterator[Parts]:
    """The gap before each step but a session's first, which would count from another session's end.

    The verifier leaves out deliberate waiting and idle time. Steps whose predecessor is not known in full (several
    verdicts came as one chunk) are left out: their gap could not be split.
    """
    for before, now in pairwise(_timed(run.arrivals)):
        if now[1].step.number == before[1].step.number + 1:
            total = now[1].step.gap_us / 1e3
            choose = min(before[1].step.choose_us / 1e3, total)
            yield {"choosing tokens": choose, "deciding, scheduling": total - choose, "total": total}


def delivery(run: Run) -> Iterator[Parts]:
    """The way of each chunk's newest tokens to the client; the parts follow one another."""
    for arrival, timings in _timed(run.arrivals):
        instants = (
            timings.forward_ended_ns,
            timings.verdict_received_ns,
            timings.durable_ns,
            timings.emitted_ns,
            arrival.received_ns,
        )
        names = ("verifier, gRPC", "log", "orchestrator", "gRPC, client")
        parts = {name: (end - begin) / 1e6 for name, (begin, end) in zip(names, pairwise(instants), strict=True)}
        yield {**parts, "total": (instants[-1] - instants[0]) / 1e6}


PATHS: dict[str, Callable[[Run], Iterator[Parts]]] = {BETWEEN: between_forwards, DELIVERY: delivery}


def figures(samples: Sequence[Sample]) -> list[Figure]:
    """All paths of all rows that report timings, part by part, the total last."""
    rows = sorted({sample.row for sample in samples if sample.run.arrivals})
    return [figure for path in PATHS for row in rows for figure in _figures(path, row, samples)]


def _figures(path: str, row: str, samples: Sequence[Sample]) -> Iterator[Figure]:
    by_repeat: dict[int, list[Parts]] = {}
    for sample in samples:
        if sample.row == row:
            by_repeat.setdefault(sample.repeat, []).extend(PATHS[path](sample.run))
    filled = [parts for parts in by_repeat.values() if parts]
    for name in filled[0][0] if filled else ():
        columns = [[parts[name] for parts in repeat] for repeat in filled]
        together = [value for column in columns for value in column]
        p50 = estimate([percentile(column, 50) for column in columns])
        yield Figure(path, name, row, p50, percentile(together, 95), len(together))


def _timed(arrivals: Iterable[Arrival]) -> list[tuple[Arrival, Timings]]:
    return [(arrival, arrival.timings) for arrival in arrivals if arrival.timings and arrival.timings.forward_ended_ns]
