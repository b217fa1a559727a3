"""What clients call: GenerationService, and what it and HTTP's doors do for a call.

Sessions are begun, read, cancelled and deleted here, also those that there are already: a parent's text, a reader's
place in a text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, TypeVar

import grpc

from orchestrator.api.requests import Repeats, Seeds, check_size, record_of, single_requests
from orchestrator.api.scores import PromptScorer
from orchestrator.chat.models import AnswerForm, AnswerReader, ChatModels, ChatPrompt
from orchestrator.chat.talk import talk_of
from orchestrator.peers.models import Target
from orchestrator.session.appender import status_of_store, store_statuses
from orchestrator.session.driver import SessionDriver
from orchestrator.session.output import Cursor, OutputTimings, SessionFailure, SessionView
from orchestrator.session.stats import Trace, stats_of
from orchestrator.sessions import END_LIMIT_S, Orchestrator
from orchestrator.store import MissingSession, SessionRecord, StoredSession, StoreError, StoreUnavailable
from orchestrator.store.base import NONE_OF_IT, deleted
from orchestrator.store.encoding import TOKEN_BYTES
from orchestrator.tenants import ANONYMOUS, check_owner, no_session
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import ClientTook, Emit, EmitEnd, End, FinishReason, Outcome
from specwire.core.text import extend_hash
from specwire.rpc import convert
from specwire.rpc.errors import RETRY_AFTER, Context, StatusError
from specwire.rpc.keys import Metadata
from specwire.rpc.model_info import described
from specwire.telemetry.logs import SHOWN_CHARACTERS
from specwire.telemetry.tracing import Side, begin, parent_in, spanned
from specwire.text.sandbox import Busy
from specwire.v1 import common_pb2, generation_pb2_grpc
from specwire.v1 import generation_pb2 as pb

# ----------------------------------------------------------------------------------------------------------------------
# Several completions of one prompt: their events in one stream.

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The streams' events as they come, each with its stream's index.

    A stream is read further once its last event has been taken. The first that fails ends all; so does closing this.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as parts:
            async for part in parts:
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
# A conversation's next turn: the text before its prompt.


async def read_again(
    orchestrator: Orchestrator, session_id: str, tenant: str, field: str, charged: bool = True
) -> StoredSession:
    """What the log holds of a tenant's session. charged: its tenant is, for as many bytes as it has.

    Raises:
        StatusError: NOT_FOUND; RESOURCE_EXHAUSTED, the tenant has no tokens left; or the log does not answer.
    """
    check_owner(session_id, tenant, field)
    if charged:
        orchestrator.admission.charge(tenant, 0, least=1)
    with store_statuses():
        log = await orchestrator.store.read(session_id)
    if log is None:
        raise no_session(session_id, field)
    if charged:
        size = len(log.record.note) + len(log.record.chat) + TOKEN_BYTES * log.length
        orchestrator.admission.charge(tenant, size)
    return log


async def runs(orchestrator: Orchestrator, session_id: str, tenant: str, field: str) -> bool:
    """Whether a tenant's session has not ended in the log, of which nothing more is read. Raises as `read_again`."""
    check_owner(session_id, tenant, field)
    with store_statuses():
        log = await orchestrator.store.tail(session_id, NONE_OF_IT)
    if log is None:
        raise no_session(session_id, field)
    return log.reason is None


async def tokens_of(
    parent: str, tenant: str, vocabulary_fingerprint: str, orchestrator: Orchestrator
) -> tuple[int, ...]:
    """All tokens of the session `parent`, prompt and output, those of its end included.

    Empty where no parent is named.

    Raises:
        StatusError: FAILED_PRECONDITION, it has not ended, or its ids mean something else here; or as `read_again`.
    """
    if not parent:
        return ()
    log = await read_again(orchestrator, parent, tenant, "parent")
    if log.reason is None:
        raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, f"parent: session {parent!r} has not ended")
    if log.record.vocabulary_fingerprint != vocabulary_fingerprint:
        message = f"parent: session {parent!r} has another vocabulary than the model that is served here"
        raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, message)
    return (*log.record.prompt, *log.tokens)


# ----------------------------------------------------------------------------------------------------------------------
# Where a reader that comes back goes on, and whether it may: PROTOCOL.md, section 12.

# Tokens whose hash takes long enough for others of the event loop to feel it.
LONG_TEXT = 4096


