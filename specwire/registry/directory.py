"""The registry in Redis: one key for each service, an index of them by expiry, and the heartbeat that keeps one there.

    specwire:service:ID     an entry (`specwire.registry.entry`); expires by itself when its service no longer renews it
    specwire:services       sorted set of ids; the score is when the entry expires, Redis's time in milliseconds
    specwire:home:SESSION   affinity: the verifier's address that had a session last

Keys are independent, so a cluster may have them on different servers. The index makes KEYS and SCAN needless, which
would walk over every session log. Expired ids are removed whenever one is added, and the index itself expires once
nobody renews it. The clock is that of the index's server, so clocks of different hosts are never compared.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace

from redis.exceptions import RedisError

from specwire.redis import Command, Node, RedisConnection, connection_of, is_trouble
from specwire.registry.entry import (
    ID,
    MOST_BYTES,
    NO_LOAD,
    InvalidEntry,
    Load,
    ServiceEntry,
    ServiceState,
    checked_address,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

FIELD = "registry"
PREFIX = "specwire:service:"
INDEX = "specwire:services"
AFFINITY = "specwire:home:"
# Most services that are read: more than any fleet has, fewer than an attacker may add.
MOST_SERVICES = 4096
TIMEOUT_S = 2.0
# Seconds for which a session's verifier is remembered: its keys and values are seldom kept for longer.
AFFINITY_TTL_S = 3600.0

ENROL = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1
"""
PRESENT = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
return redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf', 'LIMIT', 0, ARGV[1])
"""


class RegistryUnavailable(Exception):
    """Redis does not answer, or refuses."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The services that are registered. ignored: values that are no entries, by reason."""

    entries: tuple[ServiceEntry, ...] = ()
    ignored: Counter[str] = field(default_factory=Counter)


class Directory:
    """Every call ends within a few times `timeout_s`, and may be repeated. Raises RegistryUnavailable."""

    def __init__(self, redis: RedisConnection, timeout_s: float = TIMEOUT_S) -> None:
        self._redis = redis
        self._timeout_s = timeout_s

    @classmethod
    def at(cls, url: str, timeout_s: float = TIMEOUT_S) -> Directory:
        """Nothing is connected yet. Raises InvalidUrl."""
        return cls(connection_of(url, timeout_s, FIELD), timeout_s)

    async def put(self, entry: ServiceEntry, ttl_s: float) -> None:
        """Register the service for `ttl_s` seconds from now."""
        ttl_ms = max(1, round(ttl_s * 1000))
        await self._ask(PREFIX + entry.id, ("SET", PREFIX + entry.id, encode(entry), "PX", ttl_ms))
        await self._ask(INDEX, ("EVAL", ENROL, 1, INDEX, entry.id, ttl_ms))

    async def remove(self, entry_id: str) -> None:
        """Remove the service."""
        await self._ask(INDEX, ("ZREM", INDEX, entry_id))
        await self._ask(PREFIX + entry_id, ("DEL", PREFIX + entry_id))

    async def listing(self) -> Listing:
        """All services registered now, in no order."""
        found = await self._ask(INDEX, ("EVAL", PRESENT, 1, INDEX, MOST_SERVICES))
        named = [_text(each) for each in found] if isinstance(found, list) else []
        ids = [each for each in named if ID.fullmatch(each)]
        ignored: Counter[str] = Counter()
        ignored["invalid"] += len(named) - len(ids)
        entries = []
        for entry_id, value in zip(ids, await self._values(ids), strict=True):
            try:
                entries += [] if value == b"" else [_decoded(entry_id, value)]
            except InvalidEntry as error:
                ignored[error.reason] += 1
        return Listing(tuple(entries), +ignored)

    async def _values(self, ids: Sequence[str]) -> list[object]:
        """Each one's value up to the size that an entry may have; empty where it has expired."""
        keys = [PREFIX + each for each in ids]
        replies = await self._ask_all({key: ("GETRANGE", key, 0, MOST_BYTES) for key in keys})
        return [replies[key] for key in keys]

    async def note_affinity(self, affinity: dict[str, str]) -> None:
        """Note the addresses of the verifiers of these sessions."""
        ttl_ms = round(AFFINITY_TTL_S * 1000)
        await self._ask_all(
            {AFFINITY + each: ("SET", AFFINITY + each, at, "PX", ttl_ms) for each, at in affinity.items()}
        )

    async def affinity_of(self, session_id: str) -> str | None:
        """The address of the session's last verifier."""
        value = await self._ask(AFFINITY + session_id, ("GETRANGE", AFFINITY + session_id, 0, MOST_BYTES))
        try:
            return checked_address("affinity", _text(value))
        except InvalidEntry:
            return None

    async def close(self) -> None:
        await self._redis.close()

    async def _ask(self, key: str, command: Command) -> object:
        reply = (await self._ask_all({key: command}))[key]
        if isinstance(reply, Exception):
            raise RegistryUnavailable(f"the registry refused: {reply}")
        return reply

    async def _ask_all(self, commands: dict[str, Command]) -> dict[str, object]:
        """Replies by key, refusals of single commands among them; tried once more over a fresh connection."""
        try:
            return await self._tried(commands)
        except (RedisError, OSError):  # such as a connection that broke while nobody used it
            pass
        try:
            return await self._tried(commands)
        except (RedisError, OSError) as error:
            reason = str(error) or f"within {self._timeout_s:g} s"
            raise RegistryUnavailable(f"the registry does not answer: {reason}") from error

    async def _tried(self, commands: dict[str, Command]) -> dict[str, object]:
        async with asyncio.timeout(self._timeout_s):
            if not self._redis.known:
                await self._redis.ready()
        by_node = await self._by_node(commands)
        replies: dict[str, object] = {}
        for node, keys in by_node.items():
            replies.update(zip(keys, await self._round_trip(node, [commands[key] for key in keys]), strict=True))
        return replies

    async def _by_node(self, keys: Iterable[str]) -> dict[Node, list[str]]:
        found: dict[Node, list[str]] = {}
        try:
            for key in keys:
                found.setdefault(self._redis.node_of([key]), []).append(key)
        except RedisError:
            for node in self._redis.nodes()[:1]:
                await self._doubt(node)
            raise
        return found

    async def _round_trip(self, node: Node, commands: Sequence[Command]) -> list[object]:
        try:
            async with asyncio.timeout(self._timeout_s):
                replies = await self._redis.send(node, commands)
        except (RedisError, OSError):
            await self._doubt(node)
            raise
        for reply in replies:
            if isinstance(reply, Exception) and is_trouble(reply):
                await self._doubt(node)
                raise reply
        return replies

    async def _doubt(self, node: Node) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis.reset(node)
        except (RedisError, OSError):
            return  # the connection was broken already


