"""What may stand in Redis in place of a session's log: whoever can write there can write anything."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import redis
import redis.asyncio
from hypothesis import strategies as st

from orchestrator.store import SessionStore, StoreError, open_store
from orchestrator.store.base import SessionRecord
from orchestrator.store.encoding import encode_record
from orchestrator.store.scripts import SECRET_KEY, request_key, roll_key, session_keys
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Append, End, FinishReason, Outcome, TokenLogprobs
from specwire.core.text import Stopping

PROMPT, TEXT = (1, 2, 3), (4, 5, 6, 7)
WEIGHTS = "w"
TTL_S = 60.0
LIMIT_S = 120.0
FIELDS = (
    "record",
    "prompt",
    "fence",
    "owner",
    "ttl_ms",
    "retention_ms",
    "claimed_us",
    "cancelled",
    "reason",
    "text_length",
    "ended_us",
    "state",
    "other",
    "0",
    "3",
)
META, TOKENS, OUTCOMES, REQUEST, ROLL, SECRET = "meta", "tokens", "outcomes", "request", "roll", "secret"

numbers = st.one_of(st.integers(-3, 1 << 70), st.sampled_from(["nan", "inf", "1e400", "0x10", " 1", ""])).map(str)
rules = st.sampled_from(["rejection", "block", "threshold(0.3)", "typical(9,9)", "threshold(", "typical(nan,1)"])
junk = st.one_of(st.binary(max_size=16), numbers.map(str.encode))
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=4), rules)
parts = st.one_of(scalars, st.lists(scalars, max_size=2), st.dictionaries(st.text(max_size=3), scalars, max_size=2))


@dataclass(frozen=True, slots=True)
class Damage:
    """One write: `field` of the hash where it is META, a member where it is ROLL, else the whole value.

    value None deletes it; other_type turns the key into one of another type.
    """

    key: str
    field: str = ""
    value: bytes | None = None
    other_type: bool = False


def record(session_id: str = "s") -> SessionRecord:
    return SessionRecord(
        session_id, PROMPT, Sampling(logprobs=0), Stopping(20), "ada", "r", weights_fingerprint=WEIGHTS
    )


@st.composite
def records(draw: st.DrawFn) -> bytes:
    """The record's JSON with a field or two that are something else."""
    fields = json.loads(encode_record(record()))
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(fields)))
        inner = fields[name] if isinstance(fields[name], dict) and draw(st.booleans()) else fields
        if inner is not fields and inner:
            name = draw(st.sampled_from(sorted(inner)))
        if draw(st.integers(0, 3)) == 0:
            inner.pop(name, None)
        else:
            inner[name] = draw(parts)
    return json.dumps(fields).encode()


bindings = st.lists(st.one_of(st.sampled_from([b"s", b"-", b"0"]), junk), max_size=4).map(b" ".join)
damages = st.one_of(
    st.builds(Damage, st.just(META), st.sampled_from(FIELDS), st.one_of(st.none(), junk)),
    st.builds(Damage, st.just(META), st.just("record"), st.one_of(records(), junk)),
    st.builds(Damage, st.sampled_from([TOKENS, OUTCOMES, REQUEST, SECRET]), st.just(""), st.one_of(st.none(), junk)),
    st.builds(Damage, st.just(REQUEST), st.just(""), bindings),
    st.builds(Damage, st.just(ROLL), st.just(""), st.one_of(st.none(), junk)),
    st.builds(Damage, st.sampled_from([META, TOKENS, OUTCOMES, REQUEST, ROLL, SECRET]), other_type=st.just(True)),
)
members = st.lists(junk, min_size=1, max_size=4)
cases = st.lists(damages, min_size=1, max_size=3)


def spoil_roll(url: str, weights: str, members: list[bytes]) -> Counter[str]:
    """Enter anything among the sessions that orchestrators of this model look after; they do so by themselves."""
    with redis.Redis.from_url(url) as client:
        client.zadd(roll_key(weights), dict.fromkeys(members, 0))
    return Counter({"WRITTEN": 1})


