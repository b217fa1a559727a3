"""The session log's contract. `redis.py` and `memory.py` keep it; one test-suite holds both to it.

A log holds a session's prompt and decided tokens by absolute position. Rules:

- Only the holder of the newest fence writes. A fence comes from `create`, `claim` or `recreate`, and only rises.
- An append is compare-content: what the log holds already must be equal, what lies behind its end is added. So an
  append whose outcome is unknown may be repeated, and where content differs the log wins.
- A missing log is never claimed: its tokens may have been shown to a client, so only someone who still has them all
  may write it again (`recreate`).
- Every log expires `ttl_s` seconds after its last write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specwire.core.acceptance import Outcome
from specwire.core.limits import FinishReason, Stopping
from specwire.core.sampling import Sampling

Tokens = Sequence[int]
Outcomes = Sequence[Outcome]


class StoreError(Exception):
    """Base of what a store raises."""


class SessionExists(StoreError):
    """`create` of a session that has a log."""


class MissingSession(StoreError):
    """There is no log of that session: it never was, it expired, or the store lost it."""


class Fenced(StoreError):
    """Another owner has a newer fence; this one must stop writing and emitting."""


class ContentMismatch(StoreError):
    """The log holds other tokens there, or is finished: read it and reopen from it."""


class Gap(StoreError):
    """The append starts beyond the log's end: the log lost its tail. Read it."""


class StoreUnavailable(StoreError):
    """The store did not answer. What was written is unknown: read the log, do not guess."""


def missing(session_id: str) -> MissingSession:
    return MissingSession(f"session {session_id} has no log")


def fenced(session_id: str, fence: int) -> Fenced:
    return Fenced(f"session {session_id}: fence {fence} is not the newest")


def mismatch(session_id: str, position: int) -> ContentMismatch:
    return ContentMismatch(f"session {session_id}: the log holds other tokens at {position}, or has ended")


def gap(session_id: str, position: int, length: int) -> Gap:
    return Gap(f"session {session_id}: the log ends at {length}, before {position}")


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What a session was asked for; never changes.

    drafting: whether drafters may take part. ngram: whether the verifier may guess from the text itself.
    created: Unix time in seconds.
    """

    session_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    tenant: str = ""
    request_id: str = ""
    stop: tuple[str, ...] = ()
    drafting: bool = True
    ngram: bool = True
    weights_fingerprint: str = ""
    vocabulary_fingerprint: str = ""
    created: float = 0.0


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A log as it was at one instant.

    tokens: the decided ones, after the prompt, with one outcome each. reason: None while the session runs.
    text_length: once it has ended, the length of the output in code points, cut at the stop string.
    """

    record: SessionRecord
    fence: int
    owner: str
    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    reason: FinishReason | None = None
    text_length: int = 0
    cancelled: bool = False

    @property
    def length(self) -> int:
        """Of the log in tokens, prompt included: the position of the next one."""
        return len(self.record.prompt) + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Appended:
    """length: of the log in tokens, prompt included. cancelled: somebody asked for the session's end."""

    length: int
    cancelled: bool


class SessionStore(Protocol):
    """See the module's text. Every method raises StoreUnavailable, within the store's timeout, if it cannot tell."""

    @property
    def durability(self) -> str:
        """How the log is kept: "memory" or "redis"."""
        ...

    async def create(self, record: SessionRecord, ttl_s: float, owner: str = "") -> int:
        """Start a log that holds the prompt; the fence. Raises SessionExists."""
        ...

    async def claim(self, session_id: str, owner: str) -> StoredSession:
        """Become the owner, with a new fence; the log as it now stands. Raises MissingSession."""
        ...

    async def recreate(
        self, record: SessionRecord, tokens: Tokens, outcomes: Outcomes, fence: int, ttl_s: float, owner: str = ""
    ) -> None:
        """Write a lost log again, under the fence that was held. Raises Fenced if there is one with a newer fence."""
        ...

    async def append(self, session_id: str, fence: int, position: int, tokens: Tokens, outcomes: Outcomes) -> Appended:
        """Add `tokens` at the absolute `position`. Raises MissingSession, Fenced, ContentMismatch, Gap."""
        ...

    async def finish(
        self,
        session_id: str,
        fence: int,
        position: int,
        tokens: Tokens,
        outcomes: Outcomes,
        reason: FinishReason,
        text_length: int,
    ) -> Appended:
        """`append` the last tokens and end the session, both or neither. Raises as `append`."""
        ...

    async def read(self, session_id: str) -> StoredSession | None:
        """The log as it stands; None if there is none."""
        ...

    async def cancel(self, session_id: str) -> None:
        """Ask for the session's end; its owner learns it from its next append. Raises MissingSession."""
        ...

    async def bind_request(self, tenant: str, request_id: str, session_id: str, ttl_s: float) -> str:
        """The session that a request id stands for: the first one bound wins."""
        ...

    async def ping(self) -> None:
        """Raises StoreUnavailable if the store does not answer."""
        ...

    async def close(self) -> None:
        """Release connections and end tasks; idempotent."""
        ...


def check_append(position: int, tokens: Tokens, outcomes: Outcomes) -> None:
    """Refuse what no log could hold: a bug of the caller's."""
    if position < 0:
        raise ValueError(f"position: must not be negative, not {position}")
    if len(tokens) != len(outcomes):
        raise ValueError(f"outcomes: {len(outcomes)} for {len(tokens)} tokens")
