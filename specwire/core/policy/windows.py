"""What a verifier's next step does: how long each window is, which prompts are fed, what is waited for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter, mul
from typing import NamedTuple

from specwire.core.messages import MOST_WINDOW, NEGLIGIBLE, SourceKind
from specwire.core.policy.costs import part_of
from specwire.core.policy.estimates import AcceptanceByPosition, V, affordable
from specwire.core.policy.tunables import (
    LEAST_GAIN,
    LOOK_EVERY_US,
    PREFILL_ROWS,
    SHORT_CHAIN,
)

# ----------------------------------------------------------------------------------------------------------------------
# A planned step: the sessions that may take part, and each one's share.


@dataclass(frozen=True, slots=True)
class Awaited:
    """Draft tokens that should arrive around `expected_us`; waiting beyond `latest_us` is pointless."""

    tokens: int
    expected_us: float
    latest_us: float
    chance: float


class StepCandidate(NamedTuple):
    """A session with room, as `schedule` sees it.

    Attributes:
        slot: where its cache lies; names the session in the plan.
        room: tokens that it may decide now, at least 1.
        uncached: decided tokens that the slot does not hold; at least 1.
        drafted: draft tokens of the longest live chain behind the decided text, and `acceptance` of such.
        spare_us: what its ledger lets it lose in this step by waiting and by a window that is entirely wrong, including
        the cost to others.
        missing: draft tokens that are due and not here yet.
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
    awaited: Awaited | None = None
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
    """Run `shares` now, or first wait until `wait_until_us` for proposals.

    awaited: slots that are waited for, and pay for it.
    """

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


class Window(NamedTuple):
    """Draft tokens of a session that a step tests, of a source of `kind`."""

    width: int
    kind: SourceKind


NONE = Window(0, SourceKind.DRAFTER)


@dataclass(slots=True)
class Windows:
    """Windows of a step in which every session decides. rows, tokens: sums over the step; tokens are expected ones.

    Invariant: `rows` is the number of sessions and all widths.
    """

    rows: int
    tokens: float
    by_slot: dict[int, Window] = field(default_factory=dict)

    @classmethod
    def without(cls, sessions: int) -> Windows:
        return cls(sessions, float(sessions))

    def of(self, slot: int) -> Window:
        return self.by_slot.get(slot, NONE)

    def add(self, piece: WindowPiece) -> None:
        self.rows += piece.width
        self.tokens += piece.gain
        self.by_slot[piece.candidate.slot] = Window(self.of(piece.candidate.slot).width + piece.width, piece.kind)


class WindowPiece(NamedTuple):
    """Draft tokens of a session that are tested together, behind those of its earlier pieces.

    gain: tokens that they are expected to decide; density: gain per row.
    """

    density: float
    gain: float
    width: int
    candidate: StepCandidate
    kind: SourceKind


def filled(candidates: Sequence[StepCandidate]) -> Windows:
    """The widest window that each session's chain allows, whatever it costs or gains."""
    windows = Windows.without(len(candidates))
    for candidate in candidates:
        width = max(_ends(candidate), default=0)
        if width:
            windows.add(next(_whole(candidate, width)))
    return windows


def divided(candidates: Sequence[StepCandidate], V: V, most_rows: float = math.inf) -> Windows:
    """Windows of sessions, which have one row each in any case. The step has at most `most_rows` rows in all.

    A session is charged for what its window costs all of them (`row_us`). Its ledger must be able to bear that charge
    if the whole window is wrong.
    """
    sessions, windows = len(candidates), Windows.without(len(candidates))
    pieces = _within_ledgers(_fastest(_pieces(candidates, V), sessions, most_rows, V), sessions, V)
    if _pays(pieces, sessions, V):
        for piece in pieces:
            windows.add(piece)
    else:
        pieces = []
    for candidate in candidates:
        if not candidate.untested_us or windows.of(candidate.slot).width:
            continue
        for tested in _whole(candidate, min(_ends(candidate), default=0)):
            # All wait for a test of the estimates.
            cost_us, rows = sessions * (V(windows.rows + tested.width) - V(windows.rows)), windows.rows + tested.width
            if rows <= most_rows and affordable(cost_us, candidate.untested_us):
                more = [*pieces, tested]
                if len(_within_ledgers(more, sessions, V)) == len(more):
                    windows.add(tested)
                    pieces = more
                    break
    return windows


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
    """What may be tested, best first. All pieces of a session are of one source: its chain or its guess."""
    if not any(candidate.drafted or candidate.guess is not None for candidate in candidates):
        return []
    least = _least_density(len(candidates), V)
    found = [piece for candidate in candidates for piece in _offered(candidate, least)]
    return sorted(found, key=attrgetter("density"), reverse=True)


