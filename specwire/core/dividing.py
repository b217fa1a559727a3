"""How a step's rows are divided: draft tokens go where a row more is expected to gain most, as far as that pays.

A token of a window is expected to be decided with the probability that it and all before it are accepted, which falls
along the window. So the best n rows for windows are the n tokens of highest probability, whosesoever they are, and what
is left to choose is n: that of the best expected rate. It may be 0, so on a full verifier windows shrink to zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter, itemgetter, mul
from typing import NamedTuple

from specwire.core.chain import SourceKind
from specwire.core.ledger import part_of
from specwire.core.ngram import Guess
from specwire.core.shares import MOST_WINDOW, StepCandidate, V
from specwire.core.speed import AcceptanceByPosition, expected_tokens

# Windows with guesses of the verifier's own must be expected to gain as much; what they cost is known less well than
# that.
LEAST_GAIN = 1.02
# Where windows do not pay by what is known, that may be out of date, and only a test can tell: one that costs no more
# than this share of the time since the last. A guess must decide so many tokens if all is well: what is known of it
# comes from the text, so only V(m) is tested.
TESTED_SHARE = 0.005
TESTED_TOKENS = 1.5
# A token that is decided as seldom as this is not even considered: it takes time to consider.
NEVER_DECIDED = 0.01


class Window(NamedTuple):
    """Draft tokens of a session that a step tests, of a source of `kind`."""

    width: int
    kind: SourceKind


NONE = Window(0, SourceKind.DRAFTER)


@dataclass(slots=True)
class Windows:
    """Of a step in which every session decides. rows, tokens: of the step in all, tokens as expected.

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
    """Draft tokens of a session that are tested together, behind those of its pieces before.

    gain: tokens that they are expected to decide; density: by a row.
    """

    density: float
    gain: float
    width: int
    candidate: StepCandidate
    kind: SourceKind


def filled(candidates: Sequence[StepCandidate]) -> Windows:
    """All that is at hand of each one's chain, whatever it costs or gains."""
    windows = Windows.without(len(candidates))
    for candidate in candidates:
        width = max(_ends(candidate), default=0)
        if width:
            windows.add(_whole(candidate, width, candidate.acceptance, SourceKind.DRAFTER))
    return windows


def divided(candidates: Sequence[StepCandidate], V: V, most_rows: float = math.inf) -> Windows:
    """The windows of sessions each of which has a row in any case; of a step of `most_rows`, if they leave any.

    A session is charged for what its window costs them all (`part_of`), and its ledger must be able to bear that if all
    of it is wrong.
    """
    windows = Windows.without(len(candidates))
    for piece in _chosen(_pieces(candidates, V), len(candidates), most_rows, V):
        windows.add(piece)
    for candidate in candidates:
        if not windows.of(candidate.slot).width:
            _test(candidate, windows, len(candidates), most_rows, V)
    return windows


def _chosen(pieces: Sequence[WindowPiece], sessions: int, most_rows: float, V: V) -> list[WindowPiece]:
    """As many of the best as pay. Guesses have a hurdle that chains have not, so chains may do better alone."""
    if not pieces:
        return []
    choices = [_longest(pieces, sessions, most_rows, V)]
    chained = [piece for piece in pieces if piece.kind is SourceKind.DRAFTER]
    if 0 < len(chained) < len(pieces):
        choices.append(_longest(chained, sessions, most_rows, V))
    _, best = max(choices, key=itemgetter(0))
    return _borne(best, sessions, V)


def _longest(pieces: Sequence[WindowPiece], sessions: int, most_rows: float, V: V) -> tuple[float, list[WindowPiece]]:
    """As many from the first on as give the best expected rate, and that rate, less the hurdle.

    From the first one that its session could not bear, none of that session's. All are tried: V(m) need not rise.
    """
    rows, tokens = sessions, float(sessions)
    best_rate, kept, hurdle = tokens / V(rows), 0, 1.0
    widths: dict[int, int] = {}
    refused: set[int] = set()
    taken: list[WindowPiece] = []
    for piece in pieces:
        slot = piece.candidate.slot
        width = widths.get(slot, 0) + piece.width
        if rows + piece.width > most_rows:
            break
        if slot in refused or not _bears(piece.candidate, sessions, rows + piece.width, width, V):
            refused.add(slot)
            continue
        widths[slot] = width
        rows, tokens = rows + piece.width, tokens + piece.gain
        taken.append(piece)
        if piece.kind is not SourceKind.DRAFTER:
            hurdle = LEAST_GAIN
        rate = tokens / (hurdle * V(rows))
        if rate > best_rate:
            best_rate, kept = rate, len(taken)
    return best_rate, taken[:kept]


def _borne(pieces: Sequence[WindowPiece], sessions: int, V: V) -> list[WindowPiece]:
    """Without the windows of sessions that could not bear what they would be charged: their part of what all windows
    take together, of which the last rows may be the dear ones.
    """
    widths: Counter[int] = Counter()
    for piece in pieces:
        widths[piece.candidate.slot] += piece.width
    windows = widths.total()
    all_us = max(0.0, V(sessions + windows) - V(sessions))

    def borne(piece: WindowPiece) -> bool:
        return piece.candidate.spare_us >= all_us * part_of(widths[piece.candidate.slot], windows, sessions)

    return [piece for piece in pieces if borne(piece)]


