"""V(m), measured before anything else runs."""

from __future__ import annotations

import time

from specwire.core.speed import ForwardTimes, typical
from specwire.lm import Feed, LanguageModel

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
PREFIX = 64
BUDGET_S = 1.0
LEAST_RUNS, MOST_RUNS = 2, 9


def calibrate(lm: LanguageModel, budget_s: float = BUDGET_S) -> ForwardTimes:
    """Median times of forwards of one session behind a short text, in about `budget_s`; leaves slot 0 empty."""
    prefix = min(PREFIX, lm.info.context // 2)
    widths = [width for width in WIDTHS if prefix + width <= lm.info.context]
    _forward(lm, 0, prefix)
    for width in widths:
        _forward(lm, prefix, width)
    measured = {width: _median_us(lm, prefix, width, budget_s / len(widths)) for width in widths}
    lm.discard(0)
    return ForwardTimes(measured)


def _median_us(lm: LanguageModel, prefix: int, width: int, budget_s: float) -> float:
    times: list[float] = []
    while len(times) < LEAST_RUNS or (sum(times) < budget_s * 1e6 and len(times) < MOST_RUNS):
        times.append(_forward(lm, prefix, width))
    return typical(times)


def _forward(lm: LanguageModel, start: int, count: int) -> float:
    """Microseconds of a forward of `count` tokens at `start`, all of their rows wanted."""
    vocabulary = lm.info.vocabulary
    tokens = [(7 * position + 3) % vocabulary for position in range(start, start + count)]
    began = time.perf_counter_ns()
    lm.forward([Feed(0, start, tokens, count)])
    return (time.perf_counter_ns() - began) / 1000
