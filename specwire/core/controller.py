"""Chooses each session's discipline, chunk and run-ahead from measured speeds; pure: told what happened, it answers.

lockstep   drafter and verifier share cores: they take turns; the drafter sends one chunk per verdict and the
           verifier waits for it when that pays
stream     they do not, or hardly disturb each other: the drafter streams small chunks, as far ahead as the round trip
           needs (`specwire.core.streaming`, `specwire.core.side_by_side`)
off        no gain is expected: plain decoding, with a probe now and then (`specwire.core.probing`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specwire.core.agreement import Agreement
from specwire.core.calibration import Calibration
from specwire.core.chain import Proposal
from specwire.core.drafting import Pace
from specwire.core.plan import Discipline, Plan, in_turns, off
from specwire.core.planner import PlannedVerdict
from specwire.core.probing import Probing
from specwire.core.shares import MOST_WINDOW
from specwire.core.side_by_side import SideBySide
from specwire.core.speed import AcceptanceByPosition, ForwardTimes, lockstep_rate, smoothed
from specwire.core.streaming import Streaming

# Of drafting in turns: over plain decoding.
LEAST_GAIN = 1.01
# Until a token's drafting was measured.
FIRST_WINDOW = 4
FIRST_PACE = Pace(1, 32)
# Plan after each of the first verdicts, then after every so many.
FIRST_VERDICTS = 8
PLAN_EVERY = 4

# A drafter's own probabilities may end a chain once they are trusted; until then a floor too low to end anything keeps
# them coming. Windows are then longer by so many tokens.
ASKING_FLOOR = 0.01
FLOOR_STEP = 0.05
MOST_FLOOR = 0.9
EXTRA_WINDOW = 3

LEAST_OVERHEAD_US = 200.0
# Answers of a drafter on the verifier's host that the verifier does not test, one after the other: they cost, and bring
# nothing.
MOST_IGNORED = 16
# A far drafter is not given up before so many of its tokens were held against the text.
LEAST_COMPARED = 48.0

# What one session learnt counts in the next for so many tests a position, and comparisons.
INHERITED_TESTS = 16.0
INHERITED_COMPARISONS = 64.0


class Controller:
    """A `Planner` that learns: one for each drafter of a session.

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
        self._verdicts = self._ignored = 0
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

    # What happened

    def observe_proposal(self, proposal: Proposal, draft_us: int, arrived_us: float | None = None) -> None:
        """See `Planner`."""
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

    def observe_verdict(self, decided: PlannedVerdict) -> None:
        """See `Planner`."""
        self._agreement.decided(decided.position, decided.tokens)
        if decided.tested:
            self._acceptance.observe(decided.tested, decided.accepted)
            self._calibration.settle(decided.accepted)
        self._answered(decided)
        if decided.delay_us:
            overhead_us = max(0.0, decided.delay_us - self._drafted_us)
            self._observe_overhead(overhead_us)
        self._beside.verdict(len(decided.tokens), decided.forward)
        self._verdicts += 1
        answered = self._shared and (decided.tested > 0 or decided.delay_us > 0)
        self._probing.verdict(answered, float(decided.delay_us))

    def _answered(self, decided: PlannedVerdict) -> None:
        """Count answers that were in time and still not tested: a full verifier tests what pays, maybe nothing."""
        if decided.tested:
            self._ignored = 0
        elif decided.delay_us:
            self._ignored += 1

    def _observe_overhead(self, overhead_us: float) -> None:
        """A far drafter that is given up for its distance is heard once in 128 verdicts.

        No answer is faster than its line: one that took less than half of the estimate says that this is another line
        now, and smoothing would take a dozen probes to believe it.
        """
        known = self._overhead_us
        nearer = not self._shared and known is not None and overhead_us < known / 2
        self._overhead_us = smoothed(None if nearer else known, overhead_us, least=LEAST_OVERHEAD_US)

    def drafter_changed(self) -> None:
        """See `Planner`."""
        self._overhead_us = None

    # What to do

    @property
    def time_to_plan(self) -> bool:
        """Often while much is learnt from each verdict, then now and then."""
        early = self._verdicts <= FIRST_VERDICTS
        return early or self._probing.ended or self._verdicts % PLAN_EVERY == 0

    def plan(self) -> Plan:
        """See `Planner`."""
        if self._draft_us is None:
            return self._measuring()
        if not self._shared:
            return self._apart(self._draft_us)
        return self._side_by_side(self._draft_us) or self._in_turns(self._draft_us)

    def _measuring(self) -> Plan:
        if self._shared:
            return in_turns(FIRST_WINDOW, "measuring", ASKING_FLOOR)
        return Plan(Discipline.STREAM, FIRST_PACE, 0, "measuring")

    def _apart(self, draft_us: float) -> Plan:
        """The drafter has hardware of its own."""
        rates = self._acceptance.rates(MOST_WINDOW, self._agreement.rate)
        known = self._streaming(rates, draft_us)
        way = known.fastest()
        if not way.pays and self._agreement.compared >= LEAST_COMPARED:
            return self._probe_or_off()
        return known.plan(way)

    def _side_by_side(self, draft_us: float) -> Plan | None:
        rates = self._acceptance.rates(MOST_WINDOW)
        beside = self._beside.choose(rates, self._agreement.rate, draft_us, self._overhead_us or 0.0)
        if beside is None:
            return None
        pace = Pace(1, self._streaming(rates, beside.draft_us).run_ahead())
        return Plan(Discipline.STREAM, pace, 0, beside.reason)

    def _streaming(self, rates: Sequence[float], draft_us: float) -> Streaming:
        return Streaming(rates, self._agreement.rate, draft_us, self._overhead_us or 0.0, self._forward)

    def _in_turns(self, draft_us: float) -> Plan:
        rates, overhead_us = self._acceptance.rates(MOST_WINDOW), self._overhead_us or 0.0
        windows = range(MOST_WINDOW + 1)
        speeds = [lockstep_rate(rates, window, draft_us, self._forward, overhead_us) for window in windows]
        best = max(windows[1:], key=speeds.__getitem__)
        gain = speeds[best] / speeds[0]
        if gain < LEAST_GAIN or self._ignored >= MOST_IGNORED:
            return self._probe_or_off()
        if not self._calibration.trusted:
            return in_turns(best, f"window {best}, gain {gain:.2f}", ASKING_FLOOR)
        floor = self._floor(best, speeds[best], draft_us)
        return in_turns(min(MOST_WINDOW, best + EXTRA_WINDOW), f"floor {floor:.2f}, gain {gain:.2f}", floor)

    def _floor(self, window: int, speed: float, draft_us: float) -> float:
        """Chain probability below which one more draft token costs more time than it is expected to save.

        A token with chain probability P brings P tokens for draft_us + the growth of V; at the best speed (tokens per
        microsecond) that time would have brought (draft_us + growth) * speed. In coarse steps, so that the pace does
        not change all the time.
        """
        growth = (self._forward.at(window + 1) - self._forward.at(1)) / window
        steps = round((draft_us + growth) * speed / FLOOR_STEP)
        return min(MOST_FLOOR, max(ASKING_FLOOR, steps * FLOOR_STEP))

    def _probe_or_off(self) -> Plan:
        return self._probing.plan(self._shared, self._forward.at(1)) or off("no gain expected")