async def cursor_of(
    orchestrator: Orchestrator, view: SessionView, position: int, prefix_hash: int | None = None
) -> Cursor:
    """The place in the session's output of a reader that has what is before `position`; 0 for where the output begins.

    prefix_hash: of the text before it, where the reader knows that. A reader that comes from another orchestrator may
    know more than has been shown here by now; this waits for it, at most the store's timeout.

    Raises:
        InvalidParameter: no position of the output.
        StatusError: DATA_LOSS, the reader's text is not the log's; UNAVAILABLE, the output did not get there in time.
    """
    first = len(view.record.prompt)
    position = position or first
    shown = first + len(view.output.tokens)
    if position > shown and prefix_hash is not None:
        await _catch_up(orchestrator, view, position)
    elif not first <= position <= shown:
        raise InvalidParameter("from_position", f"must be from {first} to {shown}, not {position}")
    if prefix_hash is not None:
        known = view.output.tokens[: position - first]
        is_long = len(known) >= LONG_TEXT
        found = await asyncio.to_thread(_hash_of, view, known) if is_long else _hash_of(view, known)
        if found != prefix_hash:
            raise StatusError(grpc.StatusCode.DATA_LOSS, f"prefix_hash: the text before {position} is another one")
    cursor = view.output.cursor_at(position)
    view.tell(ClientTook(view.output.prompt_length + cursor.tokens))  # at the end of the credit it would wait for ever
    return cursor


async def _catch_up(orchestrator: Orchestrator, view: SessionView, position: int) -> None:
    """Wait until the output reaches `position`, if the log does."""
    timeout = orchestrator.options.store_timeout
    with store_statuses():
        log = await orchestrator.store.tail(view.record.session_id, NONE_OF_IT)
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


def _hash_of(view: SessionView, output: Sequence[int]) -> int:
    """Of the text that consists of the prompt and these tokens."""
    value = view.prompt_hash
    for token in output:
        value = extend_hash(value, token)
    return value


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
        log = await orchestrator.store.tail(session_id, NONE_OF_IT)
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
    orchestrator.deleted(session_id)
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
# Sessions as callers begin and read them, whatever the protocol: gRPC's api and HTTP's.
#
# Errors are raised as InvalidParameter, StatusError or StoreError.

# A client's own clock may end the call this much before ours says that its deadline has passed.
DEADLINE_SLACK_S = 0.1
# Seconds after which a reader may watch elsewhere a session that this orchestrator leaves in the log.
RESUME_AFTER_S = 0.1


