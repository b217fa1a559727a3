"""What the next step does: a pure function of what it is shown (no model, no clock, no queue).

Every session with room gets at least one row behind its text, so a step decides at least one token for each whose
prompt is in the cache. Prompts come in chunks under a budget: a long one delays the others by no more than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specwire.core.chain import SourceKind
from specwire.core.ngram import Guess
from specwire.core.speed import AcceptanceByPosition, expected_tokens, worth_waiting

MOST_WINDOW = 16
PREFILL_ROWS = 512
# How long a patient verifier waits for tokens that are due.
PATIENCE_US = 5e6
# A window of the verifier's own guesses must be expected to gain as much; what it costs is known less well than that.
LEAST_GAIN = 1.02
# Where V(m) says that wide forwards do not pay although a guess is good, V(m) may be out of date, and only a test can
# tell: one that costs no more than this share of the time since the last, and decides this many tokens if all is well.
PROBE_SHARE = 0.005
PROBE_TOKENS = 1.5
# Beyond a token that is accepted as seldom as this, a wider window is not even considered: it takes time to consider.
NEVER_ACCEPTED = 0.01


@dataclass(frozen=True, slots=True)
class Awaited:
    """Draft tokens that should arrive around `expected_us`; waiting beyond `latest_us` is pointless."""

    tokens: int
    expected_us: float
    latest_us: float
    chance: float


class Candidate(NamedTuple):
    """A session with room, as the scheduler sees it.

    Attributes:
        slot: where its cache lies; names the session in the plan.
        room: tokens that it may decide now, at least 1.
        uncached: decided tokens that the slot does not hold; at least 1.
        drafted: draft tokens of the longest live chain behind the decided text, and `acceptance` of such.
        spare_us: what its ledger lets it lose in this step, by waiting and by a window that is all wrong, what that
            costs others included.
        missing: draft tokens that are due and not at hand.
        guess: what the verifier itself proposes.
        untested_us: time spent since such a guess was last tested.
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
class Plan:
    """Run `shares` now, or first wait until `wait_until_us` for proposals that are due."""

    shares: tuple[Share, ...]
    wait_until_us: float | None = None


V = Callable[[int], float]


def schedule(
    candidates: Sequence[Candidate],
    now_us: float,
    V: V,
    prefill_rows: int = PREFILL_ROWS,
    patient: bool = False,
    waited_us: float = 0.0,
) -> Plan:
    """Plan a step. V(m): expected microseconds of a step of m rows.

    patient: wait for all that is due, whatever it costs, and keep no ledger. Textbook speculation, and streaming with a
    verifier that waits, are measured so; nobody is served so. waited_us: since the last step; patience has an end too.
    """
    if patient:
        candidates = [candidate._replace(spare_us=math.inf, awaited=None, guess=None) for candidate in candidates]
        short = any(candidate.missing > 0 and candidate.uncached == 1 for candidate in candidates)
        if short and waited_us < PATIENCE_US:
            return Plan((), now_us + PATIENCE_US - waited_us)
    planned, whole = _divided(candidates, prefill_rows, V)
    shares = tuple(planned[each.slot] for each in sorted(candidates, key=_uncached) if each.slot in planned)
    if all(share.fresh == 1 and share.decides for share in shares):
        return Plan(shares, _wait(candidates, shares, now_us, whole.rows, whole.tokens, V))
    return Plan(shares)


class _Part(NamedTuple):
    """Rows of a part of a step, and tokens that it is expected to decide."""

    rows: int
    tokens: float


def _divided(candidates: Sequence[Candidate], prefill_rows: int, V: V) -> tuple[dict[int, Share], _Part]:
    """Each session's share by its slot, and what the step is in all.

    A window is weighed beside the others' least parts, because it delays them all, and beside the windows of those that
    gain more by a row. Its session is charged for what it costs them all (`running.part_of`), and must be able to bear
    that.
    """
    delayed = max(1, sum(candidate.uncached == 1 for candidate in candidates))
    order = [_delaying(each, delayed) for each in sorted(candidates, key=_order)]
    least = _least_parts(order, V)
    rows, expected = sum(part.rows for part in least), sum(part.tokens for part in least)
    planned: dict[int, Share] = {}
    for candidate, own in zip(order, least, strict=True):
        share = _share(candidate, prefill_rows, rows - own.rows, expected - own.tokens, V)
        if share is None:
            continue
        if candidate.uncached > 1:
            prefill_rows -= share.fresh
        planned[candidate.slot] = share
        rows += share.rows - own.rows
        if share.decides:
            expected += (_expected(candidate, share) if share.window else 1.0) - own.tokens
    return planned, _Part(rows, expected)


