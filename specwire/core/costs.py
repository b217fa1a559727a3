"""What steps cost: V(m, rows), the plain step of a batch, and the software around a forward. Pure; microseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from specwire.core.speed import ForwardTimes, interpolated, smoothed

# Of what windows cost in a batch: how much of what was seen counts on from step to step, and for how many times what
# was expected a single slow step counts at most.
MEMORY, MOST_TIMES = 0.98, 3.0


class BatchTimes:
    """V(m, rows): a forward of several sessions, from V(m) of one and what further ones were measured to add to it.

    A row of another session costs more than one more of the same: it has keys and values of its own to read. What the
    further sessions add is linear between the numbers of sessions that were measured, and between positions of each;
    beyond the most sessions it grows in proportion, beyond the most positions not at all.

    Args:
        forward: V(m) of one session.
        measured: by (sessions, positions of each); none: sessions are taken to cost what their rows do.
    """

    def __init__(self, forward: ForwardTimes, measured: Mapping[tuple[int, int], float]) -> None:
        self._forward = forward
        self._added: dict[int, dict[int, float]] = {}
        for (sessions, depth), time_us in sorted(measured.items()):
            self._added.setdefault(sessions, {})[depth] = time_us - forward.at(sessions * depth)

    def at(self, sessions: int, rows: int) -> float:
        return self._forward.at(rows) + self._of_further(sessions, rows / sessions)

    def _of_further(self, sessions: int, depth: float) -> float:
        if not self._added or sessions < 2:
            return 0.0
        added = {number: interpolated(by_depth, depth) for number, by_depth in self._added.items()}
        most = max(added)
        if sessions > most:
            return added[most] * (sessions - 1) / (most - 1)
        return interpolated({1: 0.0, **added}, sessions)


class StepCosts:
    """Learned from steps; the ledger charges against `plain`.

    Args:
        forward: V(m), measured at start with nothing else running.
        batches: likewise, of several sessions; see BatchTimes.
    """

    def __init__(self, forward: ForwardTimes, batches: Mapping[tuple[int, int], float] | None = None) -> None:
        self.forward = forward
        self._batch = BatchTimes(forward, batches or {})
        self._plain: dict[int, float] = {}
        self._overhead: float | None = None
        # What windows added to the plain steps of their batches: seen, and expected.
        self._seen_us = self._expected_us = forward.at(1)
        # By (sessions, rows), until V(m) is refined.
        self._windows_us: dict[tuple[int, int], float] = {}

    def of(self, sessions: int) -> Callable[[int], float]:
        """A step by its rows, all `sessions` together: the forward and the software around it. For one plan."""
        if sessions < 2:
            return cache(self._of_one)
        plain_us = self.plain(sessions)
        scale = self._seen_us / self._expected_us

        def step_us(rows: int) -> float:
            return plain_us + scale * self._windows(sessions, rows)

        return cache(step_us)

    def _of_one(self, rows: int) -> float:
        return self.forward.at(rows) + self._beside(self.forward.at(1))

    def plain(self, sessions: int) -> float:
        """A step that decides one token for each of `sessions`: the forward and the software around it."""
        forward_us = self._plain_forward(sessions)
        return forward_us + self._beside(forward_us)

    def _beside(self, forward_us: float) -> float:
        return min(self._overhead or 0.0, forward_us)

    def _plain_forward(self, sessions: int) -> float:
        return self._plain.get(sessions) or self._batch.at(sessions, sessions)

    def _windows(self, sessions: int, rows: int) -> float:
        """What the rows of windows are expected to add to the plain step."""
        known = self._windows_us.get((sessions, rows))
        if known is None:
            known = max(0.0, self._batch.at(sessions, max(rows, sessions)) - self._batch.at(sessions, sessions))
            self._windows_us[sessions, rows] = known
        return known

    def observe(self, sessions: int, rows: int, forward_us: float, drafting: bool, waited: bool) -> float | None:
        """A step without prefill ran; returns what the plain step of its batch costs, None if it was one.

        A plain step counts as such only while no drafter was at work (`drafting`).
        """
        plain = rows == sessions
        if sessions == 1 and not (plain and drafting):
            self.forward.observe(rows, forward_us)
            self._windows_us.clear()
        if sessions > 1 and plain and not drafting:
            self._plain[sessions] = smoothed(self._plain.get(sessions), forward_us, 0.05)
        if sessions > 1 and not plain:
            self._observe_windows(self._windows(sessions, rows), forward_us - self._plain_forward(sessions))
        return None if plain and not waited else self.plain(sessions)

    def _observe_windows(self, expected_us: float, seen_us: float) -> None:
        """Sums, not a mean of quotients: of windows that cost next to nothing a quotient may be anything."""
        most_us = MOST_TIMES * expected_us * max(1.0, self._seen_us / self._expected_us)
        self._seen_us = MEMORY * self._seen_us + min(max(0.0, seen_us), most_us)
        self._expected_us = MEMORY * self._expected_us + expected_us

    def observe_overhead(self, overhead_us: float) -> None:
        """Between one step's forward and the next: choosing, resolving, commands; no waiting, no idling."""
        self._overhead = smoothed(self._overhead, overhead_us, 0.05)
