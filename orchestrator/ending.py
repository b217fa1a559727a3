"""Ends that somebody asks for: sessions are cancelled, or deleted, whoever drives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from orchestrator.driver import SessionDriver
from orchestrator.sessions import END_LIMIT_S, Orchestrator
from orchestrator.statuses import status_of_store, store_statuses
from orchestrator.store import MissingSession, StoreUnavailable
from orchestrator.store.errors import deleted
from orchestrator.tenants import no_session
from specwire.rpc.errors import RETRY_AFTER, StatusError


async def cancel(orchestrator: Orchestrator, session_id: str) -> None:
    """Ask whoever drives the session for its end; a session that nobody drives is ended here.

    Returns once the log has it: then it holds also where this process, or another owner, ends before the session.

    Raises:
        StatusError: NOT_FOUND; UNAVAILABLE, the log does not answer: the session may go on, and may be cancelled again.
    """
    driven = await _driven(orchestrator, session_id)
    if driven is not None:
        driven.cancel()  # nothing more is decided, whatever becomes of the log
    with _to_be_repeated(session_id, "cancel"):
        await orchestrator.cancellations.ask(session_id, driven)
    if driven is not None:
        return
    with store_statuses():
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
        driven.cancel()
        await driven.ended(END_LIMIT_S)
    with _to_be_repeated(session_id, "delete"):
        await orchestrator.cancellations.delete(session_id, driven)
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
    """What the log has not acknowledged is not done: StatusError says so."""
    try:
        yield
    except MissingSession:
        raise no_session(session_id) from None
    except StoreUnavailable as error:
        message = f"session_id: the session log does not answer, so the session may go on; {what} it again"
        raise StatusError(grpc.StatusCode.UNAVAILABLE, message, RETRY_AFTER) from error
