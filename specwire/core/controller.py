"""Chooses each session's discipline, chunk and run-ahead from measured speeds; pure: told what happened, it answers.

lockstep   drafter and verifier share cores: they take turns; the drafter sends one chunk per verdict and the
           verifier waits for it when that pays
stream     they do not: the drafter streams small chunks, as far ahead as the round trip needs
off        no gain is expected: plain decoding, with a probe now and then
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from specwire.core.drafting import Pace
from specwire.core.speed import AcceptanceByPosition, ForwardTimes, expected_tokens, lockstep_rate, smoothed

MOST_WINDOW = 16
LEAST_GAIN = 1.01
PROBE_EVERY = 128
PROBE_WINDOW = 2
FIRST_WINDOW = 4
STREAM_CHUNK = 2
STREAM_RUN_AHEAD = 32


class Discipline(StrEnum):
    """How drafter and verifier share time."""

    STREAM = "stream"
    LOCKSTEP = "lockstep"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Plan:
    """`due`: draft tokens that the verifier may expect after each verdict; 0 = none. `reason`: for metrics."""

    discipline: Discipline
    pace: Pace
    due: int
    reason: str


OFF_PACE = Pace(1, 0)


class Controller:
    """One per session.

    Args:
        forward: V(m) of the verifier, shared by its sessions.
        shared_host: drafter and verifier compute on one machine.
    """

    def __init__(self, forward: ForwardTimes, shared_host: bool) -> None:
        self._forward = forward
        self._shared = shared_host
        self._acceptance = AcceptanceByPosition()
        self._draft_us: float | None = None
        self._delay_us: float | None = None
        self._last_run_ahead = 0
        self._since_probe = 0

    def observe_proposal(self, tokens: int, draft_us: int) -> None:
        if tokens and draft_us:
            self._draft_us = smoothed(self._draft_us, draft_us / tokens)

    def observe_verdict(self, tested: int, accepted: int, delay_us: int) -> None:
        """`delay_us`: from the previous verdict to the proposal that followed it, 0 if none came."""
        if tested:
            self._acceptance.observe(tested, accepted)
        if delay_us:
            self._delay_us = smoothed(self._delay_us, float(delay_us))
        self._since_probe += 1

    def plan(self) -> Plan:
        """The settings for what is drafted next."""
        chosen = self._plan()
        self._last_run_ahead = chosen.pace.run_ahead
        return chosen

    def _plan(self) -> Plan:
        if self._draft_us is None:
            return self._lockstep(FIRST_WINDOW, "measuring") if self._shared else self._stream("measuring")
        rates = self._acceptance.rates(MOST_WINDOW)
        plain = 1.0 / self._forward.at(1)
        best = max(range(1, MOST_WINDOW + 1), key=lambda k: self._rate(rates, k))
        if self._rate(rates, best) < LEAST_GAIN * plain:
            return self._off_or_probe()
        if not self._shared:
            return self._stream(f"gain {self._rate(rates, best) / plain:.2f}")
        floor = self._floor(rates, best)
        return self._lockstep(min(MOST_WINDOW, best + 2 if floor else best), f"window {best}", floor)

    def _overhead_us(self) -> float:
        """What a cycle costs beside drafting and the forward: the delay from verdict to proposal less the drafting."""
        if self._delay_us is None or self._draft_us is None:
            return 0.0
        return max(0.0, self._delay_us - self._last_run_ahead * self._draft_us)

    def _rate(self, rates: list[float], window: int) -> float:
        draft_us = self._draft_us or 0.0
        if self._shared:
            return lockstep_rate(rates, window, draft_us, self._forward, min(self._overhead_us(), self._forward.at(1)))
        cycle = max(self._forward.at(window + 1), window * draft_us)
        return expected_tokens(rates, window) / cycle

    def _floor(self, rates: list[float], window: int) -> float:
        """Chain probability below which one more draft token costs more time than it is expected to save.

        A token with chain probability P brings P tokens for draft_us + the growth of V; at the best rate r that time
        would have brought (draft_us + growth) * r.
        """
        growth = (self._forward.at(window + 1) - self._forward.at(1)) / window
        return min(0.9, max(0.0, ((self._draft_us or 0.0) + growth) * self._rate(rates, window)))

    def _lockstep(self, window: int, reason: str, floor: float = 0.0) -> Plan:
        return Plan(Discipline.LOCKSTEP, Pace(window, window, floor), window, reason)

    def _stream(self, reason: str) -> Plan:
        return Plan(Discipline.STREAM, Pace(STREAM_CHUNK, STREAM_RUN_AHEAD), STREAM_CHUNK, reason)

    def _off_or_probe(self) -> Plan:
        if self._since_probe < PROBE_EVERY:
            return Plan(Discipline.OFF, OFF_PACE, 0, "no gain expected")
        self._since_probe = 0
        probe = Pace(PROBE_WINDOW, PROBE_WINDOW)
        return Plan(Discipline.LOCKSTEP if self._shared else Discipline.STREAM, probe, PROBE_WINDOW, "probe")
