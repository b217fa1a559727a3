"""What a store raises, and in which words."""

from __future__ import annotations

import re

from redis.exceptions import ResponseError


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
    """The store did not answer, or refused. What was written is unknown: read the log, do not guess.

    The message is a sentence that callers may see. refused: there was an answer. detail: what the store itself said,
    with addresses and names of scripts: for operators.
    """

    def __init__(self, message: str, detail: str = "", refused: bool = False) -> None:
        super().__init__(message)
        self.detail = detail
        self.refused = refused


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


# What a server says of itself, by the code that its error begins with (before 7.0 it stands inside of a script's), or
# by the class that redis-py makes of it.
SAYINGS = (
    (r"MISCONF", "takes no writes: Redis cannot save to its disk, which may be full"),
    (r"OOM|OutOfMemory", "takes no writes: Redis has no memory left"),
    (r"READONLY|ReadOnly", "takes no writes: the server is a read-only replica"),
    (r"NOREPLICAS", "takes no writes: too few of its replicas are there"),
    (r"LOADING|BusyLoading", "does not answer yet: Redis is reading its data"),
    (r"BUSY", "does not answer: Redis is busy with a script"),
    (r"NOAUTH|WRONGPASS|NOPERM|Authentication|Authorization|NoPermission", "does not let this orchestrator in"),
    (r"CLUSTERDOWN|MASTERDOWN|ClusterDown|MasterDown", "does not answer: no server has its part of the keys"),
)


def unavailable(reply: object) -> StoreUnavailable:
    """For an error that a server answered with, or that came in place of an answer."""
    said = f"{type(reply).__name__}: {reply}" if isinstance(reply, Exception) else f"unexpected reply {reply!r}"
    refused = isinstance(reply, ResponseError) or not isinstance(reply, Exception)
    for codes, meaning in SAYINGS:
        if isinstance(reply, Exception) and re.search(rf"\b({codes})", said):
            return StoreUnavailable(f"the session log {meaning}", str(reply), refused)
    meaning = "refused the call" if refused else "does not answer"
    return StoreUnavailable(f"the session log {meaning}", str(reply) if isinstance(reply, Exception) else said, refused)


def no_answer(detail: str) -> StoreUnavailable:
    return StoreUnavailable("the session log does not answer", detail)
