"""V(m), and V(m, rows) of several sessions, measured before anything else runs, or remembered of an earlier start."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeVar

from specwire.core.draft import DraftingModel, HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.policy.costs import StepCosts
from specwire.core.policy.estimates import ForwardTimes
from specwire.core.policy.heads import HeadDepth
from specwire.core.policy.tunables import MOST_HEAD_DEPTH
from specwire.lm import Feed, LanguageModel
from specwire.lm.kv_cache import CachedLM
from specwire.lm.remembered import recalled, remember

logger = logging.getLogger(__name__)

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
# Shapes of forwards of several sessions: how many, and positions of each.
SESSIONS, DEPTHS = (4, 16), (1, 4)
PREFIX = 64
# Seconds, least and most rounds: of one session, and of several, which every step refines.
BUDGET_S, LEAST_ROUNDS, MOST_ROUNDS = 1.0, 3, 15
BATCH_BUDGET_S, LEAST_BATCH_ROUNDS, MOST_BATCH_ROUNDS = 0.25, 1, 5
# Tokens that a head drafts in a turn, and turns: the first ones are slow, while the call is being optimised.
HEAD_DEPTH, HEAD_ROUNDS = 4, 12
# Readings of a text: the first ones are slow, too.
READING_ROUNDS = 4
# Plain steps by turns with and without features.
TAPPED_ROUNDS = 8
# A further forward takes some time, whatever was measured.
LEAST_FORWARD_US = 1.0
# Microseconds from which a forward is long: a hiccup or a change of shape is small beside it, and sessions of a lost
# verifier wait for all of them.
LONG_US = 30_000.0
# Forwards that must be long for that to be believed.
SURELY_LONG = 3
# Positions of one session that are measured where forwards are long; what others take lies between. Of several sessions
# windows of at most so many rows are.
LONG_WIDTHS = (1, 2, 4, 8, 16, 32)
# What is remembered holds as long as a window of so many rows takes about as many plain steps as it did: up to so many
# times as many, or as few. Forwards meet other work of the machine, so it is tried a few times. A machine that many
# times as fast as it was did other work when it was measured.
CHECKED_ROWS, CHECKED_FACTOR, CHECKS = 4, 2.0, 3

Name = TypeVar("Name", bound=Hashable)


class BatchShape(NamedTuple):
    """A forward of this many sessions, each with this many positions, with logits for all rows."""

    sessions: int
    depth: int

    @property
    def worth_long(self) -> bool:
        """Whether it is measured where forwards are long: plain steps are, and some of the others."""
        return self.depth == 1 or self.sessions * self.depth in LONG_WIDTHS


# Microseconds by (sessions, positions of each).
Times = Mapping[tuple[int, int], float]


def step_costs(lm: LanguageModel, go_on: Callable[[], None] = lambda: None) -> StepCosts:
    """Measure what steps cost, of a model with a head those that are no business of the head's.

    Takes a second or two, more where forwards are long, or a few forwards where what an earlier start measured still
    holds; leaves the slots empty. `go_on` is called before each turn and may raise.
    """
    if isinstance(lm, DraftingModel):
        lm.heed(())
    decides = lm.runner.decided_by if isinstance(lm, CachedLM) else ()
    times = _still_true(lm, _table(recalled("step costs", *decides)), go_on) if decides else None
    if times is None:
        times = _measured(lm, go_on)
        if decides:
            remember([[*shape, took] for shape, took in times.items()], "step costs", *decides)
    alone = {depth: took for (sessions, depth), took in times.items() if sessions == 1}
    return StepCosts(ForwardTimes(alone), {shape: took for shape, took in times.items() if shape[0] > 1})


def _measured(lm: LanguageModel, go_on: Callable[[], None]) -> Times:
    _fill(lm, 1)
    alone = {(1, width): took for width, took in _alone(lm, BUDGET_S, go_on).items()}
    together = calibrate_batches(lm, go_on=go_on, filled=True)
    lm.discard(0)
    return alone | together


def _table(found: Any) -> Times:
    """Of what is remembered; empty where that is no table."""
    try:
        times = {(int(sessions), int(depth)): float(took) for sessions, depth, took in found or ()}
    except (TypeError, ValueError):
        return {}
    return times if (1, 1) in times and all(0 < took < math.inf for took in times.values()) else {}


def _still_true(lm: LanguageModel, known: Times, go_on: Callable[[], None]) -> Times | None:
    """What is known, in proportion to a plain step now: a machine that others share may be twice as slow the next time.

    None where it does not hold (see CHECKED_FACTOR), or nothing is known. What steps then show goes on to correct it as
    it does what was measured (`StepCosts`).
    """
    widths = [depth for sessions, depth in known if sessions == 1 and depth <= CHECKED_ROWS]
    if not widths:
        return None
    plain, window = BatchShape(1, 1), BatchShape(1, max(widths))
    if known[plain] <= LONG_US:
        _forward(lm, plain, 0)  # the first of all may compile; of a long one that would be little
    pace, wide, alike, tries = math.inf, math.inf, False, 0
    while not alike and tries < CHECKS:
        go_on()
        pace = min(pace, _turn(lm, plain, 0) / known[plain])
        wide = min(wide, _turn(lm, window, 0) / known[window])
        alike, tries = max(pace, wide) <= CHECKED_FACTOR * min(pace, wide), tries + 1
    lm.discard(0)
    logger.info("a plain step takes %.2f times as long as remembered, a window %.2f times", pace, wide)
    if not alike or CHECKED_FACTOR * pace < 1.0:
        return None
    return {shape: pace * took for shape, took in known.items()}


def calibrate(lm: LanguageModel, budget_s: float = BUDGET_S, go_on: Callable[[], None] = lambda: None) -> ForwardTimes:
    """Times of forwards of one session behind a short text; leaves slot 0 empty."""
    _fill(lm, 1)
    times = _alone(lm, budget_s, go_on)
    lm.discard(0)
    return ForwardTimes(times)


def _alone(lm: LanguageModel, budget_s: float, go_on: Callable[[], None]) -> dict[int, float]:
    prefix = _prefix(lm)
    shapes = {width: BatchShape(1, width) for width in WIDTHS if prefix + width <= lm.info.context}
    return undisturbed(_times(lm, shapes, (LEAST_ROUNDS, MOST_ROUNDS), budget_s, go_on))


def calibrate_batches(
    lm: LanguageModel, budget_s: float = BATCH_BUDGET_S, go_on: Callable[[], None] = lambda: None, filled: bool = False
) -> dict[tuple[int, int], float]:
    """Times of forwards of several sessions, by (sessions, positions of each); none for a model of one slot.

    filled: slot 0 holds the short text already. It and the others are left empty.
    """
    prefix = _prefix(lm)
    numbers = sorted({min(sessions, lm.slots) for sessions in SESSIONS} - {1})
    depths = [depth for depth in DEPTHS if prefix + depth <= lm.info.context]
    shapes = {(sessions, depth): BatchShape(sessions, depth) for sessions in numbers for depth in depths}
    if not shapes:
        return {}
    _fill(lm, max(numbers), filled)
    times = _times(lm, shapes, (LEAST_BATCH_ROUNDS, MOST_BATCH_ROUNDS), budget_s, go_on)
    for slot in range(max(numbers)):
        lm.discard(slot)
    for sessions in numbers:
        rows = undisturbed({depth: times[sessions, depth] for depth in depths if (sessions, depth) in times})
        times |= {(sessions, depth): took for depth, took in rows.items()}
    for depth in depths:
        alike = undisturbed({sessions: times[sessions, depth] for sessions in numbers if (sessions, depth) in times})
        times |= {(sessions, depth): took for sessions, took in alike.items()}
    return times


def calibrate_head(lm: LanguageModel, heads: DraftingModel) -> HeadDepth:
    """Measure what a drafted token takes; leaves the slots empty. heads: the model again, as what drafts."""
    prefix = _prefix(lm)
    numbers = sorted({min(sessions, lm.slots) for sessions in (1, *SESSIONS)})
    tokens = _tokens(lm, 0, prefix + 1)  # the last one is fed when the next is wanted
    _fill(lm, max(numbers))
    tapped = {sessions: _tapped_us(lm, heads, sessions, tokens) for sessions in numbers}
    heads.heed(None)
    _fill(lm, max(numbers))
    most = MOST_HEAD_DEPTH if heads.most_depth is None else min(MOST_HEAD_DEPTH, heads.most_depth)
    depth = min(HEAD_DEPTH, most)
    first, further = {}, {}
    for sessions in numbers:
        first[sessions] = _drafting_us(lm, heads, sessions, tokens, 1)
        whole_us = _drafting_us(lm, heads, sessions, tokens, depth) if depth > 1 else first[sessions]
        further[sessions] = max(LEAST_FORWARD_US, (whole_us - first[sessions]) / max(1, depth - 1))
    for slot in range(max(numbers)):
        lm.discard(slot)
    reading_us = min(_reading_us(lm, heads, tokens, first[1]) for _ in range(READING_ROUNDS))
    return HeadDepth(further, most, reading_us, undisturbed(first), tapped)


def _drafting_us(lm: LanguageModel, heads: DraftingModel, sessions: int, tokens: Sequence[int], depth: int) -> float:
    """Microseconds of a draft for the first slots, which hold all of the text but its last token.

    Each is measured behind a forward of the target, which leaves little of the head in the processor's caches.
    """
    requests, times = [HeadRequest(slot, tokens, Sampling(), depth) for slot in range(sessions)], []
    for _ in range(HEAD_ROUNDS):
        _plain_us(lm, sessions, tokens)
        times.append(_taken_us(lambda: heads.draft(requests)))
    return min(times)


def _tapped_us(lm: LanguageModel, heads: DraftingModel, sessions: int, tokens: Sequence[int]) -> float:
    """Microseconds by which a plain step of the first slots, as in `_drafting_us`, is longer for its features.

    Of two steps in a row the second counts: the first finds the other's weights in the processor's caches. Of all turns
    the fastest: features take far less than what else a machine may do meanwhile.
    """
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(TAPPED_ROUNDS):
        for tapped, taken in times.items():
            heads.heed(None if tapped else ())
            first = _plain_us(lm, sessions, tokens)
            taken.append(first if first > LONG_US else _plain_us(lm, sessions, tokens))
    return max(0.0, min(times[True]) - min(times[False]))


def _plain_us(lm: LanguageModel, sessions: int, tokens: Sequence[int]) -> float:
    """Microseconds of a step of the first slots, which is rolled back."""
    held = len(tokens) - 1
    feeds = [Feed(slot, held, tokens[held:], 1) for slot in range(sessions)]
    took = _taken_us(lambda: lm.forward(feeds))
    for slot in range(sessions):
        lm.rollback(slot, held)
    return took


def _reading_us(lm: LanguageModel, heads: DraftingModel, tokens: Sequence[int], forward_us: float) -> float:
    """Microseconds by which a position more makes a reading longer; 0.0 where nothing is unread.

    forward_us: of one that reads hardly anything. Leaves the slot empty.
    """
    lm.forward([Feed(0, 0, tokens[:-1], 1)])
    rows = heads.unread(0) or 0
    took_us = _taken_us(lambda: heads.catch_up([HeadRequest(0, tokens, Sampling(), 1)]))
    lm.discard(0)
    return max(0.0, took_us - forward_us) / rows if rows else 0.0


def undisturbed(times: Mapping[int, float]) -> dict[int, float]:
    """Times of forwards by their size, each at most that of several smaller ones that it could be made of.

    What was measured longer met something else on the machine. Left so, wide windows would look dear and never be
    tried, and nothing would ever show that they are not.
    """
    found: dict[int, float] = {}
    for size, took in sorted(times.items()):
        parts = (-(-size // smaller) * known for smaller, known in found.items())
        pairs = (known + found[size - smaller] for smaller, known in found.items() if size - smaller in found)
        found[size] = min(took, *parts, *pairs) if found else took
    return found


def _prefix(lm: LanguageModel) -> int:
    return min(PREFIX, lm.info.context // 2)


def _fill(lm: LanguageModel, sessions: int, filled: bool = False) -> None:
    """Let the first slots hold a prefix. filled: slot 0 does. A head needs it fed anew, though, to see its features."""
    tokens = _tokens(lm, 0, _prefix(lm))
    if not filled:
        lm.forward([Feed(0, 0, tokens, 1)])
    for slot in range(1, sessions):
        lm.copy(0, slot, len(tokens))
        held = lm.cached(slot)
        if held < len(tokens):  # a head needs the last ones anew
            lm.forward([Feed(slot, held, tokens[held:], 1)])


def _times(
    lm: LanguageModel,
    shapes: Mapping[Name, BatchShape],
    rounds: tuple[int, int],
    budget_s: float,
    go_on: Callable[[], None],
) -> dict[Name, float]:
    """Microseconds of each shape, within the given rounds, behind the prefix.

    All shapes take turns, so that a hiccup of the machine meets them alike. The fastest quarter of each counts: other
    work of the machine can only add time, and others of the stack start meanwhile. A turn is two forwards, of which the
    second counts: after a change of shape some runtimes take longer, and V(1) must be the time of plain decoding, step
    after step. Where forwards are long few shapes are measured, each by the first forward that it has, but for plain
    decoding: steps refine the rest.
    """
    plain, prefix = next(iter(shapes)), _prefix(lm)
    times: dict[Name, list[float]] = {plain: []}
    long = False
    for name, shape in shapes.items():
        if long and not shape.worth_long:
            continue
        go_on()
        first = _forward(lm, shape, prefix)
        if name == plain:  # the first of all may compile, or be optimised; a single slow one behind it may be a hiccup
            while len(times[plain]) < SURELY_LONG and not (times[plain] and min(times[plain]) <= LONG_US):
                times[plain].append(_forward(lm, shape, prefix))
            long = min(times[plain]) > LONG_US
        else:
            times[name] = [first] if long else []
    began, done = time.perf_counter(), 0
    while done < rounds[0] or (not long and done < rounds[1] and time.perf_counter() - began < budget_s):
        for name in (plain,) if long else shapes:
            go_on()
            times[name].append(_turn(lm, shapes[name], prefix))
        done += 1
    return {name: median(sorted(values)[: (len(values) + 3) // 4]) for name, values in times.items()}


def _turn(lm: LanguageModel, shape: BatchShape, prefix: int) -> float:
    """Microseconds of a forward."""
    first = _forward(lm, shape, prefix)
    return first if first > LONG_US else _forward(lm, shape, prefix)


def _forward(lm: LanguageModel, shape: BatchShape, prefix: int) -> float:
    """Microseconds of a forward behind the prefix."""
    tokens = _tokens(lm, prefix, shape.depth)
    feeds = [Feed(slot, prefix, tokens, shape.depth) for slot in range(shape.sessions)]
    return _taken_us(lambda: lm.forward(feeds))


def _taken_us(call: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1000


def _tokens(lm: LanguageModel, start: int, count: int) -> list[int]:
    return [(7 * position + 3) % lm.info.vocabulary for position in range(start, start + count)]
