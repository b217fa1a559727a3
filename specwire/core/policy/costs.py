"""What a step costs (V), what a wait may bring and when, and the ledger that bounds what a session may lose by both."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from specwire.core.policy.estimates import ForwardTimes, interpolated, smoothed, typical
from specwire.core.policy.tunables import (
    COMPARE_EVERY,
    CONFIRM_EVERY,
    GUESSED_SHARE,
    LEAST_SEEN,
    LEAST_TIMING_US,
    LIKELY_SHARE,
    MEANT_OVER,
    OUTLIER,
    PACE_WEIGHT,
    SEEN_STEPS,
    SLACK_DEVIATIONS,
    TIMING_WEIGHT,
    TOLERATED_SHARE,
    TOLERATED_STEPS,
    TRIAL_VERDICTS,
)

# ----------------------------------------------------------------------------------------------------------------------
# V[rows, sessions]: what a step takes, its forward and the software around that. Pure; microseconds.


class BatchTimes:
    """V(m, rows) as it was measured at start: a forward of several sessions, from V(m) of one and what others add.

    A row of another session costs more than one more row of the same, because it has keys and values of its own to
    read. What further sessions add is interpolated between the measured numbers of sessions and of positions. Beyond
    the most sessions measured it grows in proportion, beyond the most positions not at all.

    Args:
        forward: V(m) of one session.
        measured: microseconds by (sessions, positions of each). Without any, sessions cost what their rows cost.
    """

    def __init__(self, forward: ForwardTimes, measured: Mapping[tuple[int, int], float]) -> None:
        self._forward = forward
        self._added: dict[int, dict[int, float]] = {}
        for (sessions, depth), time_us in sorted(measured.items()):
            self._added.setdefault(sessions, {})[depth] = time_us - forward.at(sessions * depth)

    def at(self, sessions: int, rows: float) -> float:
        """It takes at least one row's time: the addition is negative where V(m) was measured in a hiccup."""
        alone = self._forward.at
        return max(alone(1), alone(rows) + self._of_further(sessions, rows / sessions))

    def _of_further(self, sessions: int, depth: float) -> float:
        if not self._added or sessions < 2:
            return 0.0
        added = {number: interpolated(by_depth, depth) for number, by_depth in self._added.items()}
        most = max(added)
        if sessions > most:
            return added[most] * (sessions - 1) / (most - 1)
        return interpolated({1: 0.0, **added}, sessions)


class PacedSteps:
    """What steps of about so many sessions take now, against what was measured at start.

    A machine that others share may be twice as slow a second later, with all that it computes. So `pace` tells how many
    times as long as measured a plain step takes now, software included. Steps with windows tell nothing of that: they
    may be longer for their windows. What these take shows beside a plain step, where one follows the other: by `ratio`,
    the median of the last SEEN_STEPS pairs, since either step may have met something else on the machine.
    """

    def __init__(self, pace: float = 1.0) -> None:
        self.pace = pace
        self.ratio = 1.0
        self._pairs: deque[float] = deque(maxlen=SEEN_STEPS)
        # Whether the last step was plain, and how many times as long as measured it took; steps since a plain one.
        self._last: tuple[bool, float] | None = None
        self._since = 0

    @property
    def plain_due(self) -> bool:
        """Whether the next step should be a plain one, to show what the machine is like, and what windows take."""
        return self._since >= (CONFIRM_EVERY if len(self._pairs) >= LEAST_SEEN else COMPARE_EVERY)

    def observe(self, plain: bool, taken: float) -> None:
        """A step took so many times as long as it was measured. A single slow one counts for little."""
        if plain:
            shown = min(max(taken, self.pace / OUTLIER), self.pace * OUTLIER)
            self.pace *= (shown / self.pace) ** PACE_WEIGHT
        last, self._last = self._last, (plain, taken)
        self._since = 0 if plain else self._since + 1
        if last is not None and last[0] is not plain:
            self._pairs.append(last[1] / taken if plain else taken / last[1])
            if len(self._pairs) >= LEAST_SEEN:
                self.ratio = typical(self._pairs)

    def interrupted(self) -> None:
        """What comes next does not follow the last step."""
        self._last, self._since = None, 0


