"""A session log in a file: the log in memory, and behind it a journal of what changes, which is read again at start."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from orchestrator.store.base import (
    CALLED_WITHIN_S,
    AppendReply,
    Bound,
    KnownSession,
    Level,
    LoggedTokens,
    LogTail,
    SessionRecord,
    StoredSession,
    random_step,
)
from orchestrator.store.encoding import (
    MOST_FENCE,
    Instant,
    Whole,
    decode_record,
    encode_record,
    pack_logprobs,
    pack_outcomes,
    pack_tokens,
    unpack_logprobs,
    unpack_outcomes,
    unpack_tokens,
)
from orchestrator.store.journal import Journal
from orchestrator.store.memory import Clock, MemoryBinding, MemoryLog, MemoryStore
from specwire.core.messages import Append, FinishReason

# ----------------------------------------------------------------------------------------------------------------------
# What the journal holds: MessagePack arrays, whose first element says which. Record, tokens, outcomes and
# log-probabilities have the bytes of `encoding.py`. Rolls, and that somebody reads elsewhere, are hints and not kept.

Fence = Annotated[int, Meta(ge=0, le=MOST_FENCE)]


class LogState(Struct, array_like=True, frozen=True):
    """What changes of a log beside its tokens. Instants: Unix time in seconds."""

    fence: Fence
    owner: str
    claimed: Instant
    expires: Instant
    ended: Instant | None
    reason: int | None
    text_length: Whole
    cancelled: bool


class WholeLog(Struct, array_like=True, frozen=True, tag="log"):
    """A log as it stands. tokens: the prompt's first."""

    record: bytes
    ttl_s: float
    retention_s: float
    state: LogState
    tokens: bytes
    outcomes: bytes
    logprobs: tuple[bytes, ...]


class LogChange(Struct, array_like=True, frozen=True, tag="change"):
    """What was added to a log of `length` tokens, and its new state."""

    session_id: str
    state: LogState
    length: Whole
    tokens: bytes
    outcomes: bytes
    logprobs: tuple[bytes, ...]


class DeletedLog(Struct, array_like=True, frozen=True, tag="deleted"):
    """until: when that is forgotten."""

    session_id: str
    until: Instant


class RequestBinding(Struct, array_like=True, frozen=True, tag="request"):
    tenant: str
    request_id: str
    session_id: str
    digest: str
    bound: Instant
    expires: Instant


class RequestReleased(Struct, array_like=True, frozen=True, tag="released"):
    tenant: str
    request_id: str


class SharedSecret(Struct, array_like=True, frozen=True, tag="secret"):
    secret: bytes


Entry: TypeAlias = WholeLog | LogChange | DeletedLog | RequestBinding | RequestReleased | SharedSecret
# What an entry is about: a session, or a tenant's request id.
Key: TypeAlias = tuple[str, ...]
ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(list[Entry])


def _state_of(log: MemoryLog, ahead_s: float) -> LogState:
    """ahead_s: see `FileStore`."""
    reason = None if log.reason is None else int(log.reason)
    instants = log.claimed, log.expires + ahead_s, log.ended
    return LogState(log.fence, log.owner, *instants, reason, log.text_length, log.cancelled)


def _whole(log: MemoryLog, ahead_s: float) -> WholeLog:
    told = tuple(map(pack_logprobs, log.logprobs))
    texts = pack_tokens(log.tokens), pack_outcomes(log.outcomes), told
    return WholeLog(encode_record(log.record), log.ttl_s, log.retention_s, _state_of(log, ahead_s), *texts)


def _change(log: MemoryLog, length: int, ahead_s: float) -> LogChange:
    """What stands behind `length` tokens of it."""
    decided = length - log.record.prompt_length
    told = tuple(map(pack_logprobs, log.logprobs[decided:]))
    texts = pack_tokens(log.tokens[length:]), pack_outcomes(log.outcomes[decided:]), told
    return LogChange(log.record.session_id, _state_of(log, ahead_s), length, *texts)


