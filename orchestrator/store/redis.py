"""The session log in Redis: each method is one script; those of one loop tick leave in one round trip.

And how a log is opened by URL.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar, cast

from redis.exceptions import NoScriptError, RedisError

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
    no_answer,
    other_fence,
    random_step,
    unavailable,
    unmet_settings,
)
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
    Reply,
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
    Command,
    InvalidUrl,
    Node,
    RedisConnection,
    connection_of,
    is_silence,
    is_trouble,
    path_of,
    without_password,
)

__all__ = ["MEMORY", "open_store", "without_password"]

T = TypeVar("T")

# ----------------------------------------------------------------------------------------------------------------------
# Script calls to one server: those of one loop tick go out in one round trip.

# Calls in one round trip: many large ones would not be answered in time.
MOST_AT_ONCE = 256
# Share of a round trip's time that Redis may wait for its replicas.
WAIT_SHARE = 0.8
CLOSED = "the store was closed"


@dataclass(slots=True)
class _Request:
    script: str
    keys: Sequence[str]
    arguments: Sequence[Argument]
    reply: asyncio.Future[Reply]

    @property
    def command(self) -> Command:
        return ("EVALSHA", scripts.sha_of(self.script), len(self.keys), *self.keys, *self.arguments)


class Lane:
    """One round trip is under way at a time; later calls leave with the next.

    Args:
        timeout_s: for one round trip. After it the outcome is unknown and the callers get StoreUnavailable.
        replicas: how many must have acknowledged a write before its caller hears of it.
        check: is awaited before the first round trip, and before the first one after a failure, because another server
            may answer then, or the same one with other settings. Raises StoreUnavailable.
    """

    def __init__(
        self,
        redis: RedisConnection,
        node: Node,
        timeout_s: float,
        replicas: int,
        check: Callable[[Node], Awaitable[None]] | None,
    ) -> None:
        self._redis = redis
        self._node = node
        self._timeout_s = timeout_s
        self._replicas = replicas
        self._check = check
        self._checked = False
        self._staged: list[_Request] = []
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] = self._loop.create_future()
        self._task = self._loop.create_task(self._run(), name=f"store-lane {node}")

    def call(self, script: str, keys: Sequence[str], arguments: Sequence[Argument]) -> asyncio.Future[Reply]:
        """What becomes the script's reply, or a StoreUnavailable. It leaves behind all calls before it."""
        request = _Request(script, keys, arguments, self._loop.create_future())
        self._staged.append(request)
        self._go()
        return request.reply

    async def register(self) -> None:
        """Load all scripts. Raises StoreUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._prepare()
                await self._load(scripts.ALL)
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise silence(error, self._timeout_s) from error

    async def close(self) -> None:
        """End the task; calls that are still waiting get StoreUnavailable. Idempotent."""
        self._task.cancel()
        await asyncio.wait([self._task])
        _fail(self._staged, StoreUnavailable(CLOSED))

    def _go(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)

    async def _run(self) -> None:
        while True:
            await self._wake
            self._wake = self._loop.create_future()
            batch, self._staged = self._staged[:MOST_AT_ONCE], self._staged[MOST_AT_ONCE:]
            if self._staged:
                self._go()
            try:
                async with asyncio.timeout(self._timeout_s):
                    if not all(request.script in scripts.REPEATED for request in batch):
                        await self._try_connection()
                    await self._prepare()
                    await self._round_trip(batch)
            except TimeoutError:
                await self._give_up(batch, no_answer(f"no answer within {self._timeout_s:g} s"))
            except asyncio.CancelledError:
                _fail(batch, StoreUnavailable(CLOSED))
                raise
            except Exception as error:  # any error: the callers must learn of it, and the task must go on
                await self._give_up(batch, error if isinstance(error, StoreUnavailable) else unavailable(error))

    async def _prepare(self) -> None:
        if self._check is not None and not self._checked:
            await self._check(self._node)
            self._checked = True

    async def _try_connection(self) -> None:
        """Replace a connection that broke while it was idle, before a call's outcome depends on it."""
        try:
            await self._redis.send(self._node, [("PING",)])
        except (RedisError, OSError):
            await self._doubt()

    async def _give_up(self, batch: Sequence[_Request], reason: StoreUnavailable) -> None:
        """Fail all waiting calls now: they would only wait for the same error."""
        waiting, self._staged = self._staged, []
        _fail([*batch, *waiting], reason)
        await self._doubt()

    async def _doubt(self) -> None:
        """Drop connections and what is known of the servers."""
        self._checked = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis.reset(self._node)
        except (RedisError, OSError):
            return  # the connection was broken already

    async def _round_trip(self, batch: list[_Request]) -> None:
        unknown = await self._send(batch)
        if unknown:  # Redis was restarted or its scripts were flushed: those calls did nothing yet
            await self._load({request.script for request in unknown})
            for request in await self._send(unknown):
                _fail([request], no_answer("Redis does not keep scripts"))

    async def _send(self, batch: Sequence[_Request]) -> list[_Request]:
        """Send in one round trip and hand out the replies; returns the requests whose script Redis does not know."""
        commands = [request.command for request in batch]
        if self._replicas and any(request.script not in scripts.READ_ONLY for request in batch):
            commands.append(("WAIT", self._replicas, int(WAIT_SHARE * self._timeout_s * 1000)))
        replies = await self._redis.send(self._node, commands)
        shortfall = self._shortfall(replies[len(batch) :]) if self._replicas else ""
        unknown: list[_Request] = []
        for request, reply in zip(batch, replies, strict=False):
            if isinstance(reply, NoScriptError):
                unknown.append(request)
            elif request.script not in scripts.READ_ONLY and shortfall:
                _fail([request], StoreUnavailable(f"the session log is not sure to keep it: {shortfall}"))
            else:
                _resolve(request, reply)
        if any(map(is_trouble, replies)):
            await self._doubt()
        return unknown

    def _shortfall(self, waited: Sequence[object]) -> str:
        """Why the writes are not durable yet, by the reply to WAIT, if that was sent; empty if they are."""
        for answer in waited:
            if not isinstance(answer, int):
                return f"WAIT says: {answer}"
            if answer < self._replicas:
                return f"{answer} of {self._replicas} replicas have acknowledged the write"
        return ""

    async def _load(self, wanted: Iterable[str]) -> None:
        for reply in await self._redis.send(self._node, [("SCRIPT LOAD", script) for script in wanted]):
            if isinstance(reply, Exception):
                raise reply


