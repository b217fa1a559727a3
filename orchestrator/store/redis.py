"""The session log in Redis: each method is one script in a batched round trip; and how a log is opened by URL."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NoReturn, cast

from orchestrator.store import scripts
from orchestrator.store.base import (
    BEGINNING_S,
    CALLED_WITHIN_S,
    AppendReply,
    Bound,
    DamagedLog,
    Durability,
    Level,
    LoggedTokens,
    LogTail,
    SessionExists,
    SessionRecord,
    SessionStore,
    StaleLog,
    StoredSession,
    StoreError,
    StoreUnavailable,
    UnfitStore,
    check_logged,
    deleted,
    durability_of,
    gap,
    mismatch,
    missing,
    other_fence,
    random_step,
    unmet_settings,
)
from orchestrator.store.batcher import Batcher, LuaScript, Reply
from orchestrator.store.encoding import (
    encode_record,
    pack_logprobs,
    pack_outcomes,
    pack_tokens,
    request_of,
    stored_session,
    stored_tail,
)
from orchestrator.store.scripts import (
    NO_DIGEST,
    SECRET_KEY,
    ScriptAnswer,
    ping_key,
    request_key,
    roll_key,
    session_keys,
)
from orchestrator.store.sqlite import SqliteStore
from orchestrator.store.sqlite_file import UnusableFile
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import Append
from specwire.redis import (
    MEMORY,
    Argument,
    InvalidUrl,
    Node,
    RedisConnection,
    connection_of,
    is_silence,
    path_of,
    without_password,
)

# ----------------------------------------------------------------------------------------------------------------------
# A session log in Redis: each method is one script (see `scripts.py`) in a batched round trip.

PLAIN = Durability(Level.REDIS)
# Sessions in one call of a roll: a script holds up everybody else.
MOST_CALLED = 512
# Attempts to claim a log that others claim, or write again, while it is read for that.
MOST_CLAIMS = 8


class RedisStore:
    """Args: redis: the connection; timeout_s bounds every round trip; level says when a write counts.

    step: what a claim's fence is raised by.
    """

    CREATE = LuaScript(scripts.CREATE)
    RECREATE = LuaScript(scripts.RECREATE)
    CLAIM = LuaScript(scripts.CLAIM)
    READ = LuaScript(scripts.READ, writes=False)
    READ_SETTLED = LuaScript(scripts.READ_SETTLED)
    TAIL = LuaScript(scripts.TAIL, writes=False)
    TAIL_SETTLED = LuaScript(scripts.TAIL_SETTLED)
    APPEND = LuaScript(scripts.APPEND, repeated=True)
    DAMAGED = LuaScript(scripts.DAMAGED)
    CANCEL = LuaScript(scripts.CANCEL)
    NOTE_READER = LuaScript(scripts.NOTE_READER)
    DELETE = LuaScript(scripts.DELETE)
    BIND = LuaScript(scripts.BIND)
    BOUND = LuaScript(scripts.BOUND, writes=False)
    UNBIND = LuaScript(scripts.UNBIND)
    SECRET = LuaScript(scripts.SECRET)
    CALL_ROLL = LuaScript(scripts.CALL_ROLL, repeated=True)
    STRIKE = LuaScript(scripts.STRIKE, repeated=True)
    MISSED = LuaScript(scripts.MISSED)
    PING = LuaScript(scripts.PING)
    OF_LOGS = (CREATE, RECREATE, CLAIM, READ, READ_SETTLED, TAIL, TAIL_SETTLED, APPEND, DAMAGED, CANCEL, NOTE_READER)
    SCRIPTS = (*OF_LOGS, DELETE, BIND, BOUND, UNBIND, SECRET, CALL_ROLL, STRIKE, MISSED, PING)

    def __init__(
        self,
        redis: RedisConnection,
        timeout_s: float = 2.0,
        level: Durability = PLAIN,
        step: Callable[[], int] = random_step,
    ) -> None:
        self._redis = redis
        self._timeout_s = timeout_s
        self._step = step
        self._level = level
        check = self._check_settings if level.level is Level.FSYNC else None
        self._batcher = Batcher(redis, timeout_s, level.replicas, check)

    @property
    def durability(self) -> str:
        return str(self._level)

    async def register(self) -> None:
        """Load every script into Redis, so that no later call pays for it. Raises StoreUnavailable."""
        await self._batcher.register(self.SCRIPTS)

    async def _check_settings(self, node: Node) -> None:
        """Raises UnfitStore unless the server forces each write to its disk before it answers."""
        (settings,) = await self._redis.send(node, [("CONFIG GET", "*append*")])
        if not isinstance(settings, dict):
            raise UnfitStore(f"durability: redis-fsync cannot be checked, CONFIG GET says: {settings}")
        unmet = unmet_settings({_text(name): _text(value) for name, value in settings.items()})
        if unmet:
            raise UnfitStore(f"durability: {unmet}")

    async def create(
        self, record: SessionRecord, ttl_s: float, owner: str = "", retention_s: float | None = None
    ) -> int:
        head, session_id = _head(record, ttl_s, owner, retention_s), record.session_id
        # The roll comes first, so that every log is in it. A cluster may have it elsewhere: that is not waited for.
        roll = [roll_key(record.weights_fingerprint)]
        await self._batcher.post(self.CALL_ROLL, roll, _ms(CALLED_WITHIN_S), _ms(ttl_s), session_id)
        reply = await self._batcher.call(self.CREATE, session_keys(session_id), *head, pack_tokens(record.prompt))
        if reply[0] == ScriptAnswer.EXISTS:
            raise SessionExists(f"session {record.session_id} has a log")
        return int(_bytes(reply[1]))

    async def claim(self, session_id: str, owner: str, known: int = 0, now_us: int = 0) -> StoredSession:
        """Claim a log that can be read. A damaged one stays its owner's, which, if it lives, has all of it."""
        keys = session_keys(session_id)
        for _ in range(MOST_CLAIMS):
            seen = await self._batcher.call(self.READ, keys)
            if seen[0] in (ScriptAnswer.MISSING, ScriptAnswer.DELETED):
                raise missing(session_id)
            await self._whole(session_id, seen)
            record, fence, *_ = cast("list[bytes]", seen[1])
            reply = await self._batcher.call(self.CLAIM, keys, owner, fence, record, known, now_us, self._step())
            if reply[0] == ScriptAnswer.MISSING:
                raise missing(session_id)
            if reply[0] != ScriptAnswer.CHANGED:
                return await self._whole(session_id, reply)
        raise StoreUnavailable(f"the session log: {session_id} changes hands too often")

    async def _whole(self, session_id: str, reply: Reply) -> StoredSession:
        """The session in a snapshot. Raises DamagedLog, after telling the owner."""
        try:
            return stored_session(session_id, reply)
        except DamagedLog:
            await self._tell_damaged(session_id)
            raise

    async def _tell_damaged(self, session_id: str) -> None:
        with suppress(StoreUnavailable):
            await self._batcher.call(self.DAMAGED, session_keys(session_id)[:1])

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
        head = _head(record, ttl_s, owner, retention_s)
        text = pack_tokens([*record.prompt, *logged.tokens])
        keys = session_keys(record.session_id)
        said = (text, pack_outcomes(logged.outcomes), fence, int(cancelled))
        reply = await self._batcher.call(self.RECREATE, keys, *head, *said, *map(pack_logprobs, logged.logprobs))
        if reply[0] != ScriptAnswer.OK:
            _refused(reply, record.session_id, fence, 0)

    async def append(self, session_id: str, fence: int, append: Append) -> AppendReply:
        end = ("", 0) if append.end is None else (int(append.end.reason), append.end.text_length)
        said = (fence, append.position, pack_tokens(append.tokens), pack_outcomes(append.outcomes), *end)
        keys, reported = session_keys(session_id), map(pack_logprobs, append.logprobs)
        reply = await self._batcher.call(self.APPEND, keys, *said, *reported)
        if reply[0] != ScriptAnswer.OK:
            _refused(reply, session_id, fence, append.position)
        read_us = cast(int, reply[3])
        return AppendReply(cast(int, reply[1]), bool(reply[2]), read_us / 1e6 if read_us >= 0 else math.inf)

    async def read(self, session_id: str) -> StoredSession | None:
        script = self.READ_SETTLED if self._level.replicas else self.READ
        reply = await self._batcher.call(script, session_keys(session_id))
        if reply[0] == ScriptAnswer.DELETED:
            raise deleted(session_id)
        return None if reply[0] == ScriptAnswer.MISSING else await self._whole(session_id, reply)

    async def tail(self, session_id: str, skipped: int) -> LogTail | None:
        script = self.TAIL_SETTLED if self._level.replicas else self.TAIL
        reply = await self._batcher.call(script, session_keys(session_id), skipped)
        if reply[0] == ScriptAnswer.DELETED:
            raise deleted(session_id)
        if reply[0] == ScriptAnswer.MISSING:
            return None
        try:
            return stored_tail(session_id, reply, skipped)
        except DamagedLog:
            await self._tell_damaged(session_id)
            raise

    async def cancel(self, session_id: str) -> None:
        reply = await self._batcher.call(self.CANCEL, session_keys(session_id)[:1])
        if reply[0] == ScriptAnswer.MISSING:
            raise missing(session_id)

    async def note_reader(self, session_id: str) -> None:
        await self._batcher.call(self.NOTE_READER, session_keys(session_id)[:1])

    async def delete(self, session_id: str) -> None:
        reply = await self._batcher.call(self.DELETE, session_keys(session_id))
        if reply[0] == ScriptAnswer.MISSING:
            raise missing(session_id)
        tenant, request_id = request_of(_bytes(reply[1]))
        if request_id:
            await self.release_request(tenant, request_id, session_id)

    async def bind_request(
        self, tenant: str, request_id: str, session_id: str, ttl_s: float, digest: str = "", gone: str = ""
    ) -> Bound:
        keys, beginning_us = [request_key(tenant, request_id)], round(BEGINNING_S * 1e6)
        said = (session_id, _ms(ttl_s), digest or NO_DIGEST, gone, beginning_us)
        return _bound(await self._batcher.call(self.BIND, keys, *said))

    async def bound_request(self, tenant: str, request_id: str) -> Bound | None:
        reply = await self._batcher.call(self.BOUND, [request_key(tenant, request_id)])
        return None if reply[0] == ScriptAnswer.MISSING else _bound(reply)

    async def release_request(self, tenant: str, request_id: str, session_id: str) -> None:
        await self._batcher.call(self.UNBIND, [request_key(tenant, request_id)], session_id)

    async def shared_secret(self, proposed: bytes, ttl_s: float) -> bytes:
        return _bytes((await self._batcher.call(self.SECRET, [SECRET_KEY], proposed, _ms(ttl_s)))[1])

    async def call_roll(self, roll: str, session_ids: Sequence[str], within_s: float, ttl_s: float) -> None:
        for some in _portions(session_ids):
            await self._batcher.call(self.CALL_ROLL, [roll_key(roll)], _ms(within_s), _ms(ttl_s), *some)

    async def strike(self, roll: str, session_ids: Sequence[str]) -> None:
        for some in _portions(session_ids):
            await self._batcher.call(self.STRIKE, [roll_key(roll)], *some)

    async def missed(self, roll: str, again_s: float, most: int) -> list[str]:
        reply = await self._batcher.call(self.MISSED, [roll_key(roll)], _ms(again_s), most)
        return [_bytes(session_id).decode() for session_id in cast("list[object]", reply[1])]

    async def ping(self) -> None:
        await self._batcher.call_each(self.PING, ping_key)

    async def close(self) -> None:
        await self._batcher.close()
        await self._redis.close()


