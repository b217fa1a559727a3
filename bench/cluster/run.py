"""Measure how a cluster scales: python -m bench.cluster.run --help."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import machine
from bench.cluster import settings
from bench.cluster.expected import simulated
from bench.cluster.measure import measure
from bench.cluster.results import Results, bars, row_results, shown, write
from bench.entry import terminable
from bench.runs import BenchError
from specwire.rpc.process import say

OUT = Path(__file__).resolve().parents[1] / "results" / "cluster.json"


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
    args = parser().parse_args(argv)
    if args.repeats < 1:
        parser().error(f"--repeats: must be at least 1, not {args.repeats}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    before = machine.describe()
    try:
        with terminable():
            measured = measure(args.repeats, say)
    except BenchError as error:
        say(f"bench-cluster: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    rows = row_results(measured, {row.name: simulated(row) for row in settings.ROWS})
    found = Results(arguments(args.repeats), before, machine.commit(), rows, bars(measured, rows), measured.samples)
    write(found, args.out)
    print(shown(found))
    return 0 if found.holds else 1


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