def _resolve(request: _Request, reply: object) -> None:
    """Hand the reply to its caller."""
    if request.reply.done():  # its caller was cancelled
        return
    if isinstance(reply, list):
        request.reply.set_result(reply)
    else:
        request.reply.set_exception(unavailable(reply))


def _fail(batch: Sequence[_Request], reason: StoreUnavailable) -> None:
    for request in batch:
        if not request.reply.done():  # one exception each, because raising adds a traceback
            request.reply.set_exception(StoreUnavailable(str(reason), reason.detail, reason.refused))


def silence(error: RedisError | OSError, timeout_s: float) -> StoreUnavailable:
    """The error of a round trip that brought no answer."""
    return unavailable(error) if str(error) else no_answer(f"no answer within {timeout_s:g} s")


# ----------------------------------------------------------------------------------------------------------------------
# The log: each call goes to the server that holds its keys, and each server has a lane of its own.

PLAIN = Durability(Level.REDIS)
# Sessions in one call of a roll: a script holds up everybody else.
MOST_CALLED = 512
# Attempts to claim a log that others claim, or write again, while it is read for that.
MOST_CLAIMS = 8
# Keys that are tried to find one at each server.
MOST_KEYS = 1024


class RedisStore:
    """Owns the connection and the lanes.

    Args: timeout_s bounds every round trip; level says when a write counts; step: what a claim's fence is raised by.
    """

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
        self._check = self._check_settings if level.level is Level.FSYNC else None
        self._lanes: dict[Node, Lane] = {}
        self._closed = False

    @property
    def durability(self) -> str:
        return str(self._level)

    # Calls

    async def _call(self, script: str, keys: Sequence[str], *arguments: Argument) -> Reply:
        """The script's reply; the keys share a slot. Raises StoreUnavailable.

        Cancelling the caller does not take the call back.
        """
        if not self._redis.known:
            await self._ready()
        try:
            node = self._redis.node_of(keys)
        except RedisError as error:
            await self._redis.reset(self._redis.nodes()[0])
            raise unavailable(error) from error
        return await self._lane(node).call(script, keys, arguments)

    async def _ready(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if self._redis.known:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis.ready()
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise silence(error, self._timeout_s) from error

    def _lane(self, node: Node) -> Lane:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if node not in self._lanes:
            self._lanes[node] = Lane(self._redis, node, self._timeout_s, self._level.replicas, self._check)
        return self._lanes[node]

    async def register(self) -> None:
        """Load every script wherever somebody answers, so that no later call pays for it.

        Raises StoreUnavailable if nobody does.
        """
        await self._ready()
        lanes = [self._lane(node) for node in self._redis.nodes()]
        done = await asyncio.gather(*(lane.register() for lane in lanes), return_exceptions=True)
        errors = [error for error in done if isinstance(error, BaseException)]
        unfit = [error for error in errors if not isinstance(error, StoreUnavailable) or isinstance(error, UnfitStore)]
        if unfit or len(errors) == len(lanes):
            raise (unfit or errors)[0]

    async def _check_settings(self, node: Node) -> None:
        """Raises UnfitStore unless the server forces each write to its disk before it answers."""
        (settings,) = await self._redis.send(node, [("CONFIG GET", "*append*")])
        if not isinstance(settings, dict):
            raise UnfitStore(f"durability: redis-fsync cannot be checked, CONFIG GET says: {settings}")
        unmet = unmet_settings({_text(name): _text(value) for name, value in settings.items()})
        if unmet:
            raise UnfitStore(f"durability: {unmet}")

    # Logs

    async def create(
        self, record: SessionRecord, ttl_s: float, owner: str = "", retention_s: float | None = None
    ) -> int:
        head, session_id = _head(record, ttl_s, owner, retention_s), record.session_id
        await self._ready()
        # The roll comes first, so that every log is in it. A cluster may have it elsewhere: that is not waited for.
        roll = [roll_key(record.weights_fingerprint)]
        with suppress(RedisError):  # nobody serves its slot now
            entering = self._lane(self._redis.node_of(roll)).call(
                scripts.CALL_ROLL, roll, (_ms(CALLED_WITHIN_S), _ms(ttl_s), session_id)
            )
            entering.add_done_callback(lambda reply: reply.cancelled() or reply.exception())
        reply = await self._call(scripts.CREATE, session_keys(session_id), *head, pack_tokens(record.prompt))
        if reply[0] == ScriptAnswer.EXISTS:
            raise SessionExists(f"session {record.session_id} has a log")
        return int(_bytes(reply[1]))

    async def claim(self, session_id: str, owner: str, known: int = 0, now_us: int = 0) -> StoredSession:
        """Claim a log that can be read. A damaged one stays its owner's, which, if it lives, has all of it."""
        keys = session_keys(session_id)
        for _ in range(MOST_CLAIMS):
            seen = await self._call(scripts.READ, keys)
            if seen[0] in (ScriptAnswer.MISSING, ScriptAnswer.DELETED):
                raise missing(session_id)
            await self._told(session_id, seen, stored_session)
            record, fence, *_ = cast("list[bytes]", seen[1])
            reply = await self._call(scripts.CLAIM, keys, owner, fence, record, known, now_us, self._step())
            if reply[0] == ScriptAnswer.MISSING:
                raise missing(session_id)
            if reply[0] != ScriptAnswer.CHANGED:
                return await self._told(session_id, reply, stored_session)
        raise StoreUnavailable(f"the session log: {session_id} changes hands too often")

    async def _told(self, session_id: str, reply: Reply, reading: Callable[[str, Reply], T]) -> T:
        """What a snapshot says. Raises DamagedLog, after telling the owner."""
        try:
            return reading(session_id, reply)
        except DamagedLog:
            with suppress(StoreUnavailable):
                await self._call(scripts.DAMAGED, session_keys(session_id)[:1])
            raise

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
        reply = await self._call(scripts.RECREATE, keys, *head, *said, *map(pack_logprobs, logged.logprobs))
        if reply[0] != ScriptAnswer.OK:
            _refused(reply, record.session_id, fence, 0)

    async def append(self, session_id: str, fence: int, append: Append) -> AppendReply:
        end = ("", 0) if append.end is None else (int(append.end.reason), append.end.text_length)
        said = (fence, append.position, pack_tokens(append.tokens), pack_outcomes(append.outcomes), *end)
        keys, reported = session_keys(session_id), map(pack_logprobs, append.logprobs)
        reply = await self._call(scripts.APPEND, keys, *said, *reported)
        if reply[0] != ScriptAnswer.OK:
            _refused(reply, session_id, fence, append.position)
        read_us = cast(int, reply[3])
        return AppendReply(cast(int, reply[1]), bool(reply[2]), read_us / 1e6 if read_us >= 0 else math.inf)

    async def read(self, session_id: str) -> StoredSession | None:
        return await self._seen(session_id, scripts.READ, scripts.READ_SETTLED, (), stored_session)

    async def tail(self, session_id: str, skipped: int) -> LogTail | None:
        def reading(session_id: str, reply: Reply) -> LogTail:
            return stored_tail(session_id, reply, skipped)

        return await self._seen(session_id, scripts.TAIL, scripts.TAIL_SETTLED, (skipped,), reading)

    async def _seen(
        self,
        session_id: str,
        script: str,
        settled: str,
        arguments: Sequence[Argument],
        reading: Callable[[str, Reply], T],
    ) -> T | None:
        chosen = settled if self._level.replicas else script
        reply = await self._call(chosen, session_keys(session_id), *arguments)
        if reply[0] == ScriptAnswer.DELETED:
            raise deleted(session_id)
        return None if reply[0] == ScriptAnswer.MISSING else await self._told(session_id, reply, reading)

    async def cancel(self, session_id: str) -> None:
        reply = await self._call(scripts.CANCEL, session_keys(session_id)[:1])
        if reply[0] == ScriptAnswer.MISSING:
            raise missing(session_id)

    async def note_reader(self, session_id: str) -> None:
        await self._call(scripts.NOTE_READER, session_keys(session_id)[:1])

    async def delete(self, session_id: str) -> None:
        reply = await self._call(scripts.DELETE, session_keys(session_id))
        if reply[0] == ScriptAnswer.MISSING:
            raise missing(session_id)
        tenant, request_id = request_of(_bytes(reply[1]))
        if request_id:
            await self.release_request(tenant, request_id, session_id)

    # What stands beside them

    async def bind_request(
        self, tenant: str, request_id: str, session_id: str, ttl_s: float, digest: str = "", gone: str = ""
    ) -> Bound:
        keys, beginning_us = [request_key(tenant, request_id)], round(BEGINNING_S * 1e6)
        said = (session_id, _ms(ttl_s), digest or NO_DIGEST, gone, beginning_us)
        return _bound(await self._call(scripts.BIND, keys, *said))

    async def bound_request(self, tenant: str, request_id: str) -> Bound | None:
        reply = await self._call(scripts.BOUND, [request_key(tenant, request_id)])
        return None if reply[0] == ScriptAnswer.MISSING else _bound(reply)

    async def release_request(self, tenant: str, request_id: str, session_id: str) -> None:
        await self._call(scripts.UNBIND, [request_key(tenant, request_id)], session_id)

    async def shared_secret(self, proposed: bytes, ttl_s: float) -> bytes:
        return _bytes((await self._call(scripts.SECRET, [SECRET_KEY], proposed, _ms(ttl_s)))[1])

    async def call_roll(self, roll: str, session_ids: Sequence[str], within_s: float, ttl_s: float) -> None:
        for some in _portions(session_ids):
            await self._call(scripts.CALL_ROLL, [roll_key(roll)], _ms(within_s), _ms(ttl_s), *some)

    async def strike(self, roll: str, session_ids: Sequence[str]) -> None:
        for some in _portions(session_ids):
            await self._call(scripts.STRIKE, [roll_key(roll)], *some)

    async def missed(self, roll: str, again_s: float, most: int) -> list[str]:
        reply = await self._call(scripts.MISSED, [roll_key(roll)], _ms(again_s), most)
        return [_bytes(session_id).decode() for session_id in cast("list[object]", reply[1])]

    async def ping(self) -> None:
        """Raises StoreUnavailable where no server takes it."""
        await self._ready()
        keys: dict[Node, str] = {}
        wanted = set(self._redis.nodes())
        for key in map(ping_key, range(MOST_KEYS)):
            if keys.keys() >= wanted:
                break
            with suppress(RedisError):  # a slot that nobody serves now
                keys.setdefault(self._redis.node_of([key]), key)
        calls = (self._lane(node).call(scripts.PING, [key], ()) for node, key in keys.items())
        done = await asyncio.gather(*calls, return_exceptions=True)
        errors = [error for error in done if isinstance(error, BaseException)]
        if len(errors) == len(done):
            raise errors[0] if errors else no_answer("no server is known")

    async def close(self) -> None:
        """Calls that are still waiting get StoreUnavailable."""
        self._closed = True
        await asyncio.gather(*(lane.close() for lane in self._lanes.values()))
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