def _head(record: SessionRecord, ttl_s: float, owner: str, retention_s: float | None) -> tuple[Argument, ...]:
    """How the arguments of CREATE and RECREATE begin."""
    ttl_ms = _ms(ttl_s)
    return encode_record(record), len(record.prompt), owner, ttl_ms, ttl_ms if retention_s is None else _ms(retention_s)


def _bound(reply: Reply) -> Bound:
    session_id, digest = (_bytes(part).decode(errors="replace") for part in reply[1:3])
    return Bound(session_id, "" if digest == NO_DIGEST else digest)


def _portions(session_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(session_ids), MOST_CALLED):
        yield session_ids[first : first + MOST_CALLED]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _bytes(value: object) -> bytes:
    return cast(bytes, value)


def _other_fence(session_id: str, fence: int, held: bytes) -> StoreError:
    try:
        return other_fence(session_id, fence, int(held))
    except ValueError:
        return StaleLog(f"session {session_id}: its fence is no number, and older than any")


def _refused(reply: Reply, session_id: str, fence: int, position: int) -> NoReturn:
    match reply[0]:
        case ScriptAnswer.MISSING:
            raise missing(session_id)
        case ScriptAnswer.FENCED:
            raise _other_fence(session_id, fence, _bytes(reply[1]))
        case ScriptAnswer.GAP:
            raise gap(session_id, position, cast(int, reply[1]))
        case _:
            raise mismatch(session_id, position)


