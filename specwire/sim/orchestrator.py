"""One session's orchestrator under a virtual clock: the core's Session and its planner between two links.

The order of calls is that of `orchestrator/session/driver.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from draft_service.commands import AdvanceSession, CloseSession, Command, DraftedProposal, OpenSession, Reply
from specwire.core import messages
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Pace, Plan, Proposal, Verdict
from specwire.core.policy.controller import Planner
from specwire.core.policy.estimates import Forward, ForwardTimes
from specwire.core.session import Session
from specwire.core.text import Stopping, Text
from specwire.core.verify.session import Allowance
from specwire.sim.clock import Action, Clock
from specwire.sim.drafter import SimDrafter, SimLink
from specwire.sim.guesses import Guesses
from specwire.sim.verifier import SimVerifier
from verify_service.engine.messages import Opening, Report, StepTimings

GREEDY = Sampling()
# The one drafter, and the one session of each link.
SOURCE = HANDLE = 1


@dataclass(frozen=True, slots=True)
class Delays:
    """One way, software of the hop included; microseconds. append_us: until the log acknowledges."""

    verifier_us: float = 0.0
    drafter_us: float = 0.0
    append_us: float = 0.0


class Planned(NamedTuple):
    """A change of plan: when, why, and what."""

    time_us: float
    reason: str
    plan: Plan


@dataclass(slots=True)
class SimStats:
    """What a session's client saw, and its wire. Absolute times. pauses_us: between two emissions."""

    asked_us: float
    first_us: float = 0.0
    first_tokens: int = 0
    last_us: float = 0.0
    tokens: int = 0
    ledger_us: float = 0.0
    pauses_us: list[float] = field(default_factory=list)


class _Released(NamedTuple):
    text: str
    text_ends: tuple[int, ...]
    released: tuple[int, ...]
    kept: int
    stopped_at: None = None


class NoText:
    """An `OutputScanner` without text."""

    length = 0

    def push(self, tokens: Sequence[int]) -> _Released:
        return _Released("", (0,) * len(tokens), (0,) * len(tokens), len(tokens))

    def finish(self) -> str:
        return ""


