"""Chooses each session's discipline, chunk and run-ahead from measured speeds; pure: told what happened, it answers.

lockstep   drafter and verifier share cores: they take turns; the drafter sends one chunk per verdict and the
           verifier waits for it when that pays
stream     they do not, or hardly disturb each other: the drafter streams small chunks, as far ahead as the round trip
           needs
off        no gain is expected: plain decoding, with a probe now and then
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil
from typing import NamedTuple, Protocol

from specwire.core.agreement import Agreement
from specwire.core.chain import Proposal
from specwire.core.contention import Forward
from specwire.core.drafting import Pace
from specwire.core.side_by_side import SideBySide
from specwire.core.speed import (
    DECAY,
    AcceptanceByPosition,
    ForwardTimes,
    expected_tokens,
    lockstep_rate,
    smoothed,
    stream_rate,
    waiting_rate,
)

MOST_WINDOW = 16
LEAST_GAIN = 1.01
# A drafter on hardware of its own takes no time from the verifier, and what is expected of a stream is a little low.
LEAST_REMOTE_GAIN = 1.005
# A drafter that does not pay is tried out again, not more often than after so many verdicts and for this share of the
# time. A probe ends with the verdict that its answer met, or after so many. One with hardware of its own takes no time
# from the verifier, so it streams for so many and nobody waits: one comparison in 128 verdicts would teach nothing.
PROBE_EVERY = 128
PROBE_SHARE = 0.005
PROBE_VERDICTS = 4
PROBE_WINDOW = 2
STREAMED_PROBE, STREAMED_PROBE_PACE = 16, Pace(1, 8)
FIRST_WINDOW = 4
# Of a stream: chunks of up to so many tokens, as long as drafting one takes no more than this share of a forward.
MOST_CHUNK = 4
CHUNK_SHARE = 0.125
# What a stream's verifier waits for may come in several chunks, of no more than is drafted during a forward: a chain is
# wrong most often at its beginning, a token counts only once its chunk is whole, and the drafter goes on in any case.
MOST_FIRST_CHUNK = 8
FIRST_PACE = Pace(1, 32)
MOST_RUN_AHEAD = 128
# So many times the expected length of a run of right guesses is as far as drafting is of use. A drafter at rest begins
# a new chain at once; one that drafts finishes its token first, which matters where that takes this share of a forward.
USEFUL_RUNS, LEAST_USEFUL = 7.0, 4
LONG_TOKEN = 0.05

# A drafter's own probabilities are trusted to stop a chain while they foretell what is accepted within these bounds.
# Until then a floor too low to stop anything keeps them coming.
CALIBRATED = (0.7, 1.4)
LEAST_WINDOWS = 8.0
ASKING_FLOOR = 0.01
FLOOR_STEP = 0.05
MOST_FLOOR = 0.9
EXTRA_WINDOW = 3

LEAST_OVERHEAD_US = 200.0
# A far drafter is not given up before so many of its tokens were held against the text.
LEAST_COMPARED = 48.0

# What one session learnt counts in the next for so many tests a position.
INHERITED_TESTS = 16.0
INHERITED_COMPARISONS = 64.0


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

    def __str__(self) -> str:
        return f"{self.discipline}: {self.reason}"


OFF_PACE = Pace(1, 0)
FIRST_VERDICTS = 8
PLAN_EVERY = 4


class InvalidPlan(ValueError):
    """A fixed plan that cannot be read."""


def parse_plan(spec: str) -> Plan | None:
    """A fixed plan: off, lockstep:K or stream:CHUNK,RUN_AHEAD[,DUE]; None for auto, where a controller plans.

    Raises:
        InvalidPlan: `spec` reads otherwise.
    """
    name, _, numbers = spec.partition(":")
    try:
        values = [int(number) for number in numbers.split(",")] if numbers else []
        match name, values:
            case "auto", []:
                return None
            case "off", []:
                return Plan(Discipline.OFF, OFF_PACE, 0, "fixed")
            case "lockstep", [window]:
                return _checked(Plan(Discipline.LOCKSTEP, Pace(window, window), window, "fixed"))
            case "stream", [chunk, run_ahead, *due] if len(due) <= 1:
                return _checked(Plan(Discipline.STREAM, Pace(chunk, run_ahead), due[0] if due else 0, "fixed"))
    except ValueError as error:
        raise InvalidPlan(f"plan: {spec!r}: {error}") from error
    raise InvalidPlan(f"plan: must be auto, off, lockstep:K or stream:CHUNK,RUN_AHEAD[,DUE], not {spec!r}")


def _checked(plan: Plan) -> Plan:
    """ValueError for one that no drafter could follow."""
    if not plan.pace.chunk <= plan.pace.run_ahead <= MOST_RUN_AHEAD:
        raise ValueError(f"the run-ahead must be from the chunk to {MOST_RUN_AHEAD}, not {plan.pace.run_ahead}")
    if not 0 <= plan.due <= plan.pace.run_ahead:
        raise ValueError(f"due must be from 0 to the run-ahead, not {plan.due}")
    return plan


class Decided(NamedTuple):
    """What a planner is told of a verdict.

    Attributes:
        position, tokens: the decided tokens and where the first of them stands.
        tested, accepted: draft tokens of the drafter in the window, and of those the accepted ones.
        delay_us: from an earlier verdict to the proposal that answered it, 0 if none came.
        forward: the forward that decided, if it was the session's alone and its times are known.
    """

    position: int
    tokens: Sequence[int]
    tested: int
    accepted: int
    delay_us: int
    forward: Forward | None = None


class Planner(Protocol):
    """Told what happened, it says how to draft next."""

    def successor(self, forward: ForwardTimes, shared_host: bool) -> Planner: ...
    def observe_proposal(self, proposal: Proposal, draft_us: int, arrived_us: float | None = None) -> None: ...
    def observe_verdict(self, decided: Decided) -> None: ...
    def drafter_changed(self) -> None: ...
    @property
    def time_to_plan(self) -> bool: ...
    def plan(self) -> Plan: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """A `Planner` of one plan: what the controller's choices are compared with."""

    fixed: Plan

    def successor(self, forward: ForwardTimes, shared_host: bool) -> Fixed:
        return self

    def observe_proposal(self, proposal: Proposal, draft_us: int, arrived_us: float | None = None) -> None:
        pass

    def observe_verdict(self, decided: Decided) -> None:
        pass

    def drafter_changed(self) -> None:
        pass

    @property
    def time_to_plan(self) -> bool:
        return False

    def plan(self) -> Plan:
        return self.fixed


