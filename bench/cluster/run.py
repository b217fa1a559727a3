"""Measure how a cluster scales: python -m bench.cluster.run --help."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cluster import load
from bench.cluster.load import (
    HEAD,
    LEAST_LINEAR,
    MOST_ORCHESTRATORS,
    NODES,
    ONE,
    OVER_ORCHESTRATORS,
    OVER_VERIFIERS,
    ROWS,
    WIDE,
    ClusterRow,
    ServedCrowd,
    Text,
    config,
    served,
)
from bench.cluster.site import DRAFTERS, ORCHESTRATORS, VERIFIERS, Clocks, site
from bench.harness import RESULTS, entry, record
from bench.harness.entry import first_failure
from bench.harness.interleave import tracked
from bench.harness.interval import Estimate, estimate
from bench.harness.record import save
from bench.harness.report import Bar, at_least, none_of
from bench.harness.runs import BenchError
from scripts.figures.speed import cluster_table
from specwire.client import Client, SpecwireError
from specwire.rpc.process import say

DEPLOY_LIMIT_S = "240"
# Verifiers of the pools of 1, 2 and 4, of the flat ones, that of the flood; one drafter.
EXPECTED = {ORCHESTRATORS: MOST_ORCHESTRATORS, VERIFIERS: 12, DRAFTERS: 1}
# Until an orchestrator knows all that has registered.
KNOWN_S = 30.0


@dataclass(frozen=True, slots=True)
class ClusterSample:
    """One run of a row. steady: tokens/s while all sessions run. cpu: seconds by kind (`bench.cluster.site`)."""

    row: str
    repeat: int
    tokens: int
    seconds: float
    steady: float
    cpu: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def us_per_token(self, kind: str) -> float:
        return 1e6 * self.cpu[kind] / self.tokens

    @property
    def cores(self) -> float:
        """In use by all processes together, the clients included."""
        return sum(self.cpu.values()) / self.seconds


@dataclass(frozen=True, slots=True)
class MeasuredCluster:
    """mismatches: sessions whose text was another one in another row or repeat."""

    samples: Sequence[ClusterSample]
    mismatches: int


class Texts:
    """The longest text of each session so far; sessions of one model and number must not part."""

    def __init__(self) -> None:
        self.mismatches = 0
        self._longest: dict[tuple[str, int], Text] = {}

    def add(self, model: str, texts: Sequence[Text]) -> None:
        for turn, text in enumerate(texts):
            known = self._longest.get((model, turn), ())
            length = min(len(known), len(text))
            self.mismatches += known[:length] != text[:length]
            self._longest[model, turn] = max(known, text, key=len)


def measure(repeats: int, tell: Callable[[str], None]) -> MeasuredCluster:
    """Raises BenchError if something does not start, or a session fails."""
    tell("bench-cluster: starting a Ray cluster of three nodes, and deploying")
    with site(HEAD, *NODES) as here:
        here.deploy(config(here.redis), "--start-timeout", DEPLOY_LIMIT_S)
        fronts = [row["address"] for row in here.rows() if row["pool"] == "orchestrators"]
        clocks = Clocks(fronts)
        found = {kind: clocks.count(kind) for kind in EXPECTED}
        if found != EXPECTED:
            raise BenchError(f"processes: must be {EXPECTED}, not {found}")
        for front in fronts:
            _know_all(front)
        samples, texts = [], Texts()
        turns = [(repeat, row) for repeat in range(repeats) for row in ROWS]
        for repeat, row in tracked(turns, len(turns)):
            ran, cpu = _run(row, fronts, clocks)
            texts.add(row.model, ran.texts)
            samples.append(ClusterSample(row.name, repeat, ran.tokens, ran.seconds, ran.steady, cpu))
            tell(f"bench-cluster: {repeat + 1} of {repeats}: {row.name}: {ran.steady:.1f} tokens/s")
    return MeasuredCluster(samples, texts.mismatches)


def _run(row: ClusterRow, fronts: Sequence[str], clocks: Clocks) -> tuple[ServedCrowd, dict[str, float]]:
    before = clocks.read(row.orchestrators)
    with first_failure():
        ran = asyncio.run(served(row, fronts))
    after = clocks.read(row.orchestrators)
    return ran, {kind: seconds - before[kind] for kind, seconds in after.items()}


def _know_all(front: str) -> None:
    """A token of each model: then the orchestrator has found the registry's services."""
    try:
        with Client(front, patience=KNOWN_S) as client:
            for model in sorted({row.model for row in ROWS}):
                client.complete([2, 3, 4], max_tokens=1, model=model)
    except SpecwireError as error:
        raise BenchError(f"an orchestrator: {error}") from None


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
    return [*linear, none_of("sessions whose text changed", measured.mismatches)]


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


def write(results: ClusterResults, path: Path) -> dict[str, Any]:
    """Returns the record."""
    head = {
        "bars": [asdict(bar) for bar in results.bars],
        "rows": [{**asdict(row), "tokens_per_core": row.tokens_per_core} for row in results.rows],
    }
    return save(path, head, results.arguments, [asdict(sample) for sample in results.samples], results.ran_on)


OUT = RESULTS / "cluster.json"


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.cluster.run",
        description="Sessions against 1, 2 and 4 verifiers of a Ray cluster on this machine; forwards are emulated.",
        epilog="Exit code 1: it could not be measured, or a bar is missed.",
    )
    line.add_argument(
        "--repeats", type=int, default=load.REPEATS, metavar="N", help="of all rows (default: %(default)s)"
    )
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    return entry.run(parser().parse_args(argv), repeats_of, measure_all, tell)


def repeats_of(args: argparse.Namespace) -> int:
    """Raises ValueError that names what is wrong."""
    repeats: int = args.repeats
    if repeats < 1:
        raise ValueError(f"--repeats: must be at least 1, not {repeats}")
    return repeats


def measure_all(repeats: int) -> ClusterResults:
    """Raises BenchError."""
    ran_on = record.provenance()
    measured = measure(repeats, say)
    rows = row_results(measured, {row.name: load.simulated(row) for row in load.ROWS})
    return ClusterResults(arguments(repeats), ran_on, rows, bars(measured, rows), measured.samples)


def tell(found: ClusterResults, out: Path) -> bool:
    print(cluster_table(write(found, out)))
    return found.holds


def arguments(repeats: int) -> dict[str, object]:
    """What the emulated devices do, and how often it was measured."""
    return {
        "repeats": repeats,
        "V_ms": load.V_MS,
        "slope": load.SLOPE,
        "tokens": load.TOKENS,
        "sessions_per_verifier": load.SESSIONS_PER_VERIFIER,
        "slots": load.SLOTS,
        "draft_ms": load.DRAFT_MS,
        "agree": load.AGREE,
        "flood_ms": load.QUICK_MS,
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
