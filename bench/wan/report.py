"""What a measurement over a line found: its bars, and bench/results/wan.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness.interval import Estimate, estimate
from bench.harness.record import save
from bench.harness.report import Bar, at_least, at_most, exactly
from bench.harness.runs import Sample, of_row
from bench.wan.cells import AT_HOME, AWAY, FAR_AND_FAST, SHOWN, WanCell
from bench.wan.disciplines import (
    CHAIN,
    DEFAULT,
    DISCIPLINES,
    PLAIN,
    TEXTBOOK,
    first_token_ms,
    ratio,
    ratio_to,
    ratio_to_better,
    speeds,
    times,
    tokens_per_second,
)
from bench.wan.emulated import EmulatedTimes
from bench.wan.virtual import ExpectedCell, Software
from bench.wan.wire import Hop, Wire
from specwire.core.law.sampling import GUESSING_RULES

OF_BETTER, OF_OPTIMUM, SIMULATOR_ERROR = 0.97, 0.90, 0.10
SHOWN_TO_TEXTBOOK, SHOWN_TO_PLAIN = 1.2, 1.15
# Default / chain: of what is simulated, in every cell, and in those where trees must show.
OF_GAIN, LEAST_TO_CHAIN = 0.95, 0.98
TO_CHAIN = {
    AWAY: 1.10,
    WanCell(20.0, 1.0, 0.8, 0.02): 1.15,
    WanCell(80.0, 1.0, 0.9, 0.05): 1.15,
    FAR_AND_FAST: 1.08,
}
AWAY_TO_TEXTBOOK_AT_HOME = 1.10
FIRST_TOKEN_RTTS = 1.1
BYTES_PER_PROPOSED = 16.0


@dataclass(frozen=True, slots=True)
class WanResults:
    """What was not asked for is empty. notes: for people."""

    arguments: Mapping[str, object]
    software: Software
    grid: Sequence[ExpectedCell]
    cells: Sequence[EmulatedTimes]
    wire: Sequence[Wire]
    notes: Sequence[str]

    @property
    def bars(self) -> list[Bar]:
        return [
            *(bar for one in self.cells for bar in (*_cell_bars(one), *_branching_bars(one))),
            *_placed_bars(self.cells),
            *(bar for one in self.wire for bar in _wire_bars(one)),
        ]

    @property
    def texts_hold(self) -> bool:
        """Whether every text over an emulated device was the same, whatever the discipline."""
        return all(one.texts_equal for one in self.cells)


# ----------------------------------------------------------------------------------------------------------------------
# What is needed


def _cell_bars(one: EmulatedTimes) -> Iterator[Bar]:
    name, samples = one.cell.name, one.samples
    baselines = [baseline for baseline in (PLAIN, TEXTBOOK) if baseline in one.expected.speeds]
    better = ratio_to_better(samples, DEFAULT, baselines)
    yield at_least(f"{name}: default / better of {' and '.join(baselines)}", better, OF_BETTER)
    for row, optimum, best in against_optimum(one):
        yield at_least(f"{name}: {row} / simulated {optimum}", ratio_to(samples, row, best), OF_OPTIMUM)
    worst = max((simulator_error(one, discipline) for discipline in one.expected.speeds), key=lambda error: error.value)
    yield at_most(f"{name}: simulator's error, worst discipline", worst, SIMULATOR_ERROR)
    yield at_most(f"{name}: texts that differ", exactly(0.0 if one.texts_equal else 1.0), 0)
    if one.cell == SHOWN:
        yield at_least(f"{name}: default / textbook", ratio(samples, DEFAULT, TEXTBOOK), SHOWN_TO_TEXTBOOK)
        yield at_least(f"{name}: default / plain", ratio(samples, DEFAULT, PLAIN), SHOWN_TO_PLAIN)
        yield at_most(f"{name}: first token less prefill, in round trips", _first_token(one), FIRST_TOKEN_RTTS)


def against_optimum(one: EmulatedTimes) -> list[tuple[str, str, float]]:
    """(row, its optimum's name, tokens per second of that): a row that draft chains beside settings that do, too."""
    rows = [(DEFAULT, "optimum", one.expected.optimum), (CHAIN, "optimum of chains", one.expected.optimum_of_chains)]
    return [each for each in rows if speeds(one.samples, each[0])]


def _branching_bars(one: EmulatedTimes) -> Iterator[Bar]:
    """What branches gain, beside what is simulated."""
    name, found, gain = one.cell.name, ratio(one.samples, DEFAULT, CHAIN), one.expected.gain
    yield at_least(f"{name}: default / chain", found, TO_CHAIN.get(one.cell, LEAST_TO_CHAIN))
    yield at_least(f"{name}: default / chain, of the {gain:.2f} simulated", times(found, 1 / gain), OF_GAIN)


def _placed_bars(cells: Sequence[EmulatedTimes]) -> Iterator[Bar]:
    """The default away beside textbook speculation in the verifier's box."""
    by_cell = {one.cell: one for one in cells}
    if AWAY in by_cell and AT_HOME in by_cell:
        found = beside(by_cell[AWAY], DEFAULT, by_cell[AT_HOME], TEXTBOOK)
        yield at_least(f"{AWAY.name}: default / textbook at 0 ms", found, AWAY_TO_TEXTBOOK_AT_HOME)


def beside(one: EmulatedTimes, row: str, other: EmulatedTimes, to: str) -> Estimate:
    """How many times as fast a row of one cell is as one of another, repeat by repeat."""
    pairs = zip(speeds(one.samples, row), speeds(other.samples, to), strict=False)
    return estimate([first / second for first, second in pairs])


def simulator_error(one: EmulatedTimes, discipline: str) -> Estimate:
    """|simulated / measured - 1|; the interval is of the measurement, folded at zero."""
    measured = estimate(speeds(one.samples, discipline))
    low, value, high = (
        one.expected.speeds[discipline] / each - 1 for each in (measured.high, measured.value, measured.low)
    )
    nearest = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return Estimate(abs(value), nearest, max(abs(low), abs(high)), measured.coverage)


def _first_token(one: EmulatedTimes) -> Estimate:
    """The connection is up; what a prefill of one token takes is V(1)."""
    first = first_token_ms(one.samples, DEFAULT)
    value, low, high = ((each - one.cell.V_ms) / one.cell.rtt_ms for each in (first.value, first.low, first.high))
    return Estimate(value, low, high, first.coverage)


def _wire_bars(one: Wire) -> Iterator[Bar]:
    """Rules that send ids only are held to the bar; what the others take is told."""
    if one.rule not in GUESSING_RULES:
        return
    for hop in one.hops:
        if hop.tokens.get("proposals"):
            value = hop.per_token("proposals")
            yield at_most(f"{one.name}, {hop.name}: bytes per proposed token", exactly(value), BYTES_PER_PROPOSED)


# ----------------------------------------------------------------------------------------------------------------------
# On disk


def write(results: WanResults, path: Path) -> dict[str, Any]:
    """Returns the record."""
    head = {
        "bars": [asdict(bar) for bar in results.bars],
        "emulated": [_measured_cell(one) for one in results.cells],
        "simulated": [_expected_cell(one) for one in results.grid],
        "wire": [
            {"rule": one.rule, "trees": one.trees, "decided": one.decided, "hops": [_hop(hop, one) for hop in one.hops]}
            for one in results.wire
        ],
        "software": asdict(results.software),
        "notes": list(results.notes),
    }
    raw = [_session(cell.cell.name, sample) for cell in results.cells for sample in cell.samples]
    return save(path, head, results.arguments, raw)


def _measured_cell(one: EmulatedTimes) -> dict[str, object]:
    return {
        "name": one.cell.name,
        "cell": asdict(one.cell),
        "settings": one.expected.settings,
        "simulated": _rounded(one.expected.speeds),
        "optimum": round(one.expected.optimum, 3),
        "optimum_of_chains": round(one.expected.optimum_of_chains, 3),
        "disciplines": _disciplines(one.samples),
        "simulator_error": {name: asdict(simulator_error(one, name)) for name in one.expected.speeds},
        **{f"{row}_to_optimum": asdict(ratio_to(one.samples, row, best)) for row, _, best in against_optimum(one)},
        "texts_equal": one.texts_equal,
        "relay_late_ms": one.late_ms,
    }


def _disciplines(samples: Sequence[Sample]) -> dict[str, object]:
    """Of those that were measured."""
    names = [name for name in DISCIPLINES if of_row(samples, name)]
    compared = {PLAIN: "to_plain", TEXTBOOK: "to_textbook", CHAIN: "to_chain"}
    return {
        name: {
            "tokens_per_second": asdict(tokens_per_second(samples, name)),
            **{key: asdict(ratio(samples, name, other)) for other, key in compared.items() if other in names},
            "first_token_ms": asdict(first_token_ms(samples, name)),
        }
        for name in names
    }


def _expected_cell(one: ExpectedCell) -> dict[str, object]:
    return {
        "name": one.cell.name,
        "tokens_per_second": _rounded(one.speeds),
        "optimum": round(one.optimum, 3),
        "optimum_of_chains": round(one.optimum_of_chains, 3),
        "settings": one.settings,
    }


def _hop(hop: Hop, one: Wire) -> dict[str, object]:
    return {
        **asdict(hop),
        "bytes": _rounded(hop.bytes),
        "bytes_per_proposed_token": round(hop.per_token("proposals"), 3),
        "bytes_per_decided_token": round(sum(hop.bytes.values()) / one.decided, 3),
    }


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def _session(where: str, sample: Sample) -> dict[str, object]:
    run = sample.run
    return {
        "where": where,
        "repeat": sample.repeat,
        "prompt": sample.prompt,
        "discipline": sample.row,
        "tokens": len(run.tokens),
        "seconds": round(run.seconds, 6),
        "first_token_seconds": round(run.first_token_seconds, 6),
        "forwards": run.forwards,
        "tested": run.tested,
        "accepted": run.accepted,
        "plan": run.plan,
    }
