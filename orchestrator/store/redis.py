"""A session log in Redis: each method is one script (see `scripts.py`) in a batched round trip."""

from __future__ import annotations

from typing import NoReturn, cast

from redis.asyncio import Redis

from orchestrator.store import scripts
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
from orchestrator.store.batcher import Argument, Batcher, Reply, Script
from orchestrator.store.encoding import (
    decode_record,
    encode_record,
    pack_outcomes,
    pack_tokens,
    unpack_outcomes,
    unpack_tokens,
)
from orchestrator.store.scripts import Answer, request_key, session_keys
from specwire.core.limits import FinishReason


class RedisStore:
    """Args: client answers in bytes and does not retry by itself; timeout_s bounds every round trip."""

    durability = "redis"

    CREATE = Script(scripts.CREATE)
    RECREATE = Script(scripts.RECREATE)
    CLAIM = Script(scripts.CLAIM)
    READ = Script(scripts.READ)
    APPEND = Script(scripts.APPEND)
    CANCEL = Script(scripts.CANCEL)
    BIND = Script(scripts.BIND)
    PING = Script(scripts.PING)
    SCRIPTS = (CREATE, RECREATE, CLAIM, READ, APPEND, CANCEL, BIND, PING)

    def __init__(self, client: Redis, timeout_s: float = 2.0) -> None:
        self._client = client
        self._batcher = Batcher(client, timeout_s)

    async def register(self) -> None:
        """Have Redis know every script, so that no later call pays for it. Raises StoreUnavailable."""
        await self._batcher.register(self.SCRIPTS)

    async def create(self, record: SessionRecord, ttl_s: float, owner: str = "") -> int:
        arguments = (encode_record(record), len(record.prompt), owner, _ms(ttl_s), pack_tokens(record.prompt))
        reply = await self._batcher.call(self.CREATE, session_keys(record.session_id), *arguments)
        if reply[0] == Answer.EXISTS:
            raise SessionExists(f"session {record.session_id} has a log")
        return int(_bytes(reply[1]))

    async def claim(self, session_id: str, owner: str) -> StoredSession:
        reply = await self._batcher.call(self.CLAIM, session_keys(session_id), owner)
        if reply[0] == Answer.MISSING:
            raise missing(session_id)
        return _session(reply)

    async def recreate(
        self, record: SessionRecord, tokens: Tokens, outcomes: Outcomes, fence: int, ttl_s: float, owner: str = ""
    ) -> None:
        check_append(0, tokens, outcomes)
        text = pack_tokens([*record.prompt, *tokens])
        head = (encode_record(record), len(record.prompt), owner, _ms(ttl_s))
        keys = session_keys(record.session_id)
        reply = await self._batcher.call(self.RECREATE, keys, *head, text, pack_outcomes(outcomes), fence)
        if reply[0] == Answer.FENCED:
            raise fenced(record.session_id, fence)

    async def append(self, session_id: str, fence: int, position: int, tokens: Tokens, outcomes: Outcomes) -> Appended:
        return await self._append(session_id, fence, position, tokens, outcomes)

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
        return await self._append(session_id, fence, position, tokens, outcomes, int(reason), text_length)

    async def _append(
        self, session_id: str, fence: int, position: int, tokens: Tokens, outcomes: Outcomes, *end: Argument
    ) -> Appended:
        check_append(position, tokens, outcomes)
        arguments = (fence, position, pack_tokens(tokens), pack_outcomes(outcomes), *end)
        reply = await self._batcher.call(self.APPEND, session_keys(session_id), *arguments)
        if reply[0] != Answer.OK:
            _refused(reply, session_id, fence, position)
        return Appended(cast(int, reply[1]), bool(reply[2]))

    async def read(self, session_id: str) -> StoredSession | None:
        reply = await self._batcher.call(self.READ, session_keys(session_id))
        return None if reply[0] == Answer.MISSING else _session(reply)

    async def cancel(self, session_id: str) -> None:
        reply = await self._batcher.call(self.CANCEL, session_keys(session_id)[:1])
        if reply[0] == Answer.MISSING:
            raise missing(session_id)

    async def bind_request(self, tenant: str, request_id: str, session_id: str, ttl_s: float) -> str:
        reply = await self._batcher.call(self.BIND, [request_key(tenant, request_id)], session_id, _ms(ttl_s))
        return _bytes(reply[1]).decode()

    async def ping(self) -> None:
        await self._batcher.call(self.PING, ())

    async def close(self) -> None:
        await self._batcher.close()
        await self._client.aclose()


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _bytes(value: object) -> bytes:
    return cast(bytes, value)


def _refused(reply: Reply, session_id: str, fence: int, position: int) -> NoReturn:
    match reply[0]:
        case Answer.MISSING:
            raise missing(session_id)
        case Answer.FENCED:
            raise fenced(session_id, fence)
        case Answer.GAP:
            raise gap(session_id, position, cast(int, reply[1]))
        case _:
            raise mismatch(session_id, position)


def _session(reply: Reply) -> StoredSession:
    """From SNAPSHOT's reply."""
    record_json, fence, owner, reason, text_length, cancelled = cast(list[bytes], reply[1])
    text = unpack_tokens(_bytes(reply[2]))
    record = decode_record(record_json, text)
    return StoredSession(
        record=record,
        fence=int(fence),
        owner=owner.decode(),
        tokens=text[len(record.prompt) :],
        outcomes=unpack_outcomes(_bytes(reply[3])),
        reason=FinishReason(int(reason)) if reason else None,
        text_length=int(text_length or 0),
        cancelled=cancelled == b"1",
    )
