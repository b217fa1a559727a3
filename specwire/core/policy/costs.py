"""What a step costs (V), what a wait may bring and when, and the ledger that bounds what a session may lose by both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from specwire.core.policy.estimates import ForwardTimes, interpolated, likely, smoothed
from specwire.core.policy.tunables import (
    CALM_STEPS,
    DECAY,
    GUESSED_SHARE,
    LEAST_TIMING_US,
    LEAST_WINDOW_SHARE,
    LIKELY_SHARE,
    MEANT_OVER,
    NEGLIGIBLE,
    PRIOR_WINDOW_ROWS,
    PRIOR_WINDOWS,
    SLACK_DEVIATIONS,
    STEP_OUTLIER,
    STEP_WEIGHT,
    TIMING_WEIGHT,
    TOLERATED_SHARE,
    TOLERATED_STEPS,
    TRIAL_VERDICTS,
)

# ----------------------------------------------------------------------------------------------------------------------
# What steps cost: V(m, rows), the plain step of a batch, and the software around a forward. Pure; microseconds.


class BatchTimes:
    """V(m, rows): a forward of several sessions, from V(m) of one session and what further sessions add to it.

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

    def at(self, sessions: int, rows: int) -> float:
        """It takes at least one row's time: the addition is negative where V(m) was measured in a hiccup."""
        alone = self._forward.measured
        return max(alone(1), alone(rows) + self._of_further(sessions, rows / sessions))

    def _of_further(self, sessions: int, depth: float) -> float:
        if not self._added or sessions < 2:
            return 0.0
        added = {number: interpolated(by_depth, depth) for number, by_depth in self._added.items()}
        most = max(added)
        if sessions > most:
            return added[most] * (sessions - 1) / (most - 1)
        return interpolated({1: 0.0, **added}, sessions)


class WindowCosts:
    """What windows add to the plain steps of batches of about one size: V(m, rows), and what it was seen to be beyond.

    V(m, rows) is measured with forwards of one shape in a row. Between plain steps a window also changes the shape,
    which costs so much for any window, however short. So what was seen beyond V is a straight line over a window's
    rows: least squares with decay, held to zero as if that had been seen PRIOR_WINDOWS times. Measurements fade with
    every step. Else windows that were once too expensive would never run again, and nothing would show that they have
    become cheaper.

    `behind_us`: what a step with windows adds to the one behind it, on average, where that is a plain one and no
    drafter is at work. It finds other shapes and colder caches, and chooses among more rows before it: on two cores a
    fifth of a plain step of 8 sessions, nearly as much as the windows themselves.
    """

    def __init__(self) -> None:
        # Sums over what was seen, of weights, rows, rows squared, microseconds, and rows times microseconds.
        self._weight = self._rows = self._squares = self._beyond_us = self._product = self._behind_us = 0.0
        self._any_us = self._row_us = 0.0

    @property
    def behind_us(self) -> float:
        return max(0.0, self._behind_us / (self._weight + PRIOR_WINDOWS))

    def at(self, rows: int, expected_us: float) -> float:
        """What windows of so many `rows` add where V says `expected_us`; at least LEAST_WINDOW_SHARE of that."""
        return max(LEAST_WINDOW_SHARE * expected_us, expected_us + self._any_us + self._row_us * rows)

    def observe(self, rows: int, seen_us: float, expected_us: float) -> None:
        """Note how long a step's windows took beyond its plain step. It may be negative, because both are measured."""
        beyond_us = seen_us - expected_us
        self._fade(DECAY)
        self._weight += 1.0
        self._rows += rows
        self._squares += rows * rows
        self._beyond_us += beyond_us
        self._product += rows * beyond_us
        self._fit()

    def left_behind(self, behind_us: float) -> None:
        """Note how much longer than its like the plain step behind the last windows took."""
        self._behind_us += behind_us

    def fade(self) -> None:
        """Note a step without windows."""
        if self._weight:
            self._fade(DECAY if self._weight > NEGLIGIBLE else 0.0)
            self._fit()

    def _fade(self, kept: float) -> None:
        self._weight *= kept
        self._rows *= kept
        self._squares *= kept
        self._beyond_us *= kept
        self._behind_us *= kept
        self._product *= kept

    def _fit(self) -> None:
        weight, squares = self._weight + PRIOR_WINDOWS, self._squares + PRIOR_WINDOWS * PRIOR_WINDOW_ROWS**2
        determinant = weight * squares - self._rows**2
        self._any_us = (squares * self._beyond_us - self._rows * self._product) / determinant
        self._row_us = (weight * self._product - self._rows * self._beyond_us) / determinant


