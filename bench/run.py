"""Measure specwire against transformers on one machine, in one run: python -m bench.run --help."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench import results
from bench.measure import measure
from bench.plot import draw
from bench.report import report
from bench.runs import BenchError
from bench.settings import parser, settings_of
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
    results.write(found, args.out)
    draw(found, args.out.with_suffix(".png"))
    print(report(found))
    return 0 if found.texts_hold else 1


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that the processes started here are ended in order."""

    def on_signal(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    # Threads of numeric libraries in this process would only stand in the way of those that are measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
