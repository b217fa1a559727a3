"""The verifier of one session: its slot there, what it is told, and what is done when it is lost."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import grpc

from orchestrator.options import OrchestratorOptions
from orchestrator.peers.peer import PREFERENCE, VerifierPeer
from orchestrator.session.output import OutputTimings, SessionFailure, SessionListener, SessionView
from orchestrator.session.stats import TracedVerdict
from specwire.core import messages
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import FENCE_LIMIT, AssignedDrafter, SourcePace
from specwire.core.session import MOST_BUFFER, Session, State, buffer_for
from specwire.rpc import convert
from specwire.rpc.errors import code_of
from specwire.v1 import common_pb2, verify_pb2

# Seconds after which a verifier that refused the session for the moment is asked again, unless it names more.
RETRY_VERIFIER, MOST_RETRY_VERIFIER = 1.0, 10.0
# By how much longer it may wait than that.
SCATTER = 1.5
# Tokens of references that go out at once: they keep others on a slow line waiting for no longer than that takes.
REFERENCE_PART = 8192
# How many verifiers a session may lose in a row without a token, and how many newer fences they may name.
MOST_LOSSES = 4


class SessionVerifier:
    """`peer`: the verifier that has the session now; `former`: one that was lost and may still have it.

    `timings`: of the latest verdict. `references`: what it may be proposed from, each a document, until its end.
    note_paces: hears how its drafters are to draft. driver: hears all else.
    """

    def __init__(
        self,
        view: SessionView,
        options: OrchestratorOptions,
        note_paces: Callable[[Sequence[SourcePace]], None],
        driver: SessionListener,
    ) -> None:
        self.peer: VerifierPeer | None = None
        self.former: VerifierPeer | None = None
        self.timings = OutputTimings(verify_pb2.StepTimings())
        self.references: tuple[array[int], ...] = ()
        self._view = view
        self._options = options
        self._timers = view.timers
        self._note_paces = note_paces
        self._driver = driver
        self._session: Session
        self._handle = 0
        self._ledger_us = 0
        self._is_new = True  # no verifier has fed any of it
        self._losses = 0
        self._superseded = 0
        # How often each had no slot for it, since it was last open.
        self.refusals: Counter[VerifierPeer] = Counter()
        self._patience = options.verifier_wait

    def note_elsewhere(self) -> None:
        """Another orchestrator drives the session: what a verifier has cached of it may be from there."""
        self._is_new = False

    def drive(self, session: Session) -> None:
        """Serve `session` from now on: this one, under its fence."""
        self._session = session
        self.forgive()

    def forgive(self) -> None:
        """Forget earlier losses: they say nothing about the next verifier."""
        self._losses = 0
        self._patience = self._options.verifier_wait

    @property
    def round_trip_us(self) -> float:
        return self.peer.link.round_trip_us if self.peer is not None else 0.0

    def use(self, peer: VerifierPeer) -> None:
        """Take a slot there; the session opens in it."""
        self.peer, self.former = peer, None
        self._timers.cancel("former")
        self._handle = peer.attach(self)
        left = self._timers.left("verifier")
        if left is not None:
            self._patience = max(0.0, left)
        self._timers.cancel("verifier")
        self._driver.apply(
            messages.VerifierReady(buffer_for(peer.link.round_trip_us, peer.step_us, self._options.buffer))
        )

    @property
    def queued(self) -> bool:
        """Whether it probably waits for a slot there: no answer yet, from a verifier with more sessions than slots."""
        return self.peer is not None and self.peer.crowded and self._session.state is State.OPENING

    def give_up_place(self) -> None:
        """Leave a verifier's queue; the session is placed again."""
        self.leave()
        self._lose()

    def wait(self) -> None:
        """Give the session up if no verifier takes it within the rest of `verifier_wait`."""
        wait = self._options.verifier_wait
        self._timers.set("verifier", self._patience, lambda: self._driver.on_unserved(wait))

    def leave(self) -> None:
        if self.peer is not None:
            self.peer.close(self._handle)
            self.peer = None

    # What it says

    def on_opened(self, opened: verify_pb2.Opened) -> None:
        most = max(MOST_BUFFER, self._options.buffer)
        if len(opened.tail) > most:
            self._invalid("opening", f"tail: {len(opened.tail)} verdicts, of at most {most}")
            return
        if self._is_new and not opened.resumed:
            self._view.stats.cached_tokens = min(opened.cached, len(self._view.record.prompt))
        self._is_new = False
        self.refusals.clear()
        self._view.stats.count_open(asyncio.get_running_loop().time())
        try:
            paces = convert.paces_from_wire(opened.paces)
        except InvalidParameter as error:
            if opened.attach == self._session.attach:
                self._invalid("opening", error)
            return
        self._note_paces(paces)
        self._driver.apply(messages.VerifierOpened(opened.attach, opened.position, paces))

    def on_verdict(
        self, message: verify_pb2.Verdict, timings: verify_pb2.StepTimings, received_ns: int, more: bool = False
    ) -> None:
        """more: the same message brings the verdict behind it."""
        if message.attach != self._session.attach:
            return  # void: of an older opening
        try:
            verdict = convert.verdict_from_wire(message, self._view.record.sampling.logprobs, self._vocabulary)
        except InvalidParameter as error:
            self._invalid("verdict", error)
            return
        self.timings = OutputTimings(timings, received_ns)
        self._ledger_us = verdict.ledger_us
        self._superseded = 0
        self._view.stats.count_verdict(verdict)
        self.forgive()
        if self._view.trace is not None:
            self._view.trace(TracedVerdict.of(verdict, timings, self.round_trip_us, self._view.stats.plan))
        self._note_paces(verdict.paces)
        self._driver.apply(messages.VerdictArrived(message.attach, verdict, more))

    def _invalid(self, what: str, error: object) -> None:
        failure = SessionFailure(grpc.StatusCode.ABORTED, f"the verifier sent an invalid {what}: {error}")
        self._driver.on_verifier_failed(failure, final=True)

    @property
    def _vocabulary(self) -> int:
        """Ids of its model."""
        told = 0 if self.peer is None or self.peer.info is None else self.peer.info.vocabulary
        return told or convert.MOST_UINT32 + 1

    def on_refused(self, refused: common_pb2.Refused) -> None:
        code, opening = code_of(refused.code), self._session.state is State.OPENING
        # An equal fence belongs to another owner, too, where the log lost a claim; all other refusals name 0.
        if self._session.fence <= refused.fence < FENCE_LIMIT and self._superseded < MOST_LOSSES:
            self._superseded += 1
            self._driver.on_newer_fence(refused.fence)
        elif code is grpc.StatusCode.UNAVAILABLE and opening:
            # It is about to stop, and others may take the session.
            expected = self.peer is not None and self.peer.draining
            self._try_again(0.0 if expected else RETRY_VERIFIER)
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and opening and self._view.output.tokens:
            # Its verifier was lost and this one is full: a session that a client reads waits for a slot. Scattered,
            # because those that lost the same verifier would all come back at the same moments.
            seconds = max(RETRY_VERIFIER, min(refused.retry_after_ms / 1000, MOST_RETRY_VERIFIER))
            if self.peer is not None:
                self.refusals[self.peer] += 1
            self._try_again(seconds * random.Random().uniform(1.0, SCATTER))
        else:
            failure = SessionFailure(code, refused.message, refused.retry_after_ms / 1000 or None)
            self._driver.on_verifier_failed(failure)

    def _try_again(self, seconds: float) -> None:
        self._timers.set("place", seconds, self._driver.on_unplaced)
        self._lose()

    def on_lost(self) -> None:
        """The verifier keeps the session for a while, so it is worth waiting for before another one takes over.

        A session that loses one verifier after the other without a token may itself be what ends them. A verifier that
        had not taken the session in, such as one that stops and ends every link, does not count; `wait` bounds that.
        """
        taken_in = self._session.state is not State.OPENING
        if taken_in and self._session.has_credit:
            self._losses += 1  # without credit, it is the client that does not read
        self._view.stats.verifier_losses += 1
        if self._losses > MOST_LOSSES:
            message = f"{self._losses} verifiers in a row were lost before they decided a token of this session"
            self._driver.on_verifier_failed(SessionFailure(grpc.StatusCode.UNAVAILABLE, message), final=True)
        self.former = self.peer
        self._timers.set("former", PREFERENCE, self._driver.on_unplaced)
        self._lose()

    def _lose(self) -> None:
        self.peer = None
        self._driver.apply(messages.VerifierLost())
        if self._session.state is State.WAITING:
            self.wait()

    def on_broken(self, error: Exception) -> None:
        self._driver.on_broken(error)

    # What it is told

    def open(self, effect: messages.OpenVerifier, drafters: Sequence[AssignedDrafter]) -> None:
        self._send(verify_pb2.ConnectVerifyRequest(opens=[self._open(effect, drafters)]))
        if self.peer is not None and self._useful:
            self.peer.link.send_later(self._reference_parts(self.peer, effect.attach))

    def send_progress(self, effect: messages.SendProgress) -> None:
        self._send(verify_pb2.ConnectVerifyRequest(progress=[self._progress(effect)]))

    def tell_drafters(self, drafters: Sequence[AssignedDrafter]) -> None:
        """Of the session, all that there are by now."""
        told = verify_pb2.Drafters(handle=self._handle, drafters=convert.drafters_to_wire(drafters))
        self._send(verify_pb2.ConnectVerifyRequest(drafters=[told]))

    def relay(self, proposal: common_pb2.Proposal) -> None:
        """Send a drafter's proposal on, under the verifier's handle."""
        proposal.handle = self._handle
        self._send(verify_pb2.ConnectVerifyRequest(proposals=[proposal]))

    def _open(self, effect: messages.OpenVerifier, drafters: Sequence[AssignedDrafter]) -> verify_pb2.Open:
        record, left = self._view.record, self._timers.left("deadline")
        opened = verify_pb2.Open(
            handle=self._handle,
            session_id=record.session_id,
            fence=self._session.fence,
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
            no_head=not record.heads,
            head_alone=record.heads and not record.ngram,
            prediction=record.prediction,
            reference_lengths=map(len, self._useful),
            epoch=self._session.epoch(record.sampling.weighed),
            cache_scope=self._options.access.cache_scope(record.tenant),
            share_text=self._options.access.keys is not None and not record.private,
            priority=record.priority,
            traceparent=self._view.span.traceparent,
            drafters=convert.drafters_to_wire(drafters),
        )
        if self.peer is not None and self.peer.info is not None:
            del opened.prediction[self.peer.info.context :]  # a hint: what exceeds this context is dropped
        return opened

    @property
    def _useful(self) -> tuple[array[int], ...]:
        """The references, where the verifier takes any, and may guess from texts under the session's rule."""
        record, info = self._view.record, None if self.peer is None else self.peer.info
        takes = info is not None and info.text_room > 0 and record.ngram and record.sampling.guessed
        return self.references if takes else ()

    def _reference_parts(self, peer: VerifierPeer, attach: int) -> Iterator[verify_pb2.ConnectVerifyRequest]:
        """What follows the Open of an attachment, for as long as that one counts."""
        for document in self.references:
            for start in range(0, len(document), REFERENCE_PART):
                if self.peer is not peer or self._session.attach != attach:
                    return
                part = verify_pb2.ReferencePart(handle=self._handle, tokens=document[start : start + REFERENCE_PART])
                yield verify_pb2.ConnectVerifyRequest(references=[part])

    def _progress(self, effect: messages.OpenVerifier | messages.SendProgress) -> verify_pb2.Progress:
        return verify_pb2.Progress(handle=self._handle, durable=effect.durable, credit=effect.credit)

    def _send(self, message: verify_pb2.ConnectVerifyRequest) -> None:
        if self.peer is not None:
            self.peer.link.send(message)
