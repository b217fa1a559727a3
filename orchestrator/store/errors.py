"""What a store raises, and in which words."""

from __future__ import annotations


class StoreError(Exception):
    """Base of what a store raises."""


class SessionExists(StoreError):
    """`create` of a session that has a log."""


class MissingSession(StoreError):
    """There is no log of that session: it never was, it expired, or the store lost it."""


class DeletedSession(MissingSession):
    """There is no log of that session because somebody had it removed."""


class Fenced(StoreError):
    """Another owner has a newer fence, or the session was deleted; this owner must stop writing and emitting."""


class StaleLog(StoreError):
    """The log stands under an older fence than the caller's: an older state of the store came back. `recreate` it."""


class ContentMismatch(StoreError):
    """The log holds other tokens there, or is finished: read it and reopen from it."""


class Gap(StoreError):
    """The append starts beyond the log's end: the log lost its tail. `recreate` supplies it."""


class DamagedLog(StoreError):
    """What the store holds of the session cannot be read as a log."""


class StoreUnavailable(StoreError):
    """The store did not answer. What was written is unknown: read the log, do not guess."""


class UnfitStore(StoreUnavailable):
    """The store answers, but would not keep what its level of durability promises."""


def missing(session_id: str) -> MissingSession:
    return MissingSession(f"session {session_id} has no log")


def deleted(session_id: str) -> DeletedSession:
    return DeletedSession(f"session {session_id} was deleted")


def fenced(session_id: str, fence: int) -> Fenced:
    return Fenced(f"session {session_id}: fence {fence} is not the newest")


def other_fence(session_id: str, fence: int, held: int) -> Fenced | StaleLog:
    """What is wrong with `fence` where the log holds another one."""
    if held > fence:
        return fenced(session_id, fence)
    return StaleLog(f"session {session_id}: the log stands under the older fence {held}, not {fence}")


def mismatch(session_id: str, position: int) -> ContentMismatch:
    return ContentMismatch(f"session {session_id}: the log holds other tokens at {position}, or has ended")


def gap(session_id: str, position: int, length: int) -> Gap:
    return Gap(f"session {session_id}: the log ends at {length}, before {position}")
