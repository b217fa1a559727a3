"""What is needed of a measurement over a line, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bench.branching.run import written_gains
from bench.harness.interval import Estimate, estimate
from bench.harness.report import Bar, at_least, at_most
from bench.wan.cells import AT_HOME, AWAY, FAR_AND_FAST, SHOWN, WanCell
from bench.wan.disciplines import (
    CHAIN,
    DEFAULT,
    PLAIN,
    TEXTBOOK,
    first_token_ms,
    ratio,
    ratio_to,
    ratio_to_better,
    speeds,
    times,
)
from bench.wan.emulated import EmulatedTimes
from bench.wan.real_pair import MeasuredPair
from bench.wan.wire import Wire
from specwire.core.law.sampling import GUESSING_RULES

OF_BETTER, OF_OPTIMUM, SIMULATOR_ERROR = 0.97, 0.90, 0.10
SHOWN_TO_TEXTBOOK, SHOWN_TO_PLAIN = 1.2, 1.15
PAIR_TO_PLAIN, PAIR_TO_CHAIN = 0.95, 0.95
# Default / chain: of what was simulated before, in every cell, and in those where trees must show.
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


def bars(
    cells: Sequence[EmulatedTimes],
    pair: Sequence[MeasuredPair],
    wire: Sequence[Wire],
    gains: Mapping[str, float] | None = None,
) -> list[Bar]:
    """gains: default / chain by cell, simulated before; what is written in bench/results if they are not given."""
    gains = written_gains() if gains is None else gains
    return [
        *(bar for one in cells for bar in (*_cell(one), *_branching(one, gains))),
        *_placed(cells),
        *(bar for one in pair for bar in _pair(one)),
        *(bar for one in wire for bar in _wire(one)),
    ]


def _cell(one: EmulatedTimes) -> Iterator[Bar]:
    name, samples = one.cell.name, one.samples
    baselines = [baseline for baseline in (PLAIN, TEXTBOOK) if baseline in one.expected.speeds]
    better = ratio_to_better(samples, DEFAULT, baselines)
    yield at_least(f"{name}: default / better of {' and '.join(baselines)}", better, OF_BETTER)
    for row, optimum, best in against_optimum(one):
        yield at_least(f"{name}: {row} / simulated {optimum}", ratio_to(samples, row, best), OF_OPTIMUM)
    worst = max((simulator_error(one, discipline) for discipline in one.expected.speeds), key=lambda error: error.value)
    yield at_most(f"{name}: simulator's error, worst discipline", worst, SIMULATOR_ERROR)
    yield at_most(f"{name}: texts that differ", _exact(0.0 if one.texts_equal else 1.0), 0)
    if one.cell == SHOWN:
        yield at_least(f"{name}: default / textbook", ratio(samples, DEFAULT, TEXTBOOK), SHOWN_TO_TEXTBOOK)
        yield at_least(f"{name}: default / plain", ratio(samples, DEFAULT, PLAIN), SHOWN_TO_PLAIN)
        yield at_most(f"{name}: first token less prefill, in round trips", _first_token(one), FIRST_TOKEN_RTTS)


def against_optimum(one: EmulatedTimes) -> list[tuple[str, str, float]]:
    """(row, its optimum's name, tokens per second of that): a row that draft chains beside settings that do, too."""
    rows = [(DEFAULT, "optimum", one.expected.optimum), (CHAIN, "optimum of chains", one.expected.optimum_of_chains)]
    return [each for each in rows if speeds(one.samples, each[0])]


def _branching(one: EmulatedTimes, gains: Mapping[str, float]) -> Iterator[Bar]:
    """What branches gain. A cell that was not simulated before is held to what is simulated now."""
    name, found = one.cell.name, ratio(one.samples, DEFAULT, CHAIN)
    yield at_least(f"{name}: default / chain", found, TO_CHAIN.get(one.cell, LEAST_TO_CHAIN))
    gain = gains.get(name, one.expected.gain)
    yield at_least(f"{name}: default / chain, of the {gain:.2f} simulated", times(found, 1 / gain), OF_GAIN)


def _placed(cells: Sequence[EmulatedTimes]) -> Iterator[Bar]:
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


def _pair(one: MeasuredPair) -> Iterator[Bar]:
    name = f"demo pair, {one.rtt_ms:g} ms: default"
    yield at_least(f"{name} / plain", ratio(one.samples, DEFAULT, PLAIN), PAIR_TO_PLAIN)
    if speeds(one.samples, CHAIN):
        yield at_least(f"{name} / chain", ratio(one.samples, DEFAULT, CHAIN), PAIR_TO_CHAIN)


def _wire(one: Wire) -> Iterator[Bar]:
    """Rules that send ids only are held to the bar; what the others take is told."""
    if one.rule not in GUESSING_RULES:
        return
    for hop in one.hops:
        if hop.tokens.get("proposals"):
            value = hop.per_token("proposals")
            yield at_most(f"{one.name}, {hop.name}: bytes per proposed token", _exact(value), BYTES_PER_PROPOSED)


def _exact(value: float) -> Estimate:
    return Estimate(value, value, value, 1.0)