def _bears(candidate: StepCandidate, sessions: int, rows: int, width: int, V: V) -> bool:
    """Whether its ledger allows a window of `width` in a step of `rows`, for which so many sessions wait."""
    return candidate.spare_us >= sessions * max(0.0, V(rows) - V(rows - width))


def _pieces(candidates: Sequence[StepCandidate], V: V) -> list[WindowPiece]:
    """What may be tested, the best first; of chain and guess only that which is expected to decide more."""
    if not any(candidate.drafted or candidate.guess is not None for candidate in candidates):
        return []
    least = _least_density(len(candidates), V)
    found = [piece for candidate in candidates for piece in _offered(candidate, least)]
    return sorted(found, key=attrgetter("density"), reverse=True)


def _least_density(sessions: int, V: V) -> float:
    """What a row must gain where V(m) rises least on average, by widths that are powers of two: less hardly pays.

    Most guesses in a batch gain less, and a step waits until all are weighed. Where V(m) rises in steps, a row that
    happens to cost nothing may be forgone.
    """
    plain_us = V(sessions)
    widths, most = [1], MOST_WINDOW * sessions
    while widths[-1] < most:
        widths.append(2 * widths[-1])
    return sessions / plain_us * min((V(sessions + width) - plain_us) / width for width in widths)


def _offered(candidate: StepCandidate, least: float) -> Sequence[WindowPiece]:
    """Of density beyond `least`."""
    chained = _chained(candidate, least)
    guessed = _guessed(candidate, candidate.guess, least) if candidate.guess is not None else []
    return guessed if sum(piece.gain for piece in guessed) > sum(piece.gain for piece in chained) else chained


def _chained(candidate: StepCandidate, least: float) -> list[WindowPiece]:
    if not candidate.drafted or candidate.acceptance.rates(1)[0] <= least:
        return []
    return list(_cut(candidate, candidate.acceptance, _ends(candidate), SourceKind.DRAFTER, least))


def _ends(candidate: StepCandidate) -> Sequence[int]:
    """Widths that a window of its chain may have."""
    most = min(MOST_WINDOW, candidate.drafted, candidate.room - 1)
    if candidate.whole is None:
        return range(1, most + 1)
    return [end for end in candidate.whole if end <= most]


def _guessed(candidate: StepCandidate, guess: Guess, least: float) -> list[WindowPiece]:
    most = min(MOST_WINDOW, len(guess.tokens), candidate.room - 1)
    if most < 1 or guess.acceptance.rates(1)[0] <= least:
        return []
    return list(_cut(candidate, guess.acceptance, range(1, most + 1), guess.kind, least))


def _cut(
    candidate: StepCandidate, acceptance: AcceptanceByPosition, ends: Sequence[int], kind: SourceKind, least: float
) -> Iterator[WindowPiece]:
    """Pieces that end at `ends`. Their density falls as the probabilities do."""
    start, least = 0, max(least, NEVER_DECIDED)
    decided = list(accumulate(acceptance.rates(max(ends, default=0)), mul))
    for end in ends:
        gain = sum(decided[start:end])
        density = gain / (end - start)
        if density <= least:
            return
        yield WindowPiece(density, gain, end - start, candidate, kind)
        start = end


def _whole(candidate: StepCandidate, width: int, acceptance: AcceptanceByPosition, kind: SourceKind) -> WindowPiece:
    """A window in one piece."""
    gain = expected_tokens(acceptance.rates(width), width) - 1.0
    return WindowPiece(gain / width, gain, width, candidate, kind)


def _test(candidate: StepCandidate, windows: Windows, sessions: int, most_rows: float, V: V) -> None:
    """Give a session without a window one, where it is time to test whether that is right."""
    piece = _chain_due(candidate, windows.rows, sessions, V) or _guess_due(candidate, windows.rows, V)
    if piece is None or windows.rows + piece.width > most_rows:
        return
    if _bears(candidate, sessions, windows.rows + piece.width, piece.width, V):
        windows.add(piece)


def _chain_due(candidate: StepCandidate, rows: int, sessions: int, V: V) -> WindowPiece | None:
    """The least of its chain; everybody waits for it."""
    width = min(_ends(candidate), default=0)
    if not width or sessions * (V(rows + width) - V(rows)) > TESTED_SHARE * candidate.chain_untested_us:
        return None
    return _whole(candidate, width, candidate.acceptance, SourceKind.DRAFTER)


def _guess_due(candidate: StepCandidate, rows: int, V: V) -> WindowPiece | None:
    """Its guess, if that is a good one. By what it costs its own session: others' guesses are hardly due as well."""
    guess = candidate.guess
    if guess is None or not candidate.guess_untested_us:
        return None
    width = min(MOST_WINDOW, len(guess.tokens), candidate.room - 1)
    if width < 1 or V(rows + width) - V(rows) > TESTED_SHARE * candidate.guess_untested_us:
        return None
    piece = _whole(candidate, width, guess.acceptance, guess.kind)
    return piece if 1.0 + piece.gain >= TESTED_TOKENS else None
