"""GenerationService: what clients call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc

from orchestrator import replies
from orchestrator.driver import SessionDriver
from orchestrator.output import Cursor, Guess
from orchestrator.requests import record_of
from orchestrator.sessions import Orchestrator
from orchestrator.statuses import store_statuses
from orchestrator.store import SessionRecord, StoredSession
from orchestrator.target import Target
from orchestrator.tenants import ANONYMOUS, check_owner, no_session
from orchestrator.turns import tokens_of
from orchestrator.watching import cursor_of
from specwire.core.events import ClientTook
from specwire.core.limits import Ending, FinishReason
from specwire.core.preview import Provisional
from specwire.rpc import convert
from specwire.rpc.errors import Context, StatusError
from specwire.v1 import common_pb2, generation_pb2_grpc
from specwire.v1 import generation_pb2 as pb

# A client's own clock may end the call this much before ours says that its deadline has passed.
DEADLINE_SLACK_S = 0.1
# A reader of a session that this orchestrator leaves, and its log keeps, may watch it elsewhere: from then on.
RESUME_AFTER_S = 0.1


class GenerationApi(generation_pb2_grpc.GenerationServiceServicer):
    """Errors are raised as InvalidParameter, StatusError or StoreError; the interceptor turns them into statuses."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        target = self._orchestrator.pool.require_target()
        tenant = self._tenant(context)
        before = await tokens_of(request.parent, tenant, target.info.vocabulary_fingerprint, self._orchestrator.store)
        driver = await self._session_for(await record_of(request, target, tenant, before), context)
        guess = _guess(driver, target) if request.provisional else None
        with driver.readers.reading():
            try:
                async for part in self._follow(driver, Cursor(), guess):
                    yield replies.generate_response(part)
            except asyncio.CancelledError:
                _pass_deadline(driver)
                raise

    def _tenant(self, context: Context) -> str:
        """Who calls. Whoever has no right to is not here: see specwire.rpc.guard."""
        keys = self._orchestrator.options.access.keys
        return ANONYMOUS if keys is None else keys.holder(context.invocation_metadata() or ())

    async def _session_for(self, record: SessionRecord, context: Context) -> SessionDriver:
        """A new session, or the one that the same request id has started before."""
        if record.request_id:
            ttl = self._orchestrator.options.session_ttl + self._orchestrator.options.retention
            with store_statuses():
                first = await self._orchestrator.store.bind_request(
                    record.tenant, record.request_id, record.session_id, ttl
                )
            if first != record.session_id:
                return await self._joined(replace(record, session_id=first), context)
        return await self._orchestrator.open(record, context.time_remaining())

    async def _joined(self, record: SessionRecord, context: Context) -> SessionDriver:
        """The session that a request id stands for; begun now if its first call got no further than binding the id."""
        driver = await self._orchestrator.find(record.session_id)
        if driver is None and await self._read(record.session_id) is not None:
            driver = await self._orchestrator.join(record.session_id)
        return driver or await self._orchestrator.open(record, context.time_remaining())

    async def _stored(self, session_id: str) -> StoredSession:
        log = await self._read(session_id)
        if log is None:
            raise no_session(session_id)
        return log

    async def _read(self, session_id: str) -> StoredSession | None:
        with store_statuses():
            return await self._orchestrator.store.read(session_id)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        check_owner(request.session_id, self._tenant(context))
        driver = await self._orchestrator.join(request.session_id, request.take_over)
        with driver.readers.reading():
            timeout = self._orchestrator.options.store_timeout
            cursor = await cursor_of(request, driver, self._orchestrator.store, timeout)
            # What it has need not be shown again: whoever stands at the end of the credit would wait for ever.
            driver.apply(ClientTook(driver.output.prompt_length + cursor.tokens))
            async for part in self._follow(driver, cursor):
                yield replies.watch_response(part)

    async def _follow(
        self, driver: SessionDriver, cursor: Cursor, guess: Guess | None = None
    ) -> AsyncIterator[replies.Part]:
        """A reader's events from `cursor` on."""
        known = driver.output.end
        yield replies.started(driver)
        async for shown in driver.output.follow(cursor, guess):
            if isinstance(shown, Provisional):
                yield replies.provisional(shown)
                continue
            yield replies.chunk(shown)
            driver.apply(ClientTook(shown.position + len(shown.tokens)))
        end = driver.output.end
        if end is not None and end.reason is FinishReason.ERROR:
            code, message = driver.failure or (grpc.StatusCode.ABORTED, end.message)
            if driver.abandoned:
                raise StatusError(code, message, RESUME_AFTER_S)
            if known is not None:  # it is no use to come back
                raise StatusError(grpc.StatusCode.ABORTED, f"the session has failed: {message}")
            raise StatusError(code, message)
        if end is not None:
            yield replies.finished(driver, end, driver.output.since(cursor).text)

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.GetSessionResponse:
        check_owner(request.session_id, self._tenant(context))
        log = await self._stored(request.session_id)
        return pb.GetSessionResponse(
            prompt_tokens=len(log.record.prompt),
            tokens=[*log.record.prompt, *log.tokens],
            finish_reason=convert.reason_to_wire(log.reason),
            fence=log.fence,
            durability=self._orchestrator.store.durability,
            created_ms=round(log.record.created * 1000),
            ended_ms=round((log.ended or 0.0) * 1000),
            weights_fingerprint=log.record.weights_fingerprint,
        )

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        check_owner(request.session_id, self._tenant(context))
        await self._orchestrator.cancel(request.session_id)
        return pb.CancelResponse()

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Context) -> pb.DeleteSessionResponse:
        check_owner(request.session_id, self._tenant(context))
        await self._orchestrator.delete(request.session_id)
        return pb.DeleteSessionResponse()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        target = self._orchestrator.pool.require_target()
        drafters = [described(d.info) for d in self._orchestrator.pool.drafters if d.up and d.info is not None]
        return pb.GetServerInfoResponse(
            target=described(target.info), drafters=drafters, durability=self._orchestrator.store.durability
        )


def _pass_deadline(driver: SessionDriver) -> None:
    """A call ends; if because the session's deadline has passed, so does the session.

    That is the deadline of the call that began it: others that have joined it may have less time, or more.
    """
    deadline = driver.record.deadline
    if deadline and deadline - time.time() <= DEADLINE_SLACK_S:
        driver.pass_deadline()


def _guess(driver: SessionDriver, target: Target) -> Guess:
    record, info = driver.record, target.info
    ending = Ending.of(record.stopping, len(record.prompt), target.eos_ids, info.context)
    return driver.show_provisional(info.vocabulary, ending)


def described(info: common_pb2.GetModelInfoResponse) -> common_pb2.GetModelInfoResponse:
    """The description without the tokenizer, which clients do not need, and the host, which is not theirs to know."""
    copy = common_pb2.GetModelInfoResponse()
    copy.CopyFrom(info)
    copy.ClearField("tokenizer_json")
    copy.ClearField("host_id")
    return copy
