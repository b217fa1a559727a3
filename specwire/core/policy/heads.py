"""How deep a head drafts for the next step, and for which texts: as is expected to pay, or not at all. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import inf
from operator import mul
from typing import NamedTuple

from specwire.core.policy.estimates import ForwardTimes, smoothed
from specwire.core.policy.tunables import LEAST_GAIN, MOST_HEAD_DEPTH


class HeadedText(NamedTuple):
    """A text that a head may draft for.

    rates: P(accept | tested) by position. spare_us: what its ledger can bear. read: positions that the head has to
    read before, beside those that a draft reads in any case. again: it was drafted for before, so reading does not pay
    for itself by and by. instead: tokens beyond one that a guess would decide which is there already.
    """

    rates: Sequence[float]
    spare_us: float
    read: int = 0
    again: bool = False
    instead: float = 0.0


class HeadDepth:
    """What a head's forwards take, and which texts it is to draft for, all of them equally deep.

    Args:
        forward_us: of a forward of the head for so many sessions, measured at start; refined here. Microseconds.
        most: tokens that the head can draft in a row, or that are ever asked of one.
        row_us: of a position of a text that is read; refined here.
        first_us: as forward_us, of the first forward of a draft, with what is done once; None: no longer than others.
        tapped_us: by which a step of so many sessions is longer where its features are kept; None: by nothing.

    pace: how slow the machine is now, as its steps tell: with it all of this takes longer.
    """

    def __init__(
        self,
        forward_us: Mapping[int, float],
        most: int = MOST_HEAD_DEPTH,
        row_us: float = 0.0,
        first_us: Mapping[int, float] | None = None,
        tapped_us: Mapping[int, float] | None = None,
    ) -> None:
        self.most = most
        self.pace = 1.0
        self._forward = ForwardTimes(forward_us)
        self._first = ForwardTimes(forward_us if first_us is None else first_us)
        self._tapped = ForwardTimes({1: 0.0} if tapped_us is None else tapped_us)
        self._row_us = row_us
        self._scale = 1.0

    def drafting_us(self, sessions: int, depth: int) -> float:
        """What so many forwards are expected to take."""
        each_us = self._first.at(sessions) + (depth - 1) * self._forward.at(sessions)
        return self.pace * self._scale * each_us

    def reading_us(self, rows: int) -> float:
        """What so many positions of texts are expected to take."""
        return self.pace * rows * self._row_us

    def readable(self, time_us: float) -> float:
        """How many positions are expected to be read in so long; infinite where they take none."""
        return time_us // self.reading_us(1) if self._row_us else inf

    def tapped_us(self, decoding: int) -> float:
        """By what a step of so many sessions takes longer for its features."""
        return self.pace * self._tapped.at(decoding)

    def observe(self, sessions: int, depth: int, rows: int, took_us: float) -> float:
        """The head has drafted so deep for so many sessions, and read so many rows. Returns what that is charged with:
        what it was expected to take. A hiccup of the machine is nobody's debt.
        """
        drafting_us = self.drafting_us(sessions, depth)
        expected_us = drafting_us + self.reading_us(rows)
        if rows:
            each_us = max(0.0, took_us - drafting_us) / rows / self.pace
            self._row_us = smoothed(self._row_us or None, each_us)
        else:
            self._scale = smoothed(self._scale, self._scale * took_us / expected_us)
        return expected_us

    def choose(
        self, texts: Sequence[HeadedText], decoding: int, V: Callable[[int], float]
    ) -> tuple[Sequence[int], int]:
        """The places of the texts that are drafted for, and how deep, in a step of `decoding` sessions; else no places.

        It is the rule of windows: expected tokens in a step's time, by a hurdle more than without, and only for those
        that can bear their part if all of it is wrong. V: of steps whose features nobody keeps.
        """
        decided = [list(accumulate(text.rates[: self.most], mul)) for text in texts]
        found: tuple[Sequence[int], int] = (), 0
        best_rate, tapped_us = LEAST_GAIN * decoding / V(decoding), self.tapped_us(decoding)
        for depth in range(1, self.most + 1):
            able = self.able(texts, depth, decoding, V)
            if not able:
                break
            tokens = decoding + sum(sum(decided[at][:depth]) - texts[at].instead for at in able)
            again_us = self.reading_us(sum(texts[at].read for at in able if texts[at].again))
            time_us = V(decoding + depth * len(able)) + self.drafting_us(len(able), depth) + tapped_us + again_us
            rate = tokens / time_us
            if rate > best_rate:
                found, best_rate = (able, depth), rate
        return found

    def able(self, texts: Sequence[HeadedText], depth: int, decoding: int, V: Callable[[int], float]) -> Sequence[int]:
        """The places of those that can bear so deep a draft and its window: the fewer they are, the more each pays."""
        able: Sequence[int] = range(len(texts))
        while able:
            rows_us = V(decoding + depth * len(able)) - V(decoding)
            cost_us = rows_us + self.tapped_us(decoding) + self.drafting_us(len(able), depth)
            each_us = cost_us * decoding / len(able)
            left = [at for at in able if texts[at].spare_us >= each_us + decoding * self.reading_us(texts[at].read)]
            if len(left) == len(able):
                break
            able = left
        return able
