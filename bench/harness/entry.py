"""The common frame of measuring programs: arguments, errors and exit codes."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from bench.harness import QUESTIONS, RESULTS, ROOT
from bench.harness.runs import BenchError
from specwire import named_models
from specwire.client import SpecwireError
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


def line_of_texts(name: str, about: str | None, *, prompts: int, tokens: int, threads: int) -> argparse.ArgumentParser:
    """The command line of `bench.NAME`, which asks one GGUF file for texts: see `texts_asked`."""
    line = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = line.add_argument
    model = "a GGUF file, or a named model (default: %(default)s)"
    add("--target", default=named_models.REAL, metavar="MODEL", help=model)
    add("--prompts", type=int, default=prompts, metavar="N", help="(default: %(default)s)")
    add("--tokens", type=int, default=tokens, metavar="N", help="behind each (default: %(default)s)")
    add("--questions", type=Path, metavar="FILE", help="of Spec-Bench (default: beside the checkout, if it is there)")
    add("--threads", type=int, default=threads, metavar="N", help="of each that computes (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help=f"(default: bench/results/{name}_NAME.json)")
    return line


def texts_asked(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What `line_of_texts` was given, by name; `out` is set where it was not."""
    target = Path(named_models.located(args.target)).expanduser().resolve()
    if args.out is None:
        args.out = RESULTS / f"{name}_{target.stem}.json"
    questions = args.questions or (QUESTIONS if QUESTIONS.is_file() else None)
    asked = {each: getattr(args, each) for each in ("prompts", "tokens", "threads")}
    return {"target": target, "questions": questions, **asked}


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


@contextmanager
def first_failure() -> Iterator[None]:
    """Of a task group that failed, BenchError with what is for users; a group without that is raised as it is."""
    try:
        yield
    except ExceptionGroup as group:
        told: BaseException | None = group.subgroup((BenchError, SpecwireError))
        while isinstance(told, BaseExceptionGroup):
            told = told.exceptions[0]
        if told is None:
            raise
        raise BenchError(str(told)) from group


def shown_model(model: str) -> str:
    """A model's name for others: without where this machine keeps it."""
    path = Path(model)
    if not path.exists():
        return model
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def located(model: str) -> str:
    """A path made absolute (the processes run elsewhere); a hub id as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model
