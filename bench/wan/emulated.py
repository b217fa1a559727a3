"""Cells over real sockets with emulated devices: forwards are sleeps of stated length, guesses follow a recorded trace.

What is real: processes, namespaces, gRPC, the scheduler, the controller, the log, the relay's delay. What is not: the
models, and contention for cores, which sleeping has none of; therefore two cells may run at a time. Those whose round
trip is shorter than a forward run alone: there it counts what software adds to a hop, and what others add to that.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.runs import BenchError, Sample
from bench.wan.cells import SHOWN, TOKENS, V_MS, Cell
from bench.wan.disciplines import (
    DEFAULT,
    DISCIPLINES,
    PLAIN,
    TEXTBOOK,
    Discipline,
    orchestration,
    repeats_of,
    take_turns,
)
from bench.wan.places import places
from bench.wan.rig import Orchestration, Pair, Rig, rig
from bench.wan.traces import from_position
from bench.wan.virtual import Expected, Software
from specwire.client import Client

# Far cells at a time; near ones have the machine to themselves.
LANES = 2
SEED = 7
# One token: then the prompt's forward is V(1), as the simulator has it.
PROMPT = (5,)
# What the default learns before it is measured, and what settles connections for the others.
WARM_UP = {DEFAULT: 128}
LEAST_WARM_UP = 8
GAUGED_TOKENS = 64
# Textbook speculation as fast as this share of plain decoding may be the better of the two: a bar is about it.
BARRED = 0.9


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell over real sockets. late_ms: quantiles of how late the relay delivered."""

    expected: Expected
    samples: Sequence[Sample]
    late_ms: dict[str, float]
    isolated: bool

    @property
    def cell(self) -> Cell:
        return self.expected.cell

    @property
    def texts_equal(self) -> bool:
        """Whether every session said the same, as far as it went."""
        texts = {sample.run.tokens for sample in self.samples}
        longest = max(texts, key=len)
        return all(text == longest[: len(text)] for text in texts)


def measure_cells(
    expected: Sequence[Expected], repeats: int, tokens: int, progress: Callable[[Measured], None]
) -> list[Measured]:
    """Measure near cells one by one, then far ones LANES at a time, the longest first."""
    longest_first = sorted(expected, key=lambda one: -sum(tokens / speed for speed in one.speeds.values()))
    found: dict[str, Measured] = {}
    for lanes, some in parted(longest_first):
        for measured in _measure_some(some, lanes, repeats, tokens):
            found[measured.cell.name] = measured
            progress(measured)
    return [found[one.cell.name] for one in expected]


def parted(expected: Sequence[Expected]) -> list[tuple[int, list[Expected]]]:
    """(how many at a time, which cells): near ones, then far ones."""
    near = [one for one in expected if one.cell.rtt_ms < one.cell.V_ms]
    return [(1, near), (LANES, [one for one in expected if one not in near])]


def _measure_some(expected: Sequence[Expected], lanes: int, repeats: int, tokens: int) -> Iterator[Measured]:
    """A failure ends all, after the sessions under way."""
    given_up = threading.Event()
    with ThreadPoolExecutor(lanes) as pool:
        try:
            yield from pool.map(lambda one: measure_cell(one, repeats, tokens, given_up), expected)
        finally:
            given_up.set()


def measure_cell(expected: Expected, repeats: int, tokens: int, given_up: threading.Event) -> Measured:
    """All disciplines of one cell, interleaved; BenchError once `given_up` is set."""

    def ran(_: Sample) -> None:
        if given_up.is_set():
            raise BenchError(f"{expected.cell.name}: given up")

    policies = {name: expected.settings.get(name, "auto") for name in DISCIPLINES}
    plans = {name: orchestration(policy) for name, policy in policies.items()}
    with ExitStack() as owned:
        where = owned.enter_context(places())
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-wan-")))
        started = owned.enter_context(rig(where, emulated(expected.cell, folder), list(dict.fromkeys(plans.values()))))
        started.shape(expected.cell.rtt_ms)
        rows = _rows(owned, started, plans)
        for row in rows:
            row.run(PROMPT, min(tokens, WARM_UP.get(row.key, LEAST_WARM_UP)))
        samples = take_turns(rows, [PROMPT], tokens, repeats_by_discipline(expected, repeats, tokens), ran)
        return Measured(expected, samples, started.links[0].late_ms(), where.isolated)


def emulated(cell: Cell, folder: Path) -> Pair:
    """Scripted models that take the cell's times; `folder` will hold the trace."""
    trace = folder / "trace"
    trace.write_text(from_position(cell.trace, len(PROMPT)))
    target = f"scripted:{SEED}:delay_ms={cell.V_ms:g}:row_cost={cell.slope:g}:device=cloud"
    return Pair(target, f"scripted:{SEED}:delay_ms={cell.draft_ms:g}:trace={trace}:device=edge")


def _rows(owned: ExitStack, started: Rig, plans: dict[str, Orchestration]) -> list[Discipline]:
    clients = {plan: owned.enter_context(Client(address)) for plan, address in started.addresses.items()}
    return [Discipline(clients[plan], name != PLAIN, name) for name, plan in plans.items()]


def measure_software() -> Software:
    """What software adds to a step and to a hop, from plain decoding at no delay."""
    cell = Cell(0.0, 1.0, 0.0, 0.0, V_MS)
    with ExitStack() as owned:
        where = owned.enter_context(places())
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-wan-")))
        started = owned.enter_context(rig(where, emulated(cell, folder), [Orchestration()]))
        (row,) = _rows(owned, started, {PLAIN: Orchestration()})
        arrivals = row.run(PROMPT, GAUGED_TOKENS).arrivals
    timings = [arrival.timings for arrival in arrivals if arrival.timings is not None]
    if not timings:
        raise BenchError("plain: no timings came with the chunks")
    forward = statistics.median(one.step.forward_us for one in timings)
    gap = statistics.median(one.step.gap_us for one in timings)
    arrived = statistics.median((one.verdict_received_ns - one.forward_ended_ns) / 1000 for one in timings)
    # A verdict leaves about when the next forward begins; the rest of its way is the hop.
    step = max(0.0, forward + gap - 1000 * cell.V_ms)
    return Software(step_us=step, hop_us=max(0.0, arrived - gap))


def expected_seconds(expected: Expected, repeats: int, tokens: int = TOKENS) -> float:
    """About how long a cell takes."""
    counts = repeats_by_discipline(expected, repeats, tokens)
    return sum(count * tokens / expected.speeds[name] for name, count in counts.items())


def repeats_by_discipline(expected: Expected, repeats: int, tokens: int) -> dict[str, int]:
    """Baselines that are slow have fewer, except those that a bar is about; the others have all of them."""
    full = {PLAIN, DEFAULT, *(DISCIPLINES if expected.cell == SHOWN else ())}
    if expected.speeds[TEXTBOOK] > BARRED * expected.speeds[PLAIN]:
        full.add(TEXTBOOK)
    return {
        name: repeats if name in full else repeats_of(tokens / expected.speeds[name], repeats) for name in DISCIPLINES
    }
