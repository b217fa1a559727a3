"""The orchestrator's session: what happens, in which state, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from typing import Protocol

from specwire.core.law.noise import epoch_of
from specwire.core.messages import (
    MOST_WINDOW,
    AdvanceDrafter,
    Append,
    Appended,
    ClientTook,
    CloseDrafter,
    CloseVerifier,
    DrafterLost,
    DrafterReady,
    Effect,
    Emit,
    EmitEnd,
    End,
    EndRequested,
    Event,
    FinishReason,
    OpenDrafter,
    OpenVerifier,
    OwnerLost,
    Pace,
    ProposalArrived,
    RelayProposal,
    SendProgress,
    SourcePace,
    TellDrafters,
    Verdict,
    VerdictArrived,
    VerifierLost,
    VerifierOpened,
    VerifierReady,
    VerifierRefused,
)
from specwire.core.text import Text

# ----------------------------------------------------------------------------------------------------------------------
# The states of a session and their transitions, as data. They are drawn above `Session`, below.


class State(StrEnum):
    """FENCED: another owner has the session; this one sends nothing more."""

    WAITING = "waiting"
    OPENING = "opening"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"
    FENCED = "fenced"


TRANSITIONS: dict[type[Event], dict[State, frozenset[State]]] = {
    VerifierReady: {State.WAITING: frozenset({State.OPENING, State.WAITING})},
    DrafterReady: {State.RUNNING: frozenset({State.WAITING, State.OPENING})},
    VerifierOpened: {State.OPENING: frozenset({State.RUNNING})},
    VerdictArrived: {State.RUNNING: frozenset({State.RUNNING, State.ENDING})},
    VerifierLost: {State.OPENING: frozenset({State.WAITING}), State.RUNNING: frozenset({State.WAITING})},
    VerifierRefused: {
        State.OPENING: frozenset({State.ENDING}),
        State.RUNNING: frozenset({State.RUNNING, State.ENDING}),
    },
    Appended: {
        State.WAITING: frozenset({State.WAITING, State.OPENING, State.ENDING}),
        State.RUNNING: frozenset({State.RUNNING, State.ENDING}),
        State.ENDING: frozenset({State.ENDED}),
    },
    EndRequested: {
        State.WAITING: frozenset({State.WAITING, State.ENDING}),
        State.OPENING: frozenset({State.ENDING}),
        State.RUNNING: frozenset({State.RUNNING, State.ENDING}),
    },
    OwnerLost: {state: frozenset({State.FENCED}) for state in State if state is not State.ENDED},
}
"""Event -> state -> states that it may lead to. An event that is not listed for a state changes no state there."""


# ----------------------------------------------------------------------------------------------------------------------
# What one drafter of a session is told: the decided text, in advances without a gap. Pure. A session may have several
# drafters. Each is told separately, at its own pace: a paused one is told what it missed when it goes on.


@dataclass(slots=True)
class Advised:
    """A drafter, as its session's orchestrator sees it.

    pace: as its verifier planned it. missed: the position from which on a paused drafter was not told the text; None:
    it was told all. stale: the beginning of its present chain went to a verifier that is gone. unopened: it waits for
    its epoch, and is told nothing until then. changed: its pace did since it was last told.
    """

    source: int
    pace: Pace
    missed: int | None = None
    stale: bool = False
    unopened: bool = False
    changed: bool = False

    def open(self, text: Text) -> list[Effect]:
        self.missed, self.stale, self.unopened, self.changed = None, False, False, False
        return [OpenDrafter(self.source, tuple(text.tokens), self.pace)]

    def restart(self, text: Text) -> list[Effect]:
        """Make it begin a new chain, because the beginning of its present one never reached the verifier.

        An advance that goes back by a token does that, if there is a token. A paused drafter is told when it goes on.
        """
        last = len(text) - 1
        if last == 0 or self.unopened:
            return self.open(text)
        self.stale = True
        return self.advance(text, last, (text.tokens[last],))

    def plan(self, pace: Pace) -> None:
        """Take a new pace: it is told with what is decided next."""
        self.changed |= pace != self.pace
        self.pace = pace

    def tell(self, text: Text) -> list[Effect]:
        """Tell a new pace at once, to pause, to go on, or to draft differently."""
        return self.advance(text, len(text), ()) if self.changed else []

    def advance(self, text: Text, position: int, tokens: tuple[int, ...]) -> list[Effect]:
        """Tell what was decided at `position`; `text` holds it. A paused drafter is told when it goes on."""
        if self.unopened:
            return []
        pace = self.pace
        if pace.run_ahead == 0 and not self.changed:
            self.missed = position if self.missed is None else min(position, self.missed)
            return []
        self.changed = False
        if self.missed is not None:
            position, self.missed = min(position, self.missed), None
            tokens = tuple(text.tokens[position:])
        stale, self.stale = self.stale, False
        back: list[Effect] = [AdvanceDrafter(self.source, position, (), pace)] if stale else []
        return [*back, AdvanceDrafter(self.source, position, tokens, pace)]


# ----------------------------------------------------------------------------------------------------------------------
# What a session needs to know of its text; `specwire.text` implements it.


class ScannedText(Protocol):
    """Text released by some tokens; of them the first `kept` belong to the output."""

    @property
    def text(self) -> str: ...
    @property
    def text_ends(self) -> tuple[int, ...]: ...
    @property
    def released(self) -> tuple[int, ...]: ...
    @property
    def kept(self) -> int: ...
    @property
    def stopped_at(self) -> int | None: ...


class OutputScanner(Protocol):
    """Detokenises and looks for stop strings; sees every token of the output once, in order.

    `specwire.text.OutputText` is the real one. stopped_at is the output's length in code points where a stop string
    cuts it; `finish` returns what was withheld and ends the output.
    """

    def push(self, tokens: Sequence[int]) -> ScannedText: ...
    def finish(self) -> str: ...
    @property
    def length(self) -> int: ...


# ----------------------------------------------------------------------------------------------------------------------
# A session as its orchestrator sees it: events in, effects out, no I/O.
#
# A token's way: a verdict brings it (decided); an append puts it into the log (durable); then it is emitted. The
# drafters are told at once, before it is durable. One append is in flight at a time; the next takes all that was
# decided meanwhile.
#
#              VerifierReady           VerifierOpened            last append issued           acknowledged
#     WAITING ---------------> OPENING ---------------> RUNNING --------------------> ENDING --------------> ENDED
#        ^                        |                        |
#        +------ VerifierLost ----+------------------------+            any of them -- OwnerLost --> FENCED
#
# `TRANSITIONS`, above, holds the changes as data; PROTOCOL.md's table is made from it.


class IllegalEvent(RuntimeError):
    """An event that the driver must not send in this state; nothing was changed."""


@dataclass(slots=True)
class InFlight:
    """The append that waits for its acknowledgement, and what may be emitted then."""

    append: Append
    emit: Emit | None
    end: EmitEnd | None


@dataclass(slots=True)
class _Ending:
    reason: FinishReason
    message: str = ""


@dataclass(slots=True)
class Session:
    """One session under one fence.

    Args:
        text: prompt and the tokens that the log holds; all of it durable.
        prompt_length: how many of them are the prompt.
        scanner: has seen the output's durable tokens.
        buffer: tokens that the verifier may decide beyond min(durable, taken by the client).
        fence: the owner's, in the log.

    `drafters`: those that are there, by source.

    Invariants: emitted <= durable <= len(text) <= credit, prompt_length <= emitted; at most one append in flight;
    nothing is emitted that was not acknowledged; nothing is appended after the end.
    """

    text: Text
    prompt_length: int
    scanner: OutputScanner
    buffer: int = 64
    fence: int = 0
    state: State = State.WAITING
    attach: int = 0
    durable: int = field(init=False)
    emitted: int = field(init=False)
    taken: int = field(init=False)
    credit: int = field(init=False)
    drafters: dict[int, Advised] = field(default_factory=dict)
    in_flight: InFlight | None = None
    _verifier_ready: bool = False
    _pending: list[Verdict] = field(default_factory=list)
    _ending: _Ending | None = None

    def __post_init__(self) -> None:
        self.durable = self.emitted = self.taken = len(self.text)
        if self.buffer < 1:
            raise ValueError(f"buffer: must be at least 1, not {self.buffer}")
        self.credit = len(self.text) + self.buffer

    def handle(self, event: Event) -> list[Effect]:
        """Apply one event; the effects are to be run in order.

        Raises:
            IllegalEvent: VerifierReady or Appended where nothing waits for them.
        """
        before = self.state
        effects = self._dispatch(event)
        if self.state is not before and self.state not in TRANSITIONS.get(type(event), {}).get(before, ()):
            raise AssertionError(f"{type(event).__name__} led from {before} to {self.state}")
        self.check()
        return effects

    def _dispatch(self, event: Event) -> list[Effect]:
        match event:
            case VerifierReady():
                return self._on_verifier_ready(event)
            case VerifierOpened():
                return self._on_verifier_opened(event)
            case VerdictArrived():
                return self._on_verdict(event)
            case VerifierLost():
                return self._on_verifier_lost(event)
            case VerifierRefused():
                return self._on_verifier_refused(event)
            case DrafterReady():
                return self._on_drafter_ready(event)
            case DrafterLost():
                return self._on_drafter_lost(event)
            case ProposalArrived():
                return self._on_proposal(event)
            case Appended():
                return self._on_appended(event)
            case ClientTook():
                return self._on_client_took(event)
            case EndRequested():
                return self._on_end_requested(event)
            case OwnerLost():
                return self._on_owner_lost(event)

    def epoch(self, weighed: bool) -> int:
        """Names the randomness of this connection generation, under rules that weigh draft tokens; else 0."""
        return epoch_of(self.fence, self.attach) if weighed else 0

    def check(self) -> None:
        """Raise AssertionError where an invariant of PROTOCOL.md section 14 does not hold."""
        ordered = self.prompt_length <= self.emitted <= self.durable <= len(self.text) <= self.credit
        if not ordered:
            raise AssertionError(
                f"emitted {self.emitted} <= durable {self.durable} <= decided {len(self.text)} <= credit {self.credit}"
            )

    # The verifier

    def _on_verifier_ready(self, event: VerifierReady) -> list[Effect]:
        if self.state is not State.WAITING:
            raise IllegalEvent(f"VerifierReady while {self.state}")
        self.buffer = event.buffer or self.buffer
        self._verifier_ready = True
        return self._open_verifier()

    def _open_verifier(self) -> list[Effect]:
        """Open a verifier from the durable text, once no append is outstanding: then all decided text is durable."""
        if self.in_flight is not None or not self._verifier_ready:
            return []
        self.state = State.OPENING
        self.attach += 1
        self.credit = max(self.credit, self._earned)
        tokens = tuple(self.text.tokens[: self.durable])
        opening = OpenVerifier(self.attach, tokens, self.durable, self.credit, tuple(self.drafters))
        restarts = [each for drafter in self.drafters.values() for each in drafter.restart(self.text)]
        return [opening, *restarts]

    def _on_verifier_opened(self, event: VerifierOpened) -> list[Effect]:
        if self.state is State.OPENING and event.attach == self.attach:
            self.state = State.RUNNING
            self._plan(event.paces)
        return self._grant() + [each for drafter in self.drafters.values() for each in drafter.tell(self.text)]

    def _on_verdict(self, event: VerdictArrived) -> list[Effect]:
        verdict = event.verdict
        if len(verdict.outcomes) != len(verdict.tokens) or len(verdict.logprobs) not in (0, len(verdict.tokens)):
            raise ValueError(f"outcomes and logprobs must be one per token, not {verdict}")
        if self.state is not State.RUNNING or event.attach != self.attach or self._ending is not None:
            return []
        if verdict.position != len(self.text):
            return self._end(FinishReason.ERROR, f"the verifier decided {verdict.position} after {len(self.text)}")
        if verdict.end > self.credit:
            return self._end(FinishReason.ERROR, f"the verifier decided beyond its credit of {self.credit}")
        self.text.extend(verdict.tokens)
        self._pending.append(verdict)
        if verdict.finish is not None:
            self._ending = _Ending(verdict.finish)
            return self._append()
        self._plan(verdict.paces)
        advance = self._advance(verdict.position, verdict.tokens)
        return advance if event.more else advance + self._append()

    def _on_verifier_lost(self, _: VerifierLost) -> list[Effect]:
        """Lose the verifier. What it decided stands and goes into the log; the next verifier continues behind it."""
        self._verifier_ready = False
        if self.state in (State.OPENING, State.RUNNING):
            self.state = State.WAITING
        return []

    def _on_verifier_refused(self, event: VerifierRefused) -> list[Effect]:
        if self.state not in (State.OPENING, State.RUNNING) or self._over or event.attach != self.attach:
            return []
        return self._end(FinishReason.ERROR, event.message)

    # The drafters

    def _on_drafter_ready(self, event: DrafterReady) -> list[Effect]:
        if self._over:
            return []
        drafter = Advised(event.source, event.pace, unopened=event.renews)
        self.drafters[event.source] = drafter
        if event.renews:
            return self._renew_epoch()
        return [*drafter.open(self.text), *self._tell_drafters()]

    def _renew_epoch(self) -> list[Effect]:
        """Open the verifier once more, in another epoch; it goes on where it stands. Drafters hear of it with that.

        Where it waits for a verifier the next opening is another epoch anyway.
        """
        if self.state in (State.OPENING, State.RUNNING):
            self.state = State.WAITING
            return self._open_verifier()
        return []

    def _on_drafter_lost(self, event: DrafterLost) -> list[Effect]:
        return self._tell_drafters() if self.drafters.pop(event.source, None) is not None else []

    def _on_proposal(self, event: ProposalArrived) -> list[Effect]:
        opened = self.state in (State.OPENING, State.RUNNING)
        relayed = opened and not self._over and event.proposal.source in self.drafters
        return [RelayProposal(event.proposal)] if relayed else []

    def _plan(self, paces: Sequence[SourcePace]) -> None:
        """Take the verifier's plans for drafters; one that is gone needs none."""
        for each in paces:
            if (drafter := self.drafters.get(each.source)) is not None:
                drafter.plan(each.pace)

    def _advance(self, position: int, tokens: tuple[int, ...]) -> list[Effect]:
        """Tell every drafter what was decided."""
        return [each for drafter in self.drafters.values() for each in drafter.advance(self.text, position, tokens)]

    def _tell_drafters(self) -> list[Effect]:
        """Which ones there are; where no verifier has the session the next one is told with its opening."""
        return [TellDrafters(tuple(self.drafters))] if self.state in (State.OPENING, State.RUNNING) else []

    # The log and the client

    def _append(self) -> list[Effect]:
        """Start the next append if none is in flight and there is something to write."""
        if self.in_flight is not None or not (self._pending or self._ending):
            return []
        taken, self._pending = self._pending, []
        tokens = tuple(token for verdict in taken for token in verdict.tokens)
        release = self.scanner.push(tokens)
        kept = release.kept
        if release.stopped_at is not None:
            self._ending = _Ending(FinishReason.STOP_STRING)
            self.text.truncate(self.durable + kept)
        tokens = tokens[:kept]
        outcomes = tuple(outcome for verdict in taken for outcome in verdict.outcomes)[:kept]
        logprobs = tuple(each for verdict in taken for each in verdict.logprobs)[:kept]
        emit = None
        if kept:
            shown = release.text, release.text_ends[:kept], release.released[:kept]
            emit = Emit(self.durable, tokens, outcomes, *shown, logprobs)
        end = self._emit_end()
        append = Append(self.durable, tokens, outcomes, end.end if end else None, logprobs)
        self.in_flight = InFlight(append, emit, end)
        closing: list[Effect] = [CloseVerifier(), *self._close_drafters()] if end else []
        return [self.in_flight.append, *closing]

    def _emit_end(self) -> EmitEnd | None:
        if self._ending is None:
            return None
        self.state = State.ENDING
        withheld = self.scanner.finish()
        return EmitEnd(End(self._ending.reason, self._ending.message, self.scanner.length), withheld)

    def _close_drafters(self) -> list[Effect]:
        closing: list[Effect] = [CloseDrafter(source) for source in self.drafters]
        self.drafters.clear()
        return closing

    def _on_appended(self, _: Appended) -> list[Effect]:
        if self.state in (State.FENCED, State.ENDED):
            return []
        if self.in_flight is None:
            raise IllegalEvent("Appended while no append is in flight")
        done, self.in_flight = self.in_flight, None
        self.durable += len(done.append.tokens)
        effects: list[Effect] = []
        if done.emit is not None:
            self.emitted = self.durable
            effects.append(done.emit)
        if done.end is not None:
            self.state = State.ENDED
            return [*effects, done.end]
        effects += self._append()
        if self.state is State.WAITING:
            effects += self._open_verifier()
        return effects + self._grant()

    def _on_client_took(self, event: ClientTook) -> list[Effect]:
        self.taken = max(self.taken, event.position)
        return self._grant()

    def _grant(self) -> list[Effect]:
        """Raise the credit once half of it is used: a message per token would cost more than the buffer is worth."""
        if self.state is not State.RUNNING or self._earned - self.credit < max(1, self.buffer // 2):
            return []
        self.credit = self._earned
        return self._progress()

    @property
    def has_credit(self) -> bool:
        """Whether the verifier may decide."""
        return len(self.text) < self.credit

    @property
    def _earned(self) -> int:
        """The credit that the log and the client's flow control allow by now."""
        return min(self.durable, self.taken) + self.buffer

    def _progress(self) -> list[Effect]:
        return [SendProgress(self.durable, self.credit)]

    # The end

    @property
    def _over(self) -> bool:
        return self._ending is not None or self.state in (State.ENDING, State.ENDED, State.FENCED)

    def _on_end_requested(self, event: EndRequested) -> list[Effect]:
        return [] if self._over else self._end(event.reason, event.message)

    def _end(self, reason: FinishReason, message: str) -> list[Effect]:
        self._ending = _Ending(reason, message)
        return self._append()

    def _on_owner_lost(self, _: OwnerLost) -> list[Effect]:
        if self.state in (State.ENDED, State.FENCED):
            return []
        self.state = State.FENCED
        self._pending.clear()
        self.in_flight = None
        return [CloseVerifier(), *self._close_drafters()]


# ----------------------------------------------------------------------------------------------------------------------
# How many tokens a verifier may decide beyond what is durable and taken by the client.

# Bounds what is decided for a client that has gone; a fast target far away pauses for credit beyond it.
MOST_BUFFER = 1024


def buffer_for(round_trip_us: float, step_us: float, least: int) -> int:
    """The least buffer with which a verifier `round_trip_us` away never waits for credit; a plain step takes `step_us`.

    What the largest steps decide during a round trip, twice: credit is raised when half of the buffer is used.
    """
    if not step_us > 0:
        raise ValueError(f"step_us: must be positive, not {step_us}")
    decided = ceil(round_trip_us / step_us * (MOST_WINDOW + 1))
    return max(least, min(MOST_BUFFER, 2 * decided))