@dataclass(slots=True)
class Calibration:
    """How well a drafter's own estimates foretell acceptance: decayed sums over tested windows."""

    windows: float = 0.0
    expected: float = 0.0
    accepted: float = 0.0
    announced: float = 0.0

    def announce(self, expected: float) -> None:
        """A proposal came with its estimate."""
        self.announced += expected

    def settle(self, accepted: int) -> None:
        """The window that held what was announced had `accepted` tokens accepted."""
        if self.announced:
            self.windows = DECAY * self.windows + 1.0
            self.expected = DECAY * self.expected + self.announced
            self.accepted = DECAY * self.accepted + accepted
        self.announced = 0.0

    @property
    def trusted(self) -> bool:
        low, high = CALIBRATED
        return self.windows >= LEAST_WINDOWS and low * self.expected <= self.accepted <= high * self.expected


@dataclass(slots=True)
class Probing:
    """When a drafter that does not pay is tried out, and what that costs.

    Where the verifier's host also drafts, a probe's price is what the verifier may have waited: the drafter first feeds
    all that was decided since it last heard. Elsewhere nobody waits.
    """

    verdicts: int = 0
    left: int = 0
    price_us: float = 0.0
    ended: bool = False

    def verdict(self, answered: bool, price_us: float) -> None:
        self.verdicts += 1
        under_way = self.left > 0
        if under_way:
            self.left = 0 if answered else self.left - 1
            self.price_us = price_us if answered else self.price_us
        self.ended = under_way and self.left == 0

    def begins(self, plain_us: float, lasts: int) -> bool:
        """Whether to begin one, of so many verdicts at most; plain_us: time of a verdict's forward."""
        if self.verdicts < PROBE_EVERY or PROBE_SHARE * self.verdicts * plain_us < self.price_us:
            return False
        self.verdicts, self.left = 0, lasts
        return True


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
        self._agreement = Agreement()
        self._calibration = Calibration()
        self._draft_us: float | None = None
        self._overhead_us: float | None = None
        self._drafted_us = 0.0
        self._verdicts = 0
        self._probing = Probing()
        self._beside = SideBySide(forward)

    def successor(self, forward: ForwardTimes, shared_host: bool) -> Controller:
        """The controller of a session that comes after this one: it starts from what was learnt, not from guesses.

        Where it runs is not learnt: the verifier's V(m), and whether the drafter shares its host, are the new place's.

        So a drafter that does not pay costs every 128 verdicts a probe, not every session its beginning.
        """
        heir = Controller(forward, shared_host)
        heir._acceptance = self._acceptance.faded(INHERITED_TESTS)
        heir._agreement = self._agreement.faded(INHERITED_COMPARISONS)
        heir._calibration = replace(self._calibration, announced=0.0)
        heir._draft_us = self._draft_us
        heir._overhead_us = self._overhead_us
        heir._probing = replace(self._probing, left=0)
        if forward is self._forward and shared_host == self._shared:
            heir._beside = self._beside
            heir._beside.begin()
        return heir

    def observe_proposal(self, proposal: Proposal, draft_us: int, arrived_us: float | None = None) -> None:
        """A chunk came that took `draft_us` to draft. arrived_us: when, on the clock of the verdicts' forwards."""
        if proposal.tokens:
            self._observe_draft(max(1, draft_us) / len(proposal.tokens))
        if arrived_us is not None:
            self._beside.contention.drafted(arrived_us, draft_us)
        self._drafted_us = float(draft_us)
        self._calibration.announce(proposal.expected)
        self._agreement.proposal(proposal)

    def _observe_draft(self, token_us: float) -> None:
        """A token takes longer to draft while the verifier computes beside it: that is no time for taking turns by."""
        if self._beside.active:
            self._beside.drafted(token_us)
        else:
            self._draft_us = smoothed(self._draft_us, token_us)

    def observe_verdict(self, decided: Decided) -> None:
        self._agreement.decided(decided.position, decided.tokens)
        if decided.tested:
            self._acceptance.observe(decided.tested, decided.accepted)
            self._calibration.settle(decided.accepted)
        if decided.delay_us:
            overhead_us = max(0.0, decided.delay_us - self._drafted_us)
            self._observe_overhead(overhead_us)
        self._beside.verdict(len(decided.tokens), decided.forward)
        self._verdicts += 1
        answered = self._shared and (decided.tested > 0 or decided.delay_us > 0)
        self._probing.verdict(answered, float(decided.delay_us))

    def _observe_overhead(self, overhead_us: float) -> None:
        """A far drafter that is given up for its distance is heard once in 128 verdicts.

        No answer is faster than its line: one that took less than half of the estimate says that this is another line
        now, and smoothing would take a dozen probes to believe it.
        """
        known = self._overhead_us
        nearer = not self._shared and known is not None and overhead_us < known / 2
        self._overhead_us = smoothed(None if nearer else known, overhead_us, least=LEAST_OVERHEAD_US)

    def drafter_changed(self) -> None:
        """Another drafter, or another line to the same one: how far it is must be measured again."""
        self._overhead_us = None

    @property
    def time_to_plan(self) -> bool:
        """Whether to plan after the last verdict: often while much is learnt from each, then now and then."""
        early = self._verdicts <= FIRST_VERDICTS
        return early or self._probing.ended or self._verdicts % PLAN_EVERY == 0

    def plan(self) -> Plan:
        """The settings for what is drafted next."""
        if self._draft_us is None:
            return self._measuring()
        if not self._shared:
            return self._remote(self._draft_us)
        return self._side_by_side(self._draft_us) or self._in_turns(self._draft_us)

    def _side_by_side(self, draft_us: float) -> Plan | None:
        rates, overhead_us = self._acceptance.rates(MOST_WINDOW), self._overhead_us or 0.0
        beside = self._beside.choose(rates, self._agreement.rate, draft_us, overhead_us)
        if beside is None:
            return None
        pace = Pace(1, self._run_ahead(rates, beside.draft_us, overhead_us))
        return Plan(Discipline.STREAM, pace, 0, beside.reason)

    def _in_turns(self, draft_us: float) -> Plan:
        rates = self._acceptance.rates(MOST_WINDOW)
        speeds = [self._speed(rates, window, draft_us) for window in range(MOST_WINDOW + 1)]
        best = max(range(1, MOST_WINDOW + 1), key=speeds.__getitem__)
        gain = speeds[best] / speeds[0]
        if gain < LEAST_GAIN:
            return self._off_or_probe()
        if not self._calibration.trusted:
            return self._lockstep(best, ASKING_FLOOR, f"window {best}, gain {gain:.2f}")
        floor = self._floor(best, speeds[best], draft_us)
        return self._lockstep(min(MOST_WINDOW, best + EXTRA_WINDOW), floor, f"floor {floor:.2f}, gain {gain:.2f}")

    def _measuring(self) -> Plan:
        if self._shared:
            return self._lockstep(FIRST_WINDOW, ASKING_FLOOR, "measuring")
        return Plan(Discipline.STREAM, FIRST_PACE, 0, "measuring")

    def _speed(self, rates: list[float], window: int, draft_us: float) -> float:
        """Expected tokens per microsecond in lockstep; window 0 is plain decoding."""
        return lockstep_rate(rates, window, draft_us, self._forward, self._overhead_us or 0.0)

    def _remote(self, draft_us: float) -> Plan:
        """A drafter on hardware of its own streams; the verifier waits for it where a round of waiting is faster."""
        agreement = self._agreement.rate
        rates = self._acceptance.rates(MOST_WINDOW, agreement)
        plain = 1.0 / self._forward.at(1)
        delay_us = self._overhead_us or 0.0
        chunk = max(1, min(MOST_CHUNK, int(CHUNK_SHARE * self._forward.at(1) / draft_us)))
        # A verdict finds a drafter that streams in the middle of a token.
        met_us = delay_us + draft_us / 2
        windows = range(1, MOST_WINDOW + 1)
        speeds = {(Discipline.STREAM, 0): stream_rate(rates, agreement, draft_us, self._forward, met_us, chunk)}
        for window in windows:
            waiting = waiting_rate(rates, agreement, draft_us, self._forward, met_us, window)
            speeds[Discipline.STREAM, window] = waiting
            speeds[Discipline.LOCKSTEP, window] = self._speed(rates, window, draft_us)
        best = max(speeds, key=speeds.__getitem__)
        gain = speeds[best] / plain
        if gain < LEAST_REMOTE_GAIN and self._agreement.compared >= LEAST_COMPARED:
            return self._off_or_probe()
        discipline, due = best
        why = "comparing, " if gain < LEAST_REMOTE_GAIN else "waits, " if due else ""
        reason = f"{why}gain {gain:.2f}" + (f" with {due}" if due else "")
        ahead = due if discipline is Discipline.LOCKSTEP else self._run_ahead(rates, draft_us, delay_us)
        most = max(chunk, min(MOST_FIRST_CHUNK, int(self._forward.at(1) / draft_us)))
        chunk = min(due, most) or chunk if discipline is Discipline.STREAM else due
        return Plan(discipline, Pace(chunk, max(due, ahead)), due, reason)

    def _run_ahead(self, rates: list[float], draft_us: float, delay_us: float) -> int:
        """What is decided during a round trip at the best conceivable speed, and a window for the step behind it.

        No more than is of use, for a drafter whose tokens take long.
        """
        step_us = self._forward.at(1)
        fastest = min(1.0 / draft_us, expected_tokens(rates, MOST_WINDOW) / step_us)
        ahead = min(MOST_RUN_AHEAD, MOST_WINDOW + ceil((delay_us + step_us) * fastest))
        if draft_us < LONG_TOKEN * step_us:
            return ahead
        agreement = min(self._agreement.rate, 0.99)
        return min(ahead, max(LEAST_USEFUL, ceil(USEFUL_RUNS * agreement / (1.0 - agreement))))

    def _floor(self, window: int, speed: float, draft_us: float) -> float:
        """Chain probability below which one more draft token costs more time than it is expected to save.

        A token with chain probability P brings P tokens for draft_us + the growth of V; at the best speed that time
        would have brought (draft_us + growth) * speed. In coarse steps, so that the pace does not change all the time.
        """
        growth = (self._forward.at(window + 1) - self._forward.at(1)) / window
        steps = round((draft_us + growth) * speed / FLOOR_STEP)
        return min(MOST_FLOOR, max(ASKING_FLOOR, steps * FLOOR_STEP))

    def _lockstep(self, window: int, floor: float, reason: str) -> Plan:
        return Plan(Discipline.LOCKSTEP, Pace(window, window, floor), window, reason)

    def _off_or_probe(self) -> Plan:
        lasts = PROBE_VERDICTS if self._shared else STREAMED_PROBE
        if not self._probing.left and not self._probing.begins(self._forward.at(1), lasts):
            return Plan(Discipline.OFF, OFF_PACE, 0, "no gain expected")
        if not self._shared:
            return Plan(Discipline.STREAM, STREAMED_PROBE_PACE, 0, "probe")
        return Plan(Discipline.LOCKSTEP, Pace(PROBE_WINDOW, PROBE_WINDOW), PROBE_WINDOW, "probe")