def try_all(url: str, damage: list[Damage]) -> Counter[str]:
    """Call every method of a store whose log was damaged so; how each ended. Whatever is no StoreError gets out."""
    return asyncio.run(_try_all(url, damage))


async def _try_all(url: str, damage: list[Damage]) -> Counter[str]:
    client = redis.asyncio.Redis.from_url(url)
    store = await open_store(url)
    seen: Counter[str] = Counter()
    try:
        for name, call in calls(store).items():
            await _write(client, store, damage)
            async with asyncio.timeout(LIMIT_S):
                seen[f"{name} {await _outcome(call)}"] += 1
    finally:
        await store.close()
        await client.aclose()
    return seen


async def _outcome(call: Callable[[], Awaitable[object]]) -> str:
    try:
        await call()
    except StoreError as error:
        return type(error).__name__ if str(error) else "says nothing"
    return "done"


def calls(store: SessionStore) -> dict[str, Callable[[], Awaitable[object]]]:
    """Every call that meets what stands there."""
    more, outcomes = (8, 9), (Outcome.DIRECT, Outcome.DIRECT)
    told = (TokenLogprobs(-1.0),) * len(TEXT)
    at, fence = len(PROMPT) + len(TEXT), 1
    return {
        "read": lambda: store.read("s"),
        "claim": lambda: store.claim("s", "other"),
        "append": lambda: store.append("s", fence, Append(at, more, outcomes, logprobs=told[:2])),
        "finish": lambda: store.append(
            "s", fence, Append(at, more, outcomes, End(FinishReason.LENGTH, "", 9), logprobs=told[:2])
        ),
        "recreate": lambda: store.recreate(
            record(), Append(3, TEXT, (Outcome.DIRECT,) * 4, logprobs=told), 1 << 51, TTL_S
        ),
        "create": lambda: store.create(record(), TTL_S),
        "cancel": lambda: store.cancel("s"),
        "delete": lambda: store.delete("s"),
        "bind": lambda: store.bind_request("ada", "r", "s", TTL_S, "digest", "gone"),
        "bound": lambda: store.bound_request("ada", "r"),
        "release": lambda: store.release_request("ada", "r", "s"),
        "secret": lambda: store.shared_secret(b"s" * 32, TTL_S),
        "tail": lambda: store.tail("s", 1),
        "roll": lambda: store.call_roll(WEIGHTS, ["s"], 1.0, TTL_S),
        "strike": lambda: store.strike(WEIGHTS, ["s"]),
        "missed": lambda: store.missed(WEIGHTS, 0.0, 9),
    }


async def _write(client: redis.asyncio.Redis, store: SessionStore, damage: list[Damage]) -> None:
    """The log as it ought to be, then the damage."""
    keys = dict(zip((META, TOKENS, OUTCOMES), session_keys("s"), strict=True))
    keys |= {REQUEST: request_key("ada", "r"), ROLL: roll_key(WEIGHTS), SECRET: SECRET_KEY}
    await client.delete(*keys.values())
    fence = await store.create(record(), TTL_S, "me")
    told = (TokenLogprobs(-1.0),) * len(TEXT)
    await store.append("s", fence, Append(len(PROMPT), TEXT, (Outcome.DIRECT,) * len(TEXT), logprobs=told))
    await store.bind_request("ada", "r", "s", TTL_S)
    await client.hset(keys[META], "fence", 1)
    for each in damage:
        await damage_key(client, keys[each.key], each)


async def damage_key(client: redis.asyncio.Redis, key: str, damage: Damage) -> None:
    """Write this, whatever stands there."""
    if damage.other_type:
        await client.delete(key)
        await client.lpush(key, "x")
    elif await client.type(key) == b"list":
        return
    elif damage.field and damage.value is None:
        await client.hdel(key, damage.field)
    elif damage.field:
        await client.hset(key, damage.field, damage.value or b"")
    elif damage.value is None:
        await client.delete(key)
    elif damage.key == ROLL:
        await client.zadd(key, {damage.value: 0})
    else:
        await client.set(key, damage.value)