# What a reader hears: of the session first, then its pieces, then its end.
Part = SessionView | Emit | EmitEnd


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
        hash of the text before it. trace: is told what happens in the session from now on; must not
        block. traceparent: of the caller's span (W3C Trace Context); empty or invalid begins a trace. target: one for
        all sessions of a request with several; None takes `target_for` the request. chat: of a request whose prompt is
        one.
        """
        target = target or await self.target_for(request, tenant)
        driver = await self._driver_for(request, target, tenant, seed, time_left, traceparent, chat)
        if reached is not None or request.take_over:  # its driver may be gone: its reader lost the connection
            driver = await self._orchestrator.join(driver.view.record.session_id, take_over=True)
        view = driver.view
        view.trace = trace or view.trace
        with view.readers.reading():
            try:
                cursor = Cursor() if reached is None else await cursor_of(self._orchestrator, view, *reached)
                async with aclosing(self.follow(view, cursor)) as parts:
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
            parent = await read_again(self._orchestrator, request.parent, tenant, "parent")
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
        vocabulary = target.info.vocabulary_fingerprint
        try:
            if request.whole_prompt and request.parent:
                check_owner(request.parent, tenant, "parent")
            parent = "" if request.whole_prompt else request.parent
            before = await tokens_of(parent, tenant, vocabulary, self._orchestrator)
            record = await record_of(request, target, tenant, seed, before, chat, self._orchestrator.options.lengths)
        except (InvalidParameter, StatusError):
            driver = await self._repeats.begun(request, tenant)
            if driver is None:
                raise
            return driver
        return await self._session_for(record, time_left, traceparent)

    async def _session_for(self, record: SessionRecord, time_left: float | None, traceparent: str) -> SessionDriver:
        """A new session, with a span of its own; or the one that the same request id has started before."""
        session, tokens = record.session_id[:SHOWN_CHARACTERS], len(record.prompt)
        span = begin("specwire.generate", Side.SERVER, traceparent, session=session, prompt_tokens=tokens)
        try:
            begin_or_join = self._repeats.session_for if record.request_id else self._orchestrator.open
            driver = await begin_or_join(record, time_left, span)
        except BaseException as error:
            span.end(str(error) or type(error).__name__)
            raise
        if driver.view.span is not span:
            span.end(joined=driver.view.record.session_id[:SHOWN_CHARACTERS])
        return driver

    async def follow(self, view: SessionView, cursor: Cursor) -> AsyncGenerator[Part, None]:
        """What a reader hears from `cursor` on."""
        known = view.output.end
        yield view
        async for shown in view.output.follow(cursor):
            yield shown
            view.tell(ClientTook(shown.position + len(shown.tokens)))
        end = view.output.end
        if end is not None:
            _check_end(view, end, known is not None)
            yield EmitEnd(end, view.output.since(cursor).text)


def _check_end(view: SessionView, end: End, known: bool) -> None:
    """StatusError where the session failed. known: it had ended before its reader came."""
    if end.reason is not FinishReason.ERROR:
        return
    code, message, retry_after = view.failure or SessionFailure(grpc.StatusCode.ABORTED, end.message)
    if view.abandoned:
        raise StatusError(code, message, RESUME_AFTER_S)
    if known:  # coming back would not help
        raise StatusError(grpc.StatusCode.ABORTED, f"the session has failed: {message}")
    raise StatusError(code, message, retry_after)


def _pass_deadline(driver: SessionDriver) -> None:
    """End a call; if the session's own deadline has passed, end the session, too.

    That is the deadline of the call that began it; calls that joined have their own.
    """
    if driver.is_due(DEADLINE_SLACK_S):
        driver.end(FinishReason.DEADLINE)


# ----------------------------------------------------------------------------------------------------------------------
# GenerationService, over gRPC.


class GenerationApi(generation_pb2_grpc.GenerationServiceServicer):
    """Errors are raised as InvalidParameter, StatusError or StoreError; the interceptor turns them into statuses."""

    def __init__(self, orchestrator: Orchestrator, chats: ChatModels) -> None:
        self._orchestrator = orchestrator
        self._chats = chats
        self._handler = GenerationHandler(orchestrator)
        self._scorer = PromptScorer(orchestrator)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        streams, chat = await self._asked(request, context)
        with _naming_tools(chat):
            async with aclosing(merged(streams)) as parts:
                async for choice, part in parts:
                    yield pb.GenerateResponse(choice=choice, **part)

    async def _asked(
        self, request: pb.GenerateRequest, context: Context
    ) -> tuple[list[AsyncGenerator[dict[str, Any], None]], ChatPrompt | None]:
        """The streams of the completions that a request asks for; of a chat, what their sessions are asked, too."""
        tenant, left = self._tenant(context), context.time_remaining()
        self._orchestrator.admission.charge(tenant, request.ByteSize())
        parent = parent_in(context.invocation_metadata())
        target = chat = None
        if request.n > 1 or request.HasField("chat"):  # before the prompt is copied for each of them
            target = await self._handler.target_for(request, tenant)
            chat = await self._chat(request.chat, target, tenant) if request.HasField("chat") else None
            check_size(
                chat.text if chat else request.text or request.tokens.ids, target, "messages" if chat else "prompt"
            )
        singles = single_requests(request)
        (seed,) = await self._handler.seeds.of(request, tenant)
        more: dict[str, Any] = {"traceparent": parent, "target": target, "chat": chat}
        return [self._told(self._handler.generate(each, tenant, left, seed, **more)) for each in singles], chat

    async def _told(self, parts: AsyncGenerator[Part, None], known: int = 0) -> AsyncGenerator[dict[str, Any], None]:
        """Events of a stream, by their names. known: characters of the text that its reader has already."""
        view, answer = None, None
        async with aclosing(parts):
            async for part in parts:
                match part:
                    case SessionView():
                        view, form = part, AnswerForm.read(part.record.chat)
                        if form is not None:
                            answer = AnswerReader(form, view.record.session_id)
                            await answer.feed(view.output.text[:known])
                        yield {"started": _started(view, self._prompt(view.record))}
                    case Emit() if view is not None:
                        delta = None if answer is None else await answer.feed(part.text)
                        yield {"chunk": _chunk(part, view.output.timings, delta)}
                    case EmitEnd() if view is not None:
                        delta = None if answer is None else await answer.finish(part.text)
                        yield {"finished": _finished(view, part, delta)}

    def _prompt(self, record: SessionRecord) -> pb.Prompt | None:
        """The prompt as the session's readers are shown it."""
        if not record.echo:
            return None
        text = self._orchestrator.pool.models.tokenizer_of(record).decode(list(record.prompt))
        return pb.Prompt(tokens=record.prompt, text=text)

    async def _chat(self, chat: pb.Chat, target: Target, tenant: str) -> ChatPrompt:
        """What a session is asked for. Raises InvalidParameter; StatusError: too many wait for their template."""
        aside = self._orchestrator.admission.of(tenant, chat.ByteSize())
        talk = await aside(talk_of, chat)
        try:
            return await self._chats.of(target).chat(talk, aside)
        except Busy as busy:
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(busy), RETRY_AFTER) from None

    def _tenant(self, context: Context) -> str:
        """The calling tenant. Callers that may not call never come here: see specwire.rpc.server."""
        return self._handler.tenant(context.invocation_metadata() or ())

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        check_owner(request.session_id, self._tenant(context))
        shown, parent = request.session_id[:SHOWN_CHARACTERS], parent_in(context.invocation_metadata())
        with spanned("specwire.watch", Side.SERVER, parent, session=shown, take_over=request.take_over) as span:
            driver = await self._orchestrator.join(request.session_id, request.take_over, span.traceparent)
            view = driver.view
            with view.readers.reading():
                prefix_hash = request.prefix_hash if request.HasField("prefix_hash") else None
                cursor = await cursor_of(self._orchestrator, view, request.from_position, prefix_hash)
                async for part in self._told(self._handler.follow(view, cursor), cursor.characters):
                    yield pb.WatchResponse(**part)

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.GetSessionResponse:
        log = await read_again(self._orchestrator, request.session_id, self._tenant(context), "session_id")
        return pb.GetSessionResponse(
            prompt_tokens=len(log.record.prompt),
            tokens=[*log.record.prompt, *log.tokens],
            finish_reason=convert.reason_to_wire(log.reason),
            fence=log.fence,
            durability=self._orchestrator.store.durability,
            created_ms=round(log.record.created * 1000),
            ended_ms=round((log.ended or 0.0) * 1000),
            weights_fingerprint=log.record.weights_fingerprint,
            lossy=log.record.sampling.lossy,
        )

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        check_owner(request.session_id, self._tenant(context))
        await cancel(self._orchestrator, request.session_id)
        return pb.CancelResponse()

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Context) -> pb.DeleteSessionResponse:
        check_owner(request.session_id, self._tenant(context))
        await delete(self._orchestrator, request.session_id)
        return pb.DeleteSessionResponse()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        self._orchestrator.pool.require_target()
        targets = [self._of_all(target) for target in self._orchestrator.pool.targets()]
        drafters = [described(d.info) for d in self._orchestrator.pool.drafters if d.up and d.info is not None]
        return pb.GetServerInfoResponse(
            target=targets[0], drafters=drafters, durability=self._orchestrator.store.durability, targets=targets
        )

    def _of_all(self, target: Target) -> common_pb2.GetModelInfoResponse:
        """The description of a model that several verifiers may serve, with the chat template in force."""
        info = described(target.info)
        info.context, info.chat_template = target.context, self._chats.source(target)
        return info

    async def ScoreText(self, request: pb.ScoreTextRequest, context: Context) -> pb.ScoreTextResponse:
        tenant, target = self._tenant(context), self._orchestrator.pool.target_named(request.model)
        self._orchestrator.admission.charge(tenant, request.ByteSize())
        return await self._scorer.continuations(request, target, tenant, context.time_remaining())


