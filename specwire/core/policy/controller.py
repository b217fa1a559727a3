"""How a drafter is to draft for one session: off, streaming, or in turns with the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple, Protocol

from specwire.core.messages import (
    MOST_RUN_AHEAD,
    MOST_WINDOW,
    Discipline,
    Outcome,
    Pace,
    Plan,
    ProposedChunk,
    Verdict,
)
from specwire.core.policy.estimates import (
    Estimates,
    Forward,
    ForwardTimes,
    LastDraft,
    TimedChunk,
    affordable,
    expected_tokens,
    lockstep_rate,
    smoothed,
    stream_rate,
    waiting_rate,
)
from specwire.core.policy.tunables import (
    AWAITED_VERDICTS,
    CHUNK_SHARE,
    DECAY,
    ENOUGH,
    ENOUGH_COMPARED,
    EXTRA_WINDOW,
    FIRST_PACE,
    FLOOR_STEP,
    LEAST_ADVANTAGE,
    LEAST_GAIN,
    LEAST_STREAM_GAIN,
    LEAST_TIMING_US,
    LONG_TOKEN,
    MOST_BRANCHES,
    MOST_FIRST_CHUNK,
    NEGLIGIBLE,
    PLAN_EVERY,
    PROBE_EVERY,
    PROBE_WINDOW,
    SHORT_CHAIN,
    TIMING_WEIGHT,
    TOLERATED_SHARE,
    TOLERATED_STEPS,
    TRIAL_VERDICTS,
    USEFUL_RUNS,
)

# ----------------------------------------------------------------------------------------------------------------------
# How a drafter and its verifier are to share time: what a controller chooses, or a measurement fixes. Pure.
#
# lockstep   they take turns; the drafter sends one chunk per verdict and the verifier waits for it when that pays
# stream     the drafter streams small chunks, as far ahead as the round trip needs; the verifier need not wait
# off        plain decoding

OFF_PACE = Pace(1, 0)


def off(reason: str) -> Plan:
    """Draft nothing."""
    return Plan(Discipline.OFF, OFF_PACE, 0, reason)


def in_turns(window: int, reason: str, floor: float = 0.0) -> Plan:
    """One chunk of `window` tokens a verdict, which the verifier waits for.

    floor: a chain's probability below which the drafter ends the chunk; 0 ends none.
    """
    return Plan(Discipline.LOCKSTEP, Pace(window, window, floor), window, reason)


class InvalidPlan(ValueError):
    """A fixed plan that cannot be read."""


def parse_plan(spec: str) -> Plan | None:
    """A fixed plan: off, lockstep:K or stream:CHUNK,RUN_AHEAD[,DUE[,BRANCHES]]; None for auto, where a controller
    plans.

    auto:BRANCHES has it plan with drafters that extend at most so many tokens in one forward (`branches_of`).

    Raises:
        InvalidPlan: `spec` reads otherwise.
    """
    name, _, numbers = spec.partition(":")
    try:
        values = [int(number) for number in numbers.split(",")] if numbers else []
        match name, values:
            case "auto", [] | [_]:
                _check_branches(values)
                return None
            case "off", []:
                return off("fixed")
            case "lockstep", [window]:
                return _checked(in_turns(window, "fixed"))
            case "stream", [chunk, run_ahead, *rest] if len(rest) <= 2:
                due, branches = (*rest, *(0, 1)[len(rest) :])
                _check_branches((branches,))
                return _checked(Plan(Discipline.STREAM, Pace(chunk, run_ahead, branches=branches), due, "fixed"))
    except ValueError as error:
        raise InvalidPlan(f"plan: {spec!r}: {error}") from error
    raise InvalidPlan(
        f"plan: must be auto[:BRANCHES], off, lockstep:K or stream:CHUNK,RUN_AHEAD[,DUE[,BRANCHES]], not {spec!r}"
    )


def branches_of(spec: str) -> int:
    """Most tokens that a drafter's forward may extend under a plan that `parse_plan` takes."""
    name, _, number = spec.partition(":")
    return int(number) if name == "auto" and number else MOST_BRANCHES


