"""A session log in SQLite: in a file, which one process has at a time, or in this process's memory."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from orchestrator.store.base import (
    BEGINNING_S,
    CALLED_WITHIN_S,
    AppendReply,
    Bound,
    DamagedLog,
    Level,
    LoggedTokens,
    LogTail,
    SessionExists,
    SessionRecord,
    StoredSession,
    StoreError,
    StoreUnavailable,
    awake_or_asleep_s,
    check_logged,
    deleted,
    fenced,
    gap,
    mismatch,
    missing,
    no_answer,
    other_fence,
    random_step,
)
from orchestrator.store.encoding import (
    LOGPROB_BYTES,
    TOKEN_BYTES,
    decode_record,
    encode_record,
    pack_logprobs,
    pack_outcomes,
    pack_tokens,
    unpack_logprobs,
    unpack_outcomes,
    unpack_tokens,
)
from orchestrator.store.sqlite_file import EXPIRING, UnusableFile, in_memory, open_file
from specwire.core.messages import Append, FinishReason, Outcome, TokenLogprobs

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
Clock = Callable[[], float]

# ----------------------------------------------------------------------------------------------------------------------
# A session's log.

UNREADABLE = -1
# Tokens from which on a row of `texts` is followed by another one. Of less, long texts are slow to read; a longer one
# has a page of its own.
ROW_TOKENS = 32


class SessionRow(NamedTuple):
    """A row of `sessions`: see SCHEMA. From `expires` on is what writing it changes."""

    id: int
    session_id: str
    prompt: int
    tenant: str
    request_id: str
    read: float | None
    expires: float
    fence: int
    owner: str
    length: int
    last: int
    ttl_s: float
    retention_s: float
    claimed: float
    ended: float | None = None
    reason: int | None = None
    text_length: int = 0
    cancelled: int = 0

    @property
    def kept_s(self) -> float:
        """How long it stays after its last write."""
        return self.ttl_s if self.reason is None else self.retention_s


COLUMNS = ", ".join(SessionRow._fields)
CHANGING = slice(SessionRow._fields.index("expires"), None)
SAVE = f"UPDATE sessions SET {', '.join(f'{name} = ?' for name in SessionRow._fields[CHANGING])} WHERE id = ?"
BEGIN = f"INSERT INTO sessions ({COLUMNS}) VALUES (NULL{', ?' * (len(SessionRow._fields) - 1)})"
# What is put together of bytes is text to SQLite.
ADD = """
    INSERT INTO texts VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    tokens = CAST(tokens || excluded.tokens AS BLOB), outcomes = CAST(outcomes || excluded.outcomes AS BLOB),
    logprobs = CAST(logprobs || excluded.logprobs AS BLOB)"""


def _each_logprobs(packed: bytes) -> Iterator[TokenLogprobs]:
    """Of each token the number of its top ids, one byte, stands before them. Raises ValueError."""
    at = 0
    while at < len(packed):
        begin = at + 1
        at = begin + LOGPROB_BYTES + packed[at] * (TOKEN_BYTES + LOGPROB_BYTES)
        yield unpack_logprobs(packed[begin:at])


# ----------------------------------------------------------------------------------------------------------------------
# The store.

# Of each table, what is forgotten before others are served.
PORTION = 64
# A disk with less room than this takes no session: those that run may still fill it.
LEAST_FREE_BYTES = 1 << 20
# What is written to see whether that goes again: more than an append.
PROBE_BYTES = 4000
# What was deleted or has expired is gone from the file's bytes after so many seconds, and this many pages that it left
# are given back to the disk.
ERASE_S = 600.0
MOST_FREED = 1 << 15
CLOSED = "the session log was closed"
Work = Callable[[], object]


@dataclass(slots=True, eq=False)
class StagedCall:
    """`reply` is told what `work` returns or raises, once that counts."""

    work: Work
    reply: asyncio.Future[Any]

    def tell(self, answer: object) -> None:
        if self.reply.done():  # its caller has left
            return
        if isinstance(answer, Exception):
            self.reply.set_exception(answer)
        else:
            self.reply.set_result(answer)


def in_transaction(
    method: Callable[Concatenate[SqliteStore, P], T],
) -> Callable[Concatenate[SqliteStore, P], Coroutine[Any, Any, T]]:
    """Of a method of the store, what its callers await: it is done in a transaction, and is answered once that counts.

    If it raises, it has changed nothing, but that a log is marked as unreadable.
    """

    @functools.wraps(method)
    async def call(store: SqliteStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return cast(T, await store.done(functools.partial(method, store, *args, **kwargs)))

    return call


class SqliteStore:
    """In memory a call is done at once. In a file the calls of one tick of the loop are one transaction, done by a
    thread, and so are those that come while an earlier one is under way.

    Nothing expires, or seems silent, because the wall clock steps: its own begins at Unix time, and is never set.

    Args:
        path: of the file, which is made where there is none; None: in memory.
        synced: what is written counts once the disk has it, not only the system.
        timeout_s: who waits for longer is told that the log does not answer.
        clock: gives seconds (None: its own, and the wall's where instants are told and fences drawn).
        step: see `MOST_STEP_US`.

    Raises:
        UnusableFile: the file cannot be used.
    """

    def __init__(
        self,
        path: Path | None = None,
        synced: bool = False,
        timeout_s: float = 2.0,
        clock: Clock | None = None,
        step: Callable[[], int] = random_step,
    ) -> None:
        began = time.time() - awake_or_asleep_s()
        self._clock: Clock = clock or (lambda: began + awake_or_asleep_s())
        self._wall: Clock = clock or (lambda: time.time())  # the module's as it is then
        self._step = step
        self._timeout_s = timeout_s
        self._path = path
        self._staged: list[StagedCall] = []
        self._working: asyncio.Task[None] | None = None
        self._closed = False
        # Whether a transaction has failed since the last ping that did not.
        self._troubled = False
        # Whether the file may hold bytes of what is gone, and when it last was rid of them.
        self._stale, self._erased = True, -math.inf
        self._ahead = 0.0
        if path is None:
            self.durability = str(Level.MEMORY)
            self._db = in_memory()
            return
        self.durability = str(Level.FILE_FSYNC if synced else Level.FILE)
        try:
            self._path = path.resolve()
        except (OSError, RuntimeError) as error:  # symbolic links that lead to themselves
            raise UnusableFile(str(error)) from error
        self._db, self._lock = open_file(self._path, synced)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session-log")
        try:
            self._take_up_clock()
        except sqlite3.Error as error:
            self._end()
            raise UnusableFile(str(error)) from error

    def _take_up_clock(self) -> None:
        """The former process's clock was not the wall's, if that has stepped since it began."""
        (ahead,) = self._one("SELECT ahead FROM meta")
        if ahead:
            self._db.execute("BEGIN")
            for table, columns in EXPIRING.items():
                shifts = ", ".join(f"{name} = {name} + ?1" for name in columns)
                self._db.execute(f"UPDATE {table} SET {shifts}", (ahead,))
            self._db.execute("UPDATE meta SET ahead = 0.0")
            self._db.execute("COMMIT")

    # Logs

    @in_transaction
    def create(self, record: SessionRecord, ttl_s: float, owner: str = "", retention_s: float | None = None) -> int:
        session_id = record.session_id
        if self._held(session_id) is not None or self._is_deleted(session_id):
            raise SessionExists(f"session {session_id} has a log")
        self._enter(record.weights_fingerprint, [session_id], CALLED_WITHIN_S, ttl_s)
        fence = self._next_fence(0)
        self._begin(record, Append(0, (), ()), fence, ttl_s, owner, retention_s, cancelled=False)
        return fence

    @in_transaction
    def claim(self, session_id: str, owner: str, known: int = 0, now_us: int = 0) -> StoredSession:
        log = self._log(session_id)
        stored = self._whole(log)
        fence = self._next_fence(max(log.fence, known), now_us, self._step())
        log = log._replace(fence=fence, owner=owner, claimed=self._wall())
        silent_s = stored.silent_s
        if log.reason is None:
            log, silent_s = self._touched(log), 0.0
        self._save(log)
        return replace(stored, fence=fence, owner=owner, claimed=log.claimed, silent_s=silent_s)

    @in_transaction
    def recreate(
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
        log = self._held(record.session_id)
        if self._is_deleted(record.session_id) or (log is not None and log.fence > fence):
            raise fenced(record.session_id, fence)
        cancelled = cancelled or (log is not None and bool(log.cancelled))
        if log is None or log.length == UNREADABLE:
            self._begin(record, logged, fence, ttl_s, owner, retention_s, cancelled)
            return
        kept_s = ttl_s if retention_s is None else retention_s
        log = self._grown(log, 0, (*record.prompt, *logged.tokens), logged.outcomes, logged.logprobs)
        log = log._replace(owner=owner, ttl_s=ttl_s, retention_s=kept_s, cancelled=int(cancelled))
        if log.fence < fence:
            log = log._replace(fence=fence, claimed=self._wall())
        self._save(self._touched(log))

    @in_transaction
    def append(self, session_id: str, fence: int, append: Append) -> AppendReply:
        log, position, tokens, end = self._owned(session_id, fence), append.position, append.tokens, append.end
        if end is not None:
            behind, told = position + len(tokens), (int(end.reason), end.text_length)
            if log.length > behind or (log.reason is not None and (log.reason, log.text_length) != told):
                raise mismatch(session_id, behind)
        log = self._grown(log, position, tokens, append.outcomes, append.logprobs)
        if end is not None:
            log = log._replace(reason=int(end.reason), text_length=end.text_length, ended=self._wall())
        self._save(self._touched(log))
        read_s = math.inf if log.read is None else max(0.0, self._clock() - log.read)
        return AppendReply(log.length, bool(log.cancelled), read_s)

    @in_transaction
    def read(self, session_id: str) -> StoredSession | None:
        log = self._readable(session_id)
        return None if log is None else self._whole(log)

    @in_transaction
    def tail(self, session_id: str, skipped: int) -> LogTail | None:
        log = self._readable(session_id)
        return None if log is None else self._read(log, lambda: LogTail(skipped=skipped, **self._state(log, skipped)))

    @in_transaction
    def cancel(self, session_id: str) -> None:
        self._save(self._log(session_id)._replace(cancelled=1))

    @in_transaction
    def note_reader(self, session_id: str) -> None:
        noted = "UPDATE sessions SET read = ?1 WHERE session_id = ?2 AND reason IS NULL AND expires > ?1"
        self._db.execute(noted, (self._clock(), session_id))

    @in_transaction
    def delete(self, session_id: str) -> None:
        if self._is_deleted(session_id):
            return
        log = self._log(session_id)
        self._forget(session_id)
        self._db.execute("REPLACE INTO deleted VALUES (?, ?)", (session_id, self._clock() + log.ttl_s))
        self._release(log.tenant, log.request_id, session_id)

    # What stands beside them

    @in_transaction
    def bind_request(
        self, tenant: str, request_id: str, session_id: str, ttl_s: float, digest: str = "", gone: str = ""
    ) -> Bound:
        now = self._clock()
        held = self._one(
            "SELECT session_id, digest, bound, expires FROM requests"
            " WHERE tenant = ? AND request_id = ? AND expires > ?",
            *(tenant, request_id, now),
        )
        if held is None or (held[0] == gone and now - held[2] > BEGINNING_S):
            held = session_id, digest, now, now + ttl_s
        elif held[0] == session_id:
            held = session_id, held[1], 0.0, max(held[3], now + ttl_s)
        self._db.execute("REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?)", (tenant, request_id, *held))
        return Bound(*held[:2])

    @in_transaction
    def bound_request(self, tenant: str, request_id: str) -> Bound | None:
        query = "SELECT session_id, digest FROM requests WHERE tenant = ? AND request_id = ? AND expires > ?"
        held = self._one(query, tenant, request_id, self._clock())
        return None if held is None else Bound(*held)

    @in_transaction
    def release_request(self, tenant: str, request_id: str, session_id: str) -> None:
        self._release(tenant, request_id, session_id)

    def _release(self, tenant: str, request_id: str, session_id: str) -> None:
        released = "DELETE FROM requests WHERE tenant = ? AND request_id = ? AND session_id = ?"
        self._db.execute(released, (tenant, request_id, session_id))

    @in_transaction
    def shared_secret(self, proposed: bytes, ttl_s: float) -> bytes:
        self._db.execute("UPDATE meta SET secret = ? WHERE secret = x''", (proposed,))
        return cast(bytes, self._one("SELECT secret FROM meta")[0])

    @in_transaction
    def call_roll(self, roll: str, session_ids: Sequence[str], within_s: float, ttl_s: float) -> None:
        self._enter(roll, session_ids, within_s, ttl_s)

    def _enter(self, roll: str, session_ids: Sequence[str], within_s: float, ttl_s: float) -> None:
        now = self._clock()
        rows = [(roll, session_id, now + within_s, now + ttl_s) for session_id in session_ids]
        self._db.executemany("REPLACE INTO rolls VALUES (?, ?, ?, ?)", rows)

    @in_transaction
    def strike(self, roll: str, session_ids: Sequence[str]) -> None:
        rows = [(roll, session_id) for session_id in session_ids]
        self._db.executemany("DELETE FROM rolls WHERE roll = ? AND session_id = ?", rows)

    @in_transaction
    def missed(self, roll: str, again_s: float, most: int) -> list[str]:
        now = self._clock()
        query = "SELECT session_id FROM rolls WHERE roll = ? AND missed <= ? ORDER BY missed, session_id LIMIT ?"
        told = [session_id for (session_id,) in self._db.execute(query, (roll, now, most))]
        rows = [(now + again_s, roll, session_id) for session_id in told]
        self._db.executemany("UPDATE rolls SET missed = ? WHERE roll = ? AND session_id = ?", rows)
        return told

    async def ping(self) -> None:
        """Nothing is written where nothing happens: a full disk is known by the room that is left."""
        if self._troubled:
            await self._probe()
            self._troubled = False
        more = True
        while more:
            more = await self._forget_expired()
            await asyncio.sleep(0)
        if self._path is not None:
            async with self._patience():
                trouble = await self._run(self._tend, self._path)
            if trouble is not None:
                raise trouble

    @in_transaction
    def _probe(self) -> None:
        self._db.execute("UPDATE meta SET probe = randomblob(?)", (PROBE_BYTES,))

    @in_transaction
    def _forget_expired(self) -> bool:
        """Remove a portion of what has expired; whether there may be more."""
        now, most = self._clock(), 0
        for table in EXPIRING:
            expired = f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} WHERE expires <= ? LIMIT ?)"
            most = max(most, self._db.execute(expired, (now, PORTION)).rowcount)
        self._stale = self._stale or most > 0
        return most == PORTION

    # Of one log

    def _one(self, query: str, *values: object) -> Any:
        return self._db.execute(query, values).fetchone()

    def _held(self, session_id: str) -> SessionRow | None:
        query = f"SELECT {COLUMNS} FROM sessions WHERE session_id = ? AND expires > ?"
        row = self._one(query, session_id, self._clock())
        return None if row is None else SessionRow(*row)

    def _is_deleted(self, session_id: str) -> bool:
        query = "SELECT 1 FROM deleted WHERE session_id = ? AND expires > ?"
        return self._one(query, session_id, self._clock()) is not None

    def _readable(self, session_id: str) -> SessionRow | None:
        log = self._held(session_id)
        if log is None and self._is_deleted(session_id):
            raise deleted(session_id)
        return log

    def _log(self, session_id: str) -> SessionRow:
        log = self._held(session_id)
        if log is None:
            raise missing(session_id)
        return log

    def _owned(self, session_id: str, fence: int) -> SessionRow:
        log = self._held(session_id)
        if log is None:
            raise fenced(session_id, fence) if self._is_deleted(session_id) else missing(session_id)
        if log.fence != fence:
            raise other_fence(session_id, fence, log.fence)
        return log

    def _next_fence(self, newest: int, now_us: int = 0, step: int = 0) -> int:
        now_us = max(now_us, int(self._wall() * 1e6))
        return now_us if now_us > newest else newest + 1 + step

    def _begin(
        self,
        record: SessionRecord,
        logged: LoggedTokens,
        fence: int,
        ttl_s: float,
        owner: str,
        retention_s: float | None,
        cancelled: bool,
    ) -> None:
        """Write a whole log, in place of one that is there."""
        self._forget(record.session_id)
        log = SessionRow(
            id=0,  # it is given one
            session_id=record.session_id,
            prompt=record.prompt_length,
            tenant=record.tenant,
            request_id=record.request_id,
            read=None,
            expires=self._clock() + ttl_s,
            fence=fence,
            owner=owner,
            length=record.prompt_length + len(logged.tokens),
            last=record.prompt_length,
            ttl_s=ttl_s,
            retention_s=ttl_s if retention_s is None else retention_s,
            claimed=self._wall(),
            cancelled=int(cancelled),
        )
        session = cast(int, self._db.execute(BEGIN, log[1:]).lastrowid)
        self._db.execute("INSERT INTO records VALUES (?, ?)", (session, encode_record(record)))
        self._add(session, 0, record.prompt, (), ())
        if logged.tokens:
            self._add(session, log.prompt, logged.tokens, logged.outcomes, logged.logprobs)

    def _forget(self, session_id: str) -> None:
        self._db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
        self._stale = True

    def _save(self, log: SessionRow) -> None:
        self._db.execute(SAVE, (*tuple(log)[CHANGING], log.id))

    def _touched(self, log: SessionRow) -> SessionRow:
        return log._replace(expires=self._clock() + log.kept_s)

    def _grown(
        self,
        log: SessionRow,
        position: int,
        tokens: tuple[int, ...],
        outcomes: Sequence[Outcome],
        logprobs: Sequence[TokenLogprobs],
    ) -> SessionRow:
        """Add what lies behind its end; what it holds already must be equal. outcomes, logprobs: of the last tokens."""
        if position > log.length:
            raise gap(log.session_id, position, max(0, log.length))
        known = min(log.length - position, len(tokens))
        equal = not known or self._text(log, position, position + known)[0] == tokens[:known]
        if not equal or (log.reason is not None and known < len(tokens)):
            raise mismatch(log.session_id, position)
        fresh = len(tokens) - known
        if not fresh:
            return log
        last = log.length if log.length - log.last >= ROW_TOKENS else log.last
        self._add(log.id, last, tokens[known:], outcomes[-fresh:], logprobs[-fresh:])
        return log._replace(length=log.length + fresh, last=last)

    def _add(
        self,
        session: int,
        position: int,
        tokens: Sequence[int],
        outcomes: Sequence[Outcome],
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """At the end of the row that begins at `position`."""
        told = b"".join(bytes([len(each.top)]) + pack_logprobs(each) for each in logprobs)
        row = session, position, pack_tokens(tokens), pack_outcomes(outcomes), told
        self._db.execute(ADD, row)

    def _text(
        self, log: SessionRow, first: int, end: int
    ) -> tuple[tuple[int, ...], tuple[Outcome, ...], tuple[TokenLogprobs, ...]]:
        """Tokens from `first` to before `end`, and of the decided ones outcomes and log-probabilities.

        Raises ValueError.
        """
        if first >= end:
            return (), (), ()
        query = """
            SELECT position, tokens, outcomes, logprobs FROM texts WHERE session = ?1 AND position < ?3 AND position >=
            (SELECT max(position) FROM texts WHERE session = ?1 AND position <= ?2) ORDER BY position"""
        rows = self._db.execute(query, (log.id, first, end)).fetchall()
        begin = rows[0][0] if rows else first
        tokens = unpack_tokens(b"".join(row[1] for row in rows))[first - begin : end - begin]
        skipped = max(0, first - max(begin, log.prompt))
        outcomes = unpack_outcomes(b"".join(row[2] for row in rows))[skipped:]
        return tokens, outcomes, tuple(_each_logprobs(b"".join(row[3] for row in rows)))[skipped:]

    def _state(self, log: SessionRow, skipped: int) -> dict[str, Any]:
        """What a tail and a whole log have in common. Raises ValueError."""
        first = min(log.prompt + skipped, log.length)
        tokens, outcomes, logprobs = self._text(log, first, log.length)
        if log.length < log.prompt or len(tokens) != log.length - first:
            raise ValueError(f"tokens: {len(tokens)} where {log.length - first} were written")
        return {
            "fence": log.fence,
            "owner": log.owner,
            "length": log.length,
            "tokens": tokens,
            "outcomes": outcomes,
            "logprobs": logprobs,
            "reason": None if log.reason is None else FinishReason(log.reason),
            "text_length": log.text_length,
            "cancelled": bool(log.cancelled),
            "silent_s": max(0.0, self._clock() + log.kept_s - log.expires),
        }

    def _whole(self, log: SessionRow) -> StoredSession:
        """Raises DamagedLog."""

        def reading() -> StoredSession:
            (record,) = self._one("SELECT record FROM records WHERE session = ?", log.id)
            return StoredSession(
                record=decode_record(record, self._text(log, 0, log.prompt)[0]),
                claimed=log.claimed,
                ended=log.ended,
                retention_s=log.retention_s,
                **self._state(log, 0),
            )

        return self._read(log, reading)

    def _read(self, log: SessionRow, reading: Callable[[], T]) -> T:
        """Raises DamagedLog; its owner, if it lives, has all of it, and learns this with its next append."""
        try:
            return reading()
        except (ValueError, TypeError) as error:
            self._db.execute("UPDATE sessions SET length = ? WHERE id = ?", (UNREADABLE, log.id))
            raise DamagedLog(f"session {log.session_id}: its log cannot be read: {error}") from None

    # Who does it, and when

    async def done(self, work: Work) -> object:
        """What it returns, once that counts. Raises what it raises, and StoreUnavailable: its outcome is unknown."""
        if self._closed:
            raise StoreUnavailable(CLOSED)
        call = StagedCall(work, asyncio.get_running_loop().create_future())
        if self._path is None:
            call.tell(*self._transact([work]))
            return await call.reply
        self._staged.append(call)
        if self._working is None:
            self._working = asyncio.create_task(self._work_off(), name="session log")
        try:
            async with self._patience():
                return await call.reply
        except StoreUnavailable:
            with suppress(ValueError):  # what is not yet under way is not done
                self._staged.remove(call)
            raise

    @asynccontextmanager
    async def _patience(self) -> AsyncGenerator[None, None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise no_answer(f"{self._path}: its disk does not answer within {self._timeout_s:g} s") from None

    async def _work_off(self) -> None:
        while self._staged:
            calls, self._staged = self._staged, []
            answers = await self._run(self._transact, [call.work for call in calls])
            for call, answer in zip(calls, answers, strict=True):
                call.tell(answer)
        self._working = None

    def _run(self, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Have the thread do it, behind what it was given before."""
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def close(self) -> None:
        """Have what was asked done, and all of it in the file; unlock. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._path is None:
            self._db.close()
            return
        if self._working is not None:
            await asyncio.wait([self._working], timeout=self._timeout_s)
        for call in self._staged:
            call.tell(StoreUnavailable(CLOSED))
        ended = self._run(self._end)
        try:
            async with self._patience():
                await asyncio.shield(ended)
        except (sqlite3.Error, StoreUnavailable) as error:
            logger.warning("%s: it may lack its end on the disk: %s", self._path, error)
        self._thread.shutdown(wait=ended.done())

    # In the thread, if there is one

    def _transact(self, works: Sequence[Work]) -> list[object]:
        """Do all, or none; what each returned, or the exception that its caller is to get."""
        try:
            self._db.execute("BEGIN")
            ahead = self._note_clock()
            answers = [self._answer(work) for work in works]
            self._db.execute("COMMIT")
            self._ahead = ahead
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            answers = [error for _ in works]
        return [self._failed(each) if isinstance(each, sqlite3.Error) else each for each in answers]

    def _note_clock(self) -> float:
        """Have the next process know by how much the wall clock is ahead of ours; what it is told."""
        ahead = 0.0 if self._path is None else self._wall() - self._clock()
        if abs(ahead - self._ahead) <= 1.0:
            return self._ahead
        self._db.execute("UPDATE meta SET ahead = ?", (ahead,))
        return ahead

    def _answer(self, work: Work) -> object:
        answer: object
        self._db.execute("SAVEPOINT call")
        try:
            answer = work()
        except StoreError as error:
            answer = error
        except Exception as error:
            if not self._db.in_transaction:  # all of it was taken back
                raise
            self._db.execute("ROLLBACK TO call")
            answer = error
        self._db.execute("RELEASE call")
        return answer

    def _failed(self, error: sqlite3.Error) -> StoreUnavailable:
        self._troubled = True
        kind = getattr(error, "sqlite_errorcode", 0) & 0xFF  # of its codes, the last byte
        return self._refusal(str(error), kind == sqlite3.SQLITE_FULL)

    def _refusal(self, detail: str, full: bool) -> StoreUnavailable:
        why = "its disk is full" if full else "its file cannot be written"
        return StoreUnavailable(f"the session log takes no writes: {why}", f"{self._path}: {detail}", refused=full)

    def _tend(self, path: Path) -> StoreUnavailable | None:
        """Erase what is to be erased; what keeps the disk from taking more."""
        now = self._clock()
        try:
            if self._stale and now - self._erased >= ERASE_S:
                self._stale = False
                self._db.executescript(f"PRAGMA incremental_vacuum({MOST_FREED}); PRAGMA wal_checkpoint(TRUNCATE)")
                self._erased = now
            disk = os.statvfs(path)
        except sqlite3.Error as error:
            self._stale = True
            return self._failed(error)
        except OSError as error:
            return self._refusal(error.strerror or str(error), full=False)
        free = disk.f_bavail * disk.f_frsize
        # A system that does not tell how large it is counts as large.
        return self._refusal(f"{free} bytes are free", full=True) if disk.f_blocks and free < LEAST_FREE_BYTES else None

    def _end(self) -> None:
        try:
            self._db.close()
        finally:
            os.close(self._lock)
