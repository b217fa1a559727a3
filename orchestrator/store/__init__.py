"""The session log: what was decided and acknowledged, and who may go on."""

from orchestrator.store.base import (
    Appended,
    ContentMismatch,
    Fenced,
    Gap,
    MissingSession,
    SessionExists,
    SessionRecord,
    SessionStore,
    StoredSession,
    StoreError,
    StoreUnavailable,
)
from orchestrator.store.opening import open_store

__all__ = [
    "Appended",
    "ContentMismatch",
    "Fenced",
    "Gap",
    "MissingSession",
    "SessionExists",
    "SessionRecord",
    "SessionStore",
    "StoreError",
    "StoreUnavailable",
    "StoredSession",
    "open_store",
]
