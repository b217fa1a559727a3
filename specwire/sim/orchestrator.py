"""One session's orchestrator under a virtual clock: the core's Session between two links.

The order of calls is that of `orchestrator/session/driver.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from draft_service.sessions import AdvanceSession, CloseSession, Command, DraftedProposal, OpenSession, Reply
from specwire.core import messages
from specwire.core.law.sampling import Sampling
from specwire.core.messages import AssignedDrafter, Pace, Proposal, SourcePace, Verdict, first_pace
from specwire.core.session import Session
from specwire.core.text import Stopping, Text
from specwire.core.verify.session import Allowance
from specwire.sim.clock import Action, Clock
from specwire.sim.drafter import SimDrafter, SimLink
from specwire.sim.guesses import Guesses
from specwire.sim.verifier import SimVerifier
from verify_service.engine.messages import Opening, Report

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
    pace: Pace


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
    assigned: what the verifier is told of the drafter.
    prompt, tokens: lengths; the session ends with its last token. ngram: the verifier guesses from the text, too.
    head: a head may draft for it.
    """

    def __init__(
        self,
        clock: Clock,
        verifier: SimVerifier,
        drafter: SimDrafter | None,
        assigned: AssignedDrafter,
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
        self.assigned = assigned
        self.verifier = verifier
        self.drafter = drafter
        self._clock = clock
        self._delays = delays
        self._guesses = guesses
        self._ngram, self._head = ngram, head
        self._stopping = Stopping(tokens)
        self._on_ended = on_ended
        self._verifying = verifier.link(self._reported)
        self._drafting = SimLink(guesses, self._replied)
        self._events: deque[messages.Event] = deque()
        self._applying = False

    def start(self) -> None:
        """The client's request is here."""
        self._apply(messages.VerifierReady())
        if self.drafter is not None:
            first = first_pace(self.assigned.plan, self.assigned.shares_cores)
            self._apply(messages.DrafterReady(SOURCE, first))

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
            self._note(admitted.paces)
            self._apply(messages.VerifierOpened(admitted.attach, admitted.position, admitted.paces))
        for decided in report.decided:
            self._on_decided(decided.verdict)

    def _on_decided(self, verdict: Verdict) -> None:
        self.stats.ledger_us = verdict.ledger_us
        self._note(verdict.paces)
        self._apply(messages.VerdictArrived(self.session.attach, verdict))

    def _note(self, paces: Sequence[SourcePace]) -> None:
        self.plans += [Planned(self._clock.now_us, each.reason, each.pace) for each in paces]

    # From the drafter

    def _replied(self, reply: Reply) -> None:
        if isinstance(reply, DraftedProposal):
            self._clock.after(self._delays.drafter_us, partial(self._on_proposal, reply.proposal))

    def _on_proposal(self, proposal: Proposal) -> None:
        self._apply(messages.ProposalArrived(replace(proposal, source=SOURCE)))

    # Effects out

    def _run(self, effect: messages.Effect) -> None:
        match effect:
            case messages.OpenVerifier():
                self._to_verifier(partial(self._open, effect))
            case messages.SendProgress():
                allowance = Allowance(effect.durable, effect.credit)
                self._tell_verifier(progress=((HANDLE, allowance),))
            case messages.TellDrafters():
                self._tell_verifier(drafters=((HANDLE, self._assigned(effect.drafters)),))
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

    def _assigned(self, sources: Sequence[int]) -> tuple[AssignedDrafter, ...]:
        return (self.assigned,) if sources else ()

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
            allowance=Allowance(effect.durable, effect.credit),
            drafters=self._assigned(effect.drafters),
            ngram=self._ngram,
            head=self._head,
            scope=b"all",
        )
        self.verifier.open(self._verifying, opening, self._guesses.target, self._guesses.headed)
