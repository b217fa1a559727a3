"""The session log: what was decided and acknowledged, and who may go on."""

from orchestrator.store.base import LEASE_S, Appended, Bound, SessionRecord, SessionStore, StoredSession, Tail
from orchestrator.store.errors import (
    ContentMismatch,
    DamagedLog,
    DeletedSession,
    Fenced,
    Gap,
    MissingSession,
    SessionExists,
    StaleLog,
    StoreError,
    StoreUnavailable,
)
from orchestrator.store.opening import open_store

__all__ = [
    "LEASE_S",
    "Appended",
    "Bound",
    "ContentMismatch",
    "DamagedLog",
    "DeletedSession",
    "Fenced",
    "Gap",
    "MissingSession",
    "SessionExists",
    "SessionRecord",
    "SessionStore",
    "StaleLog",
    "StoreError",
    "StoreUnavailable",
    "StoredSession",
    "Tail",
    "open_store",
]
