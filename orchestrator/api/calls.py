"""Sessions as callers begin, read and end them, whatever the protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import TypeVar

import grpc

from orchestrator.api.requests import Repeats, Seeds, record_of
from orchestrator.chat.answer import AnswerForm, AnswerReader, ChatPrompt
from orchestrator.peers.models import Target
from orchestrator.session.appender import status_of_store, store_statuses
from orchestrator.session.driver import SessionDriver
from orchestrator.session.output import Cursor, OutputTimings, ProvisionalGuess, SessionFailure, SessionView
from orchestrator.session.stats import DrafterCounts, SessionStats, Trace
from orchestrator.sessions import END_LIMIT_S, Orchestrator
from orchestrator.store import MissingSession, SessionRecord, SessionStore, StoredSession, StoreError, StoreUnavailable
from orchestrator.store.base import deleted
from orchestrator.tenants import ANONYMOUS, check_owner, no_session
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import ClientTook, Emit, End, FinishReason, Outcome, SourceKind
from specwire.core.provisional import ProvisionalDraft
from specwire.core.text import Ending, extend_hash
from specwire.rpc import convert
from specwire.rpc.errors import RETRY_AFTER, StatusError
from specwire.rpc.keys import Metadata
from specwire.telemetry.tracing import Side, Span, begin
from specwire.v1 import generation_pb2 as pb

# ----------------------------------------------------------------------------------------------------------------------
# A conversation's next turn: the text before its prompt.


async def tokens_of(parent: str, tenant: str, vocabulary_fingerprint: str, store: SessionStore) -> tuple[int, ...]:
    """All tokens of the session `parent`, prompt and output, those of its end included.

    Empty where no parent is named.

    Raises:
        StatusError: NOT_FOUND; FAILED_PRECONDITION, it has not ended, or its ids mean something else here.
    """
    if not parent:
        return ()
    check_owner(parent, tenant, "parent")
    with store_statuses():
        log = await store.read(parent)
    if log is None:
        raise no_session(parent, "parent")
    if log.reason is None:
        raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, f"parent: session {parent!r} has not ended")
    if log.record.vocabulary_fingerprint != vocabulary_fingerprint:
        message = f"parent: session {parent!r} has another vocabulary than the model that is served here"
        raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, message)
    return (*log.record.prompt, *log.tokens)


# ----------------------------------------------------------------------------------------------------------------------
# Where a reader that comes back goes on, and whether it may: PROTOCOL.md, section 12.


async def cursor_of(request: pb.WatchRequest, view: SessionView, store: SessionStore, timeout: float) -> Cursor:
    """The reader's place in the session's output.

    A reader that comes from another orchestrator may know more than has been shown here by now; this waits for it, at
    most `timeout` seconds.

    Raises:
        InvalidParameter: no position of the output.
        StatusError: DATA_LOSS, the reader's text is not the log's; UNAVAILABLE, the output did not get there in time.
    """
    first = len(view.record.prompt)
    position = request.from_position or first
    shown = first + len(view.output.tokens)
    if position > shown and request.HasField("prefix_hash"):
        await _catch_up(view, store, position, timeout)
    elif not first <= position <= shown:
        raise InvalidParameter("from_position", f"must be from {first} to {shown}, not {position}")
    if request.HasField("prefix_hash") and hash_before(view, position) != request.prefix_hash:
        raise StatusError(grpc.StatusCode.DATA_LOSS, f"prefix_hash: the text before {position} is another one")
    return view.output.cursor_at(position)


async def _catch_up(view: SessionView, store: SessionStore, position: int, timeout: float) -> None:
    """Wait until the output reaches `position`, if the log does."""
    with store_statuses():
        log = await store.read(view.record.session_id)
    length = 0 if log is None else log.length
    if position > length:
        message = f"from_position: the log ends at {length}, before {position}, which was shown"
        raise StatusError(grpc.StatusCode.DATA_LOSS, message)
    try:
        async with asyncio.timeout(timeout):
            await view.output.reached(position)
    except TimeoutError:
        message = f"from_position: the text did not reach {position} within {timeout:g} s"
        raise StatusError(grpc.StatusCode.UNAVAILABLE, message) from None


def hash_before(view: SessionView, position: int) -> int:
    """The hash of the text before `position`, which is not before the prompt's end."""
    value = view.prompt_hash
    for token in view.output.tokens[: position - len(view.record.prompt)]:
        value = extend_hash(value, token)
    return value


