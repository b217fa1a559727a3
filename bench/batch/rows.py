"""The rows: this system with drafting off, on and automatic, with a head or without; transformers' two batches.

Off and automatic, with a head too, are measured greedily and at a temperature.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from bench.batch.sessions import Asked, together
from bench.harness.child import BenchChild
from bench.harness.rows import LOAD_LIMIT, RUN_LIMIT, exactly
from bench.harness.runs import Arrival, BenchError, Run
from specwire.client import SpecwireError

T = TypeVar("T")

OFF, ON, AUTOMATIC, PADDED, CONTINUOUS = "off", "on", "automatic", "padded", "continuous"
HEADED = "automatic, head"
OURS = (OFF, ON, AUTOMATIC, HEADED)
# Greedy texts repeat themselves, so draft tokens are right more often than in most texts that people ask for.
TEMPERATURE, SEED = 0.8, 1
SAMPLED_OFF, SAMPLED = f"off, {TEMPERATURE:g}", f"automatic, {TEMPERATURE:g}"
SAMPLED_HEADED = f"{HEADED}, {TEMPERATURE:g}"
# The row that a row's speed is a multiple of, where that is not OFF.
SAMPLES = dict.fromkeys((SAMPLED_OFF, SAMPLED, SAMPLED_HEADED), SAMPLED_OFF)
# Those of a stack of their own, whose target has a head.
WITH_HEAD = (HEADED, SAMPLED_HEADED)
PEERS = (PADDED, CONTINUOUS)
LABELS = {
    OFF: "specwire, drafting off",
    ON: "specwire, drafting on (fixed plan)",
    AUTOMATIC: "specwire, drafting automatic",
    HEADED: "specwire, drafting automatic, with a head",
    SAMPLED_OFF: f"specwire, drafting off, temperature {TEMPERATURE:g}",
    SAMPLED: f"specwire, drafting automatic, temperature {TEMPERATURE:g}",
    SAMPLED_HEADED: f"specwire, drafting automatic, with a head, temperature {TEMPERATURE:g}",
    PADDED: "transformers, static batch",
    CONTINUOUS: "transformers, continuous batching",
}


@dataclass(frozen=True, slots=True)
class Together:
    """Sessions that began at once. seconds: until the last one's last token."""

    seconds: float
    runs: tuple[Run, ...]


class BatchRow(Protocol):
    """One way to generate for several sessions, whatever tokens come."""

    @property
    def key(self) -> str: ...

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Together:
        """Generate exactly `tokens` tokens for each prompt; BenchError if it cannot."""
        ...


@dataclass(frozen=True, slots=True)
class OurRow:
    """Our stack, asked through gRPC in the loop of `runner`, to which the client belongs."""

    key: str
    runner: asyncio.Runner
    asked: Asked

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Together:
        seconds, runs = run_in(self.runner, self.asked.label, together(self.asked, prompts, tokens))
        return Together(seconds, tuple(runs))


@dataclass(frozen=True, slots=True)
class PeerRow:
    """transformers in its process. longest: of all prompts; most: sessions at once, in any run."""

    key: str
    peer: BenchChild
    longest: int
    most: int

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Together:
        request = {"prompts": [list(prompt) for prompt in prompts], "longest": self.longest, "most": self.most}
        answer = self.peer.ask({"do": self.key, "tokens": tokens, **request}, RUN_LIMIT)
        pairs = zip(answer["tokens"], answer["times"], strict=True)
        return Together(answer["seconds"], tuple(self._run(ids, times, tokens) for ids, times in pairs))

    def _run(self, ids: Sequence[int], times: Sequence[float], tokens: int) -> Run:
        return Run(
            tokens=exactly(tokens, ids, LABELS[self.key]),
            seconds=times[-1],
            first_token_seconds=times[0],
            forwards=len(times),
            arrivals=tuple(Arrival(1, round(1e9 * at)) for at in times),
        )


def run_in(runner: asyncio.Runner, label: str, sessions: Coroutine[Any, Any, T]) -> T:
    """What the sessions yield; BenchError with the first failure among them."""
    try:
        return runner.run(sessions)
    except* (SpecwireError, BenchError) as errors:
        failure = _first(errors)
    raise BenchError(f"{label}: {failure}")


def start_peer(target: str, dtype: str, threads: int) -> BenchChild:
    """Transformers with the target loaded."""
    peer = BenchChild("transformers", [sys.executable, "-m", "bench.batch.peer"])
    try:
        peer.ask({"do": "load", "target": target, "draft": None, "dtype": dtype, "threads": threads}, LOAD_LIMIT)
    except BaseException:
        peer.stop()
        raise
    return peer


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
