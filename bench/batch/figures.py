"""The figures of a level's runs: speed, pauses between tokens, and the verifier's work beside its forwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.batch.rows import OFF, OURS, SAMPLES, Together
from bench.harness.interval import Estimate, estimate, percentile
from bench.harness.runs import Run, Sample, first_token_ms, speed_ratio, tokens_per_forward, tokens_per_second
from specwire.client.events import Step


@dataclass(frozen=True, slots=True)
class BatchSample:
    """`level` sessions at once, of the prompts from `first` on."""

    level: int
    repeat: int
    first: int
    row: str
    together: Together

    @property
    def sessions(self) -> list[Sample]:
        runs = enumerate(self.together.runs, self.first)
        return [Sample(self.repeat, prompt, self.row, run) for prompt, run in runs]

    @property
    def whole(self) -> Sample:
        """All sessions as one run."""
        runs = self.together.runs
        tokens = tuple(token for run in runs for token in run.tokens)
        first = min(run.first_token_seconds for run in runs)
        return Sample(
            self.repeat,
            self.first,
            self.row,
            Run(tokens, self.together.seconds, first, sum(run.forwards for run in runs)),
        )


@dataclass(frozen=True, slots=True)
class Outside:
    """The verifier's engine between the end of a forward and the start of the next, where all sessions took part.

    Medians: microseconds of a step and of each session's part of it, of which `choosing` is the choice of tokens; the
    forward's; and the step's as a share of the forward that follows.
    """

    step_us: Estimate
    session_us: float
    choosing_us: float
    forward_us: float
    share: Estimate
    steps: int


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One row at one level. Pauses: between two arrivals at a session's client, whatever number of tokens came.

    to_off: until the last session has ended. full_to_off: only while all of them decode, for where one is slower than
    the others, it decodes alone in the end; None if they never did.
    """

    level: int
    row: str
    tokens_per_second: Estimate
    to_off: Estimate
    full_to_off: Estimate | None
    pause_p50_ms: float
    pause_p95_ms: float
    first_token_ms: float
    tokens_per_forward: float
    outside: Outside | None


def lines(samples: Sequence[BatchSample]) -> list[BatchLine]:
    levels = sorted({sample.level for sample in samples})
    return [line for level in levels for line in _of_level([each for each in samples if each.level == level])]


def _of_level(samples: Sequence[BatchSample]) -> Iterator[BatchLine]:
    wholes = [sample.whole for sample in samples]
    sessions = [session for sample in samples for session in sample.sessions]
    for row in dict.fromkeys(sample.row for sample in samples):
        own = [sample for sample in samples if sample.row == row]
        gaps = [gap for sample in own for run in sample.together.runs for gap in pauses_ms(run)]
        yield BatchLine(
            level=own[0].level,
            row=row,
            tokens_per_second=tokens_per_second(wholes, row),
            to_off=speed_ratio(wholes, row, SAMPLES.get(row, OFF)),
            full_to_off=full_ratio(samples, row, SAMPLES.get(row, OFF)),
            pause_p50_ms=percentile(gaps, 50) if gaps else 0.0,
            pause_p95_ms=percentile(gaps, 95) if gaps else 0.0,
            first_token_ms=first_token_ms(sessions, row),
            tokens_per_forward=tokens_per_forward(wholes, row),
            outside=_outside(own) if row in OURS else None,
        )


def full_ratio(samples: Sequence[BatchSample], row: str, other: str) -> Estimate | None:
    """Tokens/s of a row over another's, while all sessions decode; None if they never did."""
    speeds, others = _full_speeds(samples, row), _full_speeds(samples, other)
    ratios = [speeds[repeat] / others[repeat] for repeat in speeds if others.get(repeat)]
    return estimate(ratios) if ratios else None


def _full_speeds(samples: Sequence[BatchSample], row: str) -> dict[int, float]:
    """Tokens/s of each repeat, from the time when every session has its first token until one has its last."""
    tokens: Counter[int] = Counter()
    spent_ns: Counter[int] = Counter()
    for sample in samples:
        runs = sample.together.runs
        if sample.row != row or not all(run.arrivals for run in runs):
            continue
        began_ns = max(run.arrivals[0].received_ns for run in runs)
        ended_ns = min(run.arrivals[-1].received_ns for run in runs)
        if ended_ns > began_ns:
            arrivals = (each for run in runs for each in run.arrivals)
            tokens[sample.repeat] += sum(each.tokens for each in arrivals if began_ns < each.received_ns <= ended_ns)
            spent_ns[sample.repeat] += ended_ns - began_ns
    return {repeat: tokens[repeat] / spent_ns[repeat] * 1e9 for repeat in spent_ns}


def text_ratio(raw: Sequence[Mapping[str, Any]], level: int, row: str) -> Estimate:
    """How soon a text is there on average, as a multiple of off. raw: a record's runs (`bench.batch.report.write`).

    `to_off` goes by the last text of each group alone.
    """
    seconds, of_off = (_text_seconds(raw, level, each) for each in (row, SAMPLES.get(row, OFF)))
    return estimate([of_off[repeat] / seconds[repeat] for repeat in seconds])


def _text_seconds(raw: Sequence[Mapping[str, Any]], level: int, row: str) -> dict[int, float]:
    """All texts' seconds together, by repeat."""
    spent: dict[int, float] = {}
    for run in raw:
        if (run["level"], run["row"]) == (level, row):
            own = sum(session["seconds"] for session in run["sessions"])
            spent[run["repeat"]] = spent.get(run["repeat"], 0.0) + own
    return spent


def pauses_ms(run: Run) -> list[float]:
    return [(now.received_ns - before.received_ns) / 1e6 for before, now in pairwise(run.arrivals)]


def _outside(samples: Sequence[BatchSample]) -> Outside | None:
    by_repeat: dict[int, list[Step]] = {}
    for sample in samples:
        by_repeat.setdefault(sample.repeat, []).extend(full_steps(sample.together.runs))
    repeats = [steps for steps in by_repeat.values() if steps]
    if not repeats:
        return None
    together = [step for steps in repeats for step in steps]
    return Outside(
        step_us=estimate([_p50(step.gap_us for step in steps) for steps in repeats]),
        session_us=_p50(step.gap_us / step.sessions for step in together),
        choosing_us=_p50(step.choose_us for step in together),
        forward_us=_p50(step.forward_us for step in together),
        share=estimate([_p50(step.gap_us / step.forward_us for step in steps) for steps in repeats]),
        steps=len(together),
    )


def full_steps(runs: Sequence[Run]) -> list[Step]:
    """Steps that decided something for all of these sessions, once each, but the first.

    Before that one lies the beginning of the sessions.
    """
    timed = [arrival.timings for run in runs for arrival in run.arrivals]
    steps = {each.step.number: each.step for each in timed if each is not None and each.step.forward_us}
    full = [steps[number] for number in sorted(steps) if steps[number].sessions == len(runs)]
    return full[1:]


def unknown(found: Iterable[BatchLine]) -> Iterator[str]:
    """A note for each row of ours without figures between forwards: its bar neither holds nor is missed."""
    for line in found:
        if line.row in OURS and line.outside is None:
            yield f"{line.level} at once, {line.row}: no step had all sessions in it, so none counts between forwards."


def _p50(values: Iterable[float]) -> float:
    return percentile(list(values), 50)
