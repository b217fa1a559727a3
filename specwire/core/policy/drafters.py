"""How a drafter is to draft for a session: off, streaming, or in turns with its verifier.

A verifier plans for all its sessions, since it has what plans are made of: how often draft tokens are right, how long
answers take, what steps cost and what each session's ledger can bear. An orchestrator tells it which drafters a session
has, and passes a new pace on to them with the tokens of the verdict that brought it.

lockstep   drafter and verifier take turns; the drafter sends one chunk per verdict, and the verifier waits for it when
           that pays: so where they share cores
stream     the drafter streams small chunks, as far ahead as the round trip needs; the verifier waits where that pays
off        no gain is expected: plain decoding, with a try now and then
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from specwire.core.messages import (
    FIRST_PACE,
    MOST_RUN_AHEAD,
    MOST_WINDOW,
    PROBE_WINDOW,
    AssignedDrafter,
    Discipline,
    Pace,
    Plan,
    Proposal,
    SourcePace,
    branches_of,
    in_turns,
    off,
    parse_plan,
)
from specwire.core.policy.costs import Turn
from specwire.core.policy.estimates import (
    AcceptanceByPosition,
    Agreement,
    LiveChain,
    V,
    affordable,
    expected_tokens,
    lockstep_rate,
    smoothed,
    stream_rate,
    waiting_rate,
)
from specwire.core.policy.tunables import (
    APART_SHARE,
    AWAITED_VERDICTS,
    CHUNK_SHARE,
    ENOUGH,
    ENOUGH_COMPARED,
    LEAST_GAIN,
    LEAST_STREAM_GAIN,
    LEAST_TIMING_US,
    MEASURING_CHUNKS,
    MOST_FIRST_CHUNK,
    PLAN_EVERY,
    PROBE_EVERY,
    SHORT_CHAIN,
    TRIAL_VERDICTS,
)

# ----------------------------------------------------------------------------------------------------------------------
# What is known of a drafter. All sessions of a tenant learn it together; another tenant's guesses must not show in how
# soon this one's drafter is used.


@dataclass(slots=True)
class Tries:
    """When a drafter that does not pay is tried, and what that costs.

    verdicts: since the last try began or, before the first, in all. Each is divided by the sessions that share its
    step, all of which a try delays. left: of the try under way, likewise. spent_us: by which it delayed them;
    price_us: what the last one did.
    """

    verdicts: float = 0.0
    left: float = 0.0
    spent_us: float = 0.0
    price_us: float = 0.0

    def verdict(self, sessions: int, lost_us: float, ends: bool) -> None:
        """Note a verdict of a step of so many sessions, and what it lost. ends: the try has told what it can."""
        self.verdicts += 1.0 / sessions
        if self.left > 0.0:
            self.spent_us += lost_us / sessions
            self.left = 0.0 if ends else max(0.0, self.left - 1.0 / sessions)
            self.price_us = self.spent_us

    def begins(self, verdict_us: float, most: int) -> bool:
        """Whether a try of so many verdicts begins now. verdict_us: what a verdict takes without."""
        if self.verdicts < PROBE_EVERY or not affordable(self.price_us, self.verdicts * verdict_us):
            return False
        self.verdicts, self.left, self.spent_us = 0.0, float(most), 0.0
        return True


@dataclass(slots=True)
class LearntDrafter:
    """A drafter, and its line to the verifier. Times are microseconds; None: nothing was seen yet.

    acceptance: of windows that were tested. agreement: of all that was drafted. draft_us: a token's drafting while the
    verifier is idle or elsewhere; until it was seen so (apart), what it took beside a forward. overhead_us: the rest
    of the time from a verdict to the proposal that answers it.
    chunks: that told a time while none was seen apart.
    window: in turns, of all sessions: whoever is waited for, all of a batch wait. 0: it is off. ignored: verdicts in a
    row for which a turn was asked and nothing tested.
    """

    acceptance: AcceptanceByPosition = field(default_factory=AcceptanceByPosition)
    agreement: Agreement = field(default_factory=Agreement)
    draft_us: float | None = None
    apart: bool = False
    overhead_us: float | None = None
    chunks: int = 0
    window: int = 0
    ignored: float = 0.0
    tries: Tries = field(default_factory=Tries)

    def drafted(self, token_us: float, apart: bool) -> None:
        """Note how long a token took to draft. apart: while the verifier was idle, or elsewhere.

        The first one apart replaces what was measured beside forwards, and one that took less than half of what is
        known, since who is off is heard so seldom. One beside a forward tells only that it is no more.
        """
        self.chunks += not self.apart
        known = self.draft_us
        if known is None or (apart and (not self.apart or token_us < known / 2)):
            self.draft_us, self.apart = token_us, apart
            return
        self.draft_us = smoothed(known, token_us if apart else min(known, token_us))

    def answered(self, overhead_us: float) -> None:
        """Note what an answer took besides its drafting.

        No answer is faster than its line, so one that took less than half of what is known shows another line, which
        smoothing would take a dozen tries to believe.
        """
        known = self.overhead_us
        nearer = known is not None and overhead_us < known / 2
        self.overhead_us = smoothed(None if nearer else known, overhead_us, least=LEAST_TIMING_US)


class LearntDrafters:
    """By tenant's scope, the drafters that its sessions know.

    Args:
        most: of a scope, and scopes; the least recently used are forgotten.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._scopes: dict[bytes, dict[str, LearntDrafter]] = {}

    def of(self, scope: bytes, known_by: str) -> LearntDrafter:
        """For a session; nothing was learnt before it where it has no scope."""
        if not scope:
            return LearntDrafter()
        known = self._scopes[scope] = self._scopes.pop(scope, {})  # the last one is the most recently used
        found = known[known_by] = known.pop(known_by, LearntDrafter())
        if len(known) > self._most:
            del known[next(iter(known))]
        if len(self._scopes) > self._most:
            del self._scopes[next(iter(self._scopes))]
        return found