# ----------------------------------------------------------------------------------------------------------------------
# Several completions of one prompt: each a session of its own, their events in one stream.

MOST_COMPLETIONS = 64

T = TypeVar("T")


def single_requests(request: pb.GenerateRequest) -> list[pb.GenerateRequest]:
    """One request for each of the request's completions; the caller gives all the same seed.

    Raises: InvalidParameter: too many, or an option that makes sense for one only.
    """
    if request.n <= 1:
        return [request]
    if request.n > MOST_COMPLETIONS:
        raise InvalidParameter("n", f"must be from 0 to {MOST_COMPLETIONS}, not {request.n}")
    if request.sampling.choice:
        raise InvalidParameter("choice", f"must be 0 where n is {request.n}, not {request.sampling.choice}")
    if request.request_id:
        raise InvalidParameter("request_id", f"stands for one session, so n must be 1, not {request.n}")
    return [_single(request, choice) for choice in range(request.n)]


def _single(request: pb.GenerateRequest, choice: int) -> pb.GenerateRequest:
    single = pb.GenerateRequest()
    single.CopyFrom(request)
    single.ClearField("n")
    single.sampling.choice = choice
    return single


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The streams' events as they come, each with its stream's index.

    A stream is read further once its last event has been taken. The first that fails ends all; so does closing this.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for part in only:
                yield 0, part
        return
    waiting = {asyncio.create_task(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index, brought = waiting.pop(task), task.result()
                for part in brought:
                    yield index, part
                    waiting[asyncio.create_task(_next(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T, None]) -> tuple[T, ...]:
    """The next part; nothing at the end."""
    async for part in stream:
        return (part,)
    return ()


# ----------------------------------------------------------------------------------------------------------------------
# Cancelling and deleting sessions, whoever drives them.


async def cancel(orchestrator: Orchestrator, session_id: str) -> None:
    """Ask the session's owner to end it; a session that nobody drives is ended here.

    Returns once the log has the request: then it holds even if this process, or another owner, ends first. Ending the
    session here at once is an attempt; what it does not reach is left to the sweep.

    Raises:
        StatusError: NOT_FOUND; UNAVAILABLE, the log does not answer, or has lost a session that is driven here: it may
            go on, and may be cancelled again.
    """
    driven = await _driven(orchestrator, session_id)
    if driven is not None:
        driven.end(FinishReason.CANCELLED)  # nothing more is decided, even if the log fails
    with _to_be_repeated(session_id, "cancel"):
        await orchestrator.cancellations.ask(session_id, None if driven is None else driven.view)
    if driven is not None:
        return
    with suppress(StatusError, StoreError):
        log = await orchestrator.store.read(session_id)
        if log is not None and log.reason is None and (log.abandoned or log.owner == orchestrator.owner):
            await orchestrator.join(session_id)


async def delete(orchestrator: Orchestrator, session_id: str) -> None:
    """Remove the session from the log; where it runs, its readers learn that it has ended.

    Raises:
        StatusError: NOT_FOUND; UNAVAILABLE, the log does not answer: it may keep the text, and may be asked again.
    """
    driven = await _driven(orchestrator, session_id)
    if driven is not None:
        driven.end(FinishReason.CANCELLED)
        await driven.view.ended(END_LIMIT_S)
    with _to_be_repeated(session_id, "delete"):
        await orchestrator.cancellations.delete(session_id, None if driven is None else driven.view)
    orchestrator.pool.forget(session_id)
    left = orchestrator.sessions.pop(session_id, None)
    if left is not None:
        gone = deleted(session_id)
        left.abandon(status_of_store(gone), str(gone))  # its readers, if another one has driven it until now
        await left.close()


async def _driven(orchestrator: Orchestrator, session_id: str) -> SessionDriver | None:
    """Its driver, if it is driven here."""
    driver = await orchestrator.roster.find(session_id)
    return None if driver is None or driver.following else driver


@contextmanager
def _to_be_repeated(session_id: str, what: str) -> Iterator[None]:
    """Raise StatusError for what the log has not acknowledged: it is not done."""
    try:
        yield
    except MissingSession:
        raise no_session(session_id) from None
    except StoreUnavailable as error:
        message = f"session_id: {error}, so the session may go on; {what} it again"
        raise StatusError(grpc.StatusCode.UNAVAILABLE, message, RETRY_AFTER) from error


# ----------------------------------------------------------------------------------------------------------------------
# From a session's output to the events of a client's stream.

Part = pb.Started | pb.Chunk | pb.Provisional | pb.Finished


def _started(view: SessionView, prompt: pb.Prompt | None = None) -> pb.Started:
    record = view.record
    return pb.Started(
        session_id=record.session_id,
        prompt_tokens=len(record.prompt),
        sampling=convert.sampling_to_wire(record.sampling),
        prompt_hash=view.prompt_hash,
        prompt=prompt,
        lossy=record.sampling.lossy,
    )


def _provisional(known: ProvisionalDraft) -> pb.Provisional:
    return pb.Provisional(position=known.position, tokens=known.tokens, text=known.text)


def _chunk(piece: Emit, way: OutputTimings | None, delta: pb.ChatDelta | None = None) -> pb.Chunk:
    count = piece.outcomes.count
    return pb.Chunk(
        position=piece.position,
        tokens=piece.tokens,
        outcomes=convert.outcomes_to_wire(piece.outcomes),
        text=piece.text,
        text_ends=piece.text_ends,
        accepted=count(Outcome.ACCEPTED),
        recovered=count(Outcome.RECOVERED),
        bonus=count(Outcome.BONUS),
        direct=count(Outcome.DIRECT),
        timings=None if way is None else _timings(way),
        logprobs=convert.logprobs_to_wire(piece.logprobs),
        delta=delta,
    )


def _timings(known: OutputTimings) -> pb.ChunkTimings:
    return pb.ChunkTimings(
        forward_ended_ns=known.step.forward_ended_ns,
        verdict_received_ns=known.verdict_received_ns,
        durable_ns=known.durable_ns,
        emitted_ns=time.monotonic_ns(),
        step=known.step,
    )


def _finished(view: SessionView, end: End, text: str, delta: pb.ChatDelta | None = None) -> pb.Finished:
    return pb.Finished(
        reason=convert.reason_to_wire(end.reason),
        message=end.message,
        text=text,
        text_length=end.text_length,
        stats=stats_of(view.stats, len(view.record.prompt)),
        lossy=view.record.sampling.lossy,
        delta=delta,
    )


def stats_of(known: SessionStats, prompt_tokens: int) -> pb.Stats:
    outcomes, shown = known.outcomes, known.shown
    ngram, prediction, head = (
        known.drafts[kind] for kind in (SourceKind.NGRAM, SourceKind.PREDICTION, SourceKind.HEAD)
    )
    ended = known.started if known.ended is None else known.ended
    first = known.first_token if known.first_token is not None and known.is_first else known.started
    positions = max((i + 1 for i, n in enumerate(known.tested_at) if n), default=0)
    return pb.Stats(
        prompt_tokens=prompt_tokens,
        output_tokens=outcomes.total(),
        target_forwards=known.target_forwards + known.forwards_elsewhere,
        forwards_saved=known.forwards_saved,
        proposed=shown.proposed,
        tested=shown.tested,
        accepted=shown.accepted,
        recovered=outcomes[Outcome.RECOVERED],
        bonus=outcomes[Outcome.BONUS],
        direct=outcomes[Outcome.DIRECT],
        time_to_first_token_us=int((first - known.started) * 1e6),
        duration_us=int((ended - known.started) * 1e6),
        tested_at=known.tested_at[:positions],
        accepted_at=known.accepted_at[:positions],
        proposed_ngram=ngram.proposed,
        tested_ngram=ngram.tested,
        accepted_ngram=ngram.accepted,
        proposed_prediction=prediction.proposed,
        tested_prediction=prediction.tested,
        accepted_prediction=prediction.accepted,
        proposed_head=head.proposed,
        tested_head=head.tested,
        accepted_head=head.accepted,
        plan=known.plan,
        drafters=[_drafter(each) for each in known.drafters],
        cached_tokens=known.cached_tokens,
    )


def _drafter(known: DrafterCounts) -> pb.DrafterStats:
    drafts = known.drafts
    return pb.DrafterStats(
        source=known.source,
        model=known.model,
        proposed=drafts.proposed,
        tested=drafts.tested,
        accepted=drafts.accepted,
        plan=known.plan,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Sessions as callers begin and read them, whatever the protocol: gRPC's api and HTTP's.
#
# Errors are raised as InvalidParameter, StatusError or StoreError.

# A client's own clock may end the call this much before ours says that its deadline has passed.
DEADLINE_SLACK_S = 0.1
# Seconds after which a reader may watch elsewhere a session that this orchestrator leaves in the log.
RESUME_AFTER_S = 0.1
# Characters of a session's id in logs and traces: the whole id is the right to read the session.
SHOWN_CHARACTERS = 8


class GenerationHandler:
    """What an orchestrator does for its callers; one object for all calls."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._repeats = Repeats(orchestrator)
        options = orchestrator.options
        self.seeds = Seeds(orchestrator.store, options.session_ttl + options.retention)

    def tenant(self, metadata: Metadata) -> str:
        """The calling tenant. Raises StatusError (UNAUTHENTICATED) for a caller that may not call."""
        keys = self._orchestrator.options.access.keys
        return ANONYMOUS if keys is None else keys.holder(metadata)

    async def generate(
        self,
        request: pb.GenerateRequest,
        tenant: str,
        time_left: float | None,
        seed: int,
        reached: tuple[int, int] | None = None,
        trace: Trace | None = None,
        traceparent: str = "",
        target: Target | None = None,
        chat: ChatPrompt | None = None,
    ) -> AsyncGenerator[Part, None]:
        """A session's events, from its start to its end. Closing this cancels the session.

        time_left: seconds until the caller's deadline, None for none.
        seed: taken where the request has none (`seeds`).
        reached: of a caller that comes back with its request id: the position before which it has everything, and the
        hash of the text before it. See `cursor_of`. trace: is told what happens in the session from now on; must not
        block. traceparent: of the caller's span (W3C Trace Context); empty or invalid begins a trace. target: one for
        all sessions of a request with several; None takes `target_for` the request. chat: of a request whose prompt is
        one.
        """
        target = target or await self.target_for(request, tenant)
        driver = await self._driver_for(request, target, tenant, seed, time_left, traceparent, chat)
        if reached is not None or request.take_over:  # its driver may be gone: its reader lost the connection
            driver = await self._orchestrator.join(driver.view.record.session_id, take_over=True)
        guess, view = _guess(driver, target) if request.provisional else None, driver.view
        view.trace = trace or view.trace
        with view.readers.reading():
            try:
                cursor = await self.cursor_at(view, *reached) if reached is not None else Cursor()
                async with aclosing(self.follow(view, cursor, guess)) as parts:
                    async for part in parts:
                        yield part
            except asyncio.CancelledError:
                _pass_deadline(driver)
                raise
            finally:
                view.trace = None if view.trace is trace else view.trace

    async def target_for(self, request: pb.GenerateRequest, tenant: str) -> Target:
        """The target of the model that the request names, else of its parent's model."""
        pool = self._orchestrator.pool
        if request.parent and not request.model and len(pool.models.names()) > 1:
            check_owner(request.parent, tenant, "parent")
            parent = await self.read(request.parent)
            if parent is None:
                raise no_session(request.parent, "parent")
            return pool.target_named(pool.models.name_of(parent.record))
        return pool.target_named(request.model)

    async def _driver_for(
        self,
        request: pb.GenerateRequest,
        target: Target,
        tenant: str,
        seed: int,
        time_left: float | None,
        traceparent: str,
        chat: ChatPrompt | None,
    ) -> SessionDriver:
        """The request's session. One that would be refused now may have begun under its id with an earlier version."""
        vocabulary, store = target.info.vocabulary_fingerprint, self._orchestrator.store
        try:
            if request.whole_prompt and request.parent:
                check_owner(request.parent, tenant, "parent")
            parent = "" if request.whole_prompt else request.parent
            before = await tokens_of(parent, tenant, vocabulary, store)
            record = await record_of(request, target, tenant, seed, before, chat)
        except (InvalidParameter, StatusError):
            driver = await self._repeats.begun(request, tenant)
            if driver is None:
                raise
            return driver
        return await self._traced(record, time_left, traceparent)

    async def _traced(self, record: SessionRecord, time_left: float | None, traceparent: str) -> SessionDriver:
        """The session, with a span of its own if it begins here."""
        session, tokens = record.session_id[:SHOWN_CHARACTERS], len(record.prompt)
        span = begin("specwire.generate", Side.SERVER, traceparent, session=session, prompt_tokens=tokens)
        try:
            driver = await self._session_for(record, time_left, span)
        except BaseException as error:
            span.end(str(error) or type(error).__name__)
            raise
        if driver.view.span is not span:
            span.end(joined=driver.view.record.session_id[:SHOWN_CHARACTERS])
        return driver

    async def _session_for(self, record: SessionRecord, time_left: float | None, span: Span) -> SessionDriver:
        """A new session, or the one that the same request id has started before."""
        if record.request_id:
            return await self._repeats.session_for(record, time_left, span)
        return await self._orchestrator.open(record, time_left, span)

    async def cursor_at(self, view: SessionView, position: int, prefix_hash: int) -> Cursor:
        """The place of a reader that has what is before `position`; raises as `cursor_of`."""
        known = pb.WatchRequest(from_position=position, prefix_hash=prefix_hash)
        cursor = await cursor_of(known, view, self._orchestrator.store, self._orchestrator.options.store_timeout)
        # What the reader has counts as taken: at the end of the credit it would wait for ever.
        view.tell(ClientTook(view.output.prompt_length + cursor.tokens))
        return cursor

    async def read(self, session_id: str) -> StoredSession | None:
        """What the log holds of a session."""
        with store_statuses():
            return await self._orchestrator.store.read(session_id)

    def _prompt(self, record: SessionRecord) -> pb.Prompt | None:
        """The prompt as the session's readers are shown it."""
        if not record.echo:
            return None
        text = self._orchestrator.pool.models.tokenizer_of(record).decode(list(record.prompt))
        return pb.Prompt(tokens=record.prompt, text=text)

    async def follow(
        self, view: SessionView, cursor: Cursor, guess: ProvisionalGuess | None = None
    ) -> AsyncGenerator[Part, None]:
        """A reader's events from `cursor` on."""
        known, form = view.output.end, AnswerForm.read(view.record.chat)
        answer = None if form is None else AnswerReader(form, view.record.session_id)
        if answer is not None:
            await answer.skip(view.output.text[: cursor.characters])
        yield _started(view, self._prompt(view.record))
        async for shown in view.output.follow(cursor, guess):
            if isinstance(shown, ProvisionalDraft):
                yield _provisional(shown)
                continue
            yield _chunk(shown, view.output.timings, None if answer is None else answer.feed(shown.text))
            view.tell(ClientTook(shown.position + len(shown.tokens)))
        end = view.output.end
        if end is not None and end.reason is FinishReason.ERROR:
            code, message, retry_after = view.failure or SessionFailure(grpc.StatusCode.ABORTED, end.message)
            if view.abandoned:
                raise StatusError(code, message, RESUME_AFTER_S)
            if known is not None:  # coming back would not help
                raise StatusError(grpc.StatusCode.ABORTED, f"the session has failed: {message}")
            raise StatusError(code, message, retry_after)
        if end is not None:
            text = view.output.since(cursor).text
            yield _finished(view, end, text, None if answer is None else answer.finish(text))


def _pass_deadline(driver: SessionDriver) -> None:
    """End a call; if the session's own deadline has passed, end the session, too.

    That is the deadline of the call that began it; calls that joined have their own.
    """
    deadline = driver.view.record.deadline
    if deadline and deadline - time.time() <= DEADLINE_SLACK_S:
        driver.end(FinishReason.DEADLINE)


def _guess(driver: SessionDriver, target: Target) -> ProvisionalGuess:
    record = driver.view.record
    eos_ids = target.eos_ids if record.eos_ids is None else frozenset(record.eos_ids)
    ending = Ending.of(record.stopping, len(record.prompt), eos_ids, record.end)
    return driver.show_provisional(target.info.vocabulary, ending)
