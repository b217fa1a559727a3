"""`python -m tests.simulation`: many seeds, with progress, a summary, and a small script for each that fails."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from bench.soak import record
from specwire.rpc.process import say
from tests.simulation.record import OUT, WHOLE, Totals
from tests.simulation.run import run
from tests.simulation.scenario import random_scenario
from tests.simulation.shrink import report, shrunk

SHOWN_EVERY_S = 10.0
MOST_FAILURES = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if something did not hold, or not all was run."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=WHOLE, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (default: %(default)s)")
    record.add_argument(parser, OUT)
    args = parser.parse_args(arguments)
    record.check(args.out)
    totals = Totals(range(args.first, args.first + args.seeds))
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
    for seed in totals.asked:
        outcome = run(random_scenario(seed))
        totals.add(outcome)
        if outcome.found:
            print(f"\nseed {seed}:\n{report(outcome, shrunk(outcome.scenario))}\n", flush=True)
            if len(totals.failed) >= MOST_FAILURES:
                return
        if time.perf_counter() - shown > SHOWN_EVERY_S:
            shown = time.perf_counter()
            done = f"{totals.runs} of {len(totals.asked)} seeds, {len(totals.failed)} failed"
            print(f"simulation: {done}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