class SimOrchestrator:
    """Args:
    verifier: where it opens; drafter: None for plain decoding.
    planner: chooses the pace; forward: V(m) as the verifier told it.
    prompt, tokens: lengths; the session ends with its last token. ngram: the verifier guesses from the text, too.
    head: a head may draft for it.
    """

    def __init__(
        self,
        clock: Clock,
        verifier: SimVerifier,
        drafter: SimDrafter | None,
        planner: Planner,
        forward: ForwardTimes,
        guesses: Guesses,
        delays: Delays,
        tokens: int,
        buffer: int,
        on_ended: Callable[[SimOrchestrator], None],
        ngram: bool = False,
        head: bool = False,
    ) -> None:
        prompt = [guesses.target(position) for position in range(guesses.prompt)]
        self.session = Session(Text(prompt), len(prompt), NoText(), buffer)
        self.stats = SimStats(clock.now_us)
        self.plans: list[Planned] = []
        self.planner = planner
        self.verifier = verifier
        self.drafter = drafter
        self._clock = clock
        self._forward = forward
        self._delays = delays
        self._guesses = guesses
        self._ngram, self._head = ngram, head
        self._stopping = Stopping(tokens)
        self._on_ended = on_ended
        self._verifying = verifier.link(self._reported)
        self._drafting = SimLink(guesses, self._replied)
        self._planned = Pace(), 0
        self._events: deque[messages.Event] = deque()
        self._applying = False

    def start(self) -> None:
        """The client's request is here."""
        self._plan()
        self._apply(messages.VerifierReady())
        if self.drafter is not None:
            self._apply(messages.DrafterReady(SOURCE, *self._planned))

    def _apply(self, event: messages.Event) -> None:
        self._events.append(event)
        if self._applying:
            return
        self._applying = True
        while self._events:
            for effect in self.session.handle(self._events.popleft()):
                self._run(effect)
        self._applying = False

    # From the verifier

    def _reported(self, report: Report) -> None:
        self._clock.after(self._delays.verifier_us, partial(self._on_report, report))

    def _on_report(self, report: Report) -> None:
        for refusal in report.refused:
            raise AssertionError(refusal.message)
        for admitted in report.admitted:
            self._apply(messages.VerifierOpened(admitted.attach, admitted.position))
        for decided in report.decided:
            if report.timings is not None:
                self._on_decided(decided.verdict, report.timings)

    def _on_decided(self, verdict: Verdict, step: StepTimings) -> None:
        if step.sessions == 1:
            self._forward.told(step.rows, step.forward_us + step.gap_us, step.plain_us)
        self.stats.ledger_us = verdict.ledger_us
        self._apply(messages.VerdictArrived(self.session.attach, verdict))
        if self.drafter is None:
            return
        known = step.sessions, step.plain_us, step.drafts_us, step.waited_us
        forward = Forward(self._clock.now_us, step.forward_us, *known)
        self.planner.observe_verdict(verdict.seen_by(SOURCE), forward)
        if self.planner.time_to_plan:
            self._plan()

    # From the drafter

    def _replied(self, reply: Reply) -> None:
        if isinstance(reply, DraftedProposal):
            self._clock.after(self._delays.drafter_us, partial(self._on_proposal, reply.proposal, reply.spent_us))

    def _on_proposal(self, proposal: Proposal, draft_us: int) -> None:
        self.planner.observe_proposal(proposal, draft_us, self._clock.now_us)
        self._apply(messages.ProposalArrived(replace(proposal, source=SOURCE)))

    def _plan(self) -> None:
        plan = self.planner.plan()
        if (plan.pace, plan.due) != self._planned:
            self._planned = plan.pace, plan.due
            self.plans.append(Planned(self._clock.now_us, plan.reason, plan))
            self._apply(messages.PacePlanned(SOURCE, plan.pace, plan.due))

    # Effects out

    def _run(self, effect: messages.Effect) -> None:
        match effect:
            case messages.OpenVerifier():
                self._to_verifier(partial(self._open, effect))
            case messages.SendProgress():
                allowance = Allowance(effect.durable, effect.credit, effect.due)
                self._tell_verifier(progress=((HANDLE, allowance),))
            case messages.RelayProposal(proposal=Proposal() as proposal):
                self._tell_verifier(proposals=((HANDLE, proposal),))
            case messages.CloseVerifier():
                self._tell_verifier(closes=(HANDLE,))
            case messages.OpenDrafter() | messages.AdvanceDrafter() | messages.CloseDrafter():
                self._to_drafter(effect)
            case messages.Append():
                self._clock.after(self._delays.append_us, partial(self._apply, messages.Appended()))
            case messages.Emit():
                self._emit(effect)
            case messages.EmitEnd():
                self._on_ended(self)

    def _emit(self, effect: messages.Emit) -> None:
        now_us, stats = self._clock.now_us, self.stats
        if not stats.tokens:
            stats.first_us, stats.first_tokens = now_us, len(effect.tokens)
        else:
            stats.pauses_us.append(now_us - stats.last_us)
        stats.last_us = now_us
        stats.tokens += len(effect.tokens)
        self._apply(messages.ClientTook(effect.position + len(effect.tokens)))

    def _to_drafter(self, effect: messages.OpenDrafter | messages.AdvanceDrafter | messages.CloseDrafter) -> None:
        if self.drafter is not None:
            self._clock.after(self._delays.drafter_us, partial(self.drafter.send, self._command(effect)))

    def _command(self, effect: messages.OpenDrafter | messages.AdvanceDrafter | messages.CloseDrafter) -> Command:
        link = self._drafting
        match effect:
            case messages.OpenDrafter():
                return OpenSession(link, HANDLE, effect.tokens, GREEDY, effect.pace)
            case messages.AdvanceDrafter():
                return AdvanceSession(link, HANDLE, effect.position, effect.tokens, effect.pace)
            case messages.CloseDrafter():
                return CloseSession(link, HANDLE)

    # What arrives at the verifier

    def _to_verifier(self, action: Action) -> None:
        self._clock.after(self._delays.verifier_us, action)

    def _tell_verifier(self, **parts: Any) -> None:
        self._to_verifier(partial(self.verifier.send, self._verifying, **parts))

    def _open(self, effect: messages.OpenVerifier) -> None:
        opening = Opening(
            handle=HANDLE,
            session_id=str(self._verifying),
            fence=1,
            attach=effect.attach,
            tokens=effect.tokens,
            prompt_length=self.session.prompt_length,
            sampling=GREEDY,
            stopping=self._stopping,
            allowance=Allowance(effect.durable, effect.credit, effect.due),
            ngram=self._ngram,
            head=self._head,
        )
        self.verifier.open(self._verifying, opening, self._guesses.target, self._guesses.headed)