__all__ = ["MEMORY", "open_store", "without_password"]

# Seconds: nothing else waits while the log is opened, and this process may load a model meanwhile.
OPENING_S = 10.0


async def open_store(
    url: str | None, timeout_s: float = 2.0, durability: str = "", opening_s: float = OPENING_S
) -> SessionStore:
    """The log at `url` (see `specwire.redis`); "memory:" or None keeps it in this process, file:PATH in a file.

    durability: a level's name (see `orchestrator.store.base`); "" takes the plain one of where the log is.
    opening_s: a server that is silent at first is asked again for so long.

    Raises:
        StoreUnavailable: not such a URL, nothing answers there, or not as the level needs it, or the file cannot be
            used; the message names the option and shows the URL without its password.
    """
    url = MEMORY if url is None else url
    try:
        level = durability_of(durability, url)
        if url == MEMORY:
            return SqliteStore()
        if level.place == "file":
            return await asyncio.to_thread(SqliteStore, path_of(url), level.level is Level.FILE_FSYNC, timeout_s)
        redis = connection_of(url, timeout_s)
    except (InvalidParameter, InvalidUrl) as error:
        raise StoreUnavailable(str(error)) from error
    except UnusableFile as error:
        raise StoreUnavailable(f"redis-url: cannot use {url}: {error}") from error
    store = RedisStore(redis, timeout_s, level)
    try:
        await _register(store, opening_s - timeout_s)
    except UnfitStore as error:
        await store.close()
        raise StoreUnavailable(f"{error}: {without_password(url)}", error.detail) from error
    except StoreUnavailable as error:
        await store.close()
        raise StoreUnavailable(f"redis-url: cannot use {without_password(url)}: {error.detail or error}") from error
    return store


async def _register(store: RedisStore, again_s: float) -> None:
    """As its `register`; tried again for `again_s` where nobody answers. A refusal is no silence."""
    now = asyncio.get_running_loop().time
    end = now() + again_s
    while True:
        try:
            return await store.register()
        except StoreUnavailable as error:
            if now() >= end or not is_silence(error.__cause__):
                raise
