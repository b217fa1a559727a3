"""Sessions that there are already, as callers name them: a parent's text, a reader's place in a text, their end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import grpc

from orchestrator.session.appender import status_of_store, store_statuses
from orchestrator.session.driver import SessionDriver
from orchestrator.session.output import Cursor, SessionView
from orchestrator.sessions import END_LIMIT_S, Orchestrator
from orchestrator.store import MissingSession, SessionStore, StoredSession, StoreError, StoreUnavailable
from orchestrator.store.base import NONE_OF_IT, deleted
from orchestrator.store.encoding import TOKEN_BYTES
from orchestrator.tenants import check_owner, no_session
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import FinishReason
from specwire.core.text import extend_hash
from specwire.rpc.errors import RETRY_AFTER, StatusError
from specwire.v1 import generation_pb2 as pb

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
    if request.HasField("prefix_hash"):
        known = view.output.tokens[: position - first]
        is_long = len(known) >= LONG_TEXT
        found = await asyncio.to_thread(_hash_of, view, known) if is_long else _hash_of(view, known)
        if found != request.prefix_hash:
            raise StatusError(grpc.StatusCode.DATA_LOSS, f"prefix_hash: the text before {position} is another one")
    return view.output.cursor_at(position)


async def _catch_up(view: SessionView, store: SessionStore, position: int, timeout: float) -> None:
    """Wait until the output reaches `position`, if the log does."""
    with store_statuses():
        log = await store.tail(view.record.session_id, NONE_OF_IT)
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