def _least_density(sessions: int, V: V) -> float:
    """The least gain with which a row can pay, by the average slope of V(m) over widths that are powers of two.

    So most guesses of a batch need not be weighed. Where V(m) rises in steps, a row that happens to cost nothing may be
    missed.
    """
    plain_us = V(sessions)
    widths, most = [1], MOST_WINDOW * sessions
    while widths[-1] < most:
        widths.append(2 * widths[-1])
    return sessions / plain_us * min((V(sessions + width) - plain_us) / width for width in widths)


def _offered(candidate: StepCandidate, least: float) -> Sequence[WindowPiece]:
    """The pieces of its better source, chain or guess, that gain more than `least` per row; of none that is in debt."""
    if candidate.spare_us < 0.0:
        return []
    chained = _cut(candidate, candidate.acceptance, _ends(candidate), SourceKind.DRAFTER, least)
    guess = candidate.guess
    if guess is None:
        return chained
    guessed = _cut(candidate, guess.acceptance, range(1, _most(candidate, guess) + 1), guess.kind, least)
    return max(chained, guessed, key=lambda pieces: sum(piece.gain for piece in pieces))


def _ends(candidate: StepCandidate) -> Sequence[int]:
    """Widths that a window of its chain may have."""
    most = min(MOST_WINDOW, candidate.drafted, candidate.room - 1)
    if candidate.whole is None:
        return range(1, most + 1)
    return [end for end in candidate.whole if end <= most]


def _most(candidate: StepCandidate, guess: Guess) -> int:
    return min(MOST_WINDOW, len(guess.tokens), candidate.room - 1)


