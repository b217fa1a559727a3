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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import ceil
from operator import attrgetter
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
    CHUNK_SHARE,
    ENOUGH,
    EXPLORED_SHARE,
    LEAST_GAIN,
    LEAST_TIMING_US,
    OUTLIER,
    PLAN_EVERY,
    SHORT_CHAIN,
    SLACK_DEVIATIONS,
    TIMING_WEIGHT,
    TRIAL_VERDICTS,
)

# A round trip can be hundreds of steps long.
REMEMBERED_VERDICTS = 1024

# ----------------------------------------------------------------------------------------------------------------------
# What is known of a drafter. All sessions of a tenant learn it together; another tenant's guesses must not show in how
# soon this one's drafter is used.


@dataclass(slots=True)
class LearntDrafter:
    """A drafter, and its line to the verifier. Times are microseconds; None: nothing was seen yet.

    acceptance: of windows that were tested. agreement: of all that was drafted. draft_us: a token's drafting while the
    verifier is idle or elsewhere; on its cores at the machine's present pace.
    overhead_us: the rest of the time from a verdict to the proposal that answers it. deviation_us: mean error of both.
    window: in turns, of all sessions: whoever is waited for, all of a batch wait. 0: it is off. ignored: verdicts in a
    row for which a turn was asked and nothing tested.
    idle: verdicts since the last try began or, before the first, in all. left: of the try under way. Each is divided by
    the sessions that share its step, all of which a try delays; likewise what that cost them, and the last try did.
    """

    acceptance: AcceptanceByPosition = field(default_factory=AcceptanceByPosition)
    agreement: Agreement = field(default_factory=Agreement)
    draft_us: float | None = None
    pace: float = 1.0
    overhead_us: float | None = None
    deviation_us: float = 0.0
    window: int = 0
    ignored: float = 0.0
    idle: float = 0.0
    left: float = 0.0
    spent_us: float = 0.0
    price_us: float = 0.0

    def drafted(self, tokens: int, took_us: float, beside_us: float) -> None:
        """Note how long it drafted so many tokens in a row. beside_us: of that the verifier computed on the same cores.

        Meanwhile it takes up to OUTLIER times as long. So what was drafted mostly beside a forward tells between what
        and what a token takes. Less than half of what is known is believed, since who is off is heard so seldom.
        """
        apart_us = took_us if 2 * beside_us < took_us else took_us - beside_us * (1.0 - 1.0 / OUTLIER)
        least_us, most_us = apart_us / tokens, took_us / tokens
        known = self.draft_us
        if not known or most_us < known / 2:
            self.draft_us, self.deviation_us = least_us, max(self.deviation_us, took_us / 4)
            return
        taken_us = min(max(known, least_us), most_us)
        self._err(tokens * (taken_us - known))
        self.draft_us = smoothed(known, taken_us)

    def paced(self, pace: float) -> None:
        """The machine that it shares with its verifier takes so many times as long as at first for all that it does."""
        if self.draft_us is not None:
            self.draft_us *= pace / self.pace
        self.pace = pace

    def answered(self, overhead_us: float) -> None:
        """Note what an answer took besides its drafting. No answer is faster than its line, so one that took less than
        half of what is known shows another line, which smoothing would take a dozen tries to believe.
        """
        known = self.overhead_us
        if known is None:
            self.overhead_us, self.deviation_us = overhead_us, max(self.deviation_us, overhead_us / 4)
            return
        self._err(overhead_us - known)
        nearer = overhead_us < known / 2
        self.overhead_us = overhead_us if nearer else smoothed(known, overhead_us, least=LEAST_TIMING_US)

    def _err(self, error_us: float) -> None:
        self.deviation_us = smoothed(self.deviation_us, abs(error_us), least=LEAST_TIMING_US)

    def verdict(self, sessions: int, lost_us: float, ends: bool) -> None:
        """Note a verdict of a step of so many sessions, and what it lost. ends: the try has told what it can."""
        self.idle += 1.0 / sessions
        if self.left > 0.0:
            self.spent_us += lost_us / sessions
            self.left = 0.0 if ends else max(0.0, self.left - 1.0 / sessions)
            self.price_us = self.spent_us

    def tries(self, verdict_us: float, most: int) -> bool:
        """Whether it is tried although it does not pay. A try is of so many verdicts, and taken to cost a verdict's
        time, verdict_us, at least.
        """
        if self.left <= 0.0:
            if not affordable(max(verdict_us, self.price_us), self.idle * verdict_us):
                return False
            self.idle, self.left, self.spent_us = 0.0, float(most), 0.0
        self.ignored = 0.0
        return True


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
# The best way to draft.


