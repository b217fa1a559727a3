"""Sessions as whoever calls from outside begins and reads them, whatever the protocol: gRPC's api and HTTP's.

Errors are raised as InvalidParameter, StatusError or StoreError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from orchestrator import replies
from orchestrator.driver import SessionDriver
from orchestrator.output import Cursor, ProvisionalGuess
from orchestrator.repeats import Repeats
from orchestrator.requests import Seeds, record_of
from orchestrator.sessions import Orchestrator
from orchestrator.statuses import store_statuses
from orchestrator.store import SessionRecord, StoredSession
from orchestrator.target import Target
from orchestrator.tenants import ANONYMOUS, check_owner, no_session
from orchestrator.trace import Trace
from orchestrator.turns import tokens_of
from orchestrator.watching import cursor_of
from specwire.core.events import ClientTook
from specwire.core.limits import Ending, FinishReason
from specwire.core.preview import ProvisionalDraft
from specwire.core.sampling import InvalidParameter
from specwire.rpc.errors import StatusError
from specwire.rpc.keys import Metadata
from specwire.telemetry.tracing import Side, Span, begin
from specwire.v1 import generation_pb2 as pb

# A client's own clock may end the call this much before ours says that its deadline has passed.
DEADLINE_SLACK_S = 0.1
# A reader of a session that this orchestrator leaves, and its log keeps, may watch it elsewhere: from then on.
RESUME_AFTER_S = 0.1
# Of a session's id in logs and traces: whoever knows the whole may read the session.
SHOWN_CHARACTERS = 8


class Generating:
    """What an orchestrator does for its callers; one for all of them."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._repeats = Repeats(orchestrator)
        options = orchestrator.options
        self.seeds = Seeds(orchestrator.store, options.session_ttl + options.retention)

    def tenant(self, metadata: Metadata) -> str:
        """Who calls. StatusError (UNAUTHENTICATED) for whoever has no right to."""
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
    ) -> AsyncGenerator[replies.Part, None]:
        """A session's events, from its start to its end. It is cancelled when the caller closes this.

        time_left: seconds until the caller's deadline, None for none.
        seed: taken where the request has none (`seeds`).
        reached: of a caller that comes back, by its request id: the position before which it has everything, and the
            hash of the text before it. See `orchestrator.watching`.
        trace: is told what happens in the session from now on; must not block.
        traceparent: of the caller's span, as W3C Trace Context has it; "" or what is none begins a trace.
        target: of a request that makes several sessions, one for all of them; None takes `target_for` the request.
        """
        target = target or await self.target_for(request, tenant)
        driver = await self._driver_for(request, target, tenant, seed, time_left, traceparent)
        if reached is not None or request.take_over:  # whoever drove it may be gone: its reader lost the connection
            driver = await self._orchestrator.join(driver.record.session_id, take_over=True)
        guess = _guess(driver, target) if request.provisional else None
        driver.trace = trace or driver.trace
        with driver.readers.reading():
            try:
                cursor = await self.cursor_at(driver, *reached) if reached is not None else Cursor()
                async with aclosing(self.follow(driver, cursor, guess)) as parts:
                    async for part in parts:
                        yield part
            except asyncio.CancelledError:
                _pass_deadline(driver)
                raise
            finally:
                driver.trace = None if driver.trace is trace else driver.trace

    async def target_for(self, request: pb.GenerateRequest, tenant: str) -> Target:
        """Of the model that the request names, or else its parent's."""
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
    ) -> SessionDriver:
        """The session. What this version of the model would refuse may have begun under its id with another one."""
        vocabulary, store = target.info.vocabulary_fingerprint, self._orchestrator.store
        try:
            before = await tokens_of(request.parent, tenant, vocabulary, store)
            record = await record_of(request, target, tenant, seed, before)
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
        if driver.span is not span:
            span.end(joined=driver.record.session_id[:SHOWN_CHARACTERS])
        return driver

    async def _session_for(self, record: SessionRecord, time_left: float | None, span: Span) -> SessionDriver:
        """A new session, or the one that the same request id has started before."""
        if record.request_id:
            return await self._repeats.session_for(record, time_left, span)
        return await self._orchestrator.open(record, time_left, span)

    async def cursor_at(self, driver: SessionDriver, position: int, prefix_hash: int) -> Cursor:
        """The place of a reader that has what is before `position`; raises as `cursor_of`."""
        known = pb.WatchRequest(from_position=position, prefix_hash=prefix_hash)
        cursor = await cursor_of(known, driver, self._orchestrator.store, self._orchestrator.options.store_timeout)
        # What it has need not be shown again: whoever stands at the end of the credit would wait for ever.
        driver.apply(ClientTook(driver.output.prompt_length + cursor.tokens))
        return cursor

    async def read(self, session_id: str) -> StoredSession | None:
        """What the log holds of a session."""
        with store_statuses():
            return await self._orchestrator.store.read(session_id)

    def _prompt(self, record: SessionRecord) -> pb.Prompt | None:
        """What the session's readers are shown of the prompt."""
        if not record.echo:
            return None
        text = self._orchestrator.pool.models.tokenizer_of(record).decode(list(record.prompt))
        return pb.Prompt(tokens=record.prompt, text=text)

    async def follow(
        self, driver: SessionDriver, cursor: Cursor, guess: ProvisionalGuess | None = None
    ) -> AsyncGenerator[replies.Part, None]:
        """A reader's events from `cursor` on."""
        known = driver.output.end
        yield replies.started(driver, self._prompt(driver.record))
        async for shown in driver.output.follow(cursor, guess):
            if isinstance(shown, ProvisionalDraft):
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


def _pass_deadline(driver: SessionDriver) -> None:
    """A call ends; if because the session's deadline has passed, so does the session.

    That is the deadline of the call that began it: others that have joined it may have less time, or more.
    """
    deadline = driver.record.deadline
    if deadline and deadline - time.time() <= DEADLINE_SLACK_S:
        driver.pass_deadline()


def _guess(driver: SessionDriver, target: Target) -> ProvisionalGuess:
    record = driver.record
    eos_ids = target.eos_ids if record.eos_ids is None else frozenset(record.eos_ids)
    ending = Ending.of(record.stopping, len(record.prompt), eos_ids, record.end)
    return driver.show_provisional(target.info.vocabulary, ending)
