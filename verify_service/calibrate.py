"""V(m), measured before anything else runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from specwire.core.speed import ForwardTimes, typical
from specwire.lm import Feed, LanguageModel

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
PREFIX = 64
BUDGET_S = 1.0
LEAST_ROUNDS, MOST_ROUNDS = 3, 15


def calibrate(lm: LanguageModel, budget_s: float = BUDGET_S, go_on: Callable[[], None] = lambda: None) -> ForwardTimes:
    """Times of forwards of one session behind a short text, in about `budget_s`; leaves slot 0 empty.

    All widths take turns, so that a hiccup of the machine meets them alike, and the slower half of each is left out:
    what else the machine does can only add time. A turn is two forwards, of which the second counts: after a change of
    shape some runtimes take longer, and V(1) must be the time of plain decoding, step after step. `go_on` is called
    before each turn and may raise.
    """
    prefix = min(PREFIX, lm.info.context // 2)
    widths = [width for width in WIDTHS if prefix + width <= lm.info.context]
    _forward(lm, 0, prefix)
    for width in widths:
        go_on()
        _forward(lm, prefix, width)
    times: dict[int, list[float]] = {width: [] for width in widths}
    began, rounds = time.perf_counter(), 0
    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() - began < budget_s):
        for width in widths:
            go_on()
            _forward(lm, prefix, width)
            times[width].append(_forward(lm, prefix, width))
        rounds += 1
    lm.discard(0)
    return ForwardTimes({width: _faster_half(values) for width, values in times.items()})


def _faster_half(values: list[float]) -> float:
    """Median of the faster half."""
    return typical(sorted(values)[: (len(values) + 1) // 2])


def _forward(lm: LanguageModel, start: int, count: int) -> float:
    """Microseconds of a forward of `count` tokens at `start`, all of their rows wanted."""
    vocabulary = lm.info.vocabulary
    tokens = [(7 * position + 3) % vocabulary for position in range(start, start + count)]
    began = time.perf_counter_ns()
    lm.forward([Feed(0, start, tokens, count)])
    return (time.perf_counter_ns() - began) / 1000