def _check_branches(values: Sequence[int]) -> None:
    """Raise ValueError for branches that no drafter is asked for."""
    for branches in values:
        if not 1 <= branches <= MOST_BRANCHES:
            raise ValueError(f"branches must be from 1 to {MOST_BRANCHES}, not {branches}")


def _checked(plan: Plan) -> Plan:
    """Raise ValueError for a plan that no drafter could follow."""
    if not plan.pace.chunk <= plan.pace.run_ahead <= MOST_RUN_AHEAD:
        raise ValueError(f"the run-ahead must be from the chunk to {MOST_RUN_AHEAD}, not {plan.pace.run_ahead}")
    if not 0 <= plan.due <= plan.pace.run_ahead:
        raise ValueError(f"due must be from 0 to the run-ahead, not {plan.due}")
    return plan


# ----------------------------------------------------------------------------------------------------------------------
# Planners: told what happened, they say how to draft next. The controller is one, a fixed plan for comparison another.


class Planner(Protocol):
    """One drafter's part of one session: told what happened, it says how to draft next."""

    def successor(self, forward: ForwardTimes, shared_host: bool, beside: Planner | None = None) -> Planner:
        """The planner of the next session, or of this one at another verifier: it starts from what was learnt.

        forward: V(m) of that session's verifier. shared_host: its drafter computes on the verifier's host. beside: the
        planner of a session there, with which it decides; None: this one's, if it was there.
        """

    def plans_for(self, forward: ForwardTimes) -> bool:
        """Whether it plans for the verifier that has these."""

    def observe_proposal(self, proposal: ProposedChunk, draft_us: int, arrived_us: float | None = None) -> None:
        """Note a chunk that took `draft_us` to draft. arrived_us: when, on the clock of the verdicts' forwards."""

    def observe_verdict(self, verdict: Verdict, forward: Forward | None = None) -> None:
        """Note a verdict, as its drafter sees it (`Verdict.seen_by`). forward: of its step, if the times are known."""

    def drafter_changed(self) -> None:
        """Note another drafter, or another line to the same one: its distance must be measured again."""

    @property
    def time_to_plan(self) -> bool:
        """Whether to plan after the last verdict."""

    def plan(self) -> Plan:
        """The settings for what is drafted next."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A `Planner` of one fixed plan, with which the controller's choices are compared."""

    fixed: Plan

    def successor(self, forward: ForwardTimes, shared_host: bool, beside: Planner | None = None) -> Fixed:
        return self

    def plans_for(self, forward: ForwardTimes) -> bool:
        return True

    def observe_proposal(self, proposal: ProposedChunk, draft_us: int, arrived_us: float | None = None) -> None:
        pass

    def observe_verdict(self, verdict: Verdict, forward: Forward | None = None) -> None:
        pass

    def drafter_changed(self) -> None:
        pass

    @property
    def time_to_plan(self) -> bool:
        return False

    def plan(self) -> Plan:
        return self.fixed


# ----------------------------------------------------------------------------------------------------------------------
# How a drafter streams: how far ahead, in what chunks, and whether its verifier is to wait for them. Pure.
#
# A drafter on hardware of its own takes no time from the verifier. It streams, and the verifier waits for a chain's
# first tokens where a round of waiting is faster than going on alone.


class Way(NamedTuple):
    """due: draft tokens that the verifier waits for; 0: it never waits. gain: expected speed over plain decoding's."""

    discipline: Discipline
    due: int
    gain: float

    @property
    def pays(self) -> bool:
        return self.gain >= LEAST_STREAM_GAIN

    @property
    def reason(self) -> str:
        why = "comparing, " if not self.pays else "waits, " if self.due else ""
        return f"{why}gain {self.gain:.2f}" + (f" with {self.due}" if self.due else "")


