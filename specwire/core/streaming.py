"""How a drafter streams: how far ahead, in what chunks, and whether its verifier is to wait for them. Pure.

A drafter on hardware of its own takes no time from the verifier. It streams, and the verifier waits for a chain's first
tokens where a round of waiting is faster than going on alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from specwire.core.drafting import Pace
from specwire.core.plan import MOST_RUN_AHEAD, Discipline, Plan
from specwire.core.shares import MOST_WINDOW
from specwire.core.speed import ForwardTimes, expected_tokens, lockstep_rate, stream_rate, waiting_rate

# What is expected of a stream is a little low, so that even a small gain is one.
LEAST_REMOTE_GAIN = 1.005
# Chunks of up to so many tokens, as long as drafting one takes no more than this share of a forward.
MOST_CHUNK = 4
CHUNK_SHARE = 0.125
# What a stream's verifier waits for may come in several chunks, of no more than is drafted during a forward: a chain is
# wrong most often at its beginning, a token counts only once its chunk is whole, and the drafter goes on in any case.
MOST_FIRST_CHUNK = 8
# So many times the expected length of a run of right guesses is as far as drafting is of use. A drafter at rest begins
# a new chain at once; one that drafts finishes its token first, which matters where that takes this share of a forward.
USEFUL_RUNS, LEAST_USEFUL = 7.0, 4
LONG_TOKEN = 0.05


class Way(NamedTuple):
    """due: draft tokens that the verifier waits for; 0: it never waits. gain: expected speed over plain decoding's."""

    discipline: Discipline
    due: int
    gain: float

    @property
    def pays(self) -> bool:
        return self.gain >= LEAST_REMOTE_GAIN

    @property
    def reason(self) -> str:
        why = "comparing, " if not self.pays else "waits, " if self.due else ""
        return f"{why}gain {self.gain:.2f}" + (f" with {self.due}" if self.due else "")


@dataclass(frozen=True, slots=True)
class Streaming:
    """What is known of a drafter and its verifier.

    rates: P(accept | tested) by position in the window. agreement: P(a draft token is the decided one), tested or not.
    draft_us: microseconds to draft a token. delay_us: from a verdict to the proposal that answers it, drafting apart.
    forward: V(m) of the verifier.
    """

    rates: Sequence[float]
    agreement: float
    draft_us: float
    delay_us: float
    forward: ForwardTimes

    def fastest(self) -> Way:
        """For a drafter on hardware of its own: stream, with or without waiting, or take turns."""
        known = (self.rates, self.agreement, self.draft_us, self.forward)
        # A verdict finds a drafter that streams in the middle of a token.
        met_us = self.delay_us + self.draft_us / 2
        speeds = {(Discipline.STREAM, 0): stream_rate(*known, met_us, self._chunk)}
        for window in range(1, MOST_WINDOW + 1):
            speeds[Discipline.STREAM, window] = waiting_rate(*known, met_us, window)
            turns = lockstep_rate(self.rates, window, self.draft_us, self.forward, self.delay_us)
            speeds[Discipline.LOCKSTEP, window] = turns
        best = max(speeds, key=speeds.__getitem__)
        return Way(*best, speeds[best] / (1.0 / self.forward.at(1)))

    def plan(self, way: Way) -> Plan:
        if way.discipline is Discipline.LOCKSTEP:
            return Plan(way.discipline, Pace(way.due, way.due), way.due, way.reason)
        most = max(self._chunk, min(MOST_FIRST_CHUNK, int(self.forward.at(1) / self.draft_us)))
        chunk = min(way.due, most) or self._chunk
        return Plan(way.discipline, Pace(chunk, max(way.due, self.run_ahead())), way.due, way.reason)

    @property
    def _chunk(self) -> int:
        """Tokens of a chunk that nobody waits for."""
        return max(1, min(MOST_CHUNK, int(CHUNK_SHARE * self.forward.at(1) / self.draft_us)))

    def run_ahead(self) -> int:
        """What is decided during a round trip at the best conceivable speed, and a window for the step behind it.

        No more than is of use, for a drafter whose tokens take long.
        """
        step_us = self.forward.at(1)
        fastest = min(1.0 / self.draft_us, expected_tokens(self.rates, MOST_WINDOW) / step_us)
        ahead = min(MOST_RUN_AHEAD, MOST_WINDOW + ceil((self.delay_us + step_us) * fastest))
        if self.draft_us < LONG_TOKEN * step_us:
            return ahead
        agreement = min(self.agreement, 0.99)
        return min(ahead, max(LEAST_USEFUL, ceil(USEFUL_RUNS * agreement / (1.0 - agreement))))