def _cut(
    candidate: StepCandidate, acceptance: AcceptanceByPosition, ends: Sequence[int], kind: SourceKind, least: float
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


def _whole(candidate: StepCandidate, width: int) -> Iterator[WindowPiece]:
    """A window of its chain of this width, then all of its guess, each in one piece."""
    offered = [(width, candidate.acceptance, SourceKind.DRAFTER)]
    if (guess := candidate.guess) is not None:
        offered.append((_most(candidate, guess), guess.acceptance, guess.kind))
    for wide, acceptance, kind in offered:
        if wide > 0:
            gain = acceptance.expected(wide) - 1.0
            yield WindowPiece(gain / wide, gain, wide, candidate, kind)


# ----------------------------------------------------------------------------------------------------------------------
# Whose texts are searched for guesses: a look-up takes time, whether its guess is used or not, and where a text repeats
# little, or rows are dear, hardly any guess pays. Pure.


class Searchable(NamedTuple):
    """A session whose text may be searched.

    in_vain: searches in a row whose guesses were in no window. right_since: tokens that went on as the last guess said.
    unsearched_us: time of the steps since it was searched.
    """

    slot: int
    in_vain: int
    right_since: int
    unsearched_us: float = 0.0


def searched(sessions: Sequence[Searchable]) -> set[int]:
    """Slots of those that the next step searches: one of whose last guesses was used, or whose last one is still right,
    and all of them now and then. Each by its own past: a tenant's texts must not show in how soon another's are
    searched.
    """
    rest_us = LOOK_EVERY_US * len(sessions)
    return {
        each.slot
        for each in sessions
        if each.in_vain < SHORT_CHAIN or each.right_since >= SHORT_CHAIN or each.unsearched_us >= rest_us
    }


# ----------------------------------------------------------------------------------------------------------------------
# What the next step does: a pure function of its arguments (no model, no clock, no queue).
#
# Every session with room gets at least one row behind its text, so a step decides at least one token for each whose
# prompt is in the cache. Prompts come in chunks under a budget: a long one delays the others by no more than that.

# How long a patient verifier waits for tokens that are due.
PATIENCE_US = 5e6


def schedule(
    candidates: Sequence[StepCandidate],
    now_us: float,
    V: V,
    prefill_rows: int = PREFILL_ROWS,
    patient: bool = False,
    waited_us: float = 0.0,
    most_rows: float = math.inf,
) -> StepPlan:
    """Plan a step. V(m): expected microseconds of a step of m rows.

    patient: wait for everything that is due and test all of it, whatever it costs, without a ledger. It is for
    measurements: textbook speculation, and streaming with a verifier that waits. waited_us: time since the last step,
    because patience ends, too. most_rows: a step of decoding sessions gets no draft tokens beyond so many rows.
    """
    decoding = [candidate for candidate in candidates if candidate.uncached == 1]
    prompts = _chunks([candidate for candidate in candidates if candidate.uncached > 1], prefill_rows)
    if patient:
        if any(candidate.missing > 0 for candidate in decoding) and waited_us < PATIENCE_US:
            return StepPlan((), now_us + PATIENCE_US - waited_us, tuple([each.slot for each in decoding]))
        windows = filled(decoding)
    else:
        windows = divided(decoding, V, most_rows)
    shares = [_share(each.slot, windows) for each in decoding]
    if patient or prompts or len(decoding) >= most_rows:  # what came could not be tested
        return StepPlan((*shares, *prompts))
    return StepPlan(tuple(shares), *_wait(decoding, shares, now_us, windows, V))


def _share(slot: int, windows: Windows) -> Share:
    window = windows.of(slot)
    return Share(slot, 1, window.width, True, window.kind)


def _chunks(candidates: Sequence[StepCandidate], budget: int) -> list[Share]:
    """Chunks of prompts to feed, in the order given, `budget` tokens in all."""
    chunks = []
    for candidate in candidates:
        fresh = min(candidate.uncached, budget)
        if fresh:
            chunks.append(Share(candidate.slot, fresh, 0, fresh == candidate.uncached))
        budget -= fresh
    return chunks


class Expected(NamedTuple):
    """What a session would gain by waiting: `rows` more, in a window of `width`, with `gain` more expected tokens."""

    candidate: StepCandidate
    awaited: Awaited
    width: int
    rows: int
    gain: float


def _wait(
    candidates: Sequence[StepCandidate], shares: Sequence[Share], now_us: float, windows: Windows, V: V
) -> tuple[float | None, tuple[int, ...]]:
    """Until when to wait, and for whom, if what is due by then is worth it: (B + g) / (V(m + n) + w) > B / V(m).

    All sessions wait, and those that are waited for pay for it. One whose ledger could not bear its part is not waited
    for.
    """
    planned = {share.slot: share for share in shares}
    awaited = [(each, each.awaited) for each in candidates if each.awaited and each.awaited.latest_us > now_us]
    if not awaited:
        return None, ()
    least = _least_density(len(candidates), V)
    due = [_expect(each, planned[each.slot], what, least) for each, what in awaited]
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


def _expect(candidate: StepCandidate, share: Share, awaited: Awaited, least: float) -> Expected:
    """What the session's part of the step would grow by if `awaited` were there.

    The chain's window grows by what is due. Tokens that gain `least` per row or less are left out, since `divided`
    would not test them; a window that must be whole keeps them. Weighed by all that is due, a wait for a long chain
    would not pay where one for its beginning does.
    A guess gives way to the chain, if that is then expected to decide more.
    """
    chained = share.kind is SourceKind.DRAFTER
    window = share.window if chained else candidate.drafted
    wider = min(MOST_WINDOW, window + awaited.tokens, candidate.room - 1)
    if candidate.whole is None:
        decided = accumulate(candidate.acceptance.rates(wider), mul)
        wider = max(min(window, wider), sum(chance > least for chance in decided))
    present = candidate.acceptance if chained or candidate.guess is None else candidate.guess.acceptance
    gain = candidate.acceptance.expected(wider) - present.expected(share.window)
    if gain <= 0.0 and not chained:
        return Expected(candidate, awaited, share.window, 0, 0.0)
    return Expected(candidate, awaited, wider, wider - share.window, gain)
