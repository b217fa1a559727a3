"""Runs one session: turns messages into events for the core's Session, and its effects into messages and appends."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache

import grpc

from orchestrator.options import OrchestratorOptions
from orchestrator.peers.peer import VerifierPeer
from orchestrator.session.appender import SessionLog, Tasks, message_of_append, status_of_append
from orchestrator.session.drafters import Drafters
from orchestrator.session.output import SessionFailure, SessionView
from orchestrator.session.verifier import SessionVerifier
from orchestrator.store import ContentMismatch, Fenced, SessionRecord, SessionStore, StoreError
from specwire.core import messages
from specwire.core.messages import FinishReason
from specwire.core.session import OutputScanner, Session, State
from specwire.core.text import Text, hash_of
from specwire.telemetry.logs import tell
from specwire.telemetry.tally import OrchestratorTally
from specwire.telemetry.tracing import NO_SPAN, Span
from specwire.v1 import common_pb2

logger = logging.getLogger(__name__)

# Tokens of a prompt from which hashing it takes long enough for others of the event loop to feel it: about 2 ms.
LONG_PROMPT = 4096


@lru_cache(maxsize=8)
def hash_of_prompt(prompt: tuple[int, ...]) -> int:
    """Of n sessions that share a prompt once for all."""
    return hash_of(prompt)


async def hash_beside(prompt: tuple[int, ...]) -> None:
    """Hash a long prompt beside the event loop, before a session is made of it."""
    if len(prompt) >= LONG_PROMPT:
        await asyncio.to_thread(hash_of_prompt, prompt)


# Statuses that tell a client to ask again.
WORTH_REPEATING = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


class SessionNotice(Enum):
    """A session's notices to its orchestrator.

    UNPLACED: it lacks a verifier or drafters. CLAIMED: another orchestrator drove it; it is driven here now. FENCED:
    another orchestrator has claimed it, or the log has another text. ENDED: for readers here, at least. UNREAD: another
    one drives it, and nobody reads it here any more.
    """

    UNPLACED = auto()
    CLAIMED = auto()
    FENCED = auto()
    ENDED = auto()
    UNREAD = auto()


@dataclass(frozen=True, slots=True)
class SessionHost:
    """What all sessions of one orchestrator share.

    notice: is called with a session's notices. owner: the orchestrator's name in the log. missing: for people, why no
    verifier takes a session; "" where one might.
    """

    store: SessionStore
    options: OrchestratorOptions
    notice: Callable[[SessionDriver, SessionNotice], None]
    owner: str = ""
    tally: OrchestratorTally = field(default_factory=OrchestratorTally)
    missing: Callable[[SessionRecord], str] = lambda _: ""


class SessionDriver:
    """Owns the session's tasks; `close` ends them. Everything runs on the event loop, one event at a time.

    A session that another orchestrator claims is driven there: its readers here follow the log
    (`orchestrator.ownership`), until it ends or comes back (`drive`).

    `view` is what readers see of it. `verifying`, `drafters`, `log`: who takes part in it, each with its own effects.
    """

    def __init__(
        self, record: SessionRecord, fence: int, scanner: OutputScanner, host: SessionHost, span: Span = NO_SPAN
    ) -> None:
        options = host.options
        self._host = host
        self._tasks = Tasks(self.on_broken)
        grace = options.detach_grace if record.request_id else 0.0
        self.view = view = SessionView(record, span, grace, lambda: self.log.look_for_readers(), self.apply)
        self.log = SessionLog(view, host.store, options, host.owner, host.tally, self._tasks, self)
        self.drafters = Drafters(view, options, self)
        self.verifying = SessionVerifier(view, options, self.drafters.note, self)
        self._events: deque[messages.Event] = deque()
        self._applying = False
        self.drive(fence, scanner, options.retention)

    # Who drives

    def drive(self, fence: int, scanner: OutputScanner, retention: float) -> None:
        """Drive the session from the output's end on, which is the log's, under this fence.

        `scanner` has seen the output. retention: the log's, in seconds. The session waits for a verifier: `place` it.
        """
        self.fence = fence
        view, prompt_length = self.view, len(self.view.record.prompt)
        text = Text([*view.record.prompt, *view.output.tokens])
        view.newest_fence = max(fence, view.newest_fence)
        view.failure, view.prompt_hash = None, hash_of_prompt(view.record.prompt)
        self.session = Session(text, prompt_length, scanner, self._host.options.buffer, fence)
        self.log.drive(self.session, retention)
        self.verifying.drive(self.session)
        self.drafters.drive(self.session)

    @property
    def following(self) -> bool:
        """Another orchestrator drives the session, or is about to; what it writes is shown here."""
        return self.session.state is State.FENCED and self.view.output.end is None

    def let_go(self) -> None:
        """Another orchestrator has the session: leave the peers. Readers stay, and `follow` serves them."""
        self.view.timers.cancel_all()
        self.view.failure = None
        self.view.span.event("driven elsewhere")
        self.verifying.note_elsewhere()
        self.apply(messages.OwnerLost())

    def follow(self, coroutine: Coroutine[None, None, None]) -> None:
        """Own the task that fills the output meanwhile."""
        self._tasks.start(coroutine)

    # Events in

    def apply(self, event: messages.Event) -> None:
        """Apply an event and run its effects; events that effects cause wait for their turn."""
        self._events.append(event)
        if self._applying:
            return
        self._applying = True
        try:
            while self._events:
                for effect in self.session.handle(self._events.popleft()):
                    self._run(effect)
        finally:
            self._applying = False

    def use_verifier(self, peer: VerifierPeer) -> None:
        """Take a slot at a verifier; the session opens there."""
        self.drafters.use_verifier(peer)
        self.verifying.use(peer)

    def set_deadline(self, seconds: float) -> None:
        self.view.timers.set("deadline", seconds, lambda: self.end(FinishReason.DEADLINE))

    def is_due(self, within_s: float) -> bool:
        """Whether its deadline, if it has one here, passes within so many seconds."""
        left = self.view.timers.left("deadline")
        return left is not None and left <= within_s

    def end(self, reason: FinishReason) -> None:
        """End it with what is decided."""
        self.apply(messages.EndRequested(reason))

    def fail(self, code: grpc.StatusCode, message: str) -> None:
        self.view.failure = self.view.failure or SessionFailure(code, message)
        self.apply(messages.EndRequested(FinishReason.ERROR, message))

    # From peers and the log

    def on_unplaced(self) -> None:
        self._host.notice(self, SessionNotice.UNPLACED)

    def on_unserved(self, seconds: float) -> None:
        missing = self._host.missing(self.view.record)
        message = f"no verifier took the session within {seconds:g} s"
        self.end_here(grpc.StatusCode.UNAVAILABLE, f"{message}: {missing}" if missing else message)

    def on_verifier_failed(self, failure: SessionFailure, final: bool = False) -> None:
        self.view.failure = self.view.failure or failure
        if final:
            self.apply(messages.EndRequested(FinishReason.ERROR, failure.message))
        else:
            self.apply(messages.VerifierRefused(self.session.attach, failure.message))

    def on_newer_fence(self, fence: int) -> None:
        """A verifier has seen another owner, under this fence, which is not below ours: the log says who that is.

        It may say that the session is ours, where it has lost a claim and its clock is behind: then it is claimed anew,
        above that fence.
        """
        self.view.newest_fence = max(fence, self.view.newest_fence)
        if self.session.state is not State.FENCED and self.view.output.end is None:
            self._lose_to_another()

    def _lose_to_another(self) -> None:
        self.let_go()
        self._host.notice(self, SessionNotice.FENCED)

    # Effects out

    def _run(self, effect: messages.Effect) -> None:
        match effect:
            case messages.RelayProposal(proposal=common_pb2.Proposal() as proposal):
                self.verifying.relay(proposal)
            case messages.AdvanceDrafter():
                self.drafters.advance(effect)
            case messages.Append():
                repeatable = effect.end is not None and self._may_be_repeated(effect.end)
                self.log.write(effect, self.verifying.timings, repeatable)
            case messages.Emit():
                self.view.emit(effect, self.log.timings, self._host.tally)
            case messages.SendProgress():
                self.verifying.send_progress(effect)
            case messages.TellDrafters():
                self.verifying.tell_drafters(self.drafters.told(effect.drafters))
            case messages.OpenVerifier():
                self.verifying.open(effect, self.drafters.told(effect.drafters))
            case messages.CloseVerifier():
                self.verifying.leave()
            case messages.OpenDrafter():
                self.drafters.open(effect)
            case messages.CloseDrafter():
                self.drafters.close(effect)
            case messages.EmitEnd():
                self.finish(effect)

    def _may_be_repeated(self, end: messages.End) -> bool:
        """It failed for lack of something that may be there later: its request id must not stand for that failure."""
        failure = self.view.failure
        return end.reason is FinishReason.ERROR and failure is not None and failure.code in WORTH_REPEATING

    def on_log_refused(self, error: StoreError) -> None:
        """A log with another fence or other tokens wins: the session goes on from it, here or elsewhere."""
        if isinstance(error, Fenced | ContentMismatch):
            self._lose_to_another()
        else:
            self.abandon(status_of_append(error), message_of_append(error))

    def abandon(self, code: grpc.StatusCode, message: str) -> None:
        """The log, or our state, is lost: emit nothing more and end the readers' streams with a status.

        The session itself does not end: it may go on from the log, here or elsewhere.
        """
        if self.view.output.end is not None:
            return
        self.view.abandoned = True
        self.view.failure = SessionFailure(code, message)
        with suppress(AssertionError):  # the broken thing may be an invariant
            self.apply(messages.OwnerLost())
        self.finish(messages.EmitEnd(messages.End(FinishReason.ERROR, message, len(self.view.output.text)), ""))

    def leave(self) -> None:
        """The process stops."""
        if self.following or self.log.is_kept:
            self.abandon(grpc.StatusCode.UNAVAILABLE, "the orchestrator is stopping; the log keeps the session")
        else:
            self.fail(grpc.StatusCode.UNAVAILABLE, "the orchestrator is stopping")

    def end_here(self, code: grpc.StatusCode, message: str) -> None:
        """It cannot go on here, but perhaps elsewhere."""
        if self.log.is_kept:
            self.abandon(code, message)
        else:
            self.fail(code, message)

    # The end

    def on_broken(self, error: Exception) -> None:
        """A bug of ours: this session ends, whatever its state; the others go on."""
        tell(logger, self.view.record.session_id, "it failed", level=logging.ERROR, error=error)
        self._events.clear()
        self.abandon(grpc.StatusCode.INTERNAL, "the orchestrator failed; its log says why")

    def finish(self, effect: messages.EmitEnd) -> None:
        """The session has ended, for readers here at least."""
        self.view.timers.cancel_all()
        self.drafters.leave()
        self.verifying.leave()
        self.view.finish(effect)
        self._host.notice(self, SessionNotice.ENDED)

    async def close(self) -> None:
        """End the session's tasks and timers, whatever its state; used at shutdown."""
        self.view.timers.cancel_all()
        await self._tasks.cancel_all()
