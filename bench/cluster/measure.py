"""All rows in turn, again and again, on one deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.cluster.clocks import DRAFTERS, ORCHESTRATORS, VERIFIERS, Clocks
from bench.cluster.crowd import ServedCrowd, Text, served
from bench.cluster.settings import HEAD, MOST_ORCHESTRATORS, NODES, ROWS, ClusterRow, config
from bench.cluster.site import site
from bench.harness.entry import first_failure
from bench.harness.interleave import tracked
from bench.harness.runs import BenchError
from specwire.client import Client, SpecwireError

DEPLOY_LIMIT_S = "240"
# Verifiers of the pools of 1, 2 and 4, of the flat ones, that of the flood; one drafter.
EXPECTED = {ORCHESTRATORS: MOST_ORCHESTRATORS, VERIFIERS: 12, DRAFTERS: 1}
# Until an orchestrator knows all that has registered.
KNOWN_S = 30.0


@dataclass(frozen=True, slots=True)
class ClusterSample:
    """One run of a row. steady: tokens/s while all sessions run. cpu: seconds by kind (`bench.cluster.clocks`)."""

    row: str
    repeat: int
    tokens: int
    seconds: float
    steady: float
    cpu: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def us_per_token(self, kind: str) -> float:
        return 1e6 * self.cpu[kind] / self.tokens

    @property
    def cores(self) -> float:
        """In use by all processes together, the clients included."""
        return sum(self.cpu.values()) / self.seconds


@dataclass(frozen=True, slots=True)
class MeasuredCluster:
    """mismatches: sessions whose text was another one in another row or repeat."""

    samples: Sequence[ClusterSample]
    mismatches: int


class Texts:
    """The longest text of each session so far; sessions of one model and number must not part."""

    def __init__(self) -> None:
        self.mismatches = 0
        self._longest: dict[tuple[str, int], Text] = {}

    def add(self, model: str, texts: Sequence[Text]) -> None:
        for turn, text in enumerate(texts):
            known = self._longest.get((model, turn), ())
            length = min(len(known), len(text))
            self.mismatches += known[:length] != text[:length]
            self._longest[model, turn] = max(known, text, key=len)


def measure(repeats: int, tell: Callable[[str], None]) -> MeasuredCluster:
    """Raises BenchError if something does not start, or a session fails."""
    tell("bench-cluster: starting a Ray cluster of three nodes, and deploying")
    with site(HEAD, *NODES) as here:
        here.deploy(config(here.redis), "--start-timeout", DEPLOY_LIMIT_S)
        fronts = [row["address"] for row in here.rows() if row["pool"] == "orchestrators"]
        clocks = Clocks(fronts)
        found = {kind: clocks.count(kind) for kind in EXPECTED}
        if found != EXPECTED:
            raise BenchError(f"processes: must be {EXPECTED}, not {found}")
        for front in fronts:
            _know_all(front)
        samples, texts = [], Texts()
        turns = [(repeat, row) for repeat in range(repeats) for row in ROWS]
        for repeat, row in tracked(turns, len(turns)):
            ran, cpu = _run(row, fronts, clocks)
            texts.add(row.model, ran.texts)
            samples.append(ClusterSample(row.name, repeat, ran.tokens, ran.seconds, ran.steady, cpu))
            tell(f"bench-cluster: {repeat + 1} of {repeats}: {row.name}: {ran.steady:.1f} tokens/s")
    return MeasuredCluster(samples, texts.mismatches)


def _run(row: ClusterRow, fronts: Sequence[str], clocks: Clocks) -> tuple[ServedCrowd, dict[str, float]]:
    before = clocks.read(row.orchestrators)
    with first_failure():
        ran = asyncio.run(served(row, fronts))
    after = clocks.read(row.orchestrators)
    return ran, {kind: seconds - before[kind] for kind, seconds in after.items()}


def _know_all(front: str) -> None:
    """A token of each model: then the orchestrator has found the registry's services."""
    try:
        with Client(front, patience=KNOWN_S) as client:
            for model in sorted({row.model for row in ROWS}):
                client.complete([2, 3, 4], max_tokens=1, model=model)
    except SpecwireError as error:
        raise BenchError(f"an orchestrator: {error}") from None
