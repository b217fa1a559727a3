"""One session's orchestrator under a virtual clock: the core's Session and its planner between two links.

The order of calls is that of `orchestrator/session/driver.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from specwire.core import messages as ev
from specwire.core import messages as fx
from specwire.core.law.acceptance import window_counts
from specwire.core.law.sampling import Sampling
from specwire.core.limits import Ending
from specwire.core.messages import Pace, Plan, Proposal, SourceKind
from specwire.core.policy.controller import PlannedVerdict as PlannedFrom
from specwire.core.policy.controller import Planner
from specwire.core.policy.estimates import Forward, ForwardTimes
from specwire.core.session import Session
from specwire.core.text import Text
from specwire.core.verify.session import Allowance, VerifySession
from specwire.sim.clock import Action, Clock
from specwire.sim.drafter import SimDrafter, SimDraftSession
from specwire.sim.guesses import VOCABULARY, Guesses
from specwire.sim.verifier import SimSession, SimVerdict, SimVerifier

GREEDY = Sampling()
# The one drafter.
SOURCE = 1


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
    """What a session's client saw, and its wire. Absolute times."""

    asked_us: float
    first_us: float = 0.0
    first_tokens: int = 0
    last_us: float = 0.0
    tokens: int = 0
    ledger_us: float = 0.0


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


class Edge:
    """Args:
    verifier: where it opens; drafter: None for plain decoding.
    planner: chooses the pace; forward: V(m) as the verifier told it.
    prompt, tokens: lengths; the session ends with its last token. ngram: the verifier guesses from the text, too.
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
        on_ended: Callable[[Edge], None],
        ngram: bool = False,
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
        self._ngram = ngram
        self._ending = Ending(len(prompt) + tokens, frozenset(), frozenset())
        self._on_ended = on_ended
        self._held: SimSession | None = None
        self._drafting: SimDraftSession | None = (
            drafter.attach(guesses, self._draft_sent) if drafter is not None else None
        )
        self._planned = Pace(), 0
        self._events: deque[ev.Event] = deque()
        self._applying = False

    def start(self) -> None:
        """The client's request is here."""
        self._plan()
        self._apply(ev.VerifierReady())
        if self.drafter is not None:
            self._apply(ev.DrafterReady(SOURCE, *self._planned))

    def _apply(self, event: ev.Event) -> None:
        self._events.append(event)
        if self._applying:
            return
        self._applying = True
        while self._events:
            for effect in self.session.handle(self._events.popleft()):
                self._run(effect)
        self._applying = False

    # From the verifier

    def _on_decided(self, decided: SimVerdict) -> None:
        verdict, step = decided.verdict, decided.step
        if step.sessions == 1:
            self._forward.observe(step.rows, step.forward_us)
        self.stats.ledger_us = decided.ledger_us
        self._apply(ev.VerdictArrived(self.session.attach, verdict))
        if self.drafter is None:
            return
        width = min(verdict.width, len(verdict.tokens)) if verdict.kind is SourceKind.DRAFTER else 0
        accepted = window_counts(verdict.outcomes, width).accepted
        known = step.sessions, step.plain_us, step.drafts_us
        forward = Forward(step.rows, self._clock.now_us, step.forward_us, *known)
        self.planner.observe_verdict(
            PlannedFrom(verdict.position, verdict.tokens, width, accepted, round(decided.delay_us), forward)
        )
        if self.planner.time_to_plan:
            self._plan()

    # From the drafter

    def _draft_sent(self, proposal: Proposal, draft_us: float) -> None:
        self._clock.after(self._delays.drafter_us, partial(self._on_proposal, proposal, draft_us))

    def _on_proposal(self, proposal: Proposal, draft_us: float) -> None:
        self.planner.observe_proposal(proposal, round(draft_us), self._clock.now_us)
        self._apply(ev.ProposalArrived(replace(proposal, source=SOURCE)))

    def _plan(self) -> None:
        plan = self.planner.plan()
        if (plan.pace, plan.due) != self._planned:
            self._planned = plan.pace, plan.due
            self.plans.append(Planned(self._clock.now_us, plan.reason, plan))
            self._apply(ev.PacePlanned(SOURCE, plan.pace, plan.due))

    # Effects out

    def _run(self, effect: fx.Effect) -> None:
        match effect:
            case fx.OpenVerifier():
                self._to_verifier(partial(self._open, effect))
            case fx.SendProgress():
                self._to_verifier(partial(self._allow, Allowance(effect.durable, effect.credit, effect.due)))
            case fx.RelayProposal():
                self._to_verifier(partial(self._propose, effect.proposal))
            case fx.CloseVerifier():
                self._to_verifier(self._close)
            case fx.OpenDrafter() | fx.AdvanceDrafter() | fx.CloseDrafter():
                self._to_drafter(effect)
            case fx.Append():
                self._clock.after(self._delays.append_us, partial(self._apply, ev.Appended()))
            case fx.Emit():
                self._emit(effect)
            case fx.EmitEnd():
                self._on_ended(self)

    def _emit(self, effect: fx.Emit) -> None:
        now_us, stats = self._clock.now_us, self.stats
        if not stats.tokens:
            stats.first_us, stats.first_tokens = now_us, len(effect.tokens)
        stats.last_us = now_us
        stats.tokens += len(effect.tokens)
        self._apply(ev.ClientTook(effect.position + len(effect.tokens)))

    def _to_drafter(self, effect: fx.OpenDrafter | fx.AdvanceDrafter | fx.CloseDrafter) -> None:
        if self.drafter is not None and self._drafting is not None:
            self._clock.after(self._delays.drafter_us, self._drafter_action(effect, self.drafter, self._drafting))

    def _drafter_action(
        self,
        effect: fx.OpenDrafter | fx.AdvanceDrafter | fx.CloseDrafter,
        drafter: SimDrafter,
        drafting: SimDraftSession,
    ) -> Action:
        match effect:
            case fx.OpenDrafter():
                return partial(drafter.open, drafting, effect.tokens, effect.pace)
            case fx.AdvanceDrafter():
                return partial(drafter.advance, drafting, effect.position, effect.tokens, effect.pace)
            case fx.CloseDrafter():
                return partial(drafter.close, drafting)

    # What arrives at the verifier

    def _to_verifier(self, action: Action) -> None:
        self._clock.after(self._delays.verifier_us, action)

    def _open(self, effect: fx.OpenVerifier) -> None:
        allowance = Allowance(effect.durable, effect.credit, effect.due)
        session = VerifySession.opened(
            effect.tokens, self.session.prompt_length, GREEDY, self._ending, allowance, VOCABULARY, self._ngram
        )
        self._held = self.verifier.open(session, self._decided, self._guesses.target)
        opened = ev.VerifierOpened(effect.attach, len(effect.tokens))
        self._clock.after(self._delays.verifier_us, partial(self._apply, opened))

    def _decided(self, decided: SimVerdict) -> None:
        self._clock.after(self._delays.verifier_us, partial(self._on_decided, decided))

    def _propose(self, proposal: Proposal) -> None:
        if self._held is not None:
            self.verifier.propose(self._held, proposal)

    def _allow(self, allowance: Allowance) -> None:
        if self._held is not None:
            self.verifier.allow(self._held, allowance)

    def _close(self) -> None:
        if self._held is not None:
            self.verifier.close(self._held)
