"""A session log in this process's memory: the same contract, gone with the process."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.store.base import (
    BEGINNING_S,
    CALLED_WITHIN_S,
    AppendReply,
    Bound,
    KnownSession,
    LoggedTokens,
    LogTail,
    SessionExists,
    SessionRecord,
    StoredSession,
    awake_or_asleep_s,
    check_logged,
    deleted,
    fenced,
    gap,
    mismatch,
    missing,
    other_fence,
    random_step,
)
from specwire.core.messages import Append, FinishReason, Outcome, TokenLogprobs

Clock = Callable[[], float]
# Seconds between two searches of everything for what has expired. A single key is checked when it is used.
LOOK_S = 1.0
# Sessions that are told of before others are served.
TOLD_AT_ONCE = 512


@dataclass(slots=True)
class MemoryLog:
    """Seconds. claimed, ended: Unix time, as they are told. expires, read: by the store's own clock."""

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
    read: float = -math.inf


@dataclass(frozen=True, slots=True)
class MemoryBinding:
    """bound, expires: seconds by the store's own clock."""

    of: Bound
    bound: float
    expires: float


class MemoryStore:
    """Nothing expires, or seems silent, because the wall clock steps: its own begins at Unix time, and is never set.

    Args: clock gives seconds (None: its own, and the wall's where instants are told and fences drawn), step what a
    claim's fence is raised by; they may be a test's own.
    """

    durability = "memory"

    def __init__(self, clock: Clock | None = None, step: Callable[[], int] = random_step) -> None:
        began = time.time() - awake_or_asleep_s()
        self._clock: Clock = clock or (lambda: began + awake_or_asleep_s())
        self._wall: Clock = clock or (lambda: time.time())  # the module's as it is then
        self._step = step
        self._logs: dict[str, MemoryLog] = {}
        self._requests: dict[tuple[str, str], MemoryBinding] = {}
        # Deleted sessions, and until when that is known.
        self._deleted: dict[str, float] = {}
        # By model: when each running session is missed.
        self._rolls: dict[str, dict[str, float]] = {}
        self._looked = 0.0
        self._secret = b""

    async def create(
        self, record: SessionRecord, ttl_s: float, owner: str = "", retention_s: float | None = None
    ) -> int:
        self._forget_expired(LOOK_S)
        session_id = record.session_id
        if self._held(session_id) is not None or self._is_deleted(session_id):
            raise SessionExists(f"session {session_id} has a log")
        await self.call_roll(record.weights_fingerprint, [session_id], CALLED_WITHIN_S, ttl_s)
        fence = self._next_fence(0)
        self._logs[session_id] = self._log_of(record, Append(0, (), ()), fence, ttl_s, owner, retention_s)
        return fence

    def _log_of(
        self,
        record: SessionRecord,
        logged: LoggedTokens,
        fence: int,
        ttl_s: float,
        owner: str,
        retention_s: float | None,
    ) -> MemoryLog:
        expires, kept = self._clock() + ttl_s, ttl_s if retention_s is None else retention_s
        text, outcomes, logprobs = [*record.prompt, *logged.tokens], list(logged.outcomes), list(logged.logprobs)
        return MemoryLog(record, fence, owner, text, outcomes, logprobs, ttl_s, kept, self._wall(), expires)

    async def claim(self, session_id: str, owner: str, known: int = 0, now_us: int = 0) -> StoredSession:
        log = self._log(session_id)
        log.fence = self._next_fence(max(log.fence, known), now_us, self._step())
        log.owner, log.claimed = owner, self._wall()
        if log.reason is None:
            self._touch(log)
        return self._snapshot(log)

    async def recreate(
        self,
        record: SessionRecord,
        logged: LoggedTokens,
        fence: int,
        ttl_s: float,
        owner: str = "",
        retention_s: float | None = None,
        cancelled: bool = False,
    ) -> None:
        check_logged(logged)
        self._forget_expired(LOOK_S)
        held = self._held(record.session_id)
        if self._is_deleted(record.session_id) or (held is not None and held.fence > fence):
            raise fenced(record.session_id, fence)
        fresh = self._log_of(record, logged, fence, ttl_s, owner, retention_s)
        if held is not None:
            self._keep(held, fresh)
        fresh.cancelled |= cancelled
        self._logs[record.session_id] = fresh
        self._touch(fresh)

    def _keep(self, held: MemoryLog, fresh: MemoryLog) -> None:
        """What the log holds stays, and the fresh one goes on from there. Raises ContentMismatch."""
        length, text = len(held.tokens), fresh.tokens
        if held.tokens[: len(text)] != text[:length] or (len(text) > length and held.reason):
            raise mismatch(held.record.session_id, 0)
        fresh.tokens = held.tokens + text[length:]
        fresh.outcomes = held.outcomes + fresh.outcomes[len(held.outcomes) :]
        fresh.logprobs = held.logprobs + fresh.logprobs[len(held.logprobs) :]
        fresh.reason, fresh.text_length, fresh.ended = held.reason, held.text_length, held.ended
        fresh.cancelled, fresh.read = held.cancelled, held.read
        if held.fence == fresh.fence:
            fresh.claimed = held.claimed

    async def append(self, session_id: str, fence: int, append: Append) -> AppendReply:
        log, end, behind = self._owned(session_id, fence), append.end, append.position + len(append.tokens)
        if end is not None:
            ended_otherwise = log.reason and (log.reason, log.text_length) != (end.reason, end.text_length)
            if len(log.tokens) > behind or ended_otherwise:
                raise mismatch(session_id, behind)
        self._write(log, append)
        if end is not None:
            log.reason, log.text_length, log.ended = end.reason, end.text_length, self._wall()
            self._touch(log)
        return self._reply(log)

    async def read(self, session_id: str) -> StoredSession | None:
        log = self._readable(session_id)
        return self._snapshot(log) if log else None

    async def tail(self, session_id: str, skipped: int) -> LogTail | None:
        log = self._readable(session_id)
        return LogTail(skipped=skipped, **self._state(log, skipped)) if log else None

    async def cancel(self, session_id: str) -> None:
        self._log(session_id).cancelled = True

    async def note_reader(self, session_id: str) -> None:
        log = self._held(session_id)
        if log is not None and log.reason is None:
            log.read = self._clock()

    async def delete(self, session_id: str) -> None:
        if self._is_deleted(session_id):
            return
        log = self._log(session_id)
        del self._logs[session_id]
        self._deleted[session_id] = self._clock() + log.ttl_s
        self._release(log.record.tenant, log.record.request_id, session_id)

    async def bind_request(
        self, tenant: str, request_id: str, session_id: str, ttl_s: float, digest: str = "", gone: str = ""
    ) -> Bound:
        self._forget_expired(LOOK_S)
        now, key = self._clock(), (tenant, request_id)
        held = self._binding(key)
        if held is None or (held.of.session_id == gone and now - held.bound > BEGINNING_S):
            held = MemoryBinding(Bound(session_id, digest), now, now + ttl_s)
        elif held.of.session_id == session_id:
            held = MemoryBinding(held.of, 0.0, max(held.expires, now + ttl_s))
        self._requests[key] = held
        return held.of

    async def bound_request(self, tenant: str, request_id: str) -> Bound | None:
        held = self._binding((tenant, request_id))
        return held.of if held else None

    async def release_request(self, tenant: str, request_id: str, session_id: str) -> None:
        self._release(tenant, request_id, session_id)

    def _release(self, tenant: str, request_id: str, session_id: str) -> None:
        held = self._binding((tenant, request_id))
        if held is not None and held.of.session_id == session_id:
            del self._requests[tenant, request_id]

    async def shared_secret(self, proposed: bytes, ttl_s: float) -> bytes:
        self._secret = self._secret or proposed
        return self._secret

    async def call_roll(self, roll: str, session_ids: Sequence[str], within_s: float, ttl_s: float) -> None:
        missed = self._clock() + within_s
        self._rolls.setdefault(roll, {}).update(dict.fromkeys(session_ids, missed))

    async def strike(self, roll: str, session_ids: Sequence[str]) -> None:
        entered = self._rolls.get(roll, {})
        for session_id in session_ids:
            entered.pop(session_id, None)

    async def missed(self, roll: str, again_s: float, most: int) -> list[str]:
        now, entered = self._clock(), self._rolls.get(roll, {})
        told = sorted((at, session_id) for session_id, at in entered.items() if at <= now)[:most]
        entered.update((session_id, now + again_s) for _, session_id in told)
        return [session_id for _, session_id in told]

    async def known_sessions(self) -> AsyncGenerator[KnownSession, None]:
        for number, session_id in enumerate([*self._logs, *self._deleted]):
            if number % TOLD_AT_ONCE == TOLD_AT_ONCE - 1:
                await asyncio.sleep(0)
            log = self._held(session_id)
            if log is not None:
                whose = log.record.tenant, log.record.private
                yield KnownSession(session_id, "running" if log.reason is None else "ended", whose, log.ended or 0.0)
            elif self._is_deleted(session_id):
                yield KnownSession(session_id, "deleted", None)

    async def ping(self) -> None:
        self._forget_expired()

    async def close(self) -> None:
        return

    def _next_fence(self, newest: int, now_us: int = 0, step: int = 0) -> int:
        now_us = max(now_us, int(self._wall() * 1e6))
        return now_us if now_us > newest else newest + 1 + step

    def _touch(self, log: MemoryLog) -> None:
        log.expires = self._clock() + (log.ttl_s if log.reason is None else log.retention_s)

    def _forget_expired(self, since_s: float = 0.0) -> None:
        """Forget what has expired, unless that was done recently: it looks at everything."""
        now = self._clock()
        if now - self._looked < since_s:
            return
        self._looked = now
        self._logs = {key: log for key, log in self._logs.items() if log.expires > now}
        self._requests = {key: bound for key, bound in self._requests.items() if bound.expires > now}
        self._deleted = {key: until for key, until in self._deleted.items() if until > now}

    def _held(self, session_id: str) -> MemoryLog | None:
        log = self._logs.get(session_id)
        return None if log is None or log.expires <= self._clock() else log

    def _is_deleted(self, session_id: str) -> bool:
        return self._deleted.get(session_id, 0.0) > self._clock()

    def _binding(self, key: tuple[str, str]) -> MemoryBinding | None:
        held = self._requests.get(key)
        return None if held is None or held.expires <= self._clock() else held

    def _readable(self, session_id: str) -> MemoryLog | None:
        if self._is_deleted(session_id):
            raise deleted(session_id)
        return self._held(session_id)

    def _log(self, session_id: str) -> MemoryLog:
        log = self._held(session_id)
        if log is None:
            raise missing(session_id)
        return log

    def _owned(self, session_id: str, fence: int) -> MemoryLog:
        if self._is_deleted(session_id):
            raise fenced(session_id, fence)
        log = self._log(session_id)
        if log.fence != fence:
            raise other_fence(session_id, fence, log.fence)
        return log

    def _write(self, log: MemoryLog, append: Append) -> None:
        session_id, length, position, tokens = log.record.session_id, len(log.tokens), append.position, append.tokens
        if position > length:
            raise gap(session_id, position, length)
        held = log.tokens[position : position + len(tokens)]
        fresh = list(tokens[len(held) :])
        if held != list(tokens[: len(held)]) or (fresh and log.reason):
            raise mismatch(session_id, position)
        log.tokens.extend(fresh)
        log.outcomes.extend(append.outcomes[len(held) :])
        log.logprobs.extend(append.logprobs[len(held) :])
        self._touch(log)

    def _reply(self, log: MemoryLog) -> AppendReply:
        return AppendReply(len(log.tokens), log.cancelled, max(0.0, self._clock() - log.read))

    def _silent_s(self, log: MemoryLog) -> float:
        kept = log.ttl_s if log.reason is None else log.retention_s
        return max(0.0, self._clock() + kept - log.expires)

    def _state(self, log: MemoryLog, skipped: int = 0) -> dict[str, Any]:
        """The fields that a tail and a whole log have in common."""
        return {
            "fence": log.fence,
            "owner": log.owner,
            "length": len(log.tokens),
            "tokens": tuple(log.tokens[log.record.prompt_length + skipped :]),
            "outcomes": tuple(log.outcomes[skipped:]),
            "logprobs": tuple(log.logprobs[skipped:]),
            "reason": log.reason,
            "text_length": log.text_length,
            "cancelled": log.cancelled,
            "silent_s": self._silent_s(log),
        }

    def _snapshot(self, log: MemoryLog) -> StoredSession:
        return StoredSession(
            record=log.record,
            claimed=log.claimed,
            ended=log.ended,
            retention_s=log.retention_s,
            **self._state(log),
        )
