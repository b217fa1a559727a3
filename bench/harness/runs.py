"""Timed generations: what one yields, whichever row made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specwire.client import Timings
from specwire.client.events import Stats


class BenchError(RuntimeError):
    """The measurement cannot go on; one sentence."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens reaching the client: how many, when (monotonic ns), and the stack's own account of the way."""

    tokens: int
    received_ns: int
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One generation.

    Attributes:
        seconds: from the call to the last token's return.
        first_token_seconds: from the call to the first token.
        forwards: of the target.
        tested, accepted: draft tokens; tested means that all before it in the window were accepted. None if unknown.
        plan: how its end was drafted, and why; empty if unknown.
        stats: the stack's own account; None for others.
    """

    tokens: tuple[int, ...]
    seconds: float
    first_token_seconds: float
    forwards: int
    tested: int | None = None
    accepted: int | None = None
    arrivals: tuple[Arrival, ...] = ()
    plan: str = ""
    stats: Stats | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A run and its place: which repeat, which prompt, which row."""

    repeat: int
    prompt: int
    row: str
    run: Run


def of_row(samples: Sequence[Sample], row: str) -> list[Sample]:
    return [sample for sample in samples if sample.row == row]