class StepCosts:
    """What steps cost, learned from steps. The ledger charges against `plain`.

    Args:
        forward: V(m), measured at start with nothing else running.
        batches: the same of several sessions; see BatchTimes.
    """

    def __init__(self, forward: ForwardTimes, batches: Mapping[tuple[int, int], float] | None = None) -> None:
        self.forward = forward
        self._batch = BatchTimes(forward, batches or {})
        self._plain: dict[int, float] = {}
        # Time around the forwards of any step, by the size of the batch up to a power of two. For batches it is used
        # only until plain steps are known.
        self._around: dict[int, float] = {}
        # By the size of the batch up to a power of two.
        self._window_costs: defaultdict[int, WindowCosts] = defaultdict(WindowCosts)
        self._calm = CALM_STEPS
        # Whether the last step had a window: the one behind it is slower, for what that left behind. Of how many
        # sessions it was, if nothing else came between.
        self._windowed = False
        self._windowed_sessions = 0
        # What windows add, by (sessions, rows), and steps of a session alone, by rows; forgotten when they are refined.
        self._windows_us: dict[tuple[int, int], float] = {}
        self._alone_us: dict[int, float] = {}

    def of(self, sessions: int, behind: bool = True) -> Callable[[int], float]:
        """A function from a step's rows, over all `sessions`, to its time: forward and software. For one plan.

        behind: with what windows add to the step behind it, which is lost with them, but charged to no ledger.
        """
        if sessions < 2:
            return self._of_one
        plain_us = self.plain(sessions)
        costs = self._costs_of_windows(sessions)
        behind_us = costs.behind_us if behind else 0.0

        def step_us(rows: int) -> float:
            if rows <= sessions:
                return plain_us
            return plain_us + costs.at(rows - sessions, self._windows(sessions, rows)) + behind_us

        return cache(step_us)

    def _of_one(self, rows: int) -> float:
        known = self._alone_us.get(rows)
        if known is None:
            known = self._alone_us[rows] = self.forward.at(rows) + self._beside(1, self.forward.at(1))
        return known

    def plain(self, sessions: int) -> float:
        """Time of a step that decides one token for each of `sessions`: forward and software."""
        if sessions < 2:
            return self._of_one(1)
        known = self._plain.get(sessions)
        return self._like(sessions) if known is None else known

    def told(self, sessions: int) -> tuple[float, float]:
        """What drafters plan with: the plain step, and what a draft token for each of `sessions` would add to it."""
        plain_us = self.plain(sessions)
        return plain_us, max(0.0, self.of(sessions)(2 * sessions) - plain_us)

    def _like(self, sessions: int) -> float:
        """Time of a plain step of a size that was not seen yet.

        It is scaled from the next known size, which reflects how long the texts are, or else as measured at start.
        """
        forward_us = self._batch.at(sessions, sessions)
        near = min(self._plain, key=lambda known: abs(known - sessions), default=None)
        if near is not None:
            return self._plain[near] * forward_us / self._batch.at(near, near)
        return forward_us + self._beside(sessions, forward_us)

    def _beside(self, sessions: int, forward_us: float) -> float:
        return min(self._around.get(sessions.bit_length(), 0.0), forward_us)

    def _windows(self, sessions: int, rows: int) -> float:
        """What the rows of windows are expected to add to the plain step."""
        known = self._windows_us.get((sessions, rows))
        if known is None:
            known = max(0.0, self._batch.at(sessions, max(rows, sessions)) - self._batch.at(sessions, sessions))
            self._windows_us[sessions, rows] = known
        return known

    def observe(
        self, sessions: int, rows: int, forward_us: float, around_us: float, drafting: bool, waited: bool
    ) -> float | None:
        """Note a step without prefill; returns what the plain step of its batch costs, None if it was one itself.

        A plain step counts as such only while no drafter was at work (`drafting`). around_us: time between the forward
        before and this one for choosing, resolving and commands, without waiting and idling.
        """
        plain, size = rows == sessions, sessions.bit_length()
        self._calm = 0 if drafting else self._calm + 1
        calm, known_us = self._calm >= CALM_STEPS, self._around.get(size)
        around_us = min(around_us, forward_us)
        if plain or known_us is None:
            self._around[size] = smoothed(known_us, around_us, STEP_WEIGHT)
        if sessions > 1:
            self._observe_batch(sessions, rows, forward_us + around_us, calm)
        else:
            self._observe_one(rows, forward_us, around_us, calm)
        self._windowed = not plain
        self._alone_us.clear()
        return None if plain and not waited else self.plain(sessions)

    def _observe_one(self, rows: int, forward_us: float, around_us: float, calm: bool) -> None:
        """Note a step of one session. What a window adds to the time around its forward counts as the window's.

        A window is taken to last at least about as long as its forward. If plain steps met a busy machine and windows
        did not, the difference would be negative, and V with it.
        """
        self._windowed_sessions = 0
        if rows > 1:
            window_us = forward_us + around_us - self._around[1]
            self.forward.observe(rows, max(window_us, forward_us / STEP_OUTLIER))
        elif calm and not self._windowed:
            self.forward.observe(rows, forward_us)
        self._windows_us.clear()

    def interrupted(self) -> None:
        """A step that is not observed, or a pause: what the next one finds, no windows left behind."""
        self._windowed_sessions = 0
        self.forward.interrupted()

    def unexpected_us(self, sessions: int, rows: int, step_us: float) -> float:
        """How much longer a step with windows took than such steps take now; negative: shorter.

        That is the machine's doing, and a plain step might have met the same. Charged for it, a session would be in
        debt by no fault of its drafts, and plain steps hardly repay that (LOG).
        """
        return step_us - self.of(sessions, behind=False)(rows) if rows > sessions else 0.0

    def _observe_batch(self, sessions: int, rows: int, step_us: float, calm: bool) -> None:
        plain_us, costs = self.plain(sessions), self._costs_of_windows(sessions)
        behind, self._windowed_sessions = self._windowed_sessions == sessions, 0
        if rows > sessions:
            expected_us = self._windows(sessions, rows)
            likely_us = likely(step_us, plain_us + costs.at(rows - sessions, expected_us))
            costs.observe(rows - sessions, likely_us - plain_us, expected_us)
            self._windowed_sessions = sessions
        else:
            likely_us = likely(step_us, plain_us)
            if behind and calm:
                costs.left_behind(likely_us - plain_us)
            costs.fade()
        # A step with windows that is shorter than the known plain step shows that plain steps have become shorter.
        if likely_us < plain_us or (calm and rows == sessions and not self._windowed):
            self._plain[sessions] = plain_us + STEP_WEIGHT * (likely_us - plain_us)

    def _costs_of_windows(self, sessions: int) -> WindowCosts:
        return self._window_costs[sessions.bit_length()]


# ----------------------------------------------------------------------------------------------------------------------
# When a session's next proposals are due, from its own history. It is told times; microseconds throughout.

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
        share = GUESSED_SHARE if self.skipped >= TRIAL_VERDICTS else 1.0
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
        part: the share charged of what windows took beyond waiting and the plain step: see `part_of`.
        uncharged_us: of the step: what nobody expected (`StepCosts.unexpected_us`), and what a head's features took,
            which are charged by themselves.
        head: the window was a head's.
    """

    plain_us: float | None
    waited_us: float = 0.0
    part: float = 1.0
    uncharged_us: float = 0.0
    head: bool = False


def part_of(window: int, windows: int, sessions: int) -> float:
    """What a session is charged for a batch's windows, or waits, as a multiple of the time that they take.

    All sessions wait for all windows. Each is charged for its own `window` only (of `windows` rows in all), but for
    what it costs all `sessions`: a window of mean width is charged the whole time once. So the batch never loses more
    than its sessions may lose on average. And no session runs into debt through other sessions' windows, which it could
    not repay by giving up its own (docs/LOG.md). Likewise a wait: those that are waited for, one each, share it.
    """
    return sessions * window / windows if windows else 1.0
