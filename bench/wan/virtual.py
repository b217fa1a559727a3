"""The simulator's figures of a cell: each discipline at its best, and the best fixed settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from bench.harness.interleave import tracked
from bench.harness.processes import in_processes
from bench.wan.cells import TOKENS, WanCell
from bench.wan.disciplines import CHAIN, DEFAULT, PLAIN, STREAM_WAIT, TEXTBOOK, measured_in
from bench.wan.traces import Ranked
from specwire import sim

WAITING_CHUNKS, WAITING_RUN_AHEADS = (1, 2, 4), (8, 16, 32)


@dataclass(frozen=True, slots=True)
class Software:
    """What software adds, measured: between a forward and the next, to each hop, to each draft token; microseconds."""

    step_us: float = 0.0
    hop_us: float = 0.0
    draft_us: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpectedCell:
    """Tokens per second of a session, by discipline; `settings` of those that have some, and of the optima.

    optimum_of_chains: of the best fixed setting that does not branch, what CHAIN is held against. optimum: that, or the
    best of some streams that branch, whichever is faster, what DEFAULT is held against. It is no upper bound.
    """

    cell: WanCell
    speeds: dict[str, float]
    settings: dict[str, str]
    optimum_of_chains: float
    optimum: float

    @property
    def gain(self) -> float:
        """Default / chain."""
        return self.speeds[DEFAULT] / self.speeds[CHAIN]


def expect(cell: WanCell, software: Software | None = None, tokens: int = TOKENS) -> ExpectedCell:
    """Simulate every discipline of a cell. The optima are of sweeps without any software."""
    software = software or Software()
    bare, loaded = as_simulated(cell, Software(), tokens), as_simulated(cell, software, tokens)
    chains = sim.optimum(bare)
    best = max((chains, sim.optimum_of_trees(bare, chains)), key=lambda one: one.result.tokens_per_second)
    fixed = {PLAIN: sim.PLAIN}
    if TEXTBOOK in measured_in(cell):
        fixed |= {TEXTBOOK: sim.best_textbook(bare).policy, STREAM_WAIT: _best_waiting(bare)}
    speeds = {name: _speed(loaded, policy) for name, policy in fixed.items()}
    speeds |= {CHAIN: _experienced(loaded, sim.CHAIN), DEFAULT: _experienced(loaded, sim.AUTO)}
    settings = {name: policy.name for name, policy in fixed.items() if name != PLAIN}
    settings |= {"optimum of chains": chains.policy.name, "optimum": best.policy.name}
    return ExpectedCell(cell, speeds, settings, chains.result.tokens_per_second, best.result.tokens_per_second)


def expect_all(cells: Sequence[WanCell], software: Software | None = None, tokens: int = TOKENS) -> list[ExpectedCell]:
    """The same of many."""
    found = in_processes(partial(expect, software=software, tokens=tokens), cells)
    return list(tracked(found, len(cells), "cells in virtual time"))


def as_simulated(cell: WanCell, software: Software, tokens: int, trace: Ranked | None = None) -> sim.Cell:
    """trace: another than the cell's own."""
    trace = trace or cell.trace
    return sim.Cell(
        V_us=cell.V_ms * 1000,
        slope=cell.slope,
        draft_us=cell.draft_ms * 1000 + software.draft_us,
        rtt_us=cell.rtt_ms * 1000,
        row_slope=cell.row_cost,
        ranks=trace.right,
        scores=trace.scores,
        tokens=tokens,
        hop_us=software.hop_us,
        step_us=software.step_us,
    )


def _best_waiting(cell: sim.Cell) -> sim.Policy:
    candidates = [sim.stream_wait(chunk, ahead) for chunk, ahead in product(WAITING_CHUNKS, WAITING_RUN_AHEADS)]
    return max(candidates, key=lambda policy: _speed(cell, policy))


def _experienced(cell: sim.Cell, policy: sim.Policy) -> float:
    """The second session: the first one, from which it learns, is not counted in a measurement either."""
    return sim.simulate(cell, policy, learnt=sim.simulate(cell, policy).learnt).tokens_per_second


def _speed(cell: sim.Cell, policy: sim.Policy) -> float:
    return sim.simulate(cell, policy).tokens_per_second
