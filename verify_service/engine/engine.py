"""The engine: the one owner of the target model, in a thread of its own.

A step: take commands, plan, report what the last one decided, run one forward over all sessions, choose, let each
session decide. It decides at least one token for every session that has room, proposals or not. Invariant: after a
step, what a slot holds is a prefix of its session's text.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty
from typing import Any, NamedTuple

from specwire.core.invalid import Code
from specwire.core.law.acceptance import RowChoice
from specwire.core.messages import Outcome, SourceKind, Verdict
from specwire.core.model import Feed, ModelLost, SlotModel
from specwire.core.policy.costs import StepCosts, part_of
from specwire.core.policy.drafters import PlannedStep
from specwire.core.policy.tunables import LOOK_EVERY_US
from specwire.core.policy.windows import Share, StepCandidate, StepPlan, schedule
from specwire.core.verify.chains import Offer
from specwire.core.verify.session import RunningSession
from specwire.core.verify.shared_texts import ScopeTexts
from specwire.rpc.service_thread import Inbox, Stop, monotonic_us
from specwire.telemetry.tally import SIZES, STEPS, Histogram, SpeculationCounts
from verify_service.engine.batch import (
    OUT_OF_MEMORY_MESSAGE,
    Part,
    PromptTurns,
    RowSampler,
    ShortOfMemory,
    StepLimits,
    StepSharing,
    detect_out_of_memory,
    patiently,
)
from verify_service.engine.heads import DraftedStep, HeadDrafting
from verify_service.engine.messages import (
    Begun,
    Command,
    Decided,
    LinkLost,
    QueuePatience,
    Report,
    Reports,
    Scoring,
    StepTimings,
    Tick,
    TurnAway,
)
from verify_service.engine.scoring import Scorer, ScoringJob
from verify_service.engine.session_manager import SessionManager
from verify_service.engine.sessions import Held
from verify_service.engine.shares import TenantShares

logger = logging.getLogger(__name__)

MOST_SLEEP_S = 3600.0
DETACH_GRACE_US = 30e6
# How long after a forward constraints may answer before their sessions are left out of a step.
MOST_LATE_US = 20e3
LOOK_AGAIN_US = 2e3
# Weight of the commands that are taken in at once: some milliseconds' worth.
MOST_TAKEN = 1 << 14
# What a drafter weighs, of which plans are made.
DRAFTER = 16
# Packed tokens that weigh as much as one in a list.
PACKED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing to compute before `until_us` or a command.

    awaited: sessions whose proposals are due, for which it waits on purpose; they pay for all `sessions` that wait.
    """

    until_us: float
    awaited: tuple[RunningSession, ...] = ()
    sessions: int = 0

    @property
    def waiting(self) -> bool:
        return len(self.awaited) > 0


@dataclass(slots=True)
class Pauses:
    """Time since the end of the last forward in which nothing was computed; microseconds."""

    forward_ended_us: float
    waited_us: float = 0.0
    idle_us: float = 0.0
    drafted_us: float = 0.0

    def gap_us(self, now_us: float) -> float:
        return max(0.0, now_us - self.forward_ended_us - self.waited_us - self.idle_us - self.drafted_us)


class UnderWay(NamedTuple):
    """A forward of `parts`, and its rows; see `RowSampler`.

    disturbing: sessions whose drafters, on the same cores, may be at work beside it.
    """

    parts: Sequence[Part]
    rows: Any
    began_us: float
    disturbing: Sequence[Held]


class StepCharge(NamedTuple):
    """Of a step of so many `sessions`: see `RunningSession.decided`. lost_us: by which it waited, or was disturbed."""

    sessions: int
    plain_us: float | None
    lost_us: float
    windows_us: float


