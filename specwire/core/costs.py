"""What steps cost: V(m), the plain step of a batch, and the software around a forward. Pure; microseconds."""

from __future__ import annotations

from specwire.core.speed import ForwardTimes, smoothed


class StepCosts:
    """Learned from steps; the ledger charges against `plain`.

    Args:
        forward: V(m), measured at start with nothing else running.
    """

    def __init__(self, forward: ForwardTimes) -> None:
        self.forward = forward
        self._plain: dict[int, float] = {}
        self._overhead: float | None = None

    def step(self, rows: int) -> float:
        """A step of `rows` positions, all sessions together: the forward and the software around it.

        V(rows) of one session is a first approximation for a batch.
        """
        return self.forward.at(rows) + min(self._overhead or 0.0, self.forward.at(1))

    def plain(self, sessions: int) -> float:
        """A step that decides one token for each of `sessions`: the forward and the software around it."""
        forward = self._plain.get(sessions) or self.forward.at(sessions)
        return forward + min(self._overhead or 0.0, forward)

    def observe(self, sessions: int, rows: int, forward_us: float, drafting: bool, waited: bool) -> float | None:
        """A step without prefill ran; returns what the plain step of its batch costs, None if it was one.

        A plain step counts as such only while no drafter was at work (`drafting`).
        """
        plain = rows == sessions
        if sessions == 1 and not (plain and drafting):
            self.forward.observe(rows, forward_us)
        if sessions > 1 and plain and not drafting:
            self._plain[sessions] = smoothed(self._plain.get(sessions), forward_us, 0.05)
        return None if plain and not waited else self.plain(sessions)

    def observe_overhead(self, overhead_us: float) -> None:
        """Between one step's forward and the next: choosing, resolving, commands; no waiting, no idling."""
        self._overhead = smoothed(self._overhead, overhead_us, 0.05)