class StepCosts:
    """V[rows, sessions], learned from steps. The ledger charges against `plain`.

    Args:
        forward: V(m), measured at start with nothing else running.
        batches: the same of several sessions; see BatchTimes.
    """

    def __init__(self, forward: ForwardTimes, batches: Mapping[tuple[int, int], float] | None = None) -> None:
        self.forward = forward
        self._measured = BatchTimes(forward, batches or {})
        # By the number of sessions up to a power of two.
        self._sizes: dict[int, PacedSteps] = {}

    def of(self, sessions: int) -> Callable[[int], float]:
        """A function from a step's rows, over all `sessions`, to its time. For one plan.

        A step with windows takes no less than the plain step, nor more than plain steps for all its rows.
        """
        sessions = max(1, sessions)
        seen, measured = self._of(sessions), self._measured
        plain_us = measured.at(sessions, sessions)

        def step_us(rows: int) -> float:
            if rows <= sessions:
                return seen.pace * plain_us
            us = max(plain_us, measured.at(sessions, rows) * seen.ratio)
            return seen.pace * min(us, plain_us * math.ceil(rows / sessions))

        return cache(step_us)

    def plain(self, sessions: int) -> float:
        """Time of a step that decides one token for each of `sessions`."""
        return self._of(sessions).pace * self._measured.at(sessions, sessions)

    def pace(self, sessions: int) -> float:
        """How many times as long as measured at start plain steps take now."""
        return self._of(sessions).pace

    def plain_due(self, sessions: int) -> bool:
        """See PacedSteps."""
        return self._of(sessions).plain_due

    def _of(self, sessions: int) -> PacedSteps:
        """One of a new size is as slow as the machine was with the size next to it."""
        size = sessions.bit_length()
        known = self._sizes.get(size)
        if known is None:
            near = min(self._sizes, key=lambda other: abs(other - size), default=None)
            known = self._sizes[size] = PacedSteps(1.0 if near is None else self._sizes[near].pace)
        return known

    def observe(self, sessions: int, rows: int, forward_us: float, around_us: float, waited: bool) -> float | None:
        """Note a step without prefill; returns what the plain step of its batch costs, None if it was one itself.

        around_us: time between the forward before and this one for choosing, resolving and commands, without waiting
        and idling.
        """
        step_us = max(1.0, forward_us + min(around_us, forward_us))
        plain, seen = rows <= sessions, self._of(sessions)
        seen.observe(plain, step_us / self._measured.at(sessions, rows))
        for other in self._sizes.values():
            if other is not seen:
                other.interrupted()
        return None if plain and not waited else self.plain(sessions)

    def interrupted(self) -> None:
        """A step that is not observed, or a pause: what comes next does not follow the last step."""
        for seen in self._sizes.values():
            seen.interrupted()

    def windows_us(self, sessions: int, rows: int) -> float:
        """What a step is charged for its windows: what such steps take longer than plain ones, not what it took.

        A hiccup is the machine's doing, and a plain step might have met the same. Charged for it, a session would be in
        debt by no fault of its drafts, and plain steps hardly repay that (LOG).
        """
        return self.of(sessions)(rows) - self.plain(sessions)


# ----------------------------------------------------------------------------------------------------------------------
# When a session's next proposals are due, from its own history. It is told times; microseconds throughout.

# A round trip can be hundreds of steps long.
REMEMBERED_VERDICTS = 1024
# Most sources whose answers are awaited; of more, the newest.
MOST_AWAITED = 8


class Turn(NamedTuple):
    """Tokens that a drafter is asked for behind each verdict, and what one takes; 0.0 where that is not known."""

    tokens: int
    token_us: float


NO_TURNS: Mapping[int, Turn] = {}


