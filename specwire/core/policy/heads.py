"""How deep a head drafts for the next step: as deep as is expected to pay, or not at all. Pure; microseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul

from specwire.core.policy.estimates import AcceptanceByPosition, interpolated, smoothed
from specwire.core.policy.tunables import EXPLORED_SHARE, LEAST_GUESS_GAIN, MOST_HEAD_DEPTH, PROBE_WINDOW, STEP_WEIGHT


class HeadAcceptance:
    """What all sessions together learnt of a head; texts that are drawn by noise apart from greedy ones."""

    def __init__(self) -> None:
        self._greedy, self._drawn = AcceptanceByPosition(), AcceptanceByPosition()

    def of(self, temperature: float) -> AcceptanceByPosition:
        return self._drawn if temperature > 0.0 else self._greedy


class HeadDepth:
    """Depths are chosen by V(m), by the acceptance of each session's positions, and by what the head's forwards take.

    Args:
        forward_us: of a forward of the head for so many sessions, measured at start; refined here.
        most: tokens that the head can draft in a row, or that are ever asked of one.
    """

    def __init__(self, forward_us: Mapping[int, float], most: int = MOST_HEAD_DEPTH) -> None:
        self.most = most
        self._measured = dict(forward_us)
        self._scale = 1.0
        self._drafted_us = self._tried_us = 0.0

    def _forward_us(self, sessions: int) -> float:
        return self._scale * interpolated(self._measured, sessions)

    def observe(self, sessions: int, depth: int, took_us: float, now_us: float) -> None:
        """The head has drafted so many tokens for each of `sessions`."""
        expected_us = depth * interpolated(self._measured, sessions)
        self._scale = smoothed(self._scale, took_us / expected_us, STEP_WEIGHT)
        self._drafted_us = now_us

    def due(self, now_us: float) -> bool:
        """Whether one session may be drafted for although it does not pay: for EXPLORED_SHARE of the time."""
        cost_us = max(PROBE_WINDOW * self._forward_us(1), self._tried_us)
        return cost_us <= EXPLORED_SHARE * (now_us - self._drafted_us)

    def tried(self, took_us: float) -> None:
        """It took so long, with all that had to be read before."""
        self._tried_us = took_us

    def choose(self, rates: Sequence[Sequence[float]], decoding: int, V: Callable[[int], float]) -> int:
        """The depth for a step of `decoding` sessions, for some of which the head may draft; 0 for none.

        rates: of each of these, P(accept | tested) by position.
        """
        sessions = len(rates)
        forward_us = self._forward_us(sessions)
        decided = [list(accumulate(each[: self.most], mul)) for each in rates]
        plain_us, tokens = V(decoding), float(decoding)
        best, best_rate = 0, LEAST_GUESS_GAIN * decoding / plain_us
        for depth in range(1, self.most + 1):
            tokens += sum(each[depth - 1] for each in decided)
            rate = tokens / (V(decoding + depth * sessions) + depth * forward_us)
            if rate > best_rate:
                best, best_rate = depth, rate
        return best
