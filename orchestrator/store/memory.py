"""A session log in this process's memory: the same contract, gone with the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.store.base import (
    Appended,
    Outcomes,
    SessionExists,
    SessionRecord,
    StoredSession,
    Tokens,
    check_append,
    fenced,
    gap,
    mismatch,
    missing,
)
from specwire.core.acceptance import Outcome
from specwire.core.limits import FinishReason

Clock = Callable[[], float]


@dataclass(slots=True)
class _Log:
    record: SessionRecord
    fence: int
    owner: str
    tokens: list[int]
    outcomes: list[Outcome]
    ttl_s: float
    expires: float
    reason: FinishReason | None = None
    text_length: int = 0
    cancelled: bool = False


class MemoryStore:
    """Args: clock gives Unix time in seconds; it may be a test's own."""

    durability = "memory"

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._logs: dict[str, _Log] = {}
        self._requests: dict[tuple[str, str], tuple[str, float]] = {}

    async def create(self, record: SessionRecord, ttl_s: float, owner: str = "") -> int:
        self._forget_expired()
        if record.session_id in self._logs:
            raise SessionExists(f"session {record.session_id} has a log")
        fence = self._next_fence(0)
        expires = self._clock() + ttl_s
        self._logs[record.session_id] = _Log(record, fence, owner, list(record.prompt), [], ttl_s, expires)
        return fence

    async def claim(self, session_id: str, owner: str) -> StoredSession:
        log = self._log(session_id)
        log.fence, log.owner = self._next_fence(log.fence), owner
        self._touch(log)
        return _snapshot(log)

    async def recreate(
        self, record: SessionRecord, tokens: Tokens, outcomes: Outcomes, fence: int, ttl_s: float, owner: str = ""
    ) -> None:
        check_append(0, tokens, outcomes)
        self._forget_expired()
        held = self._logs.get(record.session_id)
        if held and held.fence > fence:
            raise fenced(record.session_id, fence)
        text, expires = [*record.prompt, *tokens], self._clock() + ttl_s
        self._logs[record.session_id] = _Log(record, fence, owner, text, list(outcomes), ttl_s, expires)

    async def append(self, session_id: str, fence: int, position: int, tokens: Tokens, outcomes: Outcomes) -> Appended:
        log = self._owned(session_id, fence)
        self._write(log, position, tokens, outcomes)
        return Appended(len(log.tokens), log.cancelled)

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
        log, end = self._owned(session_id, fence), position + len(tokens)
        ended_otherwise = log.reason and (log.reason, log.text_length) != (reason, text_length)
        if len(log.tokens) > end or ended_otherwise:
            raise mismatch(session_id, end)
        self._write(log, position, tokens, outcomes)
        log.reason, log.text_length = reason, text_length
        return Appended(len(log.tokens), log.cancelled)

    async def read(self, session_id: str) -> StoredSession | None:
        self._forget_expired()
        log = self._logs.get(session_id)
        return _snapshot(log) if log else None

    async def cancel(self, session_id: str) -> None:
        self._log(session_id).cancelled = True

    async def bind_request(self, tenant: str, request_id: str, session_id: str, ttl_s: float) -> str:
        self._forget_expired()
        return self._requests.setdefault((tenant, request_id), (session_id, self._clock() + ttl_s))[0]

    async def ping(self) -> None:
        return

    async def close(self) -> None:
        return

    def _next_fence(self, old: int) -> int:
        return max(old + 1, int(self._clock() * 1e6))

    def _touch(self, log: _Log) -> None:
        log.expires = self._clock() + log.ttl_s

    def _forget_expired(self) -> None:
        now = self._clock()
        self._logs = {key: log for key, log in self._logs.items() if log.expires > now}
        self._requests = {key: bound for key, bound in self._requests.items() if bound[1] > now}

    def _log(self, session_id: str) -> _Log:
        log = self._logs.get(session_id)
        if log is None or log.expires <= self._clock():
            raise missing(session_id)
        return log

    def _owned(self, session_id: str, fence: int) -> _Log:
        log = self._log(session_id)
        if log.fence != fence:
            raise fenced(session_id, fence)
        return log

    def _write(self, log: _Log, position: int, tokens: Tokens, outcomes: Outcomes) -> None:
        check_append(position, tokens, outcomes)
        session_id, length = log.record.session_id, len(log.tokens)
        if position > length:
            raise gap(session_id, position, length)
        held = log.tokens[position : position + len(tokens)]
        fresh = list(tokens[len(held) :])
        if held != list(tokens[: len(held)]) or (fresh and log.reason):
            raise mismatch(session_id, position)
        log.tokens.extend(fresh)
        log.outcomes.extend(outcomes[len(held) :])
        self._touch(log)


def _snapshot(log: _Log) -> StoredSession:
    return StoredSession(
        record=log.record,
        fence=log.fence,
        owner=log.owner,
        tokens=tuple(log.tokens[len(log.record.prompt) :]),
        outcomes=tuple(log.outcomes),
        reason=log.reason,
        text_length=log.text_length,
        cancelled=log.cancelled,
    )
