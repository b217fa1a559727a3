"""A session log in Redis: each method is one script (see `scripts.py`) in a batched round trip."""

from __future__ import annotations

from typing import NoReturn, cast

from orchestrator.store import scripts
from orchestrator.store.base import (
    Appended,
    DamagedLog,
    Logprobs,
    Outcomes,
    SessionExists,
    SessionRecord,
    StoredSession,
    StoreError,
    Tokens,
    UnfitStore,
    check_append,
    deleted,
    gap,
    mismatch,
    missing,
    other_fence,
)
from orchestrator.store.batcher import Batcher
from orchestrator.store.durability import Durability, Level, unmet_settings
from orchestrator.store.encoding import encode_record, pack_logprobs, pack_outcomes, pack_tokens, request_of
from orchestrator.store.lanes import Reply, Script
from orchestrator.store.scripts import Answer, request_key, session_keys
from orchestrator.store.snapshot import stored_session
from specwire.core.limits import FinishReason
from specwire.redis.lines import Argument, Lines, Node

PLAIN = Durability(Level.REDIS)


class RedisStore:
    """Args: lines lead to Redis; timeout_s bounds every round trip; level says when a write counts."""

    CREATE = Script(scripts.CREATE)
    RECREATE = Script(scripts.RECREATE)
    CLAIM = Script(scripts.CLAIM)
    READ = Script(scripts.READ, writes=False)
    READ_SETTLED = Script(scripts.READ_SETTLED)
    APPEND = Script(scripts.APPEND, repeated=True)
    CANCEL = Script(scripts.CANCEL)
    DELETE = Script(scripts.DELETE)
    BIND = Script(scripts.BIND)
    UNBIND = Script(scripts.UNBIND)
    PING = Script(scripts.PING, writes=False)
    SCRIPTS = (CREATE, RECREATE, CLAIM, READ, READ_SETTLED, APPEND, CANCEL, DELETE, BIND, UNBIND, PING)

    def __init__(self, lines: Lines, timeout_s: float = 2.0, level: Durability = PLAIN) -> None:
        self._lines = lines
        self._level = level
        check = self._check_settings if level.level is Level.FSYNC else None
        self._batcher = Batcher(lines, timeout_s, level.replicas, check)

    @property
    def durability(self) -> str:
        return str(self._level)

    async def register(self) -> None:
        """Have Redis know every script, so that no later call pays for it. Raises StoreUnavailable."""
        await self._batcher.register(self.SCRIPTS)

    async def _check_settings(self, node: Node) -> None:
        """Raises UnfitStore unless the server forces each write to its disk before it answers."""
        (settings,) = await self._lines.send(node, [("CONFIG GET", "*append*")])
        if not isinstance(settings, dict):
            raise UnfitStore(f"durability: redis-fsync cannot be checked, CONFIG GET says: {settings}")
        unmet = unmet_settings({_text(name): _text(value) for name, value in settings.items()})
        if unmet:
            raise UnfitStore(f"durability: {unmet}")

    async def create(
        self, record: SessionRecord, ttl_s: float, owner: str = "", retention_s: float | None = None
    ) -> int:
        head = _head(record, ttl_s, owner, retention_s)
        reply = await self._batcher.call(
            self.CREATE, session_keys(record.session_id), *head, pack_tokens(record.prompt)
        )
        if reply[0] == Answer.EXISTS:
            raise SessionExists(f"session {record.session_id} has a log")
        return int(_bytes(reply[1]))

    async def claim(self, session_id: str, owner: str) -> StoredSession:
        reply = await self._batcher.call(self.CLAIM, session_keys(session_id), owner)
        if reply[0] == Answer.MISSING:
            raise missing(session_id)
        return stored_session(session_id, reply)

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
        head = _head(record, ttl_s, owner, retention_s)
        text = pack_tokens([*record.prompt, *tokens])
        keys = session_keys(record.session_id)
        reported = map(pack_logprobs, logprobs)
        reply = await self._batcher.call(self.RECREATE, keys, *head, text, pack_outcomes(outcomes), fence, *reported)
        if reply[0] != Answer.OK:
            _refused(reply, record.session_id, fence, 0)

    async def append(
        self, session_id: str, fence: int, position: int, tokens: Tokens, outcomes: Outcomes, logprobs: Logprobs = ()
    ) -> Appended:
        return await self._append(session_id, fence, position, tokens, outcomes, logprobs)

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
        return await self._append(session_id, fence, position, tokens, outcomes, logprobs, int(reason), text_length)

    async def _append(
        self,
        session_id: str,
        fence: int,
        position: int,
        tokens: Tokens,
        outcomes: Outcomes,
        logprobs: Logprobs,
        reason: int | str = "",
        text_length: int = 0,
    ) -> Appended:
        check_append(position, tokens, outcomes, logprobs)
        said = (fence, position, pack_tokens(tokens), pack_outcomes(outcomes), reason, text_length)
        reply = await self._batcher.call(self.APPEND, session_keys(session_id), *said, *map(pack_logprobs, logprobs))
        if reply[0] != Answer.OK:
            _refused(reply, session_id, fence, position)
        return Appended(cast(int, reply[1]), bool(reply[2]))

    async def read(self, session_id: str) -> StoredSession | None:
        script = self.READ_SETTLED if self._level.replicas else self.READ
        reply = await self._batcher.call(script, session_keys(session_id))
        if reply[0] == Answer.DELETED:
            raise deleted(session_id)
        return None if reply[0] == Answer.MISSING else stored_session(session_id, reply)

    async def cancel(self, session_id: str) -> None:
        reply = await self._batcher.call(self.CANCEL, session_keys(session_id)[:1])
        if reply[0] == Answer.MISSING:
            raise missing(session_id)

    async def delete(self, session_id: str) -> None:
        reply = await self._batcher.call(self.DELETE, session_keys(session_id))
        if reply[0] == Answer.MISSING:
            raise missing(session_id)
        tenant, request_id = request_of(_bytes(reply[1]))
        if request_id:
            await self._batcher.call(self.UNBIND, [request_key(tenant, request_id)], session_id)

    async def bind_request(self, tenant: str, request_id: str, session_id: str, ttl_s: float) -> str:
        reply = await self._batcher.call(self.BIND, [request_key(tenant, request_id)], session_id, _ms(ttl_s))
        return _bytes(reply[1]).decode(errors="replace")

    async def ping(self) -> None:
        await self._batcher.call(self.PING, ())

    async def close(self) -> None:
        await self._batcher.close()
        await self._lines.close()


def _head(record: SessionRecord, ttl_s: float, owner: str, retention_s: float | None) -> tuple[Argument, ...]:
    """How the arguments of CREATE and RECREATE begin."""
    ttl_ms = _ms(ttl_s)
    return encode_record(record), len(record.prompt), owner, ttl_ms, ttl_ms if retention_s is None else _ms(retention_s)


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
        return DamagedLog(f"session {session_id}: its fence is no number")


def _refused(reply: Reply, session_id: str, fence: int, position: int) -> NoReturn:
    match reply[0]:
        case Answer.MISSING:
            raise missing(session_id)
        case Answer.FENCED:
            raise _other_fence(session_id, fence, _bytes(reply[1]))
        case Answer.GAP:
            raise gap(session_id, position, cast(int, reply[1]))
        case _:
            raise mismatch(session_id, position)
