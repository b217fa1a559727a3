"""What a verifier's next step does: how long each window is, which prompts are fed, what is waited for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, mul
from typing import NamedTuple

from specwire.core.messages import MOST_WINDOW, NEGLIGIBLE, SourceKind
from specwire.core.policy.costs import part_of
from specwire.core.policy.drafters import Due
from specwire.core.policy.estimates import AcceptanceByPosition, V, affordable
from specwire.core.policy.tunables import LEAST_GAIN, PREFILL_ROWS

# ----------------------------------------------------------------------------------------------------------------------
# A planned step: the sessions that may take part, and each one's share.


class StepCandidate(NamedTuple):
    """A session with room, as `schedule` sees it.

    Attributes:
        slot: where its cache lies; names the session in the plan.
        room: tokens that it may decide now, at least 1.
        uncached: decided tokens that the slot does not hold; at least 1.
        drafted: draft tokens of the longest live chain behind the decided text, and `acceptance` of such.
        spare_us: what its ledger lets it lose in this step by waiting and by a window that is entirely wrong, including
        the cost to others.
        missing: draft tokens that are due and not here yet, and awaited: when they should come. Waiting beyond
        `latest_us` is pointless.
        guess: what the verifier itself proposes.
        untested_us: time spent since a window of it was last tested, of whichever source.
        whole: the only widths that a window of the chain may have; None where it may have any.
    """

    slot: int
    room: int
    uncached: int
    drafted: int
    spare_us: float
    acceptance: AcceptanceByPosition
    awaited: Due | None = None
    missing: int = 0
    guess: Guess | None = None
    untested_us: float = 0.0
    whole: tuple[int, ...] | None = None


class Share(NamedTuple):
    """A session's part of a forward: `fresh` decided tokens, then `window` draft tokens of a source of `kind`.

    `decides`: the last decided token is among them, so the step decides window + 1 rows.
    """

    slot: int
    fresh: int
    window: int
    decides: bool
    kind: SourceKind = SourceKind.DRAFTER

    @property
    def rows(self) -> int:
        return self.fresh + self.window


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Run `shares` now, or first wait until `wait_until_us` for proposals of the `awaited` slots, which pay for it."""

    shares: tuple[Share, ...]
    wait_until_us: float | None = None
    awaited: tuple[int, ...] = ()


class Guess(NamedTuple):
    """Proposed `tokens` from `position` on, and how often such tokens turn out right."""

    position: int
    tokens: tuple[int, ...]
    acceptance: AcceptanceByPosition
    kind: SourceKind = SourceKind.NGRAM


# ----------------------------------------------------------------------------------------------------------------------
# How a step's rows are divided: a row goes to the draft token that is expected to gain most, as long as that pays.
#
# A token of a window is decided with the probability that it and all tokens before it are accepted. This probability
# falls along the window. So n rows are best filled with the n most probable draft tokens of all sessions.
# Only n is left to choose: the one with the best expected rate, tokens / V(rows). It may be 0: on a full verifier
# windows shrink to zero.


class Windows(NamedTuple):
    """Windows of a step in which every session decides. rows, tokens: sums over the step; tokens are expected ones."""

    rows: int
    tokens: float
    by_slot: Mapping[int, tuple[int, SourceKind]]

    def of(self, slot: int) -> tuple[int, SourceKind]:
        """How many draft tokens of it the step tests, and whose."""
        return self.by_slot.get(slot, (0, SourceKind.DRAFTER))


class WindowPiece(NamedTuple):
    """Draft tokens of a session that are tested together, behind those of its earlier pieces.

    gain: tokens that they are expected to decide; density: gain per row.
    """

    density: float
    gain: float
    width: int
    candidate: StepCandidate
    kind: SourceKind


def divided(candidates: Sequence[StepCandidate], V: V, most_rows: float = math.inf) -> Windows:
    """Windows of sessions, which have one row each in any case. A session is charged for what its window costs all of
    them (`row_us`), and must be able to bear that if the whole window is wrong.
    """
    sessions = len(candidates)
    pieces = _within_ledgers(_fastest(_pieces(candidates, V), sessions, most_rows, V), sessions, V)
    if not _pays(pieces, sessions, V):
        pieces = []
    tested, rows = {piece.candidate.slot for piece in pieces}, sessions + sum(piece.width for piece in pieces)
    for candidate in candidates:
        if not candidate.untested_us or candidate.slot in tested:
            continue
        for ends, acceptance, kind in _sources(candidate):
            # Of a chain as little as may be tested; a guess in one piece. All wait for a test of the estimates.
            width = (min if kind is SourceKind.DRAFTER else max)(ends, default=0)
            cost_us = sessions * (V(rows + width) - V(rows))
            if width and rows + width <= most_rows and affordable(cost_us, candidate.untested_us):
                gain = acceptance.expected(width) - 1.0
                more = [*pieces, WindowPiece(gain / width, gain, width, candidate, kind)]
                if len(_within_ledgers(more, sessions, V)) == len(more):
                    pieces, rows = more, rows + width
                    break
    widths = Counter[int]()
    for piece in pieces:
        widths[piece.candidate.slot] += piece.width
    by_slot = {each.candidate.slot: (widths[each.candidate.slot], each.kind) for each in pieces}
    return Windows(rows, sum((piece.gain for piece in pieces), float(sessions)), by_slot)