class EngineTally(SpeculationCounts):
    """Counts since the engine began: plain numbers, written in its thread only, read by metrics from others.

    `refused`: windows of which a token was refused, each a rollback and a dead chain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward_s = Histogram(STEPS)
        self.choose_s = Histogram(STEPS)
        self.rows = Histogram(SIZES)
        self.sessions = Histogram(SIZES)
        self.gap_us = 0
        self.waited_us = 0
        self.drafted_us = 0
        self.outcomes: Counter[Outcome] = Counter()
        self.offers: Counter[Offer] = Counter()
        self.windows = 0
        self.refused = 0

    def step(self, timings: StepTimings) -> None:
        """A forward has ended."""
        self.forward_s.observe(timings.forward_us / 1e6)
        self.choose_s.observe(timings.choose_us / 1e6)
        self.rows.observe(timings.rows)
        self.sessions.observe(timings.sessions)
        self.gap_us += timings.gap_us
        self.waited_us += timings.waited_us
        self.drafted_us += timings.drafted_us

    def verdict(self, verdict: Verdict) -> None:
        """A session's part of a step was decided."""
        for outcome in verdict.outcomes:
            self.outcomes[outcome] += 1
        self.count_drafts(verdict)
        if verdict.width:
            self.windows += 1
            self.refused += Outcome.RECOVERED in verdict.outcomes