# ----------------------------------------------------------------------------------------------------------------------
# How a drafter on hardware of its own streams: how far ahead, in what chunks, and whether its verifier is to wait.


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
    V: of a step in which the session has m rows. branches: tokens that a forward of the drafter may extend.
    waits: the verifier can wait for proposals.
    """

    rates: Sequence[float]
    agreement: float
    draft_us: float
    delay_us: float
    V: V
    branches: int = 1
    waits: bool = True

    def fastest(self) -> Way:
        """The best plan for a drafter on hardware of its own: stream, with or without waiting, or take turns."""
        live = LiveChain.of(self.rates, self.agreement, self.draft_us, self.V)
        # A verdict finds a drafter that streams in the middle of a token.
        met_us = self.delay_us + self.draft_us / 2
        alone = stream_rate(live, self.agreement, self.draft_us, self.V(1), met_us, self._chunk)
        speeds = {(Discipline.STREAM, 0): alone}
        for window in range(1, MOST_WINDOW + 1) if self.waits else ():
            first_us = met_us + window * self.draft_us + self.V(window + 1)
            speeds[Discipline.STREAM, window] = waiting_rate(live, self.rates, self.agreement, first_us, window)
            turns = lockstep_rate(self.rates, window, self.draft_us, self.V, self.delay_us)
            speeds[Discipline.LOCKSTEP, window] = turns
        best = max(speeds, key=speeds.__getitem__)
        return Way(*best, speeds[best] * self.V(1))

    def plan(self, way: Way) -> Plan:
        if way.discipline is Discipline.LOCKSTEP:
            return Plan(way.discipline, Pace(way.due, way.due, branches=self.branches), way.due, way.reason)
        most = max(self._chunk, min(MOST_FIRST_CHUNK, int(self.V(1) / self.draft_us)))
        chunk = min(way.due, most) or self._chunk
        pace = Pace(chunk, max(way.due, self.run_ahead()), branches=self.branches)
        return Plan(way.discipline, pace, way.due, way.reason)

    @property
    def _chunk(self) -> int:
        """Tokens of a chunk that nobody waits for."""
        return max(1, min(SHORT_CHAIN, int(CHUNK_SHARE * self.V(1) / self.draft_us)))

    def run_ahead(self) -> int:
        """What is decided during a round trip at the best conceivable speed, and a window behind it."""
        step_us = self.V(1)
        fastest = min(1.0 / self.draft_us, expected_tokens(self.rates, MOST_WINDOW) / step_us)
        return min(MOST_RUN_AHEAD, MOST_WINDOW + ceil((self.delay_us + step_us) * fastest))


# ----------------------------------------------------------------------------------------------------------------------
# A drafter's part of one session, at its verifier: told what happened, it says how to draft next.


class PlannedStep(NamedTuple):
    """The step behind which it is planned.

    sessions: that shared it. of: V of steps of so many sessions, from rows. spare_us: what the session's ledger can
    bear. lost_us: by which the step waited, or was disturbed by drafters on the same cores. latest_us: how long the
    verifier would wait for a drafter's next turn.
    """

    sessions: int
    of: Callable[[int], V]
    spare_us: float
    lost_us: float = 0.0
    latest_us: Callable[[int, Turn], float] = lambda *_: 0.0

    def each(self, sessions: int) -> V:
        """V of steps in which each of so many sessions has m rows."""
        step_us = self.of(sessions)
        return lambda rows: step_us(sessions * rows)


class DrafterPacing:
    """`plan`: the present one.

    Args:
        drafter: as the orchestrator told it. learnt: what is known of it, with other sessions.
        weighed: the session's rule weighs draft tokens, and has chains only. waits: the verifier can wait for
            proposals; a drafter on the cores of one that cannot is off.
    """

    def __init__(
        self, drafter: AssignedDrafter, learnt: LearntDrafter, weighed: bool = False, waits: bool = True
    ) -> None:
        self.learnt = learnt
        self._drafter, self._weighed, self._waits = drafter, weighed, waits
        self._fixed, self._branches = parse_plan(drafter.plan), branches_of(drafter.plan)
        self._verdicts = self._chunks = 0
        self._answered = False
        self._told: Pace | None = None
        self.plan = self._first()

    def _first(self) -> Plan:
        """Until a verdict tells what steps take: as others of its tenant draft, and what was not measured is tried."""
        known, shared = self.learnt, self._drafter.shares_cores
        if self._fixed is not None:
            return self._fixed
        if shared and not self._waits:
            return off("shares cores with a verifier that waits for nobody")
        if known.draft_us is None or known.tries.left > 0.0:
            return self._trying("measuring" if known.draft_us is None else "trying")
        if shared:
            return in_turns(known.window, "as before") if known.window else off("no gain expected")
        given_up = known.agreement.compared >= ENOUGH_COMPARED and not known.window
        return off("no gain expected") if given_up else Plan(Discipline.STREAM, FIRST_PACE, 0, "begins")

    def _trying(self, reason: str) -> Plan:
        if self._drafter.shares_cores:
            return in_turns(PROBE_WINDOW, reason)
        return Plan(Discipline.STREAM, FIRST_PACE, 0, reason)

    def proposed(self, proposal: Proposal, delay_us: float, beside_us: float) -> None:
        """A chunk came, so long after the verdict that it answers (0: it answers none).

        beside_us: of its drafting, for which the verifier computed. A session's first chunk took as long as its
        drafter needed to read the prompt, so it tells a time only where none is known.
        """
        self._chunks += 1
        if not proposal.tokens:
            return
        # 0 tells nothing: of two chunks that are sent together the first has it all.
        took_us = proposal.draft_us or (0 if self.learnt.draft_us is not None else 1)
        apart = not self._drafter.shares_cores or beside_us <= APART_SHARE * took_us
        if took_us and (self._chunks > 1 or self.learnt.draft_us is None):
            # The tokens of a tree's piece were drafted in one forward unless its chunk asked for more.
            levels = len(proposal.tokens)
            if proposal.parents:
                levels = min(self.plan.pace.chunk, levels)
            self.learnt.drafted(took_us / levels, apart and self._chunks > 1)
        if delay_us and apart:
            self._answered = True
            self.learnt.answered(max(0.0, delay_us - took_us))

    @property
    def turn(self) -> Turn | None:
        """Of a drafter that the verifier takes turns with, on the same cores; None of others."""
        if not self._drafter.shares_cores or self.plan.discipline is not Discipline.LOCKSTEP:
            return None
        return Turn(self._pace.chunk, (self.learnt.draft_us or 0.0) if self.learnt.apart else 0.0)

    def tested(self, width: int, accepted: int) -> None:
        """A window of its tokens was tested."""
        self.learnt.acceptance.observe(width, accepted)
        self.learnt.ignored, self._answered = 0.0, True

    def verdict(self, width: int, step: PlannedStep) -> None:
        """A verdict, of a window of so many of its tokens; plan behind it."""
        known = self.learnt
        self._verdicts += 1
        # A drafter reads the prompt first.
        if self.plan.discipline is Discipline.LOCKSTEP and not width and (self._chunks or self._verdicts > ENOUGH):
            known.ignored += 1.0 / step.sessions
        known.tries.verdict(step.sessions, step.lost_us, self._drafter.shares_cores and self._answered)
        self._answered = False
        every = TRIAL_VERDICTS if self.plan.discipline is Discipline.OFF else PLAN_EVERY
        if self._fixed is None and (self._verdicts <= ENOUGH or (self._verdicts + self._drafter.source) % every == 0):
            self.plan = self._planned(step)

    @property
    def _pace(self) -> Pace:
        return self.plan.pace.of_a_chain() if self._weighed else self.plan.pace

    def take_pace(self) -> SourcePace | None:
        """The pace, where it is not the one that was taken last: what its drafter is to be told."""
        pace = self._pace
        if pace == self._told:
            return None
        self._told = pace
        return SourcePace(self._drafter.source, pace, str(self.plan))

    def _planned(self, step: PlannedStep) -> Plan:
        known = self.learnt
        if self._drafter.shares_cores and not self._waits:
            return self.plan
        if not self._drafter.shares_cores:
            return self._trying("measuring") if known.draft_us is None else self._apart(step, known.draft_us)
        measured = known.draft_us is not None and (known.apart or known.chunks >= MEASURING_CHUNKS)
        if not measured and known.ignored < ENOUGH:
            return self._borne(step, self._trying("measuring"))
        return self._try_or_off(step) if known.draft_us is None else self._in_turns(step, known.draft_us)

    def _apart(self, step: PlannedStep, draft_us: float) -> Plan:
        """Plan for a drafter with hardware of its own: by V of the session alone, since its drafting costs nobody, and
        the verifier divides a batch's rows. A wait costs all of a batch, so whether to wait is decided by its V.
        """
        known = self.learnt
        rates = known.acceptance.rates(MOST_WINDOW, known.agreement.rate)
        facts = rates, known.agreement.rate, draft_us, known.overhead_us or 0.0
        streaming = Streaming(*facts, step.each(1), self._branches, self._waits)
        way = streaming.fastest()
        if not way.pays and known.agreement.compared >= ENOUGH_COMPARED:
            known.window = 0
            return self._try_or_off(step)
        known.window = max(1, way.due)
        if way.due and step.sessions > 1:
            best = Streaming(*facts, step.each(step.sessions), self._branches, self._waits).fastest()
            way = way._replace(discipline=best.discipline, due=best.due)
        return streaming.plan(way)

    def _in_turns(self, step: PlannedStep, draft_us: float) -> Plan:
        """All sessions of a batch draft the same window, or none: all wait for whoever is waited for, and the drafter
        drafts for all of them in one pass.
        """
        known, each = self.learnt, step.each(step.sessions)
        rates, overhead_us = known.acceptance.rates(MOST_WINDOW), known.overhead_us or 0.0
        speeds = [lockstep_rate(rates, window, draft_us, each, overhead_us) for window in range(MOST_WINDOW + 1)]
        best, now = max(range(1, MOST_WINDOW + 1), key=speeds.__getitem__), known.window
        if now and speeds[best] < LEAST_GAIN * speeds[now]:
            best = now
        gain = speeds[best] / speeds[0]
        pays = gain >= LEAST_GAIN and known.ignored < ENOUGH
        known.window = best if pays else 0
        if not pays:
            return self._try_or_off(step)
        return self._borne(step, in_turns(best, f"window {best}, gain {gain:.2f}"))

    def _borne(self, step: PlannedStep, plan: Plan) -> Plan:
        """That plan, unless the verifier would not wait for its turn, which would be in the way of the next forward.

        In a batch the drafter is at work for others anyway, and who is left out makes the wait dearer for them.
        """
        if not self._drafter.shares_cores or not plan.due or step.sessions > 1:
            return plan
        turn, each = Turn(plan.due, self.learnt.draft_us or 0.0), step.each(step.sessions)
        turn_us = step.latest_us(self._drafter.source, turn) + each(plan.due + 1) - each(1)
        return plan if turn_us <= step.spare_us else off("no turn that its ledger could bear")

    def _try_or_off(self, step: PlannedStep) -> Plan:
        tries = self.learnt.tries
        most = AWAITED_VERDICTS if self._drafter.shares_cores else TRIAL_VERDICTS
        if tries.left > 0.0 or tries.begins(step.each(step.sessions)(1), most):
            self.learnt.ignored = 0.0
            return self._borne(step, self._trying("trying"))
        return off("no gain expected")