def _fastest(pieces: Sequence[WindowPiece], sessions: int, most_rows: float, V: V) -> list[WindowPiece]:
    """The leading pieces that give the best expected rate. All lengths are tried, because V(m) may fall."""
    rows, tokens = sessions, float(sessions)
    best_rate, kept = 0.0, 0
    for number, piece in enumerate(pieces, 1):
        rows, tokens = rows + piece.width, tokens + piece.gain
        if rows > most_rows:
            break
        if tokens / V(rows) > best_rate:
            best_rate, kept = tokens / V(rows), number
    return list(pieces[:kept])


def _pays(pieces: Sequence[WindowPiece], sessions: int, V: V) -> bool:
    """Whether a step with these pieces is enough faster than one without: of many estimates those are acted on that
    err upwards, and what rows cost is not known well either.
    """
    rows, tokens = (sessions + sum(each.width for each in pieces)), sessions + sum(each.gain for each in pieces)
    return tokens * V(sessions) >= LEAST_GAIN * sessions * V(rows)


def row_us(rows: int, sessions: int, V: V) -> float:
    """What a session is charged for each row of its window, where windows of a step have so many `rows` in all.

    It is a session's part of what all windows cost together (`part_of`).
    """
    return max(0.0, sessions * (V(sessions + rows) - V(sessions)) / rows) if rows else 0.0


def _within_ledgers(pieces: Sequence[WindowPiece], sessions: int, V: V) -> list[WindowPiece]:
    """Whoever could not bear its charge if all of its window is wrong loses the least dense piece of it, until all can.

    A row's price changes with the rows that are left: the last ones of a step may be its dear ones, or any window one
    that few share.
    """
    left, dropped = list(pieces), True
    while dropped:
        widths: Counter[int] = Counter()
        last: dict[int, WindowPiece] = {}
        for piece in left:
            widths[piece.candidate.slot] += piece.width
            last[piece.candidate.slot] = piece
        each_us = row_us(widths.total(), sessions, V)
        poor = {slot for slot, width in widths.items() if last[slot].candidate.spare_us < each_us * width}
        left = [each for each in left if each.candidate.slot not in poor or each is not last[each.candidate.slot]]
        dropped = len(poor) > 0
    return left


def _pieces(candidates: Sequence[StepCandidate], V: V) -> list[WindowPiece]:
    """What may be tested, best first; of each session of its better source: its chain or its guess."""
    if not any(candidate.drafted or candidate.guess is not None for candidate in candidates):
        return []
    least = _least_density(len(candidates), V)
    found = list[WindowPiece]()
    for candidate in candidates:
        if candidate.spare_us >= 0.0:  # one in debt is offered nothing
            offered = [_cut(candidate, *source, least) for source in _sources(candidate)]
            found += max(offered, key=lambda pieces: sum(piece.gain for piece in pieces))
    return sorted(found, key=attrgetter("density"), reverse=True)


def _least_density(sessions: int, V: V) -> float:
    """The least gain with which a row can pay, by the average slope of V(m) over widths that are powers of two: most
    guesses need not be weighed. Where V(m) rises in steps, a row that happens to cost nothing may be missed.
    """
    plain_us = V(sessions)
    widths, most = [1], MOST_WINDOW * sessions
    while widths[-1] < most:
        widths.append(2 * widths[-1])
    return sessions / plain_us * min((V(sessions + width) - plain_us) / width for width in widths)


def _sources(candidate: StepCandidate) -> Iterator[tuple[Sequence[int], AcceptanceByPosition, SourceKind]]:
    """Of its chain, then of its guess, the widths that a window may have."""
    yield chain_widths(candidate), candidate.acceptance, SourceKind.DRAFTER
    if (guess := candidate.guess) is not None:
        most = min(MOST_WINDOW, len(guess.tokens), candidate.room - 1)
        yield range(1, most + 1), guess.acceptance, guess.kind


def chain_widths(candidate: StepCandidate) -> Sequence[int]:
    most = min(MOST_WINDOW, candidate.drafted, candidate.room - 1)
    if candidate.whole is None:
        return range(1, most + 1)
    return [end for end in candidate.whole if end <= most]


def _cut(
    candidate: StepCandidate, ends: Sequence[int], acceptance: AcceptanceByPosition, kind: SourceKind, least: float
) -> list[WindowPiece]:
    """Pieces that end at `ends`. Their density falls as the probabilities do."""
    start, pieces, least = 0, list[WindowPiece](), max(least, NEGLIGIBLE)
    decided = list(accumulate(acceptance.rates(max(ends, default=0)), mul))
    for end in ends:
        gain = sum(decided[start:end])
        density = gain / (end - start)
        if density <= least:
            break
        pieces.append(WindowPiece(density, gain, end - start, candidate, kind))
        start = end
    return pieces


