"""`python -m tests.simulation`: many seeds, with progress, a summary, and a small script for each that fails."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing

from bench.harness import record
from bench.harness.processes import in_processes, usual_processes
from specwire.rpc.process import say
from tests.simulation.record import OUT, WHOLE, Totals
from tests.simulation.run import run_seed
from tests.simulation.shrink import report, shrunk

SHOWN_EVERY_S = 10.0
MOST_FAILURES = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if something did not hold, or not all was run."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=WHOLE, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (default: %(default)s)")
    many = usual_processes()
    parser.add_argument("--processes", type=int, default=many, metavar="N", help="that run them (default: %(default)s)")
    record.add_argument(parser, OUT)
    args = parser.parse_args(arguments)
    if args.processes < 1:
        parser.error(f"argument --processes: must be 1 or more, not {args.processes}")
    record.check(args.out)
    totals = Totals(range(args.first, args.first + args.seeds), args.processes)
    interrupted = soak(totals)
    if not interrupted:
        record.keep(totals, args.out, OUT, say)
    print(totals.shown(), flush=True)
    return 0 if totals.clean else 1


def soak(totals: Totals) -> bool:
    """Run what is asked for; whether Ctrl-C ended it before."""
    began = time.perf_counter()
    try:
        _soak(totals)
    except KeyboardInterrupt:
        return True
    finally:
        totals.took = time.perf_counter() - began
    return False


def _soak(totals: Totals) -> None:
    shown = time.perf_counter()
    with closing(in_processes(run_seed, totals.asked, totals.processes)) as outcomes:
        for outcome in outcomes:
            totals.add(outcome)
            if outcome.found:
                seed = outcome.scenario.seed
                print(f"\nseed {seed}:\n{report(outcome, shrunk(outcome.scenario))}\n", flush=True)
                if len(totals.failed) >= MOST_FAILURES:
                    return
            if time.perf_counter() - shown > SHOWN_EVERY_S:
                shown = time.perf_counter()
                done = f"{totals.runs} of {len(totals.asked)} seeds, {len(totals.failed)} failed"
                print(f"simulation: {done}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
