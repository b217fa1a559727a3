"""The ways to decode over a line, as rows of a measurement: one generation at a time through a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.interleave import schedule
from bench.rows import SpecwireRow
from bench.runs import Sample
from bench.wan.cells import LIGHT, Cell
from bench.wan.rig import AUTO, AUTO_CHAIN, Orchestration

PLAIN, TEXTBOOK, STREAM_WAIT, CHAIN, DEFAULT = "plain", "textbook", "stream, waiting", "chain", "default"
DISCIPLINES = (PLAIN, TEXTBOOK, STREAM_WAIT, CHAIN, DEFAULT)
# The default, and what it would be without branches: these alone differ by what a further token of a forward costs.
AUTOMATIC = {CHAIN: AUTO_CHAIN, DEFAULT: AUTO}

# A discipline that is slow is repeated as often as this allows; its interval says how often that was.
MOST_SECONDS = 24.0
LEAST_REPEATS = 2


@dataclass(frozen=True, slots=True)
class Discipline(SpecwireRow):
    """A row named after its discipline; drafting is off for plain decoding."""

    name: str

    @property
    def key(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        return self.name


def orchestration(policy: str) -> Orchestration:
    """The plan that a policy of the simulator's stands for: auto[:1], plain, textbook:K or
    stream-wait:CHUNK,RUN_AHEAD.
    """
    kind, _, numbers = policy.partition(":")
    if kind in ("textbook", "stream-wait"):
        plan = f"lockstep:{numbers}" if kind == "textbook" else f"stream:{numbers},1"
        return Orchestration(plan, patient=True)
    if policy not in (AUTO, AUTO_CHAIN, "plain"):
        raise ValueError(f"policy: {policy!r} is not measured")
    return Orchestration(AUTO if policy == "plain" else policy)


def measured_in(cell: Cell) -> tuple[str, ...]:
    """The disciplines of a cell. What extends one token at a time does not care what a further one costs."""
    return DISCIPLINES if cell.row_cost <= LIGHT else (PLAIN, *AUTOMATIC)


def repeats_of(seconds: float, repeats: int, most_seconds: float = MOST_SECONDS) -> int:
    """How often a discipline whose session takes so long is measured: `repeats` times, if that does not last."""
    return max(min(LEAST_REPEATS, repeats), min(repeats, int(most_seconds / seconds)))


def take_turns(
    rows: Sequence[Discipline],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    repeats: Mapping[str, int],
    progress: Callable[[Sample], None] = lambda _: None,
) -> list[Sample]:
    """Interleave the rows, each repeat on the next prompt; a row leaves once it has had its own number of repeats."""
    samples = []
    for repeat, _, index in schedule(max(repeats.values()), 1, len(rows)):
        row = rows[index]
        if repeat >= repeats[row.key]:
            continue
        prompt = repeat % len(prompts)
        sample = Sample(repeat, prompt, row.key, row.run(prompts[prompt], tokens))
        samples.append(sample)
        progress(sample)
    return samples
