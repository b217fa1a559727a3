"""Measure many sessions at once: python -m bench.batch.run --help."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from bench.batch.measure import measure
from bench.batch.plot import draw
from bench.batch.report import report, write
from bench.batch.settings import parser, settings_of
from bench.run import terminable
from bench.runs import BenchError
from specwire.core.sampling import InvalidParameter
from specwire.rpc.process import say


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        settings = settings_of(args)
        args.out.parent.mkdir(parents=True, exist_ok=True)  # known now, not after the measurement
    except (InvalidParameter, OSError) as error:
        say(f"bench: error: {error}")
        return 2
    try:
        with terminable():
            found = measure(settings)
    except BenchError as error:
        say(f"bench: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    write(found, args.out)
    draw(found.lines, args.out.with_suffix(".png"))
    print(report(found))
    return 0 if found.texts_hold else 1


if __name__ == "__main__":
    # Threads of numeric libraries in this process would only stand in the way of those that are measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
