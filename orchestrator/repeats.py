"""Calls under a request id: the first one begins a session, the others join it, whichever orchestrator they come to.

The id is bound to the session before its log is written, so that of calls that cross one begins it. Only what was
admitted is bound: a call that is refused leaves nothing behind. The binding names the session and the digest of what
was asked for; another request under the same id is refused. A session whose log is gone (its retention is over, it was
deleted, or the log was lost) leaves its id to a new session, with an id of its own, which nobody can take for the old
one.
"""

from __future__ import annotations

from dataclasses import replace

import grpc

from orchestrator.driver import SessionDriver
from orchestrator.requests import MOST_REQUEST_ID, digest_of
from orchestrator.sessions import Orchestrator
from orchestrator.statuses import store_statuses
from orchestrator.store import Bound, DeletedSession, SessionRecord
from orchestrator.store.base import NONE_OF_IT
from orchestrator.tenants import check_owner
from specwire.core.limits import Stopping
from specwire.core.sampling import InvalidParameter, Sampling
from specwire.rpc.errors import StatusError
from specwire.telemetry.tracing import NO_SPAN, Span
from specwire.v1 import generation_pb2 as pb

# Times that an id may turn out to stand for a session that is gone meanwhile.
ATTEMPTS = 3


class Repeats:
    """One for all of an orchestrator's calls."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    async def session_for(self, record: SessionRecord, deadline: float | None, span: Span) -> SessionDriver:
        """The session that the record's request id stands for, which begins now if there is none.

        deadline, span: as of `Orchestrator.open`.

        Raises:
            StatusError: ALREADY_EXISTS, the id stands for another request; or as `Orchestrator.open` and `join`.
        """
        try:
            await self._orchestrator.admit(record)
        except (StatusError, InvalidParameter):
            joined = await self._joined_if_bound(record, span)
            if joined is None:
                raise
            return joined
        try:
            bound = await self._claim_id(record)
        except BaseException:
            self._orchestrator.dismiss(record)
            raise
        if bound.session_id == record.session_id:
            return await self._orchestrator.begin(record, deadline, span)
        self._orchestrator.dismiss(record)
        check_same(bound, record)
        return await self._joined(bound, span) or await self._orchestrator.open(
            replace(record, session_id=bound.session_id), deadline, span
        )

    async def begun(self, request: pb.GenerateRequest, tenant: str) -> SessionDriver | None:
        """The session that the request has begun under its id, if it has one and did. Raises as `session_for`."""
        if not request.request_id or len(request.request_id) > MOST_REQUEST_ID:
            return None
        asked = SessionRecord(
            "",
            (),
            Sampling(),
            Stopping(1),
            tenant=tenant,
            request_id=request.request_id,
            request_digest=digest_of(request),
        )
        return await self._joined_if_bound(asked, NO_SPAN)

    async def _claim_id(self, record: SessionRecord) -> Bound:
        """What the id stands for: the new session, one that is there, or one that is just beginning somewhere."""
        bound = await self._bind(record, "")
        for _ in range(ATTEMPTS):
            if bound.session_id == record.session_id or await self._is_there(bound):
                return bound
            gone, bound = bound, await self._bind(record, bound.session_id)
            if bound.session_id == gone.session_id:
                return bound  # bound a moment ago: whoever creates its log first has begun it
        raise StatusError(grpc.StatusCode.UNAVAILABLE, f"request_id: {record.request_id!r} changes hands too often")

    async def _bind(self, record: SessionRecord, gone: str) -> Bound:
        options = self._orchestrator.options
        kept = options.session_ttl + options.retention
        asked = (record.tenant, record.request_id, record.session_id, kept, record.request_digest, gone)
        with store_statuses():
            return check_bound(await self._orchestrator.store.bind_request(*asked), record)

    async def _joined_if_bound(self, record: SessionRecord, span: Span) -> SessionDriver | None:
        """No new session is welcome, but one that has begun can be joined."""
        with store_statuses():
            bound = await self._orchestrator.store.bound_request(record.tenant, record.request_id)
        if bound is None or not await self._is_there(check_bound(bound, record)):
            return None
        check_same(bound, record)
        return await self._joined(bound, span)

    async def _joined(self, bound: Bound, span: Span) -> SessionDriver | None:
        """None where it has no log yet."""
        driver = await self._orchestrator.roster.find(bound.session_id)
        if driver is None and await self._is_there(bound):
            driver = await self._orchestrator.join(bound.session_id, traceparent=span.traceparent)
        return driver

    async def _is_there(self, bound: Bound) -> bool:
        if self._orchestrator.roster.knows(bound.session_id):
            return True
        with store_statuses():
            try:
                return await self._orchestrator.store.tail(bound.session_id, NONE_OF_IT) is not None
            except DeletedSession:
                return False


def check_bound(bound: Bound, record: SessionRecord) -> Bound:
    """StatusError (DATA_LOSS) where the log has the id stand for what no session of this tenant is called."""
    try:
        check_owner(bound.session_id, record.tenant)
    except StatusError as error:
        message = f"request_id: what {record.request_id!r} stands for is damaged in the log"
        raise StatusError(grpc.StatusCode.DATA_LOSS, message) from error
    return bound


def check_same(bound: Bound, record: SessionRecord) -> None:
    """StatusError (ALREADY_EXISTS) where the id came with another request first, as far as that is known."""
    if bound.digest and bound.digest != record.request_digest:
        message = f"request_id: {record.request_id!r} stands for another request than this one; choose a new id"
        raise StatusError(grpc.StatusCode.ALREADY_EXISTS, message)