def _delaying(candidate: Candidate, sessions: int) -> Candidate:
    """What its ledger bears where so many sessions wait for its window, if it may have one."""
    if sessions == 1 or not _may_test(candidate):
        return candidate
    return candidate._replace(spare_us=candidate.spare_us / sessions)


def _may_test(candidate: Candidate) -> bool:
    """There is something to test."""
    return candidate.drafted > 0 or candidate.guess is not None


def _uncached(candidate: Candidate) -> bool:
    """Decoding sessions first, then prompts, in the order given."""
    return candidate.uncached > 1


def _order(candidate: Candidate) -> tuple[bool, float]:
    """Who is given rows first: decoding sessions, by what a row more gains each; then prompts, in the order given."""
    if candidate.uncached > 1:
        return True, 0.0
    chained = candidate.acceptance.rates(1)[0] if candidate.drafted else 0.0
    guessed = candidate.guess.acceptance.rates(1)[0] if candidate.guess is not None else 0.0
    return False, -max(chained, guessed)


def _least_parts(candidates: Sequence[Candidate], V: V) -> list[_Part]:
    """What each session gets whatever the others get: a row, and one more where a token of a chain is to be tested."""
    decoding = sum(candidate.uncached == 1 for candidate in candidates)
    return [_least_part(candidate, decoding, V) for candidate in candidates]


def _least_part(candidate: Candidate, decoding: int, V: V) -> _Part:
    if candidate.uncached > 1:
        return _Part(0, 0.0)
    if (
        not candidate.drafted
        or candidate.room < 2
        or candidate.whole is not None
        or not _bears(candidate, decoding - 1, 1, V)
    ):
        return _Part(1, 1.0)
    return _Part(2, 1.0 + candidate.acceptance.rates(1)[0])


def _share(candidate: Candidate, budget: int, rows: int, expected: float, V: V) -> Share | None:
    if candidate.uncached == 1:
        window, kind = _window(candidate, rows, expected, V)
        return Share(candidate.slot, 1, window, True, kind)
    fresh = min(candidate.uncached, budget)
    return Share(candidate.slot, fresh, 0, fresh == candidate.uncached) if fresh else None


def _window(candidate: Candidate, rows: int, expected: float, V: V) -> tuple[int, SourceKind]:
    """Width and kind of the window with the best expected rate, beside `rows` that decide `expected` tokens.

    Of the longest live chain at least one token is tested where the ledger allows any: its rates are learned only from
    tests. A guess is tested where it gains: its rates are learned from the text.
    """
    if not _may_test(candidate):
        return 0, SourceKind.DRAFTER
    drafted, rate = _widest(candidate, candidate.acceptance, candidate.drafted, rows, expected, V, candidate.whole)
    if candidate.guess is not None:
        tokens, acceptance = candidate.guess.tokens, candidate.guess.acceptance
        if _hopeless(candidate, len(tokens), acceptance, rows, expected, V):
            return drafted, SourceKind.DRAFTER
        guessed, guessed_rate = _widest(candidate, acceptance, len(tokens), rows, expected, V)
        gains = guessed_rate > max(rate, LEAST_GAIN * (expected + 1.0) / V(rows + 1))
        if gains or (not drafted and _probes(candidate, acceptance, rows, guessed, V)):
            return guessed, candidate.guess.kind
    return drafted, SourceKind.DRAFTER


def _widest(
    candidate: Candidate,
    acceptance: AcceptanceByPosition,
    at_hand: int,
    rows: int,
    expected: float,
    V: V,
    whole: tuple[int, ...] | None = None,
) -> tuple[int, float]:
    """The best window of the tokens at hand, at least one, and the rate that is expected of it.

    A window that the ledger could not bear if it were all wrong is no choice; (0, 0) if it bears none. whole: see
    `Candidate`.
    """
    most = min(MOST_WINDOW, at_hand, candidate.room - 1)
    widths = range(1, most + 1) if whole is None else [width for width in whole if width <= most]
    if not widths or not _bears(candidate, rows, widths[0], V):
        return 0, 0.0
    most_us = V(rows + 1) + candidate.spare_us
    best, best_rate, tokens, product = widths[0], 0.0, 1.0, 1.0
    for window, a in enumerate(acceptance.rates(most), 1):
        product *= a
        step_us = V(rows + 1 + window)
        if window > widths[0] and (step_us > most_us or product < NEVER_ACCEPTED):
            break
        tokens += product
        rate = (expected + tokens) / step_us
        if rate > best_rate and (whole is None or window in whole):
            best, best_rate = window, rate
    return best, best_rate


