"""Made-up rows and runs with chosen times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness.runs import Arrival, Run, Sample
from specwire.client import Timings
from specwire.client.events import Step

MS = 1_000_000


@dataclass
class FakeRow:
    key: str
    label: str = "a row"

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        return run(1.0, [*prompt, tokens])


def run(seconds: float, tokens: Sequence[int] = (1, 2, 3), arrivals: Sequence[Arrival] = ()) -> Run:
    return Run(tuple(tokens), seconds, seconds / 4, forwards=2, tested=4, accepted=1, arrivals=tuple(arrivals))


def sample(row: str, repeat: int, prompt: int, seconds: float, tokens: Sequence[int] = (1, 2, 3)) -> Sample:
    return Sample(repeat, prompt, row, run(seconds, tokens))


def arrival(number: int, *, gap_us: int = 500, choose_us: int = 100, ended_ms: int = 10) -> Arrival:
    """A chunk of the step `number` whose way to the client took 1, 2, 3 and 4 ms."""
    step = Step(number, sessions=1, rows=1, forward_us=0, choose_us=choose_us, gap_us=gap_us, waited_us=0)
    timings = Timings(ended_ms * MS, (ended_ms + 1) * MS, (ended_ms + 3) * MS, (ended_ms + 6) * MS, step)
    return Arrival(1, (ended_ms + 10) * MS, timings)