# ----------------------------------------------------------------------------------------------------------------------
# What the next step does: a pure function of its arguments (no model, no clock, no queue).
#
# Every session with room gets at least one row behind its text, so a step decides at least one token for each whose
# prompt is in the cache. Prompts come in chunks under a budget: a long one delays the others by no more than that.


def schedule(
    candidates: Sequence[StepCandidate],
    now_us: float,
    V: V,
    prefill_rows: int = PREFILL_ROWS,
    most_rows: float = math.inf,
) -> StepPlan:
    """Plan a step. V(m): its microseconds with m rows. most_rows: beyond these it gets no draft tokens."""
    decoding, prompts = [each for each in candidates if each.uncached == 1], chunks(candidates, prefill_rows)
    windows = divided(decoding, V, most_rows)
    shares = [Share(each.slot, 1, width, True, kind) for each in decoding for width, kind in [windows.of(each.slot)]]
    if prompts or len(decoding) >= most_rows:  # what came could not be tested
        return StepPlan((*shares, *prompts))
    return StepPlan(tuple(shares), *_wait(decoding, now_us, windows, V))


def chunks(candidates: Sequence[StepCandidate], budget: int) -> list[Share]:
    """Chunks of prompts to feed, in the order given, `budget` tokens in all."""
    fed = list[Share]()
    for candidate in candidates:
        fresh = min(candidate.uncached, budget)
        if fresh and candidate.uncached > 1:
            fed.append(Share(candidate.slot, fresh, 0, fresh == candidate.uncached))
            budget -= fresh
    return fed


class Expected(NamedTuple):
    """What a session would gain by waiting: `rows` more, in a window of `width`, with `gain` more expected tokens."""

    candidate: StepCandidate
    awaited: Due
    width: int
    rows: int
    gain: float


def _wait(
    candidates: Sequence[StepCandidate], now_us: float, windows: Windows, V: V
) -> tuple[float | None, tuple[int, ...]]:
    """Until when to wait, and for whom, if what is due by then is worth it: (B + g) / (V(m + n) + w) > B / V(m).

    All sessions wait. Those that are waited for pay for it; one whose ledger could not bear its part is not.
    """
    awaited = [(each, each.awaited) for each in candidates if each.awaited and each.awaited.latest_us > now_us]
    if not awaited:
        return None, ()
    least = _least_density(len(candidates), V)
    due = [_expect(each, *windows.of(each.slot), what, least) for each, what in awaited]
    due.sort(key=lambda each: each.awaited.expected_us)
    rows, B = windows.rows, windows.tokens
    until: float | None = None
    best_rate = B / V(rows)
    payers: tuple[int, ...] = ()
    for last, expected in enumerate(due, 1):
        if last < len(due) and due[last].awaited.expected_us == expected.awaited.expected_us:
            continue
        paying = _able(due[:last], len(candidates), now_us, rows, V)
        if not paying:
            continue
        n, g = sum(each.rows for each in paying), sum(each.awaited.chance * each.gain for each in paying)
        w = max(0.0, paying[-1].awaited.expected_us - now_us)  # one that is late may still come by its latest time
        rate = (B + g) / (V(rows + n) + w)
        if rate > best_rate:
            until, best_rate = max(each.awaited.latest_us for each in paying), rate
            payers = tuple([each.candidate.slot for each in paying])
    return until, payers


def _able(due: Sequence[Expected], sessions: int, now_us: float, rows: int, V: V) -> list[Expected]:
    """Those of `due` that can bear their part of the wait, and their windows, if all of it is in vain."""
    able, dropped = list(due), True
    while able and dropped:
        wait_us = part_of(1, len(able), sessions) * (max(each.awaited.latest_us for each in able) - now_us)
        each_us = row_us(rows + sum(each.rows for each in able) - sessions, sessions, V)
        left = [each for each in able if each.candidate.spare_us >= wait_us + each.width * each_us]
        able, dropped = left, len(left) < len(able)
    return able


def _expect(candidate: StepCandidate, present: int, kind: SourceKind, awaited: Due, least: float) -> Expected:
    """What the session's part of the step would grow by if `awaited` were there: its chain's window.

    Tokens that gain `least` per row or less are left out, since `divided` would not test them; a window that must be
    whole keeps them. Weighed by all that is due, a wait for a long chain would not pay where one for its beginning
    does.
    A guess gives way to the chain, if that is then expected to decide more.
    """
    chained, acceptance = kind is SourceKind.DRAFTER, candidate.acceptance
    window = present if chained else candidate.drafted
    wider = min(MOST_WINDOW, window + candidate.missing, candidate.room - 1)
    if candidate.whole is None:
        decided = accumulate(acceptance.rates(wider), mul)
        wider = max(min(window, wider), sum(chance > least for chance in decided))
    tested = acceptance if chained or candidate.guess is None else candidate.guess.acceptance
    gain = acceptance.expected(wider) - tested.expected(present)
    if gain <= 0.0 and not chained:
        return Expected(candidate, awaited, present, 0, 0.0)
    return Expected(candidate, awaited, wider, wider - present, gain)
