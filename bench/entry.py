"""The common frame of measuring programs: arguments, errors and exit codes."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from bench.runs import BenchError
from specwire.rpc.process import say

Settings = TypeVar("Settings")
Found = TypeVar("Found")


def run(
    args: argparse.Namespace,
    settings_of: Callable[[argparse.Namespace], Settings],
    measure: Callable[[Settings], Found],
    tell: Callable[[Found, Path], bool],
) -> int:
    """Measure what `args` ask for; returns the exit code: 0, 1 where it failed, 2 for wrong arguments.

    settings_of: raises ValueError with a sentence. measure: raises BenchError with one. tell: writes the results into
    `args.out` and beside it, and returns whether all bars hold.
    """
    try:
        settings = settings_of(args)
        args.out.parent.mkdir(parents=True, exist_ok=True)  # fail now, not after the measurement
    except (ValueError, OSError) as error:
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
    return 0 if tell(found, args.out) else 1


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
