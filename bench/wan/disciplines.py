"""The ways to decode over a line, as rows of a measurement: one generation at a time through a client.

Their speeds and ratios are of sessions of equal length, repeat by repeat.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.harness.interleave import schedule
from bench.harness.interval import Estimate, estimate
from bench.harness.runs import BenchError, Run, Sample, of_row
from bench.harness.sessions import RUN_LIMIT, run_of
from bench.wan.cells import LIGHT, WanCell
from bench.wan.rig import AUTO, AUTO_CHAIN, Orchestration
from specwire.client import Client, SpecwireError, Started

PLAIN, TEXTBOOK, STREAM_WAIT, CHAIN, DEFAULT = "plain", "textbook", "stream, waiting", "chain", "default"
DISCIPLINES = (PLAIN, TEXTBOOK, STREAM_WAIT, CHAIN, DEFAULT)
# The default, and what it would be without branches: these alone differ by what a further token of a forward costs.
AUTOMATIC = {CHAIN: AUTO_CHAIN, DEFAULT: AUTO}

# A discipline that is slow is repeated as often as this allows; its interval says how often that was.
MOST_SECONDS = 24.0
LEAST_REPEATS = 2


@dataclass(frozen=True, slots=True)
class DisciplineRow:
    """One generation at a time through gRPC; drafting is off for plain decoding."""

    client: Client
    drafting: bool
    key: str

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        """Generate exactly `tokens` tokens, and delete the session; BenchError if it cannot."""
        began_ns = time.monotonic_ns()
        try:
            events = list(
                self.client.generate(
                    prompt, max_tokens=tokens, ignore_eos=True, drafting=self.drafting, timeout=RUN_LIMIT
                )
            )
            ended_ns = time.monotonic_ns()
            # The verifier then keeps nothing that a later run of the prompt would begin from.
            for event in events:
                if isinstance(event, Started):
                    self.client.delete_session(event.session_id, timeout=RUN_LIMIT)
        except SpecwireError as error:
            raise BenchError(f"{self.key}: {error}") from error
        return run_of(events, began_ns, ended_ns, tokens, self.key, self.drafting)


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


def measured_in(cell: WanCell) -> tuple[str, ...]:
    """The disciplines of a cell. What extends one token at a time does not care what a further one costs."""
    return DISCIPLINES if cell.row_cost <= LIGHT else (PLAIN, *AUTOMATIC)


def repeats_of(seconds: float, repeats: int, most_seconds: float = MOST_SECONDS) -> int:
    """How often a discipline whose session takes so long is measured: `repeats` times, if that does not last."""
    return max(min(LEAST_REPEATS, repeats), min(repeats, int(most_seconds / seconds)))


def take_turns(
    rows: Sequence[DisciplineRow],
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


def speeds(samples: Sequence[Sample], row: str) -> list[float]:
    """Tokens per second of each session of a row, first token's delay included."""
    return [len(sample.run.tokens) / sample.run.seconds for sample in of_row(samples, row)]


def tokens_per_second(samples: Sequence[Sample], row: str) -> Estimate:
    return estimate(speeds(samples, row))


def ratio(samples: Sequence[Sample], row: str, to: str) -> Estimate:
    """How many times as fast a row is as another, over the repeats that both had."""
    pairs = zip(speeds(samples, row), speeds(samples, to), strict=False)
    return estimate([one / other for one, other in pairs])


def ratio_to_better(samples: Sequence[Sample], row: str, others: Sequence[str]) -> Estimate:
    """The same, to whichever of the others has the greater median."""
    best = max(others, key=lambda other: statistics.median(speeds(samples, other)))
    return ratio(samples, row, best)


def ratio_to(samples: Sequence[Sample], row: str, speed: float) -> Estimate:
    """A row's speed over a known one."""
    return estimate([one / speed for one in speeds(samples, row)])


def times(one: Estimate, factor: float) -> Estimate:
    """The same in other units."""
    return Estimate(one.value * factor, one.low * factor, one.high * factor, one.coverage)


def first_token_ms(samples: Sequence[Sample], row: str) -> Estimate:
    return estimate([1000 * sample.run.first_token_seconds for sample in of_row(samples, row)])