def _decoded(entry_id: str, value: object) -> ServiceEntry:
    if not isinstance(value, bytes):
        raise InvalidEntry("invalid", "is no string")
    return decode(entry_id, value)


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


# ----------------------------------------------------------------------------------------------------------------------
# What keeps one service in the registry: a heartbeat until it stops.

# Seconds between heartbeats, and for which one holds: two may be lost.
HEARTBEAT_S = 2.0
TTL_S = 3 * HEARTBEAT_S
# Seconds for a stopping service's last message: it does not wait longer for Redis.
FAREWELL_S = 1.0
# Each wait is shortened by up to this part of it, so that a fleet that started together does not speak together.
SCATTER = 0.2


def new_id() -> str:
    """A random id for a service that starts."""
    return secrets.token_hex(16)


class Registrar:
    """Registers a service and its load. The service does not depend on Redis' answer.

    Args:
        directory: owned from now on; None registers nowhere.
        describe: the service as it is now, its state and beat apart.
        every_s, ttl_s: seconds between heartbeats, and for which one holds.
    """

    def __init__(
        self,
        directory: Directory | None,
        describe: Callable[[], ServiceEntry],
        every_s: float = HEARTBEAT_S,
        ttl_s: float = TTL_S,
    ) -> None:
        self._directory = directory
        self._describe = describe
        self._every_s, self._ttl_s = every_s, ttl_s
        self._state = ServiceState.SERVING
        self._beat = 0
        self._speaking = asyncio.Lock()
        self._trouble = ""
        self._random = random.Random()  # libraries seed the global one, all replicas alike
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """The first heartbeat is sent at once, and not waited for."""
        if self._directory is not None:
            self._task = asyncio.create_task(self._run(self._directory), name="registrar")

    @property
    def registers(self) -> bool:
        """Whether anybody is to be told."""
        return self._task is not None

    async def drain(self) -> None:
        """The service is about to stop: say so now."""
        self._state = ServiceState.DRAINING
        if self._task is not None and self._directory is not None:
            await self._soon(self._say(self._directory))

    async def close(self) -> None:
        """The service has stopped. Idempotent."""
        task, self._task = self._task, None
        if task is None or self._directory is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self._soon(self._leave(self._directory))
        await self._directory.close()

    async def _soon(self, saying: Coroutine[None, None, None]) -> None:
        try:
            async with asyncio.timeout(FAREWELL_S):
                await saying
        except TimeoutError:
            return  # the last heartbeat expires

    async def _run(self, directory: Directory) -> None:
        while True:
            try:
                await self._say(directory)
            except Exception:  # a bug of ours: the next heartbeat may work, and without any the entry expires
                logger.exception("a heartbeat failed")
            await asyncio.sleep(self._every_s * self._random.uniform(1 - SCATTER, 1))

    async def _say(self, directory: Directory) -> None:
        async with self._speaking:  # what is said later must be heard later
            self._beat += 1
            entry = replace(self._describe(), state=self._state, beat=self._beat)
            try:
                await directory.put(entry, self._ttl_s)
            except RegistryUnavailable as error:
                self._note(str(error))
            else:
                self._note("")

    async def _leave(self, directory: Directory) -> None:
        async with self._speaking:
            try:
                await directory.remove(self._describe().id)
            except RegistryUnavailable as error:
                self._note(str(error))

    def _note(self, trouble: str) -> None:
        if trouble and not self._trouble:
            logger.warning("not registered: %s", trouble)
        elif self._trouble and not trouble:
            logger.info("registered again")
        self._trouble = trouble


class LoadReader:
    """Where a service's load is read. `read` is set by the thread that makes what knows it."""

    def __init__(self) -> None:
        self.read: Callable[[], Load] = lambda: NO_LOAD
