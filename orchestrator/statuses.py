"""What a client is told when the session log fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from orchestrator.store import DeletedSession, Fenced, MissingSession, SessionExists, StoreError, StoreUnavailable
from specwire.rpc.errors import RETRY_AFTER, StatusError


def status_of_store(error: StoreError) -> grpc.StatusCode:
    """Of a call that begins a session, or names one."""
    if isinstance(error, StoreUnavailable | SessionExists):  # the other call's session is joined the next time
        return grpc.StatusCode.UNAVAILABLE
    if isinstance(error, MissingSession):
        return grpc.StatusCode.NOT_FOUND
    if isinstance(error, Fenced):
        return grpc.StatusCode.FAILED_PRECONDITION
    return grpc.StatusCode.DATA_LOSS


def retry_of_store(error: StoreError) -> float | None:
    """Seconds after which the same may be asked again; None where that is no use."""
    return RETRY_AFTER if isinstance(error, StoreUnavailable) else None


def status_of_append(error: StoreError) -> grpc.StatusCode:
    """Of a running session, which had a log: that it is missing means that it was lost, unless it was deleted."""
    lost = isinstance(error, MissingSession) and not isinstance(error, DeletedSession)
    return grpc.StatusCode.DATA_LOSS if lost else status_of_store(error)


def message_of_append(error: StoreError) -> str:
    """What readers of a running session are told."""
    return str(error) if isinstance(error, StoreUnavailable) else f"session log: {error}"


@contextmanager
def store_statuses() -> Iterator[None]:
    """Within it, a StoreError becomes the StatusError that the caller is told."""
    try:
        yield
    except StoreError as error:
        raise StatusError(status_of_store(error), str(error), retry_of_store(error)) from error
