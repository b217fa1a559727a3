"""What is needed of a measurement over a line, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.bars import Bar, at_least, at_most
from bench.interval import Estimate, estimate
from bench.wan.cells import SHOWN
from bench.wan.disciplines import DEFAULT, DISCIPLINES, PLAIN, TEXTBOOK
from bench.wan.emulated import Measured
from bench.wan.real_pair import MeasuredPair
from bench.wan.speeds import first_token_ms, ratio, ratio_to, ratio_to_better, speeds
from bench.wan.wire import Wire
from specwire.core.law.sampling import GUESSING_RULES

OF_BETTER, OF_OPTIMUM, SIMULATOR_ERROR = 0.97, 0.90, 0.10
SHOWN_TO_TEXTBOOK, SHOWN_TO_PLAIN = 1.2, 1.15
PAIR_TO_PLAIN = 0.95
FIRST_TOKEN_RTTS = 1.1
BYTES_PER_PROPOSED = 16.0


def bars(cells: Sequence[Measured], pair: Sequence[MeasuredPair], wire: Sequence[Wire]) -> list[Bar]:
    return [bar for part in (map(_cell, cells), map(_pair, pair), map(_wire, wire)) for one in part for bar in one]


def _cell(one: Measured) -> Iterator[Bar]:
    name, samples = one.cell.name, one.samples
    better = ratio_to_better(samples, DEFAULT, (PLAIN, TEXTBOOK))
    yield at_least(f"{name}: default / better of plain and textbook", better, OF_BETTER)
    yield at_least(f"{name}: default / simulated optimum", ratio_to(samples, DEFAULT, one.expected.optimum), OF_OPTIMUM)
    worst = max((simulator_error(one, discipline) for discipline in DISCIPLINES), key=lambda error: error.value)
    yield at_most(f"{name}: simulator's error, worst discipline", worst, SIMULATOR_ERROR)
    yield at_most(f"{name}: texts that differ", _exact(0.0 if one.texts_equal else 1.0), 0)
    if one.cell == SHOWN:
        yield at_least(f"{name}: default / textbook", ratio(samples, DEFAULT, TEXTBOOK), SHOWN_TO_TEXTBOOK)
        yield at_least(f"{name}: default / plain", ratio(samples, DEFAULT, PLAIN), SHOWN_TO_PLAIN)
        yield at_most(f"{name}: first token less prefill, in round trips", _first_token(one), FIRST_TOKEN_RTTS)


def simulator_error(one: Measured, discipline: str) -> Estimate:
    """|simulated / measured - 1|; the interval is of the measurement, folded at zero."""
    measured = estimate(speeds(one.samples, discipline))
    low, value, high = (
        one.expected.speeds[discipline] / each - 1 for each in (measured.high, measured.value, measured.low)
    )
    nearest = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return Estimate(abs(value), nearest, max(abs(low), abs(high)), measured.coverage)


def _first_token(one: Measured) -> Estimate:
    """The connection is up; what a prefill of one token takes is V(1)."""
    first = first_token_ms(one.samples, DEFAULT)
    value, low, high = ((each - one.cell.V_ms) / one.cell.rtt_ms for each in (first.value, first.low, first.high))
    return Estimate(value, low, high, first.coverage)


def _pair(one: MeasuredPair) -> Iterator[Bar]:
    yield at_least(f"demo pair, {one.rtt_ms:g} ms: default / plain", ratio(one.samples, DEFAULT, PLAIN), PAIR_TO_PLAIN)


def _wire(one: Wire) -> Iterator[Bar]:
    """Rules that send ids only are held to the bar; what the others take is told."""
    if one.rule not in GUESSING_RULES:
        return
    for hop in one.hops:
        if hop.tokens.get("proposals"):
            value = hop.per_token("proposals")
            yield at_most(f"{one.rule}, {hop.name}: bytes per proposed token", _exact(value), BYTES_PER_PROPOSED)


def _exact(value: float) -> Estimate:
    return Estimate(value, value, value, 1.0)