class Way(NamedTuple):
    """due: draft tokens that the verifier waits for; 0: it never waits. gain: expected speed over plain decoding's."""

    discipline: Discipline
    due: int
    gain: float


def ways(known: LearntDrafter, draft_us: float, V: V, shares_cores: bool, waits: bool = True) -> list[Way]:
    """All ways to draft, and what each is expected to gain: in turns, or streaming on hardware of its own.

    V: of a step in which the session has m rows. waits: the verifier can wait for proposals.
    """
    agreement, delay_us = known.agreement.rate, known.overhead_us or 0.0
    found, windows = list[Way](), range(1, MOST_WINDOW + 1) if waits else ()
    rates = known.acceptance.rates(MOST_WINDOW, None if shares_cores else agreement)
    if not shares_cores:
        live = LiveChain.of(rates, agreement, draft_us, V)
        # A verdict finds a drafter that streams in the middle of a token.
        met_us, chunk = delay_us + draft_us / 2, least_chunk(V(1), draft_us)
        speed = stream_rate(live, agreement, draft_us, V(1), met_us, chunk)
        found.append(Way(Discipline.STREAM, 0, speed * V(1)))
        for window in windows:
            first_us = met_us + window * draft_us + V(window + 1)
            speed = waiting_rate(live, rates, agreement, first_us, window)
            found.append(Way(Discipline.STREAM, window, speed * V(1)))
    for window in windows:
        speed = lockstep_rate(rates, window, draft_us, V, delay_us)
        found.append(Way(Discipline.LOCKSTEP, window, speed * V(1)))
    return found


def least_chunk(plain_us: float, draft_us: float) -> int:
    """Tokens of a chunk that nobody waits for."""
    return max(1, min(SHORT_CHAIN, int(CHUNK_SHARE * plain_us / draft_us)))


# ----------------------------------------------------------------------------------------------------------------------
# A drafter's part of one session, at its verifier: told what happened, it says how to draft next.


class PlannedStep(NamedTuple):
    """The step behind which it is planned.

    sessions: that shared it. of: V of steps of so many sessions, from rows. spare_us: what the session's ledger can
    bear. lost_us: by which the step waited, or was disturbed by drafters on the same cores. pace: of the machine.
    """

    sessions: int
    of: Callable[[int], V]
    spare_us: float
    lost_us: float = 0.0
    pace: float = 1.0

    def each(self, sessions: int) -> V:
        """V of steps in which each of so many sessions has m rows."""
        step_us = self.of(sessions)
        return lambda rows: step_us(sessions * rows)


class Due(NamedTuple):
    """When an answer is expected, until when it makes sense to wait, and how likely it comes by then."""

    expected_us: float
    latest_us: float
    chance: float