@dataclass(frozen=True, slots=True)
class Streaming:
    """What is known of a drafter and its verifier.

    rates: P(accept | tested) by position in the window. agreement: P(a draft token is the decided one), tested or not.
    draft_us: microseconds to draft a token. delay_us: from a verdict to the proposal that answers it, drafting apart.
    forward: V(m) of the verifier. branches: tokens that a forward of the drafter may extend.
    waits: the verifier can wait for proposals.
    """

    rates: Sequence[float]
    agreement: float
    draft_us: float
    delay_us: float
    forward: ForwardTimes
    branches: int = 1
    waits: bool = True

    def fastest(self) -> Way:
        """The best plan for a drafter on hardware of its own: stream, with or without waiting, or take turns."""
        known = (self.rates, self.agreement, self.draft_us, self.forward)
        # A verdict finds a drafter that streams in the middle of a token.
        met_us = self.delay_us + self.draft_us / 2
        speeds = {(Discipline.STREAM, 0): stream_rate(*known, met_us, self._chunk)}
        for window in range(1, MOST_WINDOW + 1) if self.waits else ():
            speeds[Discipline.STREAM, window] = waiting_rate(*known, met_us, window)
            turns = lockstep_rate(self.rates, window, self.draft_us, self.forward, self.delay_us)
            speeds[Discipline.LOCKSTEP, window] = turns
        best = max(speeds, key=speeds.__getitem__)
        return Way(*best, speeds[best] / (1.0 / self.forward.at(1)))

    def plan(self, way: Way) -> Plan:
        if way.discipline is Discipline.LOCKSTEP:
            return Plan(way.discipline, Pace(way.due, way.due, branches=self.branches), way.due, way.reason)
        most = max(self._chunk, min(MOST_FIRST_CHUNK, int(self.forward.at(1) / self.draft_us)))
        chunk = min(way.due, most) or self._chunk
        pace = Pace(chunk, max(way.due, self.run_ahead()), branches=self.branches)
        return Plan(way.discipline, pace, way.due, way.reason)

    @property
    def _chunk(self) -> int:
        """Tokens of a chunk that nobody waits for."""
        return max(1, min(SHORT_CHAIN, int(CHUNK_SHARE * self.forward.at(1) / self.draft_us)))

    def run_ahead(self) -> int:
        """Run-ahead: what is decided during a round trip at the best conceivable speed, and a window behind it.

        It is bounded by what is of use for a drafter whose tokens take long.
        """
        step_us = self.forward.at(1)
        fastest = min(1.0 / self.draft_us, expected_tokens(self.rates, MOST_WINDOW) / step_us)
        ahead = min(MOST_RUN_AHEAD, MOST_WINDOW + ceil((self.delay_us + step_us) * fastest))
        if self.draft_us < LONG_TOKEN * step_us:
            return ahead
        agreement = min(self.agreement, 0.99)
        return min(ahead, max(SHORT_CHAIN, ceil(USEFUL_RUNS * agreement / (1.0 - agreement))))


# ----------------------------------------------------------------------------------------------------------------------
# When a drafter that is off is tried again. Pure.


@dataclass(slots=True)
class Tries:
    """When a drafter that does not pay is tried, and what that costs.

    verdicts: since the last try began or, before the first, in all. Each is divided by the sessions that share its
    step, all of which a try delays. left: of the try under way, each divided by the sessions that try together.
    price_us: of the last one. spent_us: on the one under way. first: the one under way is a drafter's first, which
    measures it. It has no price: a drafter may be slow at its start. ended: one did, with the last verdict.
    """

    verdicts: float = 0.0
    left: float = 0.0
    price_us: float = 0.0
    spent_us: float = 0.0
    first: bool = False
    ended: bool = False

    def verdict(self, sessions: int = 1, cost_us: float = 0.0, ends: bool = False, together: int = 1) -> None:
        """Note a verdict. cost_us: by which the try under way delayed its step. ends: it ends with this verdict.

        sessions: of the step. together: of these, with one try. Each of them tells what a step was delayed by, so each
        counts for its part; in the try's last step only the one that ends it is counted.
        """
        self.verdicts += 1.0 / sessions
        under_way = self.left > 0
        if under_way:
            self.left = 0.0 if ends else max(0.0, self.left - 1.0 / together)
            self.spent_us += cost_us if ends else cost_us / together
        self.ended = under_way and not self.left
        if self.ended and self.spent_us and not self.first:
            self.price_us = self.spent_us

    def begins(self, verdict_us: float, most: int = TRIAL_VERDICTS) -> bool:
        """Whether a try of at most so many verdicts begins now. verdict_us: what a verdict takes without."""
        if self.verdicts < PROBE_EVERY or not affordable(self.price_us, self.verdicts * verdict_us):
            return False
        self.verdicts, self.left, self.spent_us, self.first = 0.0, float(most), 0.0, False
        return True


