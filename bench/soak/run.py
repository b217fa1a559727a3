"""Soak everything in faults: python -m bench.soak.run --help."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from bench.harness.entry import terminable
from bench.harness.runs import BenchError
from bench.soak import record
from bench.soak.settings import RECORDS, parser, settings_of
from bench.soak.soak import soak
from specwire.core.invalid import InvalidParameter
from specwire.rpc.process import say


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        settings = settings_of(args)
        record.check(args.out)
    except (InvalidParameter, OSError) as error:
        say(f"soak: error: {error}")
        return 2
    try:
        with terminable():
            found = soak(settings, _silent if args.quiet else say)
    except BenchError as error:
        say(f"soak: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    record.keep(found, args.out, RECORDS[settings.pair], say)
    print(found.shown())
    return 0 if found.holds else 1


def _silent(_: str) -> None:
    pass


if __name__ == "__main__":
    # Threads of numeric libraries in this process would only stand in the way of those that are measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
