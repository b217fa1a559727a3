"""The session log: what was decided and acknowledged, and who may go on."""

from orchestrator.store.base import (
    LEASE_S,
    AppendReply,
    Bound,
    ContentMismatch,
    DamagedLog,
    DeletedSession,
    Fenced,
    Gap,
    LogTail,
    MissingSession,
    SessionExists,
    SessionRecord,
    SessionStore,
    StaleLog,
    StoredSession,
    StoreError,
    StoreUnavailable,
)
from orchestrator.store.redis import open_store

__all__ = [
    "LEASE_S",
    "AppendReply",
    "Bound",
    "ContentMismatch",
    "DamagedLog",
    "DeletedSession",
    "Fenced",
    "Gap",
    "LogTail",
    "MissingSession",
    "SessionExists",
    "SessionRecord",
    "SessionStore",
    "StaleLog",
    "StoreError",
    "StoreUnavailable",
    "StoredSession",
    "open_store",
]
