"""Rows of a box (`make bench-box`): specwire on its fastest runtime, in one process and in several; the forward alone.

The log is a file in either, and a client in a process of its own asks through gRPC. The forward alone, in a loop with
all cores, is the floor that no server is below. On one core with a pause before each it is as a service computes it:
weights that nobody reads for a while leave the caches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness.child import BenchChild
from bench.harness.machine import CpuSeconds
from bench.harness.rows import (
    FORWARD,
    LOAD_LIMIT,
    ONE_OFF,
    ONE_ON,
    PAUSED,
    RUN_LIMIT,
    SEVERAL_OFF,
    SEVERAL_ON,
    SpecwireRow,
    exactly,
    start_stack,
)
from bench.harness.runs import Row, Run
from bench.main.settings import Settings
from specwire.client import Client
from specwire.core.model import AUTO
from specwire.options import cores

ONE, SEVERAL = "one process", "several processes"
KEYS = {(ONE, False): ONE_OFF, (ONE, True): ONE_ON, (SEVERAL, False): SEVERAL_OFF, (SEVERAL, True): SEVERAL_ON}
LABEL = "the forward alone"
# Milliseconds from the end of a forward to the start of the next, as the rows of a box have them (`bench.main.gaps`).
PAUSE_MS = 0.28


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """Greedy decoding by our runtime, without a server: `bench.step.peer`."""

    peer: BenchChild
    key: str
    label: str
    pause_ms: float = 0.0

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        request = {"do": "generate", "prompt": list(prompt), "tokens": tokens, "pause_ms": self.pause_ms}
        answer = self.peer.ask(request, RUN_LIMIT)
        seconds, first = answer["seconds"], answer["first_token_seconds"]
        return Run(exactly(tokens, answer["tokens"], self.label), seconds, first, forwards=tokens)


@dataclass(frozen=True, slots=True)
class BoxRow(SpecwireRow):
    """Our stack in ONE process or SEVERAL: drafting off, or what it does by default."""

    processes: str

    @property
    def key(self) -> str:
        return KEYS[self.processes, self.drafting]

    @property
    def label(self) -> str:
        return f"specwire in {self.processes}, {'default' if self.drafting else 'drafting off'}"


def start(settings: Settings, cleanup: ExitStack) -> tuple[list[Row], dict[str, CpuSeconds]]:
    """The rows, and the clocks of their processes, which `cleanup` ends."""
    floors = (
        (FORWARD, LABEL, cores(), 0.0),
        (PAUSED, f"{LABEL}, on one core, {PAUSE_MS} ms between two", 1, PAUSE_MS),
    )
    rows: list[Row] = []
    clocks: dict[str, CpuSeconds] = {}
    for key, label, threads, pause_ms in floors:
        floor = cleanup.enter_context(BenchChild(label, [sys.executable, "-m", "bench.step.peer"]))
        loading = {"target": settings.target, "dtype": settings.dtype, "threads": threads, "slots": 1, "runtime": AUTO}
        floor.ask({"do": "load", **loading}, LOAD_LIMIT)
        rows.append(ForwardRow(floor, key, label, pause_ms))
        clocks[label] = floor.cpu_seconds
    folder = Path(cleanup.enter_context(TemporaryDirectory(prefix="specwire-box-")))
    for processes, options in ((ONE, ("--one-process",)), (SEVERAL, ())):
        log = f"file:{folder / processes.partition(' ')[0]}.log"
        words = ("--runtime", AUTO, "--redis-url", log, "--http", "none", *options)
        stack, address = start_stack(settings.target, settings.draft, settings.dtype, False, *words)
        cleanup.enter_context(stack)
        client = cleanup.enter_context(Client(address))
        rows += [BoxRow(client, drafting, processes) for drafting in (False, True)]
        clocks[processes] = stack.cpu_seconds
    return rows, clocks