def _hopeless(
    candidate: Candidate, most: int, acceptance: AcceptanceByPosition, rows: int, expected: float, V: V
) -> bool:
    """No window of a guess can gain, nor is it time to test whether V(m) is right: known from two widths.

    A window of w decides at most w times the first token's chance beyond 1. If that is too little at the least and at
    the greatest width it is so between them, where V is straight, as a batch's nearly is. Most guesses in one are of
    this kind, and a step waits until all are weighed.
    """
    plain_us, chance = V(rows + 1), acceptance.rates(1)[0]
    if rows == 0 or V(rows + 2) - plain_us <= PROBE_SHARE * candidate.untested_us:
        return False
    needed = LEAST_GAIN * (expected + 1.0) / plain_us
    return all(expected + 1.0 + width * chance <= needed * V(rows + 1 + width) for width in (1, most))


def _probes(candidate: Candidate, acceptance: AcceptanceByPosition, rows: int, window: int, V: V) -> bool:
    affordable = V(rows + 1 + window) - V(rows + 1) <= PROBE_SHARE * candidate.untested_us
    return window > 0 and affordable and _tokens(acceptance, window) >= PROBE_TOKENS


def _bears(candidate: Candidate, rows: int, window: int, V: V) -> bool:
    return candidate.spare_us >= max(0.0, V(rows + 1 + window) - V(rows + 1))


def _expected(candidate: Candidate, share: Share) -> float:
    if share.kind is not SourceKind.DRAFTER and candidate.guess is not None:
        return _tokens(candidate.guess.acceptance, share.window)
    return _tokens(candidate.acceptance, share.window)


def _tokens(acceptance: AcceptanceByPosition, window: int) -> float:
    return expected_tokens(acceptance.rates(window), window) if window else 1.0


def _wait(
    candidates: Sequence[Candidate], shares: Sequence[Share], now_us: float, rows: int, B: float, V: V
) -> float | None:
    """Until when to wait, if the proposals due by then are worth it: (B + g) / (V(m + n) + w) > B / V(m).

    A session whose ledger could not bear it vetoes: its tokens would wait for the others' proposals.
    """
    if all(candidate.awaited is None for candidate in candidates):
        return None
    spare = min((candidate.spare_us for candidate in candidates), default=0.0)
    planned = {share.slot: share for share in shares}
    due = sorted(
        ((c.awaited, c) for c in candidates if c.awaited is not None and c.awaited.latest_us > now_us),
        key=lambda pair: pair[0].expected_us,
    )
    until, best_rate, g, n, w = None, 0.0, 0.0, 0, 0.0
    for awaited, candidate in due:
        more, gain = _more(candidate, planned[candidate.slot], awaited)
        g += awaited.chance * gain
        n += more
        w = max(w, awaited.expected_us - now_us)
        rate = (B + g) / (V(rows + n) + w)
        worst = awaited.latest_us - now_us + V(rows + n) - V(len(shares))
        if spare >= worst and worth_waiting(B, g, V(rows), V(rows + n), w) and rate > best_rate:
            until, best_rate = awaited.latest_us, rate
    return until


def _more(candidate: Candidate, share: Share, awaited: Awaited) -> tuple[int, float]:
    """Rows and expected tokens that the session's part would grow by if `awaited` were there.

    The chain's window grows. A guess gives way to the chain, if that is then expected to decide more.
    """
    window = share.window if share.kind is SourceKind.DRAFTER else candidate.drafted
    wider = min(MOST_WINDOW, window + awaited.tokens, candidate.room - 1)
    gain = _tokens(candidate.acceptance, wider) - _expected(candidate, share)
    if gain <= 0.0 and share.kind is not SourceKind.DRAFTER:
        return 0, 0.0
    return wider - share.window, gain