# ----------------------------------------------------------------------------------------------------------------------
# Whether a verifier waits for a turn. One that its ledger could not bear it does not wait for, and a drafter that
# drafts it all the same is in the way of the next forward. Pure; microseconds.


@dataclass(slots=True)
class LostTime:
    """What a session has lost by drafting on the verifier's cores.

    ledger_us: its balance, as the verifier told it. beside_us: drafting beside forwards, of which no ledger knows: it
    delayed them. tokens: decided.
    """

    ledger_us: float = 0.0
    beside_us: float = 0.0
    tokens: int = 0

    def verdict(self, ledger_us: float, beside_us: float, tokens: int) -> None:
        self.ledger_us = ledger_us
        self.beside_us += beside_us
        self.tokens += tokens

    def bears(self, cost_us: float, forward: ForwardTimes) -> bool:
        """Whether the ledger bears a turn that costs so much if it is in vain."""
        tolerated = TOLERATED_SHARE * self.tokens + TOLERATED_STEPS
        return self.ledger_us + self.beside_us + cost_us <= tolerated * forward.at(1)


# ----------------------------------------------------------------------------------------------------------------------
# What the sessions of a batch decide together. Pure; microseconds.


@dataclass(slots=True)
class InTurns:
    """What the sessions of a verifier and of a drafter on its host know and decide together, where they share steps.

    All of a batch wait for whoever is waited for, and the drafter drafts for all of them in one pass. A drafter that
    pays for all may so pay for none alone: sessions that decided one by one did not begin, or stopped by the chance of
    their own texts while the others still waited. So all draft the same window, or none. What a step's sessions tell
    counts together as much as what one session alone tells: else the first few guesses of a crowd turned all off.

    Those of other tenants and of other orchestrators share the steps, but decide apart.

    known: acceptance and times, of all these sessions. probes: of a drafter that is off. window: of each session of a
    batch; 0: it is off. ignored: answers in a row that were in time and not tested. changes: how often the window
    changed, and a probe began or ended, so that all plan again at once. others_us: for which a verifier waits for other
    drafters. sessions: of these, in the last step. ended_us, heard: when the step under way ended, and its verdicts.
    """

    known: Estimates
    probes: Tries = field(default_factory=Tries)
    window: int = 0
    ignored: float = 0.0
    changes: int = 0
    others_us: float = 0.0
    sessions: int = 1
    ended_us: float | None = None
    heard: int = 0

    def begin(self) -> None:
        """Begin a session that is alone. Its verifier keeps a new ledger for it, and its drafter reads a prompt first.

        So a probe ends, but a first try that has not seen a draft apart yet begins anew.
        """
        self.ignored = 0.0
        anew = self.probes.first and not self.known.drafted_apart
        self.probes.left = float(AWAITED_VERDICTS) if anew else 0.0

    def verdict(self, forward: Forward | None) -> None:
        """Note a verdict. forward: of its step; None: the step is not known, and counts as one of its own.

        Of the first step all sessions are taken for these.
        """
        ended_us = forward.ended_us if forward is not None else None
        if ended_us is None or ended_us != self.ended_us:
            first = forward.sessions if forward is not None else 1
            self.sessions, self.heard, self.ended_us = self.heard or first, 0, ended_us
        self.heard += 1

    def waited(self, waited_us: float, heard: bool) -> None:
        """Note a step's wait. heard: for an answer to this session, it may be.

        While these sessions' own drafter is waited for nobody can tell what others' take: it fades, so that a batch
        does not draft for ever for others that have gone.
        """
        if heard or self.window:
            self.others_us *= DECAY ** (1.0 / self.sessions)
            return
        self.others_us = smoothed(self.others_us, waited_us, least=LEAST_TIMING_US)

    def decide(self, window: int) -> None:
        """Have each session of a batch draft so many tokens from now on."""
        if window != self.window:
            self.window = window
            self.changes += 1


