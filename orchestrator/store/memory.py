"""A session log in this process's memory: the same contract, gone with the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.store.base import (
    Appended,
    Logprobs,
    Outcomes,
    SessionExists,
    SessionRecord,
    StoredSession,
    Tokens,
    check_append,
    deleted,
    fenced,
    gap,
    mismatch,
    missing,
    other_fence,
)
from specwire.core.acceptance import Outcome
from specwire.core.limits import FinishReason
from specwire.core.logprobs import TokenLogprobs

Clock = Callable[[], float]


@dataclass(slots=True)
class _Log:
    record: SessionRecord
    fence: int
    owner: str
    tokens: list[int]
    outcomes: list[Outcome]
    logprobs: list[TokenLogprobs]
    ttl_s: float
    retention_s: float
    claimed: float
    expires: float
    ended: float | None = None
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
        # Of deleted sessions: the fence that nobody reaches, and until when it stands.
        self._deleted: dict[str, tuple[int, float]] = {}

    async def create(
        self, record: SessionRecord, ttl_s: float, owner: str = "", retention_s: float | None = None
    ) -> int:
        self._forget_expired()
        if record.session_id in self._logs or record.session_id in self._deleted:
            raise SessionExists(f"session {record.session_id} has a log")
        fence = self._next_fence(0)
        self._logs[record.session_id] = self._log_of(record, [], [], [], fence, ttl_s, owner, retention_s)
        return fence

    def _log_of(
        self,
        record: SessionRecord,
        tokens: Tokens,
        outcomes: Outcomes,
        logprobs: Logprobs,
        fence: int,
        ttl_s: float,
        owner: str,
        retention_s: float | None,
    ) -> _Log:
        now, kept = self._clock(), ttl_s if retention_s is None else retention_s
        text = [*record.prompt, *tokens]
        return _Log(
            record, fence, owner, text, list(outcomes), list(logprobs), ttl_s, kept, claimed=now, expires=now + ttl_s
        )

    async def claim(self, session_id: str, owner: str) -> StoredSession:
        log = self._log(session_id)
        log.fence, log.owner, log.claimed = self._next_fence(log.fence), owner, self._clock()
        if log.reason is None:
            self._touch(log)
        return self._snapshot(log)

    async def recreate(
        self,
        record: SessionRecord,
        tokens: Tokens,
        outcomes: Outcomes,
        fence: int,
        ttl_s: float,
        owner: str = "",
        retention_s: float | None = None,
        logprobs: Logprobs = (),
    ) -> None:
        check_append(0, tokens, outcomes, logprobs)
        self._forget_expired()
        held = self._logs.get(record.session_id)
        newest = held.fence if held else self._deleted.get(record.session_id, (0, 0.0))[0]
        if newest > fence:
            raise fenced(record.session_id, fence)
        if held is None or held.fence < fence:
            fresh = self._log_of(record, tokens, outcomes, logprobs, fence, ttl_s, owner, retention_s)
            self._logs[record.session_id] = fresh
            return
        text, length = [*record.prompt, *tokens], len(held.tokens)
        if held.tokens[: len(text)] != text[:length] or (len(text) > length and held.reason):
            raise mismatch(record.session_id, 0)
        held.outcomes.extend(outcomes[len(held.outcomes) :])
        held.logprobs.extend(logprobs[len(held.logprobs) :])
        held.tokens.extend(text[length:])
        self._touch(held)

    async def append(
        self, session_id: str, fence: int, position: int, tokens: Tokens, outcomes: Outcomes, logprobs: Logprobs = ()
    ) -> Appended:
        log = self._owned(session_id, fence)
        self._write(log, position, tokens, outcomes, logprobs)
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
        logprobs: Logprobs = (),
    ) -> Appended:
        log, end = self._owned(session_id, fence), position + len(tokens)
        ended_otherwise = log.reason and (log.reason, log.text_length) != (reason, text_length)
        if len(log.tokens) > end or ended_otherwise:
            raise mismatch(session_id, end)
        self._write(log, position, tokens, outcomes, logprobs)
        log.reason, log.text_length, log.ended = reason, text_length, self._clock()
        self._touch(log)
        return Appended(len(log.tokens), log.cancelled)

    async def read(self, session_id: str) -> StoredSession | None:
        self._forget_expired()
        if session_id in self._deleted:
            raise deleted(session_id)
        log = self._logs.get(session_id)
        return self._snapshot(log) if log else None

    async def cancel(self, session_id: str) -> None:
        self._log(session_id).cancelled = True

    async def delete(self, session_id: str) -> None:
        log = self._log(session_id)
        del self._logs[session_id]
        self._deleted[session_id] = self._next_fence(log.fence), self._clock() + log.ttl_s
        request = log.record.tenant, log.record.request_id
        if self._requests.get(request, ("",))[0] == session_id:
            del self._requests[request]

    async def bind_request(self, tenant: str, request_id: str, session_id: str, ttl_s: float) -> str:
        self._forget_expired()
        return self._requests.setdefault((tenant, request_id), (session_id, self._clock() + ttl_s))[0]

    async def ping(self) -> None:
        self._forget_expired()

    async def close(self) -> None:
        return

    def _next_fence(self, old: int) -> int:
        return max(old + 1, int(self._clock() * 1e6))

    def _touch(self, log: _Log) -> None:
        log.expires = self._clock() + (log.ttl_s if log.reason is None else log.retention_s)

    def _forget_expired(self) -> None:
        now = self._clock()
        self._logs = {key: log for key, log in self._logs.items() if log.expires > now}
        self._requests = {key: bound for key, bound in self._requests.items() if bound[1] > now}
        self._deleted = {key: left for key, left in self._deleted.items() if left[1] > now}

    def _log(self, session_id: str) -> _Log:
        log = self._logs.get(session_id)
        if log is None or log.expires <= self._clock():
            raise missing(session_id)
        return log

    def _owned(self, session_id: str, fence: int) -> _Log:
        if session_id in self._deleted:
            raise fenced(session_id, fence)
        log = self._log(session_id)
        if log.fence != fence:
            raise other_fence(session_id, fence, log.fence)
        return log

    def _write(self, log: _Log, position: int, tokens: Tokens, outcomes: Outcomes, logprobs: Logprobs) -> None:
        check_append(position, tokens, outcomes, logprobs)
        session_id, length = log.record.session_id, len(log.tokens)
        if position > length:
            raise gap(session_id, position, length)
        held = log.tokens[position : position + len(tokens)]
        fresh = list(tokens[len(held) :])
        if held != list(tokens[: len(held)]) or (fresh and log.reason):
            raise mismatch(session_id, position)
        log.tokens.extend(fresh)
        log.outcomes.extend(outcomes[len(held) :])
        log.logprobs.extend(logprobs[len(held) :])
        self._touch(log)

    def _snapshot(self, log: _Log) -> StoredSession:
        kept = log.ttl_s if log.reason is None else log.retention_s
        return StoredSession(
            record=log.record,
            fence=log.fence,
            owner=log.owner,
            tokens=tuple(log.tokens[len(log.record.prompt) :]),
            outcomes=tuple(log.outcomes),
            reason=log.reason,
            text_length=log.text_length,
            cancelled=log.cancelled,
            silent_s=max(0.0, self._clock() + kept - log.expires),
            claimed=log.claimed,
            ended=log.ended,
            logprobs=tuple(log.logprobs),
        )
