"""Cells over real sockets with emulated devices: forwards are sleeps of stated length, guesses follow a recorded trace.

What is real: processes, gRPC, the scheduler, the planner, the log, the relay's delay. What is not: the
models, and contention for cores, which sleeping has none of; therefore two cells may run at a time. Those whose round
trip is shorter than a forward run alone: there it counts what software adds to a hop, and what others add to that.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.harness.interleave import tracked
from bench.harness.runs import BenchError, Sample
from bench.wan.cells import AT_HOME, SHOWN, TOKENS, WanCell
from bench.wan.disciplines import (
    AUTOMATIC,
    CHAIN,
    DEFAULT,
    DISCIPLINES,
    PLAIN,
    TEXTBOOK,
    DisciplineRow,
    measured_in,
    orchestration,
    repeats_of,
    take_turns,
)
from bench.wan.rig import Orchestration, WanPair, WanRig, rig
from bench.wan.virtual import ExpectedCell, Software
from specwire.client import Client, Timings

# Far cells at a time; near ones have the machine to themselves.
LANES = 2
SEED = 7
# One token: then the prompt's forward is V(1), as the simulator has it.
PROMPT = (5,)
# What the default learns before it is measured, and what settles connections for the others.
WARM_UP = {CHAIN: 128, DEFAULT: 128}
LEAST_WARM_UP = 8
# Steps of each kind from which software's share is told, those left out at first, chunks of lockstep, hops of a round.
GAUGED_STEPS, UNSETTLED = 64, 4
GAUGED_CHUNKS = (1, 7)
HOPS = 4
# Textbook speculation as fast as this share of plain decoding may be the better of the two: a bar is about it.
BARRED = 0.9


@dataclass(frozen=True, slots=True)
class EmulatedTimes:
    """A cell over real sockets. late_ms: quantiles of how late the relay delivered."""

    expected: ExpectedCell
    samples: Sequence[Sample]
    late_ms: dict[str, float]

    @property
    def cell(self) -> WanCell:
        return self.expected.cell

    @property
    def texts_equal(self) -> bool:
        """Whether every session said the same, as far as it went."""
        texts = {sample.run.tokens for sample in self.samples}
        longest = max(texts, key=len)
        return all(text == longest[: len(text)] for text in texts)


def measure_cells(
    expected: Sequence[ExpectedCell], repeats: int, tokens: int, progress: Callable[[EmulatedTimes], None]
) -> list[EmulatedTimes]:
    """Measure near cells one by one, then far ones LANES at a time, the longest first."""
    longest_first = sorted(expected, key=lambda one: -sum(tokens / speed for speed in one.speeds.values()))
    found: dict[str, EmulatedTimes] = {}
    for lanes, some in parted(longest_first):
        for measured in tracked(_measure_some(some, lanes, repeats, tokens), len(some), f"cells, {lanes} at a time"):
            found[measured.cell.name] = measured
            progress(measured)
    return [found[one.cell.name] for one in expected]


def parted(expected: Sequence[ExpectedCell]) -> list[tuple[int, list[ExpectedCell]]]:
    """(how many at a time, which cells): near ones, then far ones."""
    near = [one for one in expected if one.cell.rtt_ms < one.cell.V_ms]
    return [(1, near), (LANES, [one for one in expected if one not in near])]


def _measure_some(expected: Sequence[ExpectedCell], lanes: int, repeats: int, tokens: int) -> Iterator[EmulatedTimes]:
    """A failure ends all, after the sessions under way."""
    given_up = threading.Event()
    with ThreadPoolExecutor(lanes) as pool:
        try:
            yield from pool.map(lambda one: measure_cell(one, repeats, tokens, given_up), expected)
        finally:
            given_up.set()


def measure_cell(expected: ExpectedCell, repeats: int, tokens: int, given_up: threading.Event) -> EmulatedTimes:
    """All disciplines of one cell, interleaved; BenchError once `given_up` is set."""

    def ran(_: Sample) -> None:
        if given_up.is_set():
            raise BenchError(f"{expected.cell.name}: given up")

    policies = {name: expected.settings.get(name, AUTOMATIC.get(name, PLAIN)) for name in measured_in(expected.cell)}
    plans = {name: orchestration(policy) for name, policy in policies.items()}
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-wan-")))
        started = owned.enter_context(rig(emulated(expected.cell, folder), list(dict.fromkeys(plans.values()))))
        started.shape(expected.cell.rtt_ms)
        rows = _rows(owned, started, plans)
        for row in rows:
            row.run(PROMPT, min(tokens, WARM_UP.get(row.key, LEAST_WARM_UP)))
        samples = take_turns(rows, [PROMPT], tokens, repeats_by_discipline(expected, repeats, tokens), ran)
        return EmulatedTimes(expected, samples, started.links[0].late_ms())


def emulated(cell: WanCell, folder: Path) -> WanPair:
    """Scripted models that take the cell's times; `folder` will hold the trace."""
    ranks = folder / "ranks"
    ranks.write_text(cell.trace.played(len(PROMPT)))
    target = f"scripted:{SEED}:delay_ms={cell.V_ms:g}:row_cost={cell.slope:g}:device=cloud"
    draft = f"scripted:{SEED}:delay_ms={cell.draft_ms:g}:row_cost={cell.row_cost:g}:ranks={ranks}:device=edge"
    return WanPair(target, draft)


