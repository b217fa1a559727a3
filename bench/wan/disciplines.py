"""The four ways to decode over a line, as rows of a measurement: one generation at a time through a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.interleave import schedule
from bench.rows import SpecwireRow
from bench.runs import Sample
from bench.wan.rig import AUTO, Orchestration

PLAIN, TEXTBOOK, STREAM_WAIT, DEFAULT = "plain", "textbook", "stream, waiting", "default"
DISCIPLINES = (PLAIN, TEXTBOOK, STREAM_WAIT, DEFAULT)

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
    """The plan that a policy of the simulator's stands for: auto, plain, textbook:K or stream-wait:CHUNK,RUN_AHEAD."""
    kind, _, numbers = policy.partition(":")
    if kind in ("textbook", "stream-wait"):
        plan = f"lockstep:{numbers}" if kind == "textbook" else f"stream:{numbers},1"
        return Orchestration(plan, patient=True)
    if policy not in ("auto", "plain"):
        raise ValueError(f"policy: {policy!r} is not measured")
    return Orchestration(AUTO)


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
