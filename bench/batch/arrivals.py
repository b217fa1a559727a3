"""Requests that arrive as a Poisson process: the tokens a second of those that are served in time (goodput)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from bench.batch.figures import pauses_ms
from bench.batch.sessions import Asked, forget, generate
from bench.harness.interval import Estimate, estimate, percentile
from bench.harness.runs import BenchError, Run
from specwire.client import SpecwireError


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """In time: the first token within `first_ms`, and 95 % of the pauses of a request within `pause_ms`."""

    first_ms: float
    pause_ms: float


@dataclass(frozen=True, slots=True)
class ServedArrival:
    """One request, in seconds since the first was due. run: None if it was refused or failed."""

    due: float
    ended: float
    run: Run | None
    late: float = 0.0

    @property
    def first_ms(self) -> float:
        """From when it was due to its first token."""
        return 1e3 * (self.late + self.run.first_token_seconds) if self.run else float("inf")

    @property
    def pause_ms(self) -> float:
        """The 95th percentile of its pauses."""
        pauses = pauses_ms(self.run) if self.run else []
        return percentile(pauses, 95) if pauses else 0.0

    def in_time(self, target: LatencyTarget) -> bool:
        return self.run is not None and self.first_ms <= target.first_ms and self.pause_ms <= target.pause_ms


@dataclass(frozen=True, slots=True)
class ArrivalLoad:
    """share: of the speed that drafting off reached with `level` sessions at once; seed: of the arrivals."""

    share: float
    per_second: float
    seed: int


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One load, served by one row."""

    load: ArrivalLoad
    row: str
    served: tuple[ServedArrival, ...]

    @property
    def seconds(self) -> float:
        return max(each.ended for each in self.served)

    @property
    def tokens_per_second(self) -> float:
        return sum(len(each.run.tokens) for each in self.served if each.run) / self.seconds

    def goodput(self, target: LatencyTarget) -> float:
        """Tokens per second of the requests that were served in time."""
        return sum(len(each.run.tokens) for each in self.served if each.run and each.in_time(target)) / self.seconds


@dataclass(frozen=True, slots=True)
class LoadLine:
    """A row under one share of load, over all of its seeds."""

    share: float
    row: str
    requests_per_second: float
    tokens_per_second: Estimate
    goodput: Estimate
    in_time: float
    refused: int
    first_p50_ms: float
    first_p95_ms: float
    pause_p95_ms: float


def due_times(load: ArrivalLoad, requests: int) -> list[float]:
    """Seconds, the first at 0; the same for every row."""
    chance = random.Random(load.seed)
    times = [0.0]
    while len(times) < requests:
        times.append(times[-1] + chance.expovariate(load.per_second))
    return times


async def serve(
    asked: Asked, prompts: Sequence[Sequence[int]], tokens: int, times: Sequence[float]
) -> list[ServedArrival]:
    """Ask for prompt after prompt at these times, without waiting for earlier ones."""
    began = asyncio.get_running_loop().time()
    ids: list[str] = []
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_serve(asked, prompts[index % len(prompts)], tokens, began, due, ids))
            for index, due in enumerate(times)
        ]
    await forget(asked.client, ids)
    return [task.result() for task in tasks]


async def _serve(
    asked: Asked, prompt: Sequence[int], tokens: int, began: float, due: float, ids: list[str]
) -> ServedArrival:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(began + due - loop.time())
    late = loop.time() - began - due
    run = None
    with suppress(SpecwireError, BenchError):
        session_id, run = await generate(asked, prompt, tokens)
        ids.append(session_id)
    return ServedArrival(due, loop.time() - began, run, late)


def load_lines(samples: Sequence[LoadSample], target: LatencyTarget) -> list[LoadLine]:
    places = dict.fromkeys((sample.load.share, sample.row) for sample in samples)
    return [_line([one for one in samples if (one.load.share, one.row) == place], target) for place in places]


def _line(samples: Sequence[LoadSample], target: LatencyTarget) -> LoadLine:
    served = [each for sample in samples for each in sample.served]
    answered = [each for each in served if each.run is not None]
    pauses = [pause for each in answered if each.run for pause in pauses_ms(each.run)]
    first = [each.first_ms for each in answered]
    return LoadLine(
        share=samples[0].load.share,
        row=samples[0].row,
        requests_per_second=samples[0].load.per_second,
        tokens_per_second=estimate([sample.tokens_per_second for sample in samples]),
        goodput=estimate([sample.goodput(target) for sample in samples]),
        in_time=sum(each.in_time(target) for each in served) / len(served),
        refused=len(served) - len(answered),
        first_p50_ms=percentile(first, 50) if first else 0.0,
        first_p95_ms=percentile(first, 95) if first else 0.0,
        pause_p95_ms=percentile(pauses, 95) if pauses else 0.0,
    )