def _rows(owned: ExitStack, started: WanRig, plans: dict[str, Orchestration]) -> list[DisciplineRow]:
    clients = {plan: owned.enter_context(Client(address)) for plan, address in started.addresses.items()}
    return [DisciplineRow(clients[plan], name != PLAIN, name) for name, plan in plans.items()]


def measure_software() -> Software:
    """What software adds to a step, a hop and a draft token, at no delay.

    A step, from plain decoding: what is between the beginnings of two forwards beyond V. The rest from rounds of
    lockstep in which every guess is right: such a round is a step, k draft tokens and four hops (proposal and verdict,
    each through the orchestrator), so two values of k tell draft tokens and hops apart.
    """
    cell = WanCell(0.0, 8.0, 1.0, 0.0, row_cost=0.0)
    plans = {PLAIN: Orchestration(), **{f"k = {k}": orchestration(f"textbook:{k}") for k in GAUGED_CHUNKS}}
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-wan-")))
        started = owned.enter_context(rig(emulated(cell, folder), list(plans.values())))
        plain, *lockstep = _rows(owned, started, plans)
        step_us = _step_us(_told(plain, GAUGED_STEPS)) - 1000 * cell.V_ms
        rounds = {
            k: _round_us(_told(row, GAUGED_STEPS * (k + 1))) for k, row in zip(GAUGED_CHUNKS, lockstep, strict=True)
        }
    return software_of(rounds, step_us, 1000 * cell.V_ms, 1000 * cell.draft_ms)


def software_of(rounds: Mapping[int, float], step_us: float, V_us: float, draft_us: float) -> Software:
    """rounds: what a round of lockstep takes, by the length of its chunk, for two lengths; microseconds."""
    (short, short_us), (long, long_us) = sorted(rounds.items())
    token_us = max(draft_us, (long_us - short_us) / (long - short))
    step_us = max(0.0, step_us)
    hops_us = short_us - short * token_us - V_us - step_us
    return Software(step_us=step_us, hop_us=max(0.0, hops_us / HOPS), draft_us=token_us - draft_us)


def _told(row: DisciplineRow, tokens: int) -> list[Timings]:
    row.run(PROMPT, LEAST_WARM_UP)
    timings = [arrival.timings for arrival in row.run(PROMPT, tokens).arrivals if arrival.timings is not None]
    if len(timings) <= UNSETTLED + 1:
        raise BenchError(f"{row.key}: only {len(timings)} chunks came with timings")
    return timings[UNSETTLED:]


def _step_us(timings: Sequence[Timings]) -> float:
    """From the beginning of a forward to that of the next."""
    return statistics.median(one.step.forward_us for one in timings) + statistics.median(
        one.step.gap_us for one in timings
    )


def _round_us(timings: Sequence[Timings]) -> float:
    """From one verdict to the next."""
    return statistics.median(
        (after.verdict_received_ns - before.verdict_received_ns) / 1000 for before, after in pairwise(timings)
    )


def expected_seconds(expected: ExpectedCell, repeats: int, tokens: int = TOKENS) -> float:
    """About how long a cell takes."""
    counts = repeats_by_discipline(expected, repeats, tokens)
    return sum(count * tokens / expected.speeds[name] for name, count in counts.items())


def repeats_by_discipline(expected: ExpectedCell, repeats: int, tokens: int) -> dict[str, int]:
    """Baselines that are slow have fewer, except those that a bar is about; the others have all of them."""
    full, speeds = {CHAIN, DEFAULT, *(DISCIPLINES if expected.cell in (SHOWN, AT_HOME) else ())}, expected.speeds
    if TEXTBOOK in speeds:
        full.add(PLAIN)
        if speeds[TEXTBOOK] > BARRED * speeds[PLAIN]:
            full.add(TEXTBOOK)
    return {name: repeats if name in full else repeats_of(tokens / speed, repeats) for name, speed in speeds.items()}