# ----------------------------------------------------------------------------------------------------------------------
# Chooses each session's discipline, chunk and run-ahead from measured speeds; pure: told what happened, it answers.
#
# lockstep   drafter and verifier share cores: they take turns; the drafter sends one chunk per verdict and the
#            verifier waits for it when that pays
# stream     each has cores of its own: the drafter streams small chunks, as far ahead as the round trip needs
#            (`Streaming`)
# off        no gain is expected: plain decoding, with a probe now and then (`Tries`); or they share cores, and the
#            verifier waits for nobody


class Controller:
    """A `Planner` that learns: one for each drafter of a session.

    Args:
        forward: V(m) of the verifier, shared by its sessions.
        shared_host: drafter and verifier compute on the same cores.
        branches: most tokens that a forward of the drafter extends where it computes elsewhere; 1 asks for chains.
        waits: the verifier can wait for proposals. A drafter on the cores of one that cannot is off.
    """

    def __init__(
        self, forward: ForwardTimes, shared_host: bool, branches: int = MOST_BRANCHES, waits: bool = True
    ) -> None:
        self._forward = forward
        self._shared = shared_host
        self._branches = branches
        self._waits = waits
        self._known = Estimates()
        self._drafted_us = 0.0
        self._last_draft = LastDraft()
        self._verdicts = 0
        self._turns = InTurns(Estimates(), Tries(left=AWAITED_VERDICTS, first=True) if self._in_turn else Tries())
        self._batch: ForwardTimes | None = None
        # Whether a turn was asked for with the last verdict's plan and not tested.
        self._lost, self._vain = LostTime(), False
        self._chunk = 1
        self._changes = 0
        # Whether it is off now, and verdicts for which it was, alone, since it last had an answer drafted apart.
        self._off, self._rested = False, 0

    def successor(self, forward: ForwardTimes, shared_host: bool, beside: Planner | None = None) -> Controller:
        """The controller of the session after this one. It starts from what was learnt, not from guesses.

        V(m), and whether the drafter shares the verifier's host, are those of the new session. So a drafter that does
        not pay costs a probe every 128 verdicts, not the beginning of every session.
        """
        heir = Controller(forward, shared_host, self._branches, self._waits)
        heir._known = self._known.faded()
        heir._rested = self._rested
        measures = heir._in_turn and not self._known.drafted_apart
        probes = heir._turns.probes if measures else replace(self._turns.probes, left=0.0)
        heir._turns = InTurns(self._known.faded(), probes)
        there = beside if isinstance(beside, Controller) else self
        if forward is there._forward:
            heir._batch = there._batch
        if forward is there._forward and heir._in_turn and there._in_turn:
            heir._turns = there._turns
            if there._batch is None:
                heir._turns.begin()
        return heir

    def plans_for(self, forward: ForwardTimes) -> bool:
        """See `Planner`."""
        return forward is self._forward

    # What happened

    def observe_proposal(self, proposal: ProposedChunk, draft_us: int, arrived_us: float | None = None) -> None:
        """See `Planner`."""
        if proposal.tokens:
            # The tokens of a tree's piece were drafted in one forward unless its chunk asked for more.
            levels = min(self._chunk, len(proposal.tokens)) if proposal.parents else len(proposal.tokens)
            self._observe_draft(max(1, draft_us) / levels, draft_us, arrived_us)
        self._drafted_us = float(draft_us)
        self._known.calibration.announce(proposal.expected)
        self._known.agreement.proposal(proposal)

    def _observe_draft(self, token_us: float, took_us: float, arrived_us: float | None) -> None:
        """Note a draft time per token. In turns it is learnt with the next verdict, which tells what was beside it."""
        later = self._in_turn and arrived_us is not None
        if self._in_turn:
            self._last_draft.drafted(TimedChunk(arrived_us, took_us, token_us if later else None))
        if not later:
            self._learn_draft(token_us, apart=True)

    def _learn_draft(self, token_us: float, apart: bool) -> None:
        """apart: the verifier was idle meanwhile, or has hardware of its own."""
        for known, weight in self._learners:
            known.drafted(token_us, weight, apart)

    @property
    def _weight(self) -> float:
        """Of a new timing in what is known of it, which is forgotten with each verdict for which the drafter was off.

        Who is off is heard once in 128 verdicts. With the weight of one timing among many, a drafter that was slow at
        its start stays off for as many of them as it takes to believe that it no longer is. In a batch nothing is
        forgotten: there each pass tells all of its sessions the same.
        """
        return 1.0 - (1.0 - TIMING_WEIGHT) ** (1 + self._rested)

    @property
    def _learners(self) -> tuple[tuple[Estimates, float], ...]:
        """What learns from a timing, and its weight there: one pass drafts for all of a batch, and each tells of it."""
        weight = self._weight
        return (self._known, weight), (self._turns.known, 1.0 - (1.0 - weight) ** (1.0 / self._turns.sessions))

    def observe_verdict(self, verdict: Verdict, forward: Forward | None = None) -> None:
        """See `Planner`."""
        self._turns.verdict(forward)
        token_us = self._last_draft.verdict(forward)
        apart = self._last_draft.apart
        if token_us is not None:
            self._learn_draft(token_us, apart)
        self._observe_turn(verdict)
        self._known.agreement.decided(verdict.position, verdict.tokens)
        if verdict.width:
            accepted = verdict.outcomes[: verdict.width].count(Outcome.ACCEPTED)
            self._known.acceptance.observe(verdict.width, accepted)
            self._turns.known.acceptance.observe(verdict.width, accepted, 1.0 / self._turns.sessions)
            self._known.calibration.settle(accepted)
        self._answered(verdict)
        if verdict.delay_us and apart:
            overhead_us = max(0.0, verdict.delay_us - self._drafted_us)
            self._observe_overhead(overhead_us)
        heard = verdict.width > 0 or verdict.delay_us > 0
        if forward is not None:
            self._batch = _batch_times(forward)
            waited_us = forward.waited_us if self._batch else 0.0
            self._turns.waited(waited_us, heard)
        self._rested = 0 if (heard and apart) or self._batch else self._rested + self._off
        self._verdicts += 1
        self._probed(verdict, forward.sessions if forward is not None else 1, apart)

    def _observe_turn(self, verdict: Verdict) -> None:
        """Note what the ledger holds. A turn that was asked for and not tested was drafted beside the next forward."""
        self._vain = self._in_turn and not (self._off or verdict.width) and self._last_draft.chunks > 0
        draft_us = self._timed(self._known).draft_us or 0.0
        beside_us = min(self._chunk * draft_us, self._forward.at(1)) if self._vain else 0.0
        self._lost.verdict(verdict.ledger_us, beside_us, len(verdict.tokens))

    def _probed(self, verdict: Verdict, sessions: int, apart: bool) -> None:
        """Note a verdict for probes. That of a drafter on the verifier's host ends with an answer drafted apart.

        Its price is what the verifier may have waited, or was disturbed: the drafter first feeds all that was decided
        since it last heard. The first try has none, and a session takes part in it from its first chunk on: before that
        its drafter reads the prompt. Nobody waits for a drafter elsewhere.
        """
        if not self._shared:
            self._turns.probes.verdict()
        elif self._last_draft.chunks or not self._turns.probes.first:
            answered = verdict.width > 0 or verdict.delay_us > 0
            ends = answered and apart and self._turns.known.drafted_apart
            self._turns.probes.verdict(sessions, float(verdict.delay_us), ends, self._turns.sessions)
            self._turns.changes += self._turns.probes.ended

    def _answered(self, verdict: Verdict) -> None:
        """Count answers that were not tested: a full verifier tests and awaits what pays, maybe nothing."""
        if verdict.width:
            self._turns.ignored = 0.0
        elif verdict.delay_us or (self._vain and self._batch is None):
            self._turns.ignored += 1.0 / self._turns.sessions

    def _observe_overhead(self, overhead_us: float) -> None:
        """Take in what an answer took besides its drafting: the rest of the delay that the verifier measured.

        It is another quantity than that delay, by which the verifier waits (`Expectation`): plans change how much is
        drafted. A far drafter that was given up is heard only once in 128 verdicts. No answer is faster than its line,
        so one that took less than half of the estimate shows that the line has changed, which smoothing would take a
        dozen probes to believe.
        """
        before = self._known.overhead_us
        nearer = not self._shared and before is not None and overhead_us < before / 2
        self._known.overhead_us = None if nearer else before
        for known, weight in self._learners:
            known.overhead_us = smoothed(known.overhead_us, overhead_us, weight, LEAST_TIMING_US)

    def drafter_changed(self) -> None:
        """See `Planner`. What answers cost on the old line, and that they were not tested, is forgotten.

        Otherwise a drafter that did not pay over a slow line would hardly be probed over a fast one.
        """
        self._known.overhead_us = self._turns.known.overhead_us = None
        self._turns.ignored = 0.0
        self._turns.probes.price_us = 0.0

    @property
    def _step(self) -> ForwardTimes:
        """V(m) of the step that the session takes part in, where each session has m rows."""
        return self._batch or self._forward

    # What to do

    @property
    def time_to_plan(self) -> bool:
        """Whether to plan now: often while each verdict teaches much, then now and then.

        What is off learns little from a verdict, and all sessions of a batch plan: it is planned again once in as many
        verdicts as a try has, and at once where another session of the batch has changed what all do.
        """
        if self._turns.probes.ended or (self._batch is not None and self._changes != self._turns.changes):
            return True
        if self._off:
            return self._verdicts % TRIAL_VERDICTS == 0
        if self._vain and self._batch is None:
            return True
        return self._verdicts <= ENOUGH or self._verdicts % PLAN_EVERY == 0

    def plan(self) -> Plan:
        """See `Planner`."""
        plan = self._plan()
        self._chunk, self._off = plan.pace.chunk, plan.discipline is Discipline.OFF
        self._changes = self._turns.changes
        return plan

    def _plan(self) -> Plan:
        if self._shared and not self._waits:
            return off("shares cores with a verifier that waits for nobody")
        draft_us = self._timed(self._known).draft_us
        if draft_us is None or self._only_beside_forwards:
            return self._measuring()
        if not self._shared:
            return self._apart(draft_us)
        return self._in_turns(draft_us)

    @property
    def _in_turn(self) -> bool:
        """Whether drafter and verifier take turns."""
        return self._shared and self._waits

    def _timed(self, known: Estimates) -> Estimates:
        """What tells how long drafts and answers take: that, unless only others have seen a draft, or one apart."""
        all_known = (known, self._turns.known, self._known) if self._in_turn else (known,)
        apart = [each for each in all_known if each.drafted_apart]
        return (apart or [each for each in all_known if each.draft_us is not None] or [known])[0]

    @property
    def _only_beside_forwards(self) -> bool:
        """Whether no draft was seen yet but beside a forward, as a session's first one is, and the first try lasts."""
        return self._in_turn and not self._timed(self._known).drafted_apart and self._turns.probes.left > 0

    def _measuring(self) -> Plan:
        if self._in_turn:
            return in_turns(PROBE_WINDOW, "measuring", NEGLIGIBLE)
        return Plan(Discipline.STREAM, FIRST_PACE, 0, "measuring")

    def _apart(self, draft_us: float) -> Plan:
        """Plan for a drafter with hardware of its own."""
        rates = self._known.acceptance.rates(MOST_WINDOW, self._known.agreement.rate)
        known = self._streaming(rates, draft_us)
        way = known.fastest()
        if not way.pays and self._known.agreement.compared >= ENOUGH_COMPARED:
            return self._probe_or_off()
        if self._batch and way.due:
            # Its drafting costs the others nothing, but a wait does: all wait, for rows that cost what a batch's do.
            best = replace(known, forward=self._batch).fastest()
            way = way._replace(discipline=best.discipline, due=best.due)
        return known.plan(way)

    def _streaming(self, rates: Sequence[float], draft_us: float) -> Streaming:
        """Plan by V of the session alone: the verifier divides a batch's rows, and drafting elsewhere costs nobody."""
        known = self._known.agreement.rate, draft_us, self._known.overhead_us or 0.0, self._forward
        return Streaming(rates, *known, self._branches, self._waits)

    def _in_turns(self, draft_us: float) -> Plan:
        """Plan by what is known of all sessions of a batch, as they do, or of this one alone.

        In a batch no floor ends chains: whoever goes on is waited for by all.
        """
        known, waited_us = self._known, 0.0
        if self._batch:
            if not self._verdicts:
                return self._as_the_others()
            known, waited_us = self._turns.known, self._turns.others_us
        rates, timed = known.acceptance.rates(MOST_WINDOW), self._timed(known)
        draft_us = timed.draft_us or draft_us
        times = draft_us, self._step, timed.overhead_us or 0.0, waited_us
        windows = range(MOST_WINDOW + 1)
        speeds = [lockstep_rate(rates, window, *times) for window in windows]
        best = max(windows[1:], key=speeds.__getitem__)
        gain = speeds[best] / speeds[0]
        now = self._turns.window if self._batch else 0
        if now and speeds[best] < LEAST_GAIN * speeds[now]:
            best, gain = now, speeds[now] / speeds[0]
        begins = self._batch is not None and not now
        pays = gain >= (LEAST_ADVANTAGE if begins else LEAST_GAIN) and self._turns.ignored < ENOUGH
        if self._batch:
            self._turns.decide(best if pays else 0)
        if not pays:
            return self._probe_or_off()
        turn_us = best * draft_us + (timed.overhead_us or 0.0) + self._forward.at(best + 1) - self._forward.at(1)
        if self._batch is None and not self._lost.bears(turn_us, self._forward):
            return off("no turn that its ledger could bear")
        if self._batch or not self._known.calibration.trusted:
            return in_turns(best, f"window {best}, gain {gain:.2f}", NEGLIGIBLE)
        floor = self._floor(rates, best, speeds[best], draft_us)
        return in_turns(min(MOST_WINDOW, best + EXTRA_WINDOW), f"floor {floor:.2f}, gain {gain:.2f}", floor)

    def _as_the_others(self) -> Plan:
        """Follow what those that shared steps decided: before a verdict it does not know whether it shares any."""
        if self._turns.window:
            return in_turns(self._turns.window, f"window {self._turns.window}, as others", NEGLIGIBLE)
        return in_turns(PROBE_WINDOW, "probe") if self._turns.probes.left else off("no gain expected")

    def _floor(self, rates: Sequence[float], window: int, speed: float, draft_us: float) -> float:
        """Chain probability below which one more draft token costs more time than it is expected to save.

        Behind a chain of probability P the next token is expected to bring P times its own rate, for draft_us + the
        growth of V; at the best speed (tokens per microsecond) that time would have brought (draft_us + growth) *
        speed. In coarse steps, so that the pace does not change all the time.
        """
        growth = (self._step.at(window + 1) - self._step.at(1)) / window
        steps = round((draft_us + growth) * speed / rates[window - 1] / FLOOR_STEP)
        return min(1.0 - FLOOR_STEP, max(NEGLIGIBLE, steps * FLOOR_STEP))

    def _probe_or_off(self) -> Plan:
        most = AWAITED_VERDICTS if self._shared else TRIAL_VERDICTS
        if not self._turns.probes.left:
            if not self._turns.probes.begins(self._step.at(1), most):
                return off("no gain expected")
            self._turns.changes += 1
        return in_turns(PROBE_WINDOW, "probe") if self._in_turn else Plan(Discipline.STREAM, FIRST_PACE, 0, "probe")


def _batch_times(forward: Forward) -> ForwardTimes | None:
    """V(m) of a batch whose sessions have m rows each; None for a session alone, and if unknown."""
    if forward.sessions < 2 or not forward.plain_us:
        return None
    return ForwardTimes({1: forward.plain_us, 2: forward.plain_us + forward.drafts_us})
