"""The verifier of one session: the place that it has there, what goes there, and what is done when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc

from orchestrator.options import OrchestratorOptions
from orchestrator.peers.peer import PREFERENCE, VerifierPeer
from orchestrator.session.output import Output, OutputTimings
from orchestrator.session.stats import SessionStats
from orchestrator.store import SessionRecord
from orchestrator.timers import Timers
from specwire.core import messages as ev
from specwire.core import messages as fx
from specwire.core.invalid import InvalidParameter
from specwire.core.limits import buffer_for
from specwire.core.messages import VerdictArrived
from specwire.core.session import Session, State
from specwire.rpc import convert
from specwire.rpc.errors import code_of
from specwire.telemetry.tracing import Span
from specwire.v1 import common_pb2, verify_pb2

# Seconds after which a verifier that refused the session for the moment is asked again.
RETRY_VERIFIER = 1.0
# Fences are microseconds of a clock (`orchestrator.store.scripts`); what lies behind the year 2112 is none.
BELIEVED_FENCE = 1 << 52
# Verifiers that a session may lose in a row without a token, and other owners' fences that they may name.
MOST_LOSSES = 4


class VerifierOwner(Protocol):
    """The session, as its verifier sees it."""

    @property
    def session(self) -> Session: ...
    @property
    def fence(self) -> int: ...
    @property
    def output(self) -> Output: ...
    @property
    def span(self) -> Span: ...
    @property
    def epoch(self) -> int: ...
    def apply(self, event: ev.Event) -> None: ...
    def on_decided(self, event: VerdictArrived) -> None: ...
    def on_refused(self, code: grpc.StatusCode, message: str) -> None: ...
    def on_newer_fence(self, fence: int) -> None: ...
    def fail(self, code: grpc.StatusCode, message: str) -> None: ...
    def end_here(self, code: grpc.StatusCode, message: str) -> None: ...
    def on_broken(self, error: Exception) -> None: ...


class SessionVerifier:
    """`peer` is the verifier that has the session now; `former` one that was lost and may have it still.

    `timings`: of the latest verdict. place: find a verifier for the session. missing: why there is none, for people.
    """

    def __init__(
        self,
        owner: VerifierOwner,
        record: SessionRecord,
        options: OrchestratorOptions,
        stats: SessionStats,
        timers: Timers,
        place: Callable[[], None],
        missing: Callable[[], str],
    ) -> None:
        self.peer: VerifierPeer | None = None
        self.former: VerifierPeer | None = None
        self.timings = OutputTimings(verify_pb2.StepTimings())
        self._owner = owner
        self._record = record
        self._options = options
        self._stats = stats
        self._timers = timers
        self._place = place
        self._missing = missing
        self._handle = 0
        self._ledger_us = 0
        self._is_new = True  # no verifier has fed any of it
        self._losses = 0
        self._superseded = 0
        self._patience = options.peer_timeout

    def note_elsewhere(self) -> None:
        """Others drive the session: what is cached of it from now on may be its own."""
        self._is_new = False

    def forgive(self) -> None:
        """What was lost before tells nothing of what comes."""
        self._losses = 0
        self._patience = self._options.peer_timeout

    @property
    def round_trip_us(self) -> float:
        return self.peer.link.round_trip_us if self.peer is not None else 0.0

    def use(self, peer: VerifierPeer) -> None:
        """Take a place there; the session opens in it."""
        self.peer, self.former = peer, None
        self._timers.cancel("former")
        self._handle = peer.attach(self)
        left = self._timers.left("verifier")
        if left is not None:
            self._patience = max(0.0, left)
        self._timers.cancel("verifier")
        step_us = peer.forward_times.at(1)
        self._owner.apply(ev.VerifierReady(buffer_for(peer.link.round_trip_us, step_us, self._options.buffer)))

    @property
    def queued(self) -> bool:
        """It probably waits for a slot there: no answer yet, of one that has more sessions than slots."""
        return self.peer is not None and self.peer.crowded and self._owner.session.state is State.OPENING

    def give_up_place(self) -> None:
        """Leave a verifier's queue; the session is to be placed anew."""
        self.leave()
        self._lose()

    def wait(self) -> None:
        """Give the session up if no verifier takes it within what is left of the peer timeout."""
        self._timers.set("verifier", self._patience, self._give_up)

    def _give_up(self) -> None:
        message = f"no verifier took the session within {self._options.peer_timeout:g} s"
        missing = self._missing()
        self._owner.end_here(grpc.StatusCode.UNAVAILABLE, f"{message}: {missing}" if missing else message)

    def leave(self) -> None:
        if self.peer is not None:
            self.peer.close(self._handle)
            self.peer = None

    # What it says

    def on_opened(self, opened: verify_pb2.Opened) -> None:
        if self._is_new and not opened.resumed:
            self._stats.cached_tokens = min(opened.cached, len(self._record.prompt))
        self._is_new = False
        self._stats.count_open(asyncio.get_running_loop().time())
        self._owner.apply(ev.VerifierOpened(opened.attach, opened.position))

    def on_verdict(self, message: verify_pb2.Verdict, timings: verify_pb2.StepTimings, received_ns: int) -> None:
        try:
            event = VerdictArrived(message.attach, convert.verdict_from_wire(message, self._record.sampling.logprobs))
        except InvalidParameter as error:
            self._owner.fail(grpc.StatusCode.ABORTED, f"the verifier sent an invalid verdict: {error}")
            return
        self.timings = OutputTimings(timings, received_ns)
        self._ledger_us = event.verdict.ledger_us
        if event.attach != self._owner.session.attach:
            self._owner.apply(event)  # void
            return
        self._superseded = 0
        self._stats.count_verdict(event.verdict)
        self.forgive()
        self._owner.on_decided(event)

    def on_refused_by_verifier(self, refused: common_pb2.Refused) -> None:
        code, opening = code_of(refused.code), self._owner.session.state is State.OPENING
        # An equal fence is another owner's, too, where a claim was lost; all other refusals name 0.
        if self._owner.fence <= refused.fence < BELIEVED_FENCE and self._superseded < MOST_LOSSES:
            self._superseded += 1
            self._owner.on_newer_fence(refused.fence)
        elif code is grpc.StatusCode.UNAVAILABLE and opening:
            # It is about to stop, and others may take the session.
            expected = self.peer is not None and self.peer.draining
            self._try_again(0.0 if expected else RETRY_VERIFIER)
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and opening and self._owner.output.tokens:
            # Its verifier was lost and this one is full: a session that a client reads is worth waiting for a place.
            self._try_again(RETRY_VERIFIER)
        else:
            self._owner.on_refused(code, refused.message)

    def _try_again(self, seconds: float) -> None:
        self._timers.set("place", seconds, self._place)
        self._lose()

    def on_verifier_lost(self) -> None:
        """It keeps the session for a while, so there is some reason to wait for it before another one takes over.

        A session that loses one verifier after the other, and gets no token from any, may be what ends them.
        """
        if self._owner.session.has_credit:
            self._losses += 1  # without, it is the client that has no time for a token
        self._stats.verifier_losses += 1
        if self._losses > MOST_LOSSES:
            message = f"{self._losses} verifiers in a row were lost before they decided a token of this session"
            self._owner.fail(grpc.StatusCode.UNAVAILABLE, message)
        self.former = self.peer
        self._timers.set("former", PREFERENCE, self._place)
        self._lose()

    def _lose(self) -> None:
        self.peer = None
        self._owner.apply(ev.VerifierLost())
        if self._owner.session.state is State.WAITING:
            self.wait()

    def on_broken(self, error: Exception) -> None:
        self._owner.on_broken(error)

    # What it is told

    def run(self, effect: fx.OpenVerifier | fx.SendProgress | fx.RelayProposal | fx.CloseVerifier) -> None:
        match effect:
            case fx.OpenVerifier():
                self._send(verify_pb2.ConnectVerifyRequest(opens=[self._open(effect)]))
            case fx.SendProgress():
                self._send(verify_pb2.ConnectVerifyRequest(progress=[self._progress(effect)]))
            case fx.RelayProposal():
                proposal = convert.proposal_to_wire(effect.proposal, self._handle)
                self._send(verify_pb2.ConnectVerifyRequest(proposals=[proposal]))
            case fx.CloseVerifier():
                self.leave()

    def _open(self, effect: fx.OpenVerifier) -> verify_pb2.Open:
        record, left = self._record, self._timers.left("deadline")
        opened = verify_pb2.Open(
            handle=self._handle,
            session_id=record.session_id,
            fence=self._owner.fence,
            attach=effect.attach,
            tokens=effect.tokens,
            prompt_length=len(record.prompt),
            sampling=convert.sampling_to_wire(record.sampling),
            stopping=convert.stopping_to_wire(record.stopping),
            progress=self._progress(effect),
            deadline_ms=0 if left is None else max(1, int(left * 1000)),
            vocabulary_fingerprint=record.vocabulary_fingerprint,
            ledger_us=self._ledger_us,
            no_ngram=not record.ngram,
            prediction=record.prediction,
            epoch=self._owner.epoch,
            cache_scope=self._options.access.cache_scope(record.tenant),
            priority=record.priority,
            traceparent=self._owner.span.traceparent,
        )
        if self.peer is not None and self.peer.info is not None:
            del opened.prediction[self.peer.info.context :]  # a hint: what another one would have held is no more
        return opened

    def _progress(self, effect: fx.OpenVerifier | fx.SendProgress) -> verify_pb2.Progress:
        return verify_pb2.Progress(handle=self._handle, durable=effect.durable, credit=effect.credit, due=effect.due)

    def _send(self, message: verify_pb2.ConnectVerifyRequest) -> None:
        if self.peer is not None:
            self.peer.link.send(message)
