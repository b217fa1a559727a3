"""A conversation's next turn: what stands before its prompt."""

from __future__ import annotations

import grpc

from orchestrator.statuses import store_statuses
from orchestrator.store import SessionStore
from orchestrator.tenants import check_owner, no_session
from specwire.rpc.errors import StatusError


async def tokens_of(parent: str, tenant: str, vocabulary_fingerprint: str, store: SessionStore) -> tuple[int, ...]:
    """Prompt and output of the session `parent`, all of them: the end-of-sequence id, and a stop string's, too.

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
