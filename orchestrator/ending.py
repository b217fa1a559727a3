"""Ends that somebody asks for: sessions are cancelled, or deleted, whoever drives them."""

from __future__ import annotations

from contextlib import suppress

from orchestrator.sessions import END_LIMIT_S, Orchestrator
from orchestrator.statuses import status_of_store, store_statuses
from orchestrator.store import MissingSession, StoreError
from orchestrator.store.errors import deleted
from orchestrator.tenants import no_session


async def cancel(orchestrator: Orchestrator, session_id: str) -> None:
    """Ask whoever drives the session for its end; a session that nobody drives is ended here.

    Raises:
        StatusError: NOT_FOUND, or the log does not answer.
    """
    store = orchestrator.store
    driver = await orchestrator.roster.find(session_id)
    if driver is not None and not driver.following:
        driver.cancel()
        with suppress(StoreError):  # what is promised now holds also where this process ends before the session
            await store.cancel(session_id)
        return
    with store_statuses():
        try:
            await orchestrator.cancellations.ask(session_id)
        except MissingSession:
            raise no_session(session_id) from None
        log = await store.read(session_id)
    if log is not None and log.reason is None and (log.abandoned or log.owner == orchestrator.owner):
        await orchestrator.join(session_id)


async def delete(orchestrator: Orchestrator, session_id: str) -> None:
    """Remove the session from the log; where it runs, its readers learn that it has ended.

    Raises:
        StatusError: NOT_FOUND, or the log does not answer.
    """
    driver = await orchestrator.roster.find(session_id)
    if driver is not None and not driver.following:
        driver.cancel()
        await driver.ended(END_LIMIT_S)
    with store_statuses():
        await orchestrator.store.delete(session_id)
    orchestrator.pool.forget(session_id)
    left = orchestrator.sessions.pop(session_id, None)
    if left is not None:
        gone = deleted(session_id)
        left.abandon(status_of_store(gone), str(gone))  # its readers, if another one has driven it until now
        await left.close()
