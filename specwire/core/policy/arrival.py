"""When a session's next proposals are due, from its own history. Pure: it is told times; microseconds throughout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from specwire.core.policy.estimates import smoothed
from specwire.core.policy.tunables import (
    GUESSED_SHARE,
    IN_A_ROW,
    LEAST_TIMING_US,
    LIKELY_SHARE,
    SLACK_DEVIATIONS,
    TIMING_WEIGHT,
)

# A round trip can be hundreds of steps long.
REMEMBERED_VERDICTS = 1024
# Most sources whose answers are awaited; of more, the newest.
MOST_AWAITED = 8


@dataclass(slots=True)
class Expectation:
    """The delay from a verdict to a source's proposal that answers it: mean, mean deviation, how often it was in time.

    A new chain answers the verdict that ended at its base, wherever later verdicts stand; a chunk of a chain that goes
    on answers the last verdict. `chance` is judged on every verdict, waited for or not. Only the delay of new chains is
    reported: a chain that goes on was under way before the verdict that it is compared with.
    """

    delay_us: float | None = None
    deviation_us: float = 0.0
    chance: float = 1.0
    arrived: bool = True
    skipped: int = 0
    last_delay_us: float = 0.0
    _since_us: float | None = None
    _verdicts: dict[int, float] = field(default_factory=dict)

    def verdict(self, end: int, now_us: float, waited: bool) -> None:
        """A verdict that ends at position `end` goes out."""
        if waited:
            self.skipped = 0
        if not self.arrived and self._since_us is not None:
            self.skipped += not waited
            if self.delay_us is not None or waited:
                self._judge(now_us - self._since_us <= self._latest())
        self._remember(end, now_us)
        self.arrived = False

    def take_delay(self) -> float:
        """The delay to be reported, once; 0 if there is none."""
        told, self.last_delay_us = self.last_delay_us, 0.0
        return told

    def _remember(self, end: int, now_us: float) -> None:
        self._since_us = now_us
        self._verdicts[end] = now_us
        if len(self._verdicts) > REMEMBERED_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]

    def proposal(self, base: int, offset: int, arrived_us: float, live: bool) -> None:
        """A proposal arrived. live: it agrees with the text; one that does not answered an older verdict."""
        asked_us = self._asked(base, offset)
        first = not self.arrived
        self.arrived = self.arrived or live
        if asked_us is None or not (first or offset == 0):
            return
        delay_us = max(0.0, arrived_us - asked_us)
        self._learn(delay_us)
        if offset == 0:
            self.last_delay_us = self.last_delay_us or delay_us

    def due(self, plain_step_us: float) -> tuple[float, float] | None:
        """(expected, latest) arrival of the answer to the last verdict; None if it is here or none was asked for."""
        since = self._since_us
        if self.arrived or since is None:
            return None
        if self.delay_us is None:
            expected = GUESSED_SHARE * plain_step_us
            return since + expected, since + 2 * expected
        share = GUESSED_SHARE if self.skipped >= IN_A_ROW else 1.0
        return since + share * self.delay_us, since + self._latest()

    def _learn(self, delay_us: float) -> None:
        if self.delay_us is None:
            self.deviation_us = delay_us / 4
        else:
            self._judge(delay_us <= self._latest())
            away_us = abs(delay_us - self.delay_us)
            self.deviation_us = smoothed(self.deviation_us, away_us, least=LEAST_TIMING_US)
        self.delay_us = smoothed(self.delay_us, delay_us, least=LEAST_TIMING_US)

    def _asked(self, base: int, offset: int) -> float | None:
        return self._verdicts.get(base) if offset == 0 else self._since_us

    def _latest(self) -> float:
        return (self.delay_us or 0.0) + max(LEAST_TIMING_US, SLACK_DEVIATIONS * self.deviation_us)

    def _judge(self, kept: bool) -> None:
        self.chance += TIMING_WEIGHT * ((1.0 if kept else 0.0) - self.chance)


class DueAnswer(NamedTuple):
    """The delay from a verdict to the answer of `source`; (0, 0.0) where none came."""

    source: int
    delay_us: float


NO_ANSWER = DueAnswer(0, 0.0)


class Due(NamedTuple):
    """When an answer of `source` is expected, until when it makes sense to wait, and how likely it comes by then."""

    source: int
    expected_us: float
    latest_us: float
    chance: float


class Expectations:
    """Expected arrivals of every source of a session.

    `_unheard` is the expectation of a source that has not proposed yet: all verdicts went to it. A source that is gone
    keeps its entry, and its chance falls, until newer ones need the entry.
    """

    def __init__(self) -> None:
        self.by_source: dict[int, Expectation] = {}
        self._unheard = Expectation()

    def proposal(self, source: int, base: int, offset: int, arrived_us: float, live: bool) -> None:
        """See Expectation.proposal."""
        self._of(source).proposal(base, offset, arrived_us, live)

    def _of(self, source: int) -> Expectation:
        known = self.by_source.get(source)
        if known is None:
            fresh = replace(self._unheard, _verdicts=dict(self._unheard._verdicts))
            if self.by_source:
                fresh.chance, fresh.skipped = 1.0, 0
            known = self.by_source[source] = fresh
            if len(self.by_source) > MOST_AWAITED:
                del self.by_source[min(self.by_source)]
        return known

    def verdict(self, end: int, now_us: float, waited: bool) -> DueAnswer:
        """A verdict goes out; returns the answer that is reported with it: the sources take turns."""
        told = NO_ANSWER
        for source, expectation in list(self.by_source.items()):
            expectation.verdict(end, now_us, waited)
            if not told.source and (delay_us := expectation.take_delay()):
                told = DueAnswer(source, delay_us)
                self.by_source[source] = self.by_source.pop(source)
        self._unheard.verdict(end, now_us, waited)
        return told

    def due(self, plain_step_us: float) -> Due | None:
        """The answer to the last verdict that is worth waiting for; None if all are here or none was asked for."""
        known = self.by_source or {0: self._unheard}
        times = ((source, each.chance, each.due(plain_step_us)) for source, each in known.items())
        due = [Due(source, *when, chance) for source, chance, when in times if when is not None]
        likely = max((each.chance for each in due), default=0.0)
        return min((each for each in due if each.chance >= LIKELY_SHARE * likely), key=_expected, default=None)


def _expected(due: Due) -> float:
    return due.expected_us
