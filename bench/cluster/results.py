"""The figures of `make bench-cluster`, what was needed, and their forms for people and on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.cluster.clocks import ORCHESTRATORS
from bench.cluster.measure import ClusterSample, MeasuredCluster
from bench.cluster.settings import LEAST_LINEAR, ONE, OVER_ORCHESTRATORS, OVER_VERIFIERS, ROWS, WIDE, ClusterRow
from bench.harness.interval import Estimate, estimate
from bench.harness.record import save
from bench.harness.report import Bar, at_least, at_most, bar_lines, table


@dataclass(frozen=True, slots=True)
class ClusterRowResult:
    """A row's figures.

    tokens_per_second: from the first request to the last answer. steady: while all sessions run.
    to_one: steady, over that of one verifier in the same repeat, divided by the verifiers; or over those of one
        orchestrator, divided by the orchestrators. None of what is no multiple of anything.
    simulated: tokens/s by the simulator. orchestrator_us: processor time of all orchestrators for each decided token.
    busy: cores that an orchestrator uses. cores: that everything uses, clients and Ray included.
    """

    name: str
    verifiers: int
    orchestrators: int
    sessions: int
    tokens_per_second: Estimate
    steady: Estimate
    to_one: Estimate | None
    simulated: float | None
    orchestrator_us: Estimate
    busy: float
    cores: float

    @property
    def tokens_per_core(self) -> float:
        """What one core's worth of orchestrator would decide in a second."""
        return 1e6 / self.orchestrator_us.value


@dataclass(frozen=True, slots=True)
class ClusterResults:
    """A measurement; simulated: tokens/s by row, None where no device is what limits it."""

    arguments: Mapping[str, object]
    ran_on: Mapping[str, object]
    rows: Sequence[ClusterRowResult]
    bars: Sequence[Bar]
    samples: Sequence[ClusterSample]

    @property
    def holds(self) -> bool:
        return all(bar.holds for bar in self.bars)


def row_results(measured: MeasuredCluster, simulated: Mapping[str, float | None]) -> list[ClusterRowResult]:
    """Of every row that has run."""
    by_row = {row: [each for each in measured.samples if each.row == row.name] for row in ROWS}
    return [
        _row_result(row, found, by_row[first_of(row)], simulated[row.name]) for row, found in by_row.items() if found
    ]


def first_of(row: ClusterRow) -> ClusterRow:
    """The row of which it is to be a multiple."""
    return WIDE[0] if row in WIDE else ONE


def multiple_of(row: ClusterRow) -> int:
    return row.orchestrators if row in WIDE else row.verifiers


def bars(measured: MeasuredCluster, rows: Sequence[ClusterRowResult]) -> list[Bar]:
    linear = [
        at_least(
            f"tokens/s over {multiple_of(row)} times those of {first_of(row).name}: {row.name}", found, LEAST_LINEAR
        )
        for row, found in zip(ROWS, [each.to_one for each in rows], strict=True)
        if found is not None
    ]
    wrong = measured.mismatches
    return [*linear, at_most("sessions whose text changed", Estimate(wrong, wrong, wrong, 1.0), 0)]


def _row_result(
    row: ClusterRow, found: Sequence[ClusterSample], firsts: Sequence[ClusterSample], simulated: float | None
) -> ClusterRowResult:
    to_one = [each.steady / first.steady / multiple_of(row) for each, first in zip(found, firsts, strict=True)]
    busy = [each.cpu[ORCHESTRATORS] / each.seconds / row.orchestrators for each in found]
    return ClusterRowResult(
        name=row.name,
        verifiers=row.verifiers,
        orchestrators=row.orchestrators,
        sessions=row.at_once,
        tokens_per_second=estimate([each.tokens_per_second for each in found]),
        steady=estimate([each.steady for each in found]),
        to_one=estimate(to_one) if row in (*OVER_VERIFIERS, *OVER_ORCHESTRATORS) else None,
        simulated=simulated,
        orchestrator_us=estimate([each.us_per_token(ORCHESTRATORS) for each in found]),
        busy=estimate(busy).value,
        cores=estimate([each.cores for each in found]).value,
    )


def write(results: ClusterResults, path: Path) -> None:
    head = {
        "bars": [asdict(bar) for bar in results.bars],
        "rows": [{**asdict(row), "tokens_per_core": row.tokens_per_core} for row in results.rows],
    }
    save(path, head, results.arguments, [asdict(sample) for sample in results.samples], results.ran_on)


def shown(results: ClusterResults) -> str:
    """The table and the bars."""
    head = (
        "row",
        "sessions",
        "tokens/s",
        "steady",
        "linear",
        "simulated",
        "us/token",
        "tokens/s per core",
        "cores in use",
    )
    lines = [
        (
            row.name,
            str(row.sessions),
            f"{row.tokens_per_second.value:.1f}",
            f"{row.steady.value:.1f}",
            "" if row.to_one is None else f"{row.to_one.value:.3f}",
            "" if row.simulated is None else f"{row.simulated:.1f}",
            f"{row.orchestrator_us.value:.0f}",
            f"{row.tokens_per_core:.0f}",
            f"{row.cores:.2f}",
        )
        for row in results.rows
    ]
    return "\n\n".join("\n".join(part) for part in (table(head, lines), bar_lines(results.bars)))
