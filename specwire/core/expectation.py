"""When a session's next proposal is due, from its own history. Pure: it is told times; microseconds throughout."""

from __future__ import annotations

from dataclasses import dataclass, field

from specwire.core.speed import smoothed

# A round trip can be hundreds of steps long.
REMEMBERED_VERDICTS = 1024
MEMORY = 0.2
# A first guess before anything was measured, as shares of a plain step.
GUESSED_DELAY, GUESSED_DEVIATION = 0.5, 0.25
# Lateness that is still waited for: a few deviations, as TCP's retransmission timer has it (RFC 6298).
LEAST_SLACK_US = 200.0
SLACK_DEVIATIONS = 4
# After so many steps without waiting, the delay is taken to be half of what was measured: it was measured while the
# verifier computed, and on shared cores a wait shortens it. The ledger pays for a wrong guess.
PROBE_AFTER = 16
PROBE_SHARE = 0.5


@dataclass(slots=True)
class Expectation:
    """The delay from a verdict to the proposal that answers it: mean, mean deviation, and how often it kept its time.

    A new chain answers the verdict that ended at its base, wherever later verdicts stand; a chunk of a chain that goes
    on answers the last verdict. `chance` is judged on every verdict, waited for or not. Reported is the delay of new
    chains alone: a chain that goes on was under way before the verdict that it is held against.
    """

    delay_us: float | None = None
    deviation_us: float = 0.0
    chance: float = 1.0
    arrived: bool = True
    skipped: int = 0
    last_delay_us: float = 0.0
    _since_us: float | None = None
    _verdicts: dict[int, float] = field(default_factory=dict)

    def verdict(self, end: int, now_us: float, waited: bool) -> float:
        """A verdict that ends at position `end` goes out; returns the delay to be reported with it, 0 if none."""
        if waited:
            self.skipped = 0
        if not self.arrived and self._since_us is not None:
            self.skipped += not waited
            if self.delay_us is not None or waited:
                self._judge(now_us - self._since_us <= self._latest())
        told, self.last_delay_us = self.last_delay_us, 0.0
        self._remember(end, now_us)
        self.arrived = False
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
            expected = GUESSED_DELAY * plain_step_us
            return since + expected, since + expected + 2 * GUESSED_DEVIATION * plain_step_us
        share = PROBE_SHARE if self.skipped >= PROBE_AFTER else 1.0
        return since + share * self.delay_us, since + self._latest()

    def _learn(self, delay_us: float) -> None:
        if self.delay_us is None:
            self.deviation_us = delay_us / 4
        else:
            self._judge(delay_us <= self._latest())
            self.deviation_us = smoothed(self.deviation_us, abs(delay_us - self.delay_us), MEMORY, LEAST_SLACK_US)
        self.delay_us = smoothed(self.delay_us, delay_us, MEMORY, LEAST_SLACK_US)

    def _asked(self, base: int, offset: int) -> float | None:
        return self._verdicts.get(base) if offset == 0 else self._since_us

    def _latest(self) -> float:
        return (self.delay_us or 0.0) + max(LEAST_SLACK_US, SLACK_DEVIATIONS * self.deviation_us)

    def _judge(self, kept: bool) -> None:
        self.chance += MEMORY * ((1.0 if kept else 0.0) - self.chance)