class DrafterPacing:
    """`plan`: the present one. It is told times; microseconds throughout.

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
        self._count = self._chunks = 0
        self._answered = False
        self._told: Pace | None = None
        # When which verdict went out, by its end; whether the last one is answered, and how often answers are in time.
        self._verdicts: dict[int, float] = {}
        self._asked_us: float | None = None
        self._here, self._chance = True, 1.0
        self.plan = self._first()

    def _first(self) -> Plan:
        """Until a verdict tells what steps take: as others of its tenant draft, and what was not measured is tried."""
        known, shared = self.learnt, self._drafter.shares_cores
        if self._fixed is not None:
            return self._fixed
        if shared and not self._waits:
            return off("shares cores with a verifier that waits for nobody")
        if known.draft_us is None or known.left > 0.0:
            return self._trying("measuring" if known.draft_us is None else "trying")
        if not known.window and (shared or self._compared):
            return off("no gain expected")
        return in_turns(known.window, "as before") if shared else self._trying("begins")

    @property
    def _compared(self) -> bool:
        """Whether enough was held against the text to give up a drafter on hardware of its own."""
        return self.learnt.agreement.compared >= 3 * TRIAL_VERDICTS

    def _trying(self, reason: str) -> Plan:
        streaming = Plan(Discipline.STREAM, FIRST_PACE, 0, reason)
        return in_turns(PROBE_WINDOW, reason) if self._drafter.shares_cores else streaming

    # Answers

    @property
    def in_turns(self) -> bool:
        """Whether the verifier takes turns with it, on the same cores."""
        return self._drafter.shares_cores and self.plan.discipline is Discipline.LOCKSTEP

    def asked(self, end: int, now_us: float) -> None:
        """A verdict that ends at position `end` goes out."""
        if not self._here and self._asked_us is not None:
            self._judge(now_us - self._asked_us)
        self._asked_us, self._here = now_us, False
        self._verdicts[end] = now_us
        if len(self._verdicts) > REMEMBERED_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]

    def proposed(
        self,
        proposal: Proposal,
        arrived_us: float,
        live: bool = True,
        answers: bool = True,
        forwards: Iterable[tuple[float, float]] = (),
    ) -> None:
        """A chunk came. live: it agrees with the text. answers: it does, or did when it was drafted. forwards: when the
        verifier's last ones began and ended.

        A new chain answers the verdict that ended at its base, wherever later verdicts stand; one that goes on was
        under way before. Of an answer on the verifier's cores what counts is how long it took; else, what the drafter
        says that drafting took. For a session's first chunk its drafter read the prompt, so it tells a time only where
        none is known.
        """
        self._chunks += 1
        self._here = self._here or live
        asked_us = self._verdicts.get(proposal.base) if proposal.offset == 0 else None
        # 0 tells nothing: of two chunks that are sent together the first has it all.
        took_us, beside_us = float(proposal.draft_us), 0.0
        if self._drafter.shares_cores:
            took_us = took_us if asked_us is None else max(0.0, arrived_us - asked_us)
            begun_us = arrived_us - took_us
            beside_us = sum(max(0.0, min(arrived_us, ended) - max(begun_us, began)) for began, ended in forwards)
        if proposal.tokens and (self.learnt.draft_us is None or (took_us and self._chunks > 1)):
            # The tokens of a tree's piece were drafted in one forward unless its chunk asked for more.
            levels = min(self.plan.pace.chunk, len(proposal.tokens)) if proposal.parents else len(proposal.tokens)
            self.learnt.drafted(max(1, levels), took_us, beside_us)
        if answers and proposal.tokens and asked_us is not None:
            delay_us = max(0.0, arrived_us - asked_us)
            if self.learnt.overhead_us is not None:
                self._judge(delay_us)
            self._answered = True
            self.learnt.answered(max(0.0, delay_us - took_us))

    def _judge(self, delay_us: float) -> None:
        kept = delay_us <= self._answer_us + self._slack_us
        self._chance += TIMING_WEIGHT * (float(kept) - self._chance)

    @property
    def _answer_us(self) -> float:
        """From a verdict to its answer, as far as it is known."""
        known = self.learnt
        return (known.overhead_us or 0.0) + self._pace.chunk * (known.draft_us or 0.0)

    @property
    def _slack_us(self) -> float:
        return max(LEAST_TIMING_US, SLACK_DEVIATIONS * self.learnt.deviation_us)

    def due(self, plain_us: float) -> Due | None:
        """The answer to the last verdict; None if it is here, or none was asked for. One of which nothing is known may
        come soon, and is waited for half a plain step at most. A turn on the same cores pays only if it is waited for.
        """
        if self._here or self._asked_us is None or not self.plan.due:
            return None
        answer_us = self._answer_us
        latest_us = answer_us + self._slack_us if answer_us else plain_us / 2
        chance = 1.0 if self.in_turns else self._chance
        return Due(self._asked_us + (answer_us or CHUNK_SHARE * plain_us), self._asked_us + latest_us, chance)

    # Plans

    def tested(self, width: int, accepted: int) -> None:
        """A window of its tokens was tested."""
        self.learnt.acceptance.observe(width, accepted)
        self.learnt.ignored, self._answered = 0.0, True

    def verdict(self, width: int, step: PlannedStep) -> None:
        """A verdict, of a window of so many of its tokens; plan behind it."""
        known = self.learnt
        self._count += 1
        if self._drafter.shares_cores:
            known.paced(step.pace)
        # A drafter reads the prompt first.
        if self.plan.discipline is Discipline.LOCKSTEP and not width and (self._chunks or self._count > ENOUGH):
            known.ignored += 1.0 / step.sessions
        known.verdict(step.sessions, step.lost_us, self._drafter.shares_cores and self._answered)
        self._answered, every = False, TRIAL_VERDICTS if self.plan.discipline is Discipline.OFF else PLAN_EVERY
        if self._fixed is None and (self._count <= ENOUGH or (self._count + self._drafter.source) % every == 0):
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
        """The way that is expected to gain most.

        On hardware of its own it is planned by V of the session alone, since its drafting costs nobody, and the
        verifier divides a batch's rows; but a wait costs all of a batch, so whether to wait is decided by its V. On the
        verifier's cores all sessions of a batch draft the same window, or none: all wait for whoever is waited for, and
        the drafter drafts for all of them in one pass.
        """
        known, shared = self.learnt, self._drafter.shares_cores
        if shared and not self._waits:
            return self.plan
        draft_us = None if known.draft_us is None else max(1.0, known.draft_us)  # 0 of one that has told no time yet
        if draft_us is None and known.ignored < ENOUGH:
            return self._borne(step, self._trying("measuring"))
        if draft_us is None:
            return self._try_or_off(step)
        found = ways(known, draft_us, step.each(step.sessions if shared else 1), shared, self._waits)
        best = max(found, key=attrgetter("gain"))
        if shared and known.window and best.gain < LEAST_GAIN * found[known.window - 1].gain:
            best = found[known.window - 1]
        pays = best.gain >= LEAST_GAIN and known.ignored < ENOUGH
        if not shared:  # a stream delays nobody, so it may gain as little as tries may cost
            pays = best.gain >= 1.0 + EXPLORED_SHARE or not self._compared
        if not pays:
            known.window = 0
            return self._try_or_off(step)
        known.window = max(1, best.due)
        if shared:
            return self._borne(step, in_turns(best.due, f"window {best.due}, gain {best.gain:.2f}"))
        if best.due and step.sessions > 1:
            batch = max(ways(known, draft_us, step.each(step.sessions), shared, self._waits), key=attrgetter("gain"))
            best = best._replace(discipline=batch.discipline, due=batch.due)
        return self._streamed(best, step.each(1), draft_us)

    def _streamed(self, way: Way, V: V, draft_us: float) -> Plan:
        """The plan, with a run-ahead that covers what is decided during a round trip at the best conceivable speed, and
        a window behind it.
        """
        reason, chunk = f"gain {way.gain:.2f}" + (f" with {way.due}" if way.due else ""), least_chunk(V(1), draft_us)
        if way.discipline is Discipline.LOCKSTEP:
            return Plan(way.discipline, Pace(way.due, way.due, branches=self._branches), way.due, reason)
        known, step_us = self.learnt, V(1)
        rates = known.acceptance.rates(MOST_WINDOW, known.agreement.rate)
        fastest = min(1.0 / draft_us, expected_tokens(rates, MOST_WINDOW) / step_us)
        ahead = min(MOST_RUN_AHEAD, MOST_WINDOW + ceil(((known.overhead_us or 0.0) + step_us) * fastest))
        # A chain is wrong most often at its beginning, and the drafter goes on in any case: so no more is waited for.
        most = max(chunk, min(2 * SHORT_CHAIN, int(step_us / draft_us)))
        pace = Pace(min(way.due, most) or chunk, max(way.due, ahead), branches=self._branches)
        return Plan(way.discipline, pace, way.due, reason)

    def _borne(self, step: PlannedStep, plan: Plan) -> Plan:
        """That plan, unless the verifier would not wait for its turn, which would be in the way of the next forward.

        In a batch the drafter is at work for others anyway, and who is left out makes the wait dearer for them.
        """
        if not self._drafter.shares_cores or not plan.due or step.sessions > 1:
            return plan
        known, V = self.learnt, step.each(1)
        turn_us = plan.due * (known.draft_us or 0.0) + V(plan.due + 1) - V(1)
        if known.overhead_us is not None:
            turn_us += known.overhead_us + self._slack_us
        return plan if turn_us <= step.spare_us else off("no turn that its ledger could bear")

    def _try_or_off(self, step: PlannedStep) -> Plan:
        most = PLAN_EVERY if self._drafter.shares_cores else TRIAL_VERDICTS
        if self.learnt.tries(step.each(step.sessions)(1), most):
            return self._borne(step, self._trying("trying"))
        return off("no gain expected")
