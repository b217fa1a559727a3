"""The figures of `make bench-ingress`, and their forms for people and on disk."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness.interval import Estimate, estimate, percentile
from bench.harness.record import write_object
from bench.harness.report import Bar, at_most, bar_lines, table
from bench.ingress.measure import DIRECT, KINDS, SERVED, IngressSample, Measured


@dataclass(frozen=True, slots=True)
class WayResult:
    """A way in: medians over the repeats, each of all its streams.

    first_ms, gap_p99_ms: milliseconds until the first token; the 99th percentile of those between two tokens.
    us_per_token: processor time, by kind of process.
    """

    way: str
    first_ms: Estimate
    first_p95_ms: Estimate
    gap_ms: Estimate
    gap_p99_ms: Estimate
    us_per_token: Mapping[str, Estimate]

    @property
    def whole_us(self) -> float:
        return sum(each.value for each in self.us_per_token.values())


def way_results(measured: Measured) -> list[WayResult]:
    return [_way(way, [each for each in measured.samples if each.way == way]) for way in (DIRECT, SERVED)]


def more_ms(measured: Measured) -> Estimate:
    """Milliseconds until the first token through Serve, less those of the direct way in the same repeat."""
    by_way = {way: [each for each in measured.samples if each.way == way] for way in (DIRECT, SERVED)}
    pairs = zip(by_way[SERVED], by_way[DIRECT], strict=True)
    return estimate([1000 * (statistics.median(a.firsts_s) - statistics.median(b.firsts_s)) for a, b in pairs])


def bars(measured: Measured) -> list[Bar]:
    wrong = measured.mismatches
    return [at_most("streams whose text differs", Estimate(wrong, wrong, wrong, 1.0), 0)]


def _way(way: str, samples: Sequence[IngressSample]) -> WayResult:
    firsts = [[1000 * each for each in sample.firsts_s] for sample in samples]
    gaps = [[1000 * each for each in sample.gaps_s] for sample in samples]
    return WayResult(
        way,
        estimate([statistics.median(each) for each in firsts]),
        estimate([percentile(each, 95) for each in firsts]),
        estimate([statistics.median(each) for each in gaps]),
        estimate([percentile(each, 99) for each in gaps]),
        {kind: estimate([1e6 * sample.cpu[kind] / sample.tokens for sample in samples]) for kind in KINDS},
    )


def write(measured: Measured, head: Mapping[str, object], path: Path) -> None:
    """head: arguments, machine and commit."""
    told = {
        "name": path.stem,
        "bars": [asdict(bar) for bar in bars(measured)],
        "ways": [{**asdict(way), "whole_us": way.whole_us} for way in way_results(measured)],
        "more_ms": asdict(more_ms(measured)),
        **head,
    }
    write_object(told, [asdict(sample) for sample in measured.samples], path)


def shown(measured: Measured) -> str:
    head = ("way in", "first token, ms", "p95", "between tokens, ms", "p99", *(f"{kind}, us/token" for kind in KINDS))
    lines = [
        (
            way.way,
            *(f"{each.value:.1f}" for each in (way.first_ms, way.first_p95_ms, way.gap_ms, way.gap_p99_ms)),
            *(f"{each.value:.0f}" for each in way.us_per_token.values()),
        )
        for way in way_results(measured)
    ]
    return "\n\n".join("\n".join(part) for part in (table(head, lines), bar_lines(bars(measured))))
