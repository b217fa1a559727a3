"""What a step costs (V), what a wait may bring and when, and the ledger that bounds what a session may lose by both."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median

from specwire.core.policy.estimates import ForwardTimes, interpolated
from specwire.core.policy.tunables import (
    EXPLORED_SHARE,
    OUTLIER,
    PACE_WEIGHT,
    PLAN_EVERY,
    SEEN_STEPS,
    TIMING_WEIGHT,
    TOLERATED_SHARE,
    TOLERATED_STEPS,
)

# ----------------------------------------------------------------------------------------------------------------------
# V[rows, sessions]: what a step takes, its forward and the software around that. Pure; microseconds.


class PacedSteps:
    """What steps of about so many sessions take now, against what was measured at start.

    A machine that others share may be twice as slow a second later, with all that it computes. So `pace` tells how many
    times as long as measured a plain step takes now, software included. What steps with windows take shows beside a
    plain step, where one follows the other: by `ratio`, the median of the last SEEN_STEPS pairs, since either may have
    met something else on the machine. Until there are some, steps with windows tell nothing of the machine: they may be
    longer for their windows. Where these say that it has changed, a plain step has to show it.
    """

    def __init__(self, pace: float = 1.0) -> None:
        # `_felt`: by all steps. `_shown`: when the last plain step showed it.
        self.pace = self._felt = self._shown = pace
        self.ratio = 1.0
        self._pairs: deque[float] = deque(maxlen=SEEN_STEPS)
        # Whether the last step was plain, and how many times as long as measured it took; steps since a plain one.
        self._last: tuple[bool, float] | None = None
        self._since = 0

    @property
    def _compared(self) -> bool:
        return 3 * len(self._pairs) >= SEEN_STEPS

    @property
    def plain_due(self) -> bool:
        """Whether the next step should be a plain one: windows alone cannot tell if the machine or they take longer.

        Where neither does, one is due for each share of steps that tries may take, whatever windows others have.
        """
        changed = 8 * abs(self._felt - self._shown) > self._shown and self._since >= PLAN_EVERY
        return changed or self._since >= 1.0 / EXPLORED_SHARE

    def observe(self, plain: bool, taken: float) -> None:
        """A step took so many times as long as it was measured. A single slow one counts for little."""
        shown = taken if plain else taken / self.ratio
        shown = min(max(shown, self.pace / OUTLIER), self.pace * OUTLIER)
        if plain or self._compared:
            self.pace *= (shown / self.pace) ** (PACE_WEIGHT if plain else TIMING_WEIGHT)
        self._felt *= (shown / self._felt) ** (PACE_WEIGHT if plain else TIMING_WEIGHT)
        if plain:
            self._shown = self.pace
        last, self._last = self._last, (plain, taken)
        self._since = 0 if plain else self._since + 1
        if last is not None and last[0] is not plain:
            self._pairs.append(last[1] / taken if plain else taken / last[1])
            if self._compared:
                self.ratio = median(self._pairs)

    def interrupted(self) -> None:
        """What comes next does not follow the last step."""
        self._last, self._since = None, 0


class StepCosts:
    """V[rows, sessions], learned from steps. The ledger charges against `plain`.

    A row of another session costs more than one more row of the same, because it has keys and values of its own to
    read. What further sessions add is interpolated between the measured numbers of sessions and of positions. Beyond
    the most sessions measured it grows in proportion, beyond the most positions not at all.

    Args:
        forward: V(m) of one session, measured at start with nothing else running.
        batches: likewise by (sessions, positions of each). Without any, sessions cost what their rows cost.
    """

    def __init__(self, forward: ForwardTimes, batches: Mapping[tuple[int, int], float] | None = None) -> None:
        self.forward = forward
        self._added: dict[int, dict[int, float]] = {}
        for (sessions, depth), time_us in sorted((batches or {}).items()):
            self._added.setdefault(sessions, {})[depth] = time_us - forward.at(sessions * depth)
        # By the number of sessions up to a power of two.
        self._sizes: dict[int, PacedSteps] = {}

    def measured(self, sessions: int, rows: int) -> float:
        """As at start; at least one row's time: an addition is negative where V(m) was measured in a hiccup."""
        added_us = 0.0
        if self._added and sessions > 1:
            added = {number: interpolated(by_depth, rows / sessions) for number, by_depth in self._added.items()}
            most = max(added)
            between_us = interpolated({1: 0.0, **added}, sessions)
            added_us = between_us if sessions <= most else added[most] * (sessions - 1) / (most - 1)
        return max(self.forward.at(1), self.forward.at(rows) + added_us)

    def of(self, sessions: int) -> Callable[[int], float]:
        """For one plan, from a step's rows, over all `sessions`, to its time. With windows it takes no less than the
        plain step, nor more than plain steps for all its rows.
        """
        sessions = max(1, sessions)
        seen, plain_us = self.seen(sessions), self.measured(sessions, sessions)

        def step_us(rows: int) -> float:
            if rows <= sessions:
                return seen.pace * plain_us
            us = max(plain_us, self.measured(sessions, rows) * seen.ratio)
            return seen.pace * min(us, plain_us * math.ceil(rows / sessions))

        return cache(step_us)

    def plain(self, sessions: int) -> float:
        """Time of a step that decides one token for each of `sessions`."""
        return self.seen(sessions).pace * self.measured(sessions, sessions)

    def seen(self, sessions: int) -> PacedSteps:
        """What steps of so many tell. One of a new size is as slow as the machine was with the size next to it."""
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
        plain, seen = rows <= sessions, self.seen(sessions)
        seen.observe(plain, step_us / self.measured(sessions, rows))
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

        A hiccup is the machine's doing. Charged for it, a session would be in debt by no fault of its drafts, and plain
        steps hardly repay that (LOG).
        """
        return self.of(sessions)(rows) - self.plain(sessions)


# ----------------------------------------------------------------------------------------------------------------------
# The ledger that makes "never slower" a rule instead of a hope (docs/HOW_IT_WORKS.md).
#
#     L = time spent - time that plain decoding would have taken for the same tokens
#
# L stays within TOLERATED_SHARE of the elapsed time plus TOLERATED_STEPS plain steps. A window or a wait is begun only
# if L would stay there even if no draft token is accepted; beyond that the session decodes plainly. Waiting, wider
# forwards and probes are charged. In a batch a window is charged to its own session, and a wait to those that are
# waited for, by what it costs all of them (`part_of`). The plain steps are the batch's: a wait, or a draft of a head,
# costs the whole batch. Windows are not charged in a step that also feeds a prompt. Hiccups of the machine are not
# charged: what such steps take on average decides, which is learnt from all sessions' steps.


@dataclass(slots=True)
class Ledger:
    """A session's balance L, in microseconds. A reattached session starts from its predecessor's.

    Invariant, but for steps that took longer than expected: L stays within TOLERATED_SHARE of elapsed_us plus
    TOLERATED_STEPS plain steps of the largest batch.
    """

    balance_us: float = 0.0
    elapsed_us: float = 0.0

    def charge(self, spent_us: float, tokens: int, plain_step_us: float, cost_us: float | None = None) -> None:
        """Note a step of `spent_us` (with its waiting) that decided `tokens`. cost_us: the charge, if another."""
        self.balance_us += (spent_us if cost_us is None else cost_us) - tokens * plain_step_us
        self.elapsed_us += spent_us

    def spare_us(self, plain_step_us: float) -> float:
        """What windows and waits may lose at worst in the next step; negative in debt."""
        return TOLERATED_SHARE * self.elapsed_us + TOLERATED_STEPS * plain_step_us - self.balance_us


def part_of(window: int, windows: int, sessions: int) -> float:
    """What a session is charged for a batch's windows, or waits, as a multiple of the time that they take.

    All sessions wait for all windows. Each is charged for its own `window` only (of `windows` rows in all), but for
    what it costs all `sessions`: a window of mean width is charged the whole time once. So the batch never loses more
    than its sessions may lose on average. And no session runs into debt through other sessions' windows, which it could
    not repay by giving up its own (docs/LOG.md). Likewise a wait: those that are waited for, one each, share it.
    """
    return sessions * window / windows if windows else 1.0