def weight(command: Command) -> int:
    """See `Inbox`."""
    match command:
        case Tick(opens=opens, proposals=proposals):
            parts = 1 + len(opens) + len(proposals) + len(command.progress) + len(command.closes)
            told = sum(len(opening.tokens) for opening in opens)
            told += sum(1 + len(tokens) // PACKED_TOKENS for _, tokens in command.references)
            told += DRAFTER * sum(1 + len(drafters) for _, drafters in command.drafters)
            told += DRAFTER * sum(len(opening.drafters) for opening in opens)
            return parts + len(command.forgotten) + told + sum(len(proposal.tokens) for _, proposal in proposals)
        case Scoring():
            return 1 + len(command.tokens) + sum(map(len, command.others))
        case _:
            return 1


class Engine:
    """Commands go into `inbox`, from any thread; `deliver` gets what a step says to each link.

    `deliver` is called in the engine's thread, about once a step, and must not block.
    """

    def __init__(
        self,
        lm: SlotModel,
        sampler: RowSampler,
        costs: StepCosts,
        deliver: Callable[[Reports], None],
        now_us: Callable[[], float] = monotonic_us,
        patient: bool = False,
        ngram: bool = True,
        detach_grace_us: float = DETACH_GRACE_US,
        patience: QueuePatience = QueuePatience(),  # noqa: B008 # frozen
        drafting: HeadDrafting | None = None,
        shares: TenantShares | None = None,
        text_memory: int = 0,
        known: ScopeTexts | None = None,
    ) -> None:
        """patient: see `patiently`; ngram and those after it: see `SessionManager`.

        drafting: of a head, behind the texts of `lm`. shares: what tenants may have; None where there are none.
        """
        self.lm = lm
        self._sampler = sampler
        self.costs = costs
        self.inbox: Inbox[Command] = Inbox(weight)
        self.tally = EngineTally()
        self.sessions = SessionManager(
            lm,
            now_us,
            ngram,
            detach_grace_us,
            patience,
            self.tally.offers,
            head=drafting is not None,
            shares=shares,
            text_memory=text_memory,
            known=known,
        )
        self.roster = self.sessions.roster
        self.steps = 0
        self.stopped = False
        self.step_began_s: float | None = None
        self._deliver = deliver
        self._now_us = now_us
        self._pauses = Pauses(now_us())
        self._limits = StepLimits()
        self._turns = PromptTurns() if shares is None else PromptTurns(shares.weight)
        self._sharing = None if shares is None else StepSharing(shares, costs, self.roster, lm, now_us)
        self._scorer = Scorer(lm, sampler, self.sessions, self._sharing)
        self._drafting = drafting
        self.shares = shares
        self.plan: Callable[..., StepPlan] = schedule
        if patient:
            self.plan = lambda candidates, now_us, _, prefill_rows, __: patiently(
                candidates, now_us, prefill_rows, self._pauses.waited_us
            )

    def run(self) -> None:
        """Run steps until a Stop arrives."""
        while not self.stopped:
            self.step_began_s = time.monotonic()
            rest = self.step()
            self.step_began_s = None
            if rest is not None:
                self._sleep(rest)
        self.tell()
        self._scorer.abandon()

    def step(self) -> Rest | None:
        """Do what can be done now; returns how long there will be nothing to do, None to go on at once.

        What a step decides is told after the next one is planned, or before a rest. Sending needs the interpreter,
        which a forward leaves to other threads and planning does not.
        """
        self._take_commands()
        self.sessions.expire(self._now_us())
        self.sessions.slot_queue.fill(between_steps=True)
        self.sessions.slot_queue.catch_up()
        ready = [held for held in self.roster if held.session.room > 0 and not held.waiting]
        if self._sharing is not None:
            ready = self._sharing.able(ready, self._scorer.lent)
        runnable = self._runnable(ready)
        late = len(runnable) < len(ready)
        if self.sessions.references.waiting:
            self.sessions.references.read(busy=bool(runnable))
        if self._drafting is not None and self._drafting.works and runnable:
            self._draft(self._drafting, runnable)
        shown = self._shown(runnable)
        if self._sharing is not None:
            shown = self._sharing.chosen(shown, runnable, self._scorer.tenants)
        candidates = self._turns.ordered(shown, runnable)
        decoding = sum(each.uncached == 1 for each in candidates)
        V = self.costs.of(decoding)
        most_rows = decoding if self.costs.seen(decoding).plain_due else self._limits.most_rows
        plan = self.plan(candidates, self._now_us(), V, self._limits.prefill_rows, most_rows)
        self.tell()
        if plan.wait_until_us is not None and not (self._scorer.jobs and self._scorer.turn(idle=False)):
            awaited = tuple([runnable[slot].running for slot in plan.awaited])
            return Rest(min(plan.wait_until_us, self.sessions.next_deadline_us), awaited, decoding)
        if plan.shares:
            shares = [(share, runnable[share.slot]) for share in plan.shares]
            for share, held in shares:
                if share.decides and held.looked:
                    used = share.window > 0 and share.kind in (SourceKind.NGRAM, SourceKind.PREDICTION)
                    held.looks_in_vain = 0 if used else held.looks_in_vain + 1
            self._compute(shares)
        scoring = self._scorer.turn(idle=not plan.shares) if self._scorer.jobs else None
        if scoring is not None:
            self.tell()
            self._score(scoring)
            return None
        return None if plan.shares or self.sessions.references.waiting else Rest(self._next_us(late))

    def _runnable(self, ready: Sequence[Held]) -> dict[int, Held]:
        """By slot those whose constraints have answered; it is noted of each whether it is searched for guesses."""
        runnable: dict[int, Held] = {}
        rest_us = LOOK_EVERY_US * sum(held.session.ngram is not None for held in ready)
        step_us = self.costs.plain(max(1, len(ready)))
        for held in ready:
            with self.sessions.containing(held):
                if held.session.heard():
                    held.looked = held.looks(rest_us)
                    held.unsearched_us = 0.0 if held.looked else held.unsearched_us + step_us
                    runnable[held.slot] = held
        return runnable

    def _shown(self, runnable: Mapping[int, Held]) -> list[StepCandidate]:
        shown: list[StepCandidate] = []
        plain_us = self.costs.plain(max(1, sum(map(self._decodes, runnable.values()))))
        for slot, held in runnable.items():
            with self.sessions.containing(held):
                cached, most, looked = self.lm.cached(slot), self.lm.most_window, held.looked
                shown.append(held.running.candidate(slot, cached, plain_us, looked, most))
        return shown

    def _decodes(self, held: Held) -> bool:
        """Whether its next step decides a token; else its prompt is fed."""
        return held.session.position - self.lm.cached(held.slot) == 1

    def _next_us(self, late: bool) -> float:
        """When to look again, if nothing comes: at a deadline, or soon where a constraint had not answered.

        It may have answered by now, and nobody would wake us for that.
        """
        paced_us = math.inf if self._sharing is None else self._sharing.next_us
        return min(self.sessions.next_deadline_us, paced_us, self._now_us() + LOOK_AGAIN_US if late else math.inf)

    def _draft(self, drafting: HeadDrafting, runnable: Mapping[int, Held]) -> None:
        """Draft behind what is decided, whose verdict does not wait for that."""
        decoding = {slot: held for slot, held in runnable.items() if self._decodes(held)}
        if self.costs.seen(len(decoding)).plain_due:
            return
        began_us, prompts = self._now_us(), {slot: held for slot, held in runnable.items() if slot not in decoding}
        plain_us, V = self.costs.plain(max(1, len(decoding))), self.costs.of(len(decoding))
        drafting.draft(DraftedStep(decoding, prompts, V, plain_us, self.costs.seen(1).pace), self._now_us, self.tell)
        self._pauses.drafted_us += self._now_us() - began_us

    # Commands and reports

    def _take_commands(self) -> None:
        """Take waiting commands, up to a limit: a flood must not keep the sessions from their steps."""
        for command in self.inbox.waiting(MOST_TAKEN):
            self._apply(command)

    def _apply(self, command: Command | Stop) -> None:
        match command:
            case Tick():
                if command.opens:
                    self.tell()  # a handle may be another session's now, and opening one may take a while
                self.sessions.tick(command)
            case Begun():
                self.sessions.begun(command)
            case LinkLost():
                self.sessions.link_lost(command.link)
            case Scoring():
                self._scorer.add(command)
            case TurnAway():
                self.sessions.turn_away(command.message)
            case Stop():
                self.stopped = True

    def _sleep(self, rest: Rest) -> None:
        """Sleep until a command arrives or the rest is over."""
        began_us = self._now_us()
        try:
            seconds = min(MOST_SLEEP_S, max(0.0, (rest.until_us - began_us) / 1e6))
            self._apply(self.inbox.get(timeout=0.0 if self.stopped else seconds))
        except Empty:
            pass  # the rest is over
        self.rested(rest, self._now_us() - began_us)

    def rested(self, rest: Rest, slept_us: float) -> None:
        """Account for the time between two steps."""
        if rest.waiting:
            self._pauses.waited_us += slept_us
            for running in rest.awaited:
                running.waited_us += slept_us * part_of(1, len(rest.awaited), rest.sessions)
        else:
            self._pauses.idle_us += slept_us

    def tell(self) -> None:
        """Deliver what is to be said, if anything is."""
        if self.sessions.reports:
            self._deliver(self.sessions.take_reports())

    # A step's parts

    def _compute(self, shares: Sequence[tuple[Share, Held]]) -> None:
        """Run one forward. What fails for one session ends that one; a forward that fails is tried for each alone."""
        try:
            parts = self._parts(shares)
            if parts:
                self._forward(parts)
        except ModelLost:
            raise  # the next step would fail as well, and other verifiers can go on with its sessions
        except ShortOfMemory as short:
            self._relieve(shares, short)
        except Exception:
            logger.exception("a step of %d sessions failed", len(shares))
            self._one_by_one(shares, Code.INTERNAL, "the target's forward failed; the verifier's log says why")

    def _parts(self, shares: Sequence[tuple[Share, Held]]) -> list[Part]:
        parts: list[Part] = []
        for share, held in shares:
            with self.sessions.containing(held):
                part = Part.of(share, held)
                if part.wanted:
                    held.session.ask(part.tokens)
                parts.append(part)
        return parts

    def _one_by_one(self, shares: Sequence[tuple[Share, Held]], code: Code, message: str) -> None:
        """Try each session of a forward alone, which decided nothing; one that was alone ends by `code`."""
        if len(shares) == 1:
            [(_, held)] = shares
            if self.roster.contains(held):
                self.sessions.fail(held, code, message)
            return
        self._take_back(shares)
        for share, held in shares:
            if self.roster.contains(held) and held.session.room > 0:
                self._compute([(share, held)])
                self.tell()

    def _take_back(self, shares: Sequence[tuple[Share, Held]]) -> None:
        for _, held in shares:
            if self.roster.contains(held):
                self.lm.rollback(held.slot, min(self.lm.cached(held.slot), held.session.position - 1))

    def _relieve(self, shares: Sequence[tuple[Share, Held]], short: ShortOfMemory) -> None:
        """Answer a forward that lacked memory and decided nothing.

        From the next step on prompts are fed in smaller chunks, with fewer draft tokens. If that is not enough, each
        session is tried alone, and one that is too large by itself is given up.
        """
        logger.warning("short of memory for a forward of %d sessions: %s", len(shares), short)
        self._take_back(shares)
        if not self._limits.lower([share for share, _ in shares]):
            self._one_by_one(shares, Code.RESOURCE_EXHAUSTED, OUT_OF_MEMORY_MESSAGE)

    def _forward(self, parts: Sequence[Part]) -> None:
        under_way = self.begin(parts)
        self.end(under_way, self._now_us())

    def begin(self, parts: Sequence[Part]) -> UnderWay:
        """The first half of a forward; nothing else may be done to the model before the second one."""
        feeds = [self._feed(part) for part in parts]
        began_us, disturbing = self._now_us(), [part.held for part in parts if part.held.running.disturbs]
        with detect_out_of_memory():
            return UnderWay(parts, self.lm.forward(feeds), began_us, disturbing)

    def end(self, under_way: UnderWay, ended_us: float) -> None:
        """The second half: choose and decide. ended_us: when the target had computed."""
        parts = under_way.parts
        with detect_out_of_memory():
            told = self._sampler.choose(under_way.rows, parts, self._patience_until(ended_us + MOST_LATE_US))
        timings = self._timed(parts, under_way.began_us, ended_us)
        failed = self.lm.failed
        self._turns.took(parts)
        if self._sharing is not None:
            self._sharing.took(parts, timings.forward_us)
        # A proposal that arrived during the forward still meets the last row; what was closed is gone.
        self._take_commands()
        self._decide(parts, told, failed, timings, under_way.disturbing)

    def _timed(self, parts: Sequence[Part], began_us: float, ended_us: float) -> StepTimings:
        """Account for the times of a step whose tokens are chosen."""
        chosen_us = self._now_us()
        pauses, self._pauses = self._pauses, Pauses(ended_us)
        self.sessions.forwards.append((began_us, ended_us))
        timings = StepTimings(
            step=self.steps,
            sessions=len(parts),
            rows=sum(part.share.rows for part in parts),
            forward_us=round(ended_us - began_us),
            choose_us=round(chosen_us - ended_us),
            gap_us=round(pauses.gap_us(began_us)),
            waited_us=round(pauses.waited_us),
            forward_ended_ns=round(ended_us * 1000),
            drafted_us=round(pauses.drafted_us),
        )
        self.steps += 1
        self.tally.step(timings)
        return timings

    def _patience_until(self, until_us: float) -> Callable[[Part], bool]:
        """Whether a part's constraint has answered; all of them together are waited for until one deadline."""
        return lambda part: part.held.session.heard(max(0.0, until_us - self._now_us()) / 1e6)

    def _feed(self, part: Part) -> Feed:
        """Tokens behind the prompt are rows (`Feed.rows`): steps fed them one by one, here or at a verifier before."""
        slot, fresh, text = part.share.slot, part.share.fresh, part.held.session.text.tokens
        start = self.lm.cached(slot)
        stop = start + fresh
        rows = max(0, stop - max(start, part.held.prompt_length))
        if fresh - rows == 1 and start > 0:
            start -= 1  # a prompt's token that is fed alone would be computed as a row
        return Feed(slot, start, [*text[start:stop], *part.tokens], part.wanted, rows=rows + len(part.tokens))

    def _decide(
        self,
        parts: Sequence[Part],
        told: Sequence[RowChoice],
        failed: frozenset[int],
        timings: StepTimings,
        disturbing: Sequence[Held],
    ) -> None:
        # The time that features take counts as the head's: plain decoding would not have kept any, nor other windows.
        tapped_us = 0.0 if self._drafting is None else min(timings.forward_us, self._drafting.tapped_us(len(parts)))
        forward_us = timings.forward_us - tapped_us
        disturbed_us = self._disturbed_us(parts, timings, forward_us, disturbing)
        plain_us = self._learn(parts, timings, forward_us, len(disturbing) > 0)
        windows = sum(part.share.window for part in parts)
        windows_us = self.costs.windows_us(len(parts), len(parts) + windows)
        for part, choice in zip(parts, told, strict=True):
            if not self.roster.contains(part.held):
                continue
            report = self.sessions.report_of(part.held)
            report.timings = timings
            charged_us = windows_us * part_of(part.share.window, windows, len(parts))
            charge = StepCharge(len(parts), plain_us, timings.waited_us + disturbed_us, charged_us)
            with self.sessions.containing(part.held):
                self._decide_one(part, choice, part.share.slot in failed, report, charge)

    def _disturbed_us(
        self, parts: Sequence[Part], timings: StepTimings, forward_us: float, disturbing: Sequence[Held]
    ) -> float:
        """By how much drafters at work beside a step made it longer; their sessions are charged for what all lost."""
        if not disturbing:
            return 0.0
        expected_us = self.costs.of(len(parts))(timings.rows)
        disturbed_us = max(0.0, forward_us + timings.gap_us - expected_us)
        for held in disturbing:
            cost_us = disturbed_us * part_of(1, len(disturbing), len(parts))
            held.session.ledger.charge(0.0, 0, 0.0, cost_us)
        return disturbed_us

    def _decide_one(self, part: Part, choice: RowChoice, failed: bool, report: Report, charge: StepCharge) -> None:
        if failed:
            self._mistrust(part)
        elif choice.failure is not None:
            raise choice.failure
        elif choice.tokens:
            self._resolve(part, choice, report, charge)
        elif part.wanted:
            # Its constraint has not answered yet: it is left out until then, and tried again.
            self.lm.rollback(part.share.slot, part.held.session.position - 1)

    def _mistrust(self, part: Part) -> None:
        """Contain logits that are not finite: the session loses its drafts if one may be the cause, else it ends.

        The model has discarded the slot, so the text is fed again, which no ledger could bear a second time.
        """
        held = part.held
        if part.window and held.session.can_mistrust:
            held.session.mistrust()
            held.running.nothing_decided(self._now_us())
        else:
            message = f"the target's logits before position {held.session.position} are not finite"
            self.sessions.fail(held, Code.ABORTED, message)

    def _learn(self, parts: Sequence[Part], timings: StepTimings, forward_us: float, disturbed: bool) -> float | None:
        """Refine the costs; what the plain step of this batch costs, None if this was one (or held a prompt).

        A step that drafters disturbed tells nothing.
        """
        prompted = any(part.share.fresh > 1 or not part.share.decides for part in parts)
        if prompted or disturbed:
            self.costs.interrupted()
            plain = timings.rows == len(parts) and not timings.waited_us
            return None if prompted or plain else self.costs.plain(len(parts))
        waited, rows = timings.waited_us > 0, timings.rows
        plain_us = self.costs.observe(len(parts), rows, forward_us, timings.gap_us, waited)
        if self._drafting is not None:
            self._drafting.charge_features(len(parts))
        return plain_us

    def _resolve(self, part: Part, choice: RowChoice, report: Report, charge: StepCharge) -> None:
        held, session = part.held, part.held.session
        if session.room == 0:
            # Taken over during the forward by an owner who allows less. The last token is fed again when it has room.
            self.lm.rollback(held.slot, session.position - 1)
            return
        # Likewise clipped: under greedy and coupled the choices that are left out would be made again, under others
        # nothing has been drawn yet.
        window = session.clipped(part.tokens)
        chosen = choice.tokens[: len(window) + 1]
        verdict = session.resolve(chosen, window, part.share.kind, part.source, choice.report, choice.judge)
        # The token decided behind the window was not fed yet, also where a draft token of that position was, behind
        # a window that was clipped: the next step feeds it, and takes the next token from its row.
        self.lm.rollback(held.slot, verdict.position + min(verdict.accepted, len(window)))
        self.tally.verdict(verdict)
        if self._sharing is not None:
            self._sharing.shares.count_decided(held.tenant, len(verdict.tokens))
        if verdict.tokens:
            self._report(held, verdict, report, charge)
        if session.stuck:
            self.sessions.give_up(held)
        elif verdict.finish is not None:
            self.sessions.linger(held)

    def _report(self, held: Held, verdict: Verdict, report: Report, charge: StepCharge) -> None:
        """Tell its link what was decided, charge the session for it, and plan its drafters."""
        session, now_us = held.session, self._now_us()
        held.running.decided(now_us, len(verdict.tokens), charge.plain_us, charge.windows_us)
        sessions, costs = charge.sessions, self.costs
        spare_us = session.ledger.spare_us(costs.plain(sessions))
        step = PlannedStep(sessions, costs.of, spare_us, charge.lost_us, costs.seen(sessions).pace)
        paces = held.running.planned(verdict, step)
        verdict = verdict._replace(ledger_us=round(session.ledger.balance_us), paces=paces)
        report.decided.append(Decided(held.handle, held.attach, verdict))

    def _score(self, scoring: ScoringJob) -> None:
        """A chunk of scoring counts as a pause: it is no part of what a step costs its sessions."""
        began_us, fed = self._now_us(), scoring.fed
        self._scorer.run_chunk(scoring)
        elapsed_us = self._now_us() - began_us
        if self._sharing is not None and scoring.fed > fed:
            self._sharing.scored(scoring.request.tenant, scoring.fed - fed, elapsed_us)
        self._pauses.idle_us += elapsed_us
        for held in self.roster:
            held.running.since_us += elapsed_us
