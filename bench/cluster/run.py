"""Measure how a cluster scales: python -m bench.cluster.run --help."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cluster import settings
from bench.cluster.expected import simulated
from bench.cluster.measure import measure
from bench.cluster.results import ClusterResults, bars, row_results, shown, write
from bench.harness import RESULTS, entry, record
from specwire.rpc.process import say

OUT = RESULTS / "cluster.json"


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.cluster.run",
        description="Sessions against 1, 2 and 4 verifiers of a Ray cluster on this machine; forwards are emulated.",
        epilog="Exit code 1: it could not be measured, or a bar is missed.",
    )
    line.add_argument(
        "--repeats", type=int, default=settings.REPEATS, metavar="N", help="of all rows (default: %(default)s)"
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
    rows = row_results(measured, {row.name: simulated(row) for row in settings.ROWS})
    return ClusterResults(arguments(repeats), ran_on, rows, bars(measured, rows), measured.samples)


def tell(found: ClusterResults, out: Path) -> bool:
    write(found, out)
    print(shown(found))
    return found.holds


def arguments(repeats: int) -> dict[str, object]:
    """What the emulated devices do, and how often it was measured."""
    return {
        "repeats": repeats,
        "V_ms": settings.V_MS,
        "slope": settings.SLOPE,
        "tokens": settings.TOKENS,
        "sessions_per_verifier": settings.SESSIONS_PER_VERIFIER,
        "slots": settings.SLOTS,
        "draft_ms": settings.DRAFT_MS,
        "agree": settings.AGREE,
        "flood_ms": settings.QUICK_MS,
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