def _add_tokens(log: MemoryLog, entry: WholeLog | LogChange, tokens: Sequence[int]) -> None:
    """Add to the text, and put the state in place. Raises ValueError."""
    log.tokens.extend(tokens)
    log.outcomes.extend(unpack_outcomes(entry.outcomes))
    log.logprobs.extend(map(unpack_logprobs, entry.logprobs))
    decided = len(log.tokens) - log.record.prompt_length
    if len(log.outcomes) != decided or len(log.logprobs) not in (0, decided):
        raise ValueError(f"outcomes: {len(log.outcomes)}, logprobs: {len(log.logprobs)} for {decided} tokens")
    state = entry.state
    log.fence, log.owner, log.claimed, log.expires = state.fence, state.owner, state.claimed, state.expires
    log.reason = None if state.reason is None else FinishReason(state.reason)
    log.ended, log.text_length, log.cancelled = state.ended, state.text_length, state.cancelled


# ----------------------------------------------------------------------------------------------------------------------
# The store.

# The file is written anew, with what is live only, once it is so many times as large as it was after that the last
# time, but not below this size.
GROWTH = 4
LEAST_BYTES = 4 << 20
# Or so long after the last time, in seconds, if it holds sessions that were deleted or have expired.
ERASE_S = 600.0
# Bytes that are encoded in one tick for that.
PORTION_BYTES = 1 << 18