@dataclass(slots=True)
class Expectation:
    """The delay from a verdict to a source's proposal that answers it: mean, mean deviation, how often it was in time.

    A new chain answers the verdict that ended at its base, wherever later verdicts stand; a chunk of a chain that goes
    on answers the last verdict. `chance` is judged on every verdict, waited for or not. Only the delay of new chains is
    told: a chain that goes on was under way before the verdict that it is compared with.

    asked: tokens that it was of on average, of a drafter that the verifier takes turns with.
    """

    delay_us: float | None = None
    deviation_us: float = 0.0
    chance: float = 1.0
    arrived: bool = True
    skipped: int = 0
    asked: float = 0.0
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

    def _remember(self, end: int, now_us: float) -> None:
        self._since_us = now_us
        self._verdicts[end] = now_us
        if len(self._verdicts) > REMEMBERED_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]

    def proposal(
        self, base: int, offset: int, arrived_us: float, live: bool, turn: Turn | None = None, apart: bool = True
    ) -> float:
        """A proposal arrived. live: it agrees with the text; one that does not answered an older verdict.

        apart: drafted while the verifier was idle, or on cores of its own. Beside a forward a drafter on the verifier's
        takes far longer than where it is waited for, and that delay is not learnt.

        Returns:
            How long after the verdict that it answers; 0.0 where it goes on with a chain, or answers none.
        """
        asked_us = self._asked(base, offset)
        first = not self.arrived
        self.arrived = self.arrived or live
        if asked_us is None or not (first or offset == 0) or not apart:
            return 0.0
        delay_us = max(0.0, arrived_us - asked_us)
        if turn is not None:
            self.asked = smoothed(self.asked or None, turn.tokens)
        self._learn(delay_us)
        return delay_us if offset == 0 else 0.0

    def due(self, plain_step_us: float, turn: Turn | None = None) -> tuple[float, float] | None:
        """(expected, latest) arrival of the answer to the last verdict; None if it is here or none was asked for."""
        since = self._since_us
        if self.arrived or since is None:
            return None
        if self.delay_us is None:
            if turn is not None and turn.token_us:
                return since + turn.tokens * turn.token_us, since + self.latest_us(turn)
            expected = GUESSED_SHARE * plain_step_us
            return since + expected, since + 2 * expected
        share = GUESSED_SHARE if self.skipped >= TRIAL_VERDICTS else 1.0
        further_us = self._further_us(turn)
        return since + share * self.delay_us + further_us, since + self._latest() + further_us

    def latest_us(self, turn: Turn) -> float:
        """How long after a verdict its answer is waited for; as long as drafting takes where none was seen."""
        if self.delay_us is None:
            return turn.tokens * turn.token_us
        return self._latest() + self._further_us(turn)

    def _further_us(self, turn: Turn | None) -> float:
        """By how much longer than on average what is asked for takes."""
        return (turn.tokens - self.asked) * turn.token_us if turn is not None and self.asked else 0.0

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

    def proposal(
        self,
        source: int,
        base: int,
        offset: int,
        arrived_us: float,
        live: bool,
        turn: Turn | None = None,
        apart: bool = True,
    ) -> float:
        """See Expectation.proposal."""
        return self._of(source).proposal(base, offset, arrived_us, live, turn, apart)

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

    def verdict(self, end: int, now_us: float, waited: bool) -> None:
        """A verdict goes out."""
        for expectation in (*self.by_source.values(), self._unheard):
            expectation.verdict(end, now_us, waited)

    def latest_us(self, source: int, turn: Turn) -> float:
        """See Expectation."""
        return self.by_source.get(source, self._unheard).latest_us(turn)

    def due(
        self, plain_step_us: float, turns: Mapping[int, Turn] = NO_TURNS, owing: Collection[int] | None = None
    ) -> Due | None:
        """The answer to the last verdict that is worth waiting for; None if all are here or none was asked for.

        owing: the sources that were asked for one; None: all.

        turns: by source, of drafters that the verifier takes turns with. That was planned, and pays only if it waits.
        """
        known = self.by_source or {next(iter(turns), 0): self._unheard}
        due: list[Due] = []
        for source, each in known.items():
            if source and owing is not None and source not in owing:
                continue
            when = each.due(plain_step_us, turns.get(source))
            if when is not None:
                due.append(Due(source, *when, 1.0 if source in turns else each.chance))
        likely = max((each.chance for each in due), default=0.0)
        return min((each for each in due if each.chance >= LIKELY_SHARE * likely), key=_expected, default=None)


def _expected(due: Due) -> float:
    return due.expected_us


# ----------------------------------------------------------------------------------------------------------------------
# The ledger that makes "never slower" a rule instead of a hope (docs/HOW_IT_WORKS.md).
#
#     L = time spent - time that plain decoding would have taken for the same tokens
#
# L stays within 2 % of the elapsed time plus two plain steps. A window or a wait is begun only if L would stay there
# even if no draft token is accepted; beyond that the session decodes plainly. Waiting, wider forwards and probes are
# charged. In a batch a window is charged to its own session, and a wait to those that are waited for, by what it costs
# all of them (`part_of`). What a head loses is known apart: no other source goes without a window for that. Its two
# plain steps are the batch's, which are longer, also for a text that is alone later: a draft costs the whole batch, and
# none could begin within two steps of a text alone. Windows are not charged in a step that also feeds a prompt. Hiccups
# of the machine are not charged: what such steps take on average decides, which is learnt from all sessions' steps.


