"""Whether drafter and verifier, on one host, should compute at once instead of taking turns. Pure; microseconds.

Side by side hides the drafting behind the forwards, and stretches both by what they take from each other. That is
measured (`specwire.core.contention`); where nothing is measured they take turns. What it is taken up for is an expected
rate, and an expectation leaves something out: both ways are also held against what they really brought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specwire.core.contention import Contention, Forward
from specwire.core.speed import DECAY, ForwardTimes, lockstep_rate, smoothed, stream_rate

# Side by side must be expected to be so much better before it is taken up.
LEAST_ADVANTAGE = 1.05
# How the two get along is tried out where side by side would be better if they did not disturb each other at all: every
# so many verdicts, first after so many, for so many. Under 2 % of the verdicts, each stretched by some part: under 1 %.
TRY_EVERY, TRY_FIRST, TRY_VERDICTS = 1024, 128, 16


class Beside(NamedTuple):
    """Draft side by side; a token then takes `draft_us`."""

    draft_us: float
    reason: str


@dataclass(slots=True)
class _Brought:
    """Tokens that verdicts brought, and the time that passed until they came; decayed sums. verdicts: counted."""

    tokens: float = 0.0
    time_us: float = 0.0
    verdicts: int = 0

    def add(self, tokens: int, time_us: float) -> None:
        self.tokens = DECAY * self.tokens + tokens
        self.time_us = DECAY * self.time_us + time_us
        self.verdicts += 1

    def less_than(self, other: _Brought) -> bool:
        """Whether it was slower; False while too little was seen to say."""
        seen = min(self.verdicts, other.verdicts) >= TRY_VERDICTS
        return seen and self.tokens * other.time_us < other.tokens * self.time_us


class SideBySide:
    """Of one verifier and one drafter on its host; sessions that come after one another share it.

    `active`: they compute side by side now.

    Args:
        forward: V(m) of the verifier.
    """

    def __init__(self, forward: ForwardTimes) -> None:
        self.contention = Contention(forward)
        self.active = False
        self._draft_us: float | None = None
        self._since_try = TRY_EVERY - TRY_FIRST
        self._brought_beside, self._brought_in_turns = _Brought(), _Brought()
        self._last_us: float | None = None
        self._alone = True

    def begin(self) -> None:
        """Another session: nothing is known of the time before its first verdict."""
        self._last_us = None

    def drafted(self, token_us: float) -> None:
        """A token took so long to draft while they were side by side."""
        self._draft_us = smoothed(self._draft_us, token_us)

    def verdict(self, tokens: int, forward: Forward | None) -> None:
        """A verdict brought `tokens`. forward: of the session alone; None where there were others, or none is known."""
        self._since_try += 1
        ended_us = forward.ended_us if forward is not None else None
        self._alone = forward is not None
        if forward is not None:
            self.contention.forward(forward)
        if ended_us is not None and self._last_us is not None:
            brought = self._brought_beside if self.active else self._brought_in_turns
            brought.add(tokens, ended_us - self._last_us)
        self._last_us = ended_us

    def choose(self, rates: Sequence[float], agreement: float, draft_us: float, overhead_us: float) -> Beside | None:
        """How to draft side by side, or None: take turns.

        Args:
            rates, agreement: see `specwire.core.speed.stream_rate`.
            draft_us: a token's drafting while the verifier is idle.
            overhead_us: from a verdict to the proposal that answers it, without drafting.
        """
        chosen = self._choose(rates, agreement, draft_us, overhead_us)
        if self.active and chosen is None:
            self._since_try = TRY_VERDICTS
        self.active = chosen is not None
        return chosen

    def _choose(self, rates: Sequence[float], agreement: float, draft_us: float, overhead_us: float) -> Beside | None:
        apart = self.contention.apart()
        if apart is None:
            return None  # nobody tells the times of forwards, or too few were told yet
        if not self._alone:
            return None  # what one session gains says nothing of a batch, for all of which the drafter would draft
        if self._since_try < TRY_VERDICTS:
            return Beside(draft_us, "trying side by side")
        turns = _turns(rates, draft_us, overhead_us, apart)
        slowdown, together = self.contention.slowdown, self.contention.together()
        if slowdown is not None and together is not None and not self._brought_beside.less_than(self._brought_in_turns):
            beside_us = self._draft_us or slowdown * draft_us
            speed = _beside(rates, agreement, beside_us, overhead_us, together)
            if speed > (1.0 if self.active else LEAST_ADVANTAGE) * turns:
                return Beside(beside_us, f"side by side, contention {slowdown:.2f}, gain {speed * apart.at(1):.2f}")
        at_best = _beside(rates, agreement, draft_us, overhead_us, apart)
        if self._since_try < TRY_EVERY or at_best <= LEAST_ADVANTAGE * turns:
            return None
        self._since_try, self._brought_beside = 0, _Brought()
        return Beside(draft_us, "trying side by side")


def _turns(rates: Sequence[float], draft_us: float, overhead_us: float, forward: ForwardTimes) -> float:
    """The best rate of taking turns, plain decoding included."""
    windows = range(len(rates) + 1)
    return max(lockstep_rate(rates, window, draft_us, forward, overhead_us) for window in windows)


def _beside(
    rates: Sequence[float], agreement: float, draft_us: float, overhead_us: float, forward: ForwardTimes
) -> float:
    """A verdict finds the drafter in the middle of a token."""
    return stream_rate(rates, agreement, draft_us, forward, overhead_us + draft_us / 2, 1)