@contextmanager
def _naming_tools(chat: ChatPrompt | None) -> Iterator[None]:
    """Where the constraint that a chat's tools demand is refused, name the tools: the caller sent no constraint."""
    try:
        yield
    except (InvalidParameter, StatusError) as error:
        demanded = f"{chat.constraint.kind}: " if chat is not None and chat.constraint is not None else ""
        said = error.message if isinstance(error, StatusError) else str(error)
        if not demanded or not said.startswith(demanded):
            raise
        message = said.removeprefix(demanded)
        if isinstance(error, StatusError):
            raise StatusError(error.code, f"tools: {message}", error.retry_after) from None
        raise InvalidParameter("tools", message) from None


# From what a reader hears to the events of a client's stream.


def _started(view: SessionView, prompt: pb.Prompt | None) -> pb.Started:
    record = view.record
    return pb.Started(
        session_id=record.session_id,
        prompt_tokens=len(record.prompt),
        sampling=convert.sampling_to_wire(record.sampling),
        prompt_hash=view.prompt_hash,
        prompt=prompt,
        lossy=record.sampling.lossy,
    )


def _chunk(piece: Emit, way: OutputTimings | None, delta: pb.ChatDelta | None) -> pb.Chunk:
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


def _finished(view: SessionView, part: EmitEnd, delta: pb.ChatDelta | None) -> pb.Finished:
    return pb.Finished(
        reason=convert.reason_to_wire(part.end.reason),
        message=part.end.message,
        text=part.text,
        text_length=part.end.text_length,
        stats=stats_of(view.stats, len(view.record.prompt)),
        lossy=view.record.sampling.lossy,
        delta=delta,
    )