class FileStore(MemoryStore):
    """Blocks while it opens and reads the file; then each change counts once it is in there.

    The file has Unix times, for the next process. `_ahead_s`: by so much the wall clock, which steps, is ahead of the
    store's own, by which things expire here.

    Args:
        path: of the file, which is made where there is none.
        synced: a change counts once the disk has it, not only the system.
        timeout_s: for what is written, as of a round trip.
        clock, step: see MemoryStore.

    Raises:
        JournalError: the file cannot be used.
    """

    def __init__(
        self,
        path: Path,
        synced: bool = False,
        timeout_s: float = 2.0,
        clock: Clock | None = None,
        step: Callable[[], int] = random_step,
    ) -> None:
        super().__init__(clock, step)
        self.durability = str(Level.FILE_FSYNC if synced else Level.FILE)
        # Whether the file is to be written anew soon: it holds sessions that are gone, or what a former process could
        # not force to the disk, which reading does not tell.
        self._stale = synced
        self._journal = Journal(path, synced, timeout_s, self._replay)
        self._forget_expired()
        self._enter_running()
        # Bytes after the file was last written anew, and when that was; unknown of a former process's.
        self._least, self._rewritten = 0, -math.inf
        self._rewriting: asyncio.Task[None] | None = None
        # While that is done: what the new file is not yet told of.
        self._untold: set[Key] | None = None

    async def create(
        self, record: SessionRecord, ttl_s: float, owner: str = "", retention_s: float | None = None
    ) -> int:
        await self._journal.ready()
        with self._noted(record.session_id):
            fence = await super().create(record, ttl_s, owner, retention_s)
        await self._journal.settled()
        return fence

    async def claim(self, session_id: str, owner: str, known: int = 0, now_us: int = 0) -> StoredSession:
        await self._journal.ready()
        with self._noted(session_id):
            claimed = await super().claim(session_id, owner, known, now_us)
        await self._journal.settled()
        return claimed

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
        await self._journal.ready()
        with self._noted(record.session_id):
            await super().recreate(record, logged, fence, ttl_s, owner, retention_s, cancelled)
        await self._journal.settled()

    async def append(self, session_id: str, fence: int, append: Append) -> AppendReply:
        await self._journal.ready()
        with self._noted(session_id):
            reply = await super().append(session_id, fence, append)
        await self._journal.settled()
        return reply

    async def read(self, session_id: str) -> StoredSession | None:
        log = await super().read(session_id)
        await self._journal.settled()  # what is told of the log counts
        return log

    async def tail(self, session_id: str, skipped: int) -> LogTail | None:
        tail = await super().tail(session_id, skipped)
        await self._journal.settled()
        return tail

    async def cancel(self, session_id: str) -> None:
        await self._journal.ready()
        with self._noted(session_id):
            await super().cancel(session_id)
        await self._journal.settled()

    async def delete(self, session_id: str) -> None:
        await self._journal.ready()
        log = self._logs.get(session_id)
        await super().delete(session_id)
        if log is not None and session_id not in self._logs:
            self._note((session_id,), self._deleted_entry(session_id))
            self._note_request(log.record.tenant, log.record.request_id)
            self._stale = True
        await self._journal.settled()

    async def bind_request(
        self, tenant: str, request_id: str, session_id: str, ttl_s: float, digest: str = "", gone: str = ""
    ) -> Bound:
        await self._journal.ready()
        before = self._requests.get((tenant, request_id))
        bound = await super().bind_request(tenant, request_id, session_id, ttl_s, digest, gone)
        if self._requests[tenant, request_id] is not before:
            self._note_request(tenant, request_id)
        await self._journal.settled()
        return bound

    async def bound_request(self, tenant: str, request_id: str) -> Bound | None:
        bound = await super().bound_request(tenant, request_id)
        await self._journal.settled()
        return bound

    async def release_request(self, tenant: str, request_id: str, session_id: str) -> None:
        await self._journal.ready()
        await super().release_request(tenant, request_id, session_id)
        if (tenant, request_id) not in self._requests:
            self._note_request(tenant, request_id)
        await self._journal.settled()

    async def shared_secret(self, proposed: bytes, ttl_s: float) -> bytes:
        await self._journal.ready()
        before, secret = self._secret, await super().shared_secret(proposed, ttl_s)
        if not before:
            self._note((), SharedSecret(secret))
        await self._journal.settled()
        return secret

    async def known_sessions(self) -> AsyncGenerator[KnownSession, None]:
        await self._journal.settled()
        async for known in super().known_sessions():
            yield known

    async def ping(self) -> None:
        """Nothing is written where nothing happens: a full disk is known by the room that is left."""
        await super().ping()
        self._rewrite_if_due()
        await self._journal.check()

    async def close(self) -> None:
        if self._rewriting is not None:
            self._rewriting.cancel()
            await asyncio.wait([self._rewriting])
        await self._journal.close()

    # Into the journal

    @property
    def _ahead_s(self) -> float:
        return self._wall() - self._clock()

    @contextmanager
    def _noted(self, session_id: str) -> Iterator[None]:
        """Notes what was changed of a session's log within it; an error there has changed nothing."""
        before = self._logs.get(session_id)
        length = 0 if before is None else len(before.tokens)
        yield
        log = self._logs[session_id]
        ahead_s = self._ahead_s
        self._note((session_id,), _change(log, length, ahead_s) if log is before else _whole(log, ahead_s))

    def _note_request(self, tenant: str, request_id: str) -> None:
        self._note((tenant, request_id), self._request_entry(tenant, request_id))

    def _request_entry(self, tenant: str, request_id: str) -> RequestBinding | RequestReleased:
        held = self._requests.get((tenant, request_id))
        if held is None:
            return RequestReleased(tenant, request_id)
        ahead_s = self._ahead_s
        instants = held.bound and held.bound + ahead_s, held.expires + ahead_s
        return RequestBinding(tenant, request_id, held.of.session_id, held.of.digest, *instants)

    def _deleted_entry(self, session_id: str) -> DeletedLog:
        return DeletedLog(session_id, self._deleted[session_id] + self._ahead_s)

    def _note(self, key: Key, entry: Entry) -> None:
        told = self._untold is not None and key not in self._untold
        self._journal.add(ENCODER.encode(entry), to_next=told)

    def _forget_expired(self, since_s: float = 0.0) -> None:
        before = len(self._logs)
        super()._forget_expired(since_s)
        self._stale = self._stale or len(self._logs) < before

    # Out of the journal

    def _replay(self, payload: bytes) -> None:
        """Raises ValueError."""
        try:
            entries = DECODER.decode(payload)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None
        for entry in entries:
            self._replay_entry(entry)

    def _replay_entry(self, entry: Entry) -> None:
        match entry:
            case WholeLog():
                self._replay_log(entry)
            case LogChange():
                log = self._logs.get(entry.session_id)
                if log is None or len(log.tokens) != entry.length:
                    found = "no log" if log is None else f"{len(log.tokens)} tokens"
                    raise ValueError(f"session {entry.session_id}: {found} where it adds to {entry.length} tokens")
                _add_tokens(log, entry, unpack_tokens(entry.tokens))
            case DeletedLog():
                self._stale = self._logs.pop(entry.session_id, None) is not None or self._stale
                self._deleted[entry.session_id] = entry.until
            case RequestBinding():
                bound = Bound(entry.session_id, entry.digest)
                self._requests[entry.tenant, entry.request_id] = MemoryBinding(bound, entry.bound, entry.expires)
            case RequestReleased():
                self._requests.pop((entry.tenant, entry.request_id), None)
            case SharedSecret():
                self._secret = entry.secret

    def _replay_log(self, entry: WholeLog) -> None:
        text = unpack_tokens(entry.tokens)
        record = decode_record(entry.record, text)
        log = MemoryLog(record, 0, "", [], [], [], entry.ttl_s, entry.retention_s, claimed=0.0, expires=0.0)
        _add_tokens(log, entry, text)
        self._logs[record.session_id] = log

    def _enter_running(self) -> None:
        """Into the rolls: a session that its owner, who is gone, began is missed if nobody takes it."""
        missed = self._clock() + CALLED_WITHIN_S
        for session_id, log in self._logs.items():
            if log.reason is None:
                self._rolls.setdefault(log.record.weights_fingerprint, {})[session_id] = missed

    # Anew

    def _rewrite_if_due(self) -> None:
        if self._rewriting is not None and not self._rewriting.done():
            return
        grown = self._journal.size >= max(LEAST_BYTES, GROWTH * self._least)
        if grown or (self._stale and time.monotonic() - self._rewritten >= ERASE_S):
            self._rewriting = asyncio.create_task(self._rewrite(), name="session log, anew")

    async def _rewrite(self) -> None:
        self._stale = False
        try:
            self._stale = not await self._journal.rewrite(self._portions()) or self._stale
        finally:
            self._untold = None
            self._least, self._rewritten = self._journal.size, time.monotonic()

    def _portions(self) -> Iterator[list[bytes]]:
        """All that is live. What a portion tells of leaves `_untold` in the tick in which it is taken."""
        keys: list[Key] = [*((session_id,) for session_id in (*self._logs, *self._deleted)), *self._requests]
        self._untold = set(keys)
        portion = [ENCODER.encode(SharedSecret(self._secret))] if self._secret else []
        size = 0
        while self._untold:
            entry = self._live_entry(self._untold.pop())
            if entry is not None:
                portion.append(ENCODER.encode(entry))
                size += len(portion[-1])
            if size >= PORTION_BYTES:
                yield portion
                portion, size = [], 0
        yield portion

    def _live_entry(self, key: Key) -> Entry | None:
        """What a new file is told of it; None where it is gone."""
        if len(key) > 1:
            tenant, request_id = key
            return self._request_entry(tenant, request_id) if key in self._requests else None
        (session_id,) = key
        if session_id in self._logs:
            return _whole(self._logs[session_id], self._ahead_s)
        return self._deleted_entry(session_id) if session_id in self._deleted else None