@dataclass(slots=True)
class Ledger:
    """A session's balance L, in microseconds. A reattached session starts from its predecessor's.

    tokens: decided while it was kept. head_us: the part of L that the head's drafts and their windows lost; negative:
    gained.
    Invariant, but for steps that took longer than expected: L stays within TOLERATED_SHARE of elapsed_us, which is of
    MEANT_OVER tokens at least where there is a head, plus TOLERATED_STEPS plain steps, a head's of the largest batch.
    """

    balance_us: float = 0.0
    elapsed_us: float = 0.0
    tokens: int = 0
    head_us: float = 0.0

    def charge(
        self, spent_us: float, tokens: int, plain_step_us: float, cost_us: float | None = None, head: bool = False
    ) -> None:
        """Note a step of `spent_us` (with its waiting) that decided `tokens`.

        cost_us: the charge, if another. head: it is for what a head drafted.
        """
        lost_us = (spent_us if cost_us is None else cost_us) - tokens * plain_step_us
        self.balance_us += lost_us
        self.elapsed_us += spent_us
        self.tokens += tokens
        if head:
            self.head_us += lost_us

    def spare_us(self, plain_step_us: float) -> float:
        """What windows of other sources than a head, and waits, may lose at worst in the next step; negative in debt.

        What a head lost of the part that only it may lose is not theirs to pay.
        """
        tolerated_us = self._tolerated_us(plain_step_us)
        if self.head_us <= 0.0:
            return tolerated_us - self.balance_us
        ahead_us = self._tolerated_us(plain_step_us, plain_step_us)
        return min(ahead_us, tolerated_us + self.head_us) - self.balance_us

    def head_spare_us(self, plain_step_us: float, token_us: float, alone: bool = True) -> float:
        """Likewise a head, and the windows that it drafts. A text may lose by it at its beginning already what it may
        lose over MEANT_OVER tokens.

        token_us: what a further token takes at least: a step of the session alone, since the others of its batch may
            end before those tokens come.
        alone: no other source proposes. Else the plain steps that others may lose are left to them.
        """
        others_us = max(0.0, self.balance_us - self.head_us)
        kept_us = 0.0 if alone else max(0.0, TOLERATED_STEPS * plain_step_us - others_us)
        return self._tolerated_us(plain_step_us, token_us) - kept_us - self.balance_us

    def _tolerated_us(self, plain_step_us: float, token_us: float = 0.0) -> float:
        ahead_us = token_us * max(0, MEANT_OVER - self.tokens)
        return TOLERATED_SHARE * (self.elapsed_us + ahead_us) + TOLERATED_STEPS * plain_step_us


class StepCharge(NamedTuple):
    """What of a step a session is charged for; microseconds.

    Attributes:
        plain_us: the plain step of the same batch. None: this step was it (no draft token tested, nothing waited for),
            or a prompt shared it.
        waited_us: the step waited for proposals, of whichever session.
        part: the share charged of what windows take, `windows_us`: see `part_of` and `StepCosts.windows_us`.
        head: the window was a head's.
        sessions: that shared the step.
        disturbed_us: by which drafters on the same cores made it longer, which is charged by itself.
    """

    plain_us: float | None
    waited_us: float = 0.0
    part: float = 1.0
    windows_us: float = 0.0
    head: bool = False
    sessions: int = 1
    disturbed_us: float = 0.0


def part_of(window: int, windows: int, sessions: int) -> float:
    """What a session is charged for a batch's windows, or waits, as a multiple of the time that they take.

    All sessions wait for all windows. Each is charged for its own `window` only (of `windows` rows in all), but for
    what it costs all `sessions`: a window of mean width is charged the whole time once. So the batch never loses more
    than its sessions may lose on average. And no session runs into debt through other sessions' windows, which it could
    not repay by giving up its own (docs/LOG.md). Likewise a wait: those that are waited for, one each, share it.
    """
    return sessions * window / windows if windows else 1.0
