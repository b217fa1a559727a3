"""What may stand in Redis in place of the registry: whoever can write there can write anything."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import redis.asyncio
from hypothesis import strategies as st

from specwire.registry.directory import AFFINITY, INDEX, PREFIX, Directory, RegistryUnavailable
from specwire.registry.entry import MOST_BYTES, Load, Role, ServedModel, ServiceEntry, encode
from tests.fuzz.services import Services
from tests.fuzz.values import LIMIT_S, junk, parts

ID = "0" * 32
SERVICE, LISTED, AT = "service", "index", "home"
KEYS = {SERVICE: PREFIX + ID, LISTED: INDEX, AT: AFFINITY + "s"}
ENTRY = ServiceEntry(ID, Role.VERIFIER, "127.0.0.1:1", models=(ServedModel("m", "ab", "cd"),), load=Load(1, 2, 3))


@dataclass(frozen=True, slots=True)
class Written:
    """One write. value None deletes the key; other_type turns it into a list."""

    key: str
    value: bytes | None = None
    other_type: bool = False


def _objects(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The object and those in it, as far as they still are such."""
    models = fields.get("models")
    inner = [fields.get("load"), *(models if isinstance(models, list) else [])]
    return [fields, *(each for each in inner if isinstance(each, dict) and each)]


@st.composite
def entries(draw: st.DrawFn) -> bytes:
    """An entry's JSON with a field or two that are something else, or far too long."""
    fields = {"v": 1, **json.loads(encode(ENTRY)), **asdict(ENTRY)}
    for _ in range(draw(st.integers(1, 2))):
        inner = draw(st.sampled_from(_objects(fields)))
        name = draw(st.sampled_from(sorted(inner)))
        if draw(st.sampled_from(range(4))) == 2:
            inner.pop(name)
        else:
            inner[name] = draw(parts)
    data = json.dumps(fields).encode()
    return data + b" " * MOST_BYTES if draw(st.sampled_from(range(8))) == 5 else data


values = st.one_of(st.none(), junk, entries())
writes = st.one_of(
    st.builds(Written, st.just(SERVICE), values),
    st.builds(Written, st.just(SERVICE), entries()),
    st.builds(Written, st.just(LISTED), st.one_of(st.none(), junk, st.just(b"f" * 32))),
    st.builds(Written, st.just(AT), values),
    st.builds(Written, st.sampled_from(sorted(KEYS)), other_type=st.just(True)),
)
cases = st.lists(writes, min_size=1, max_size=3)


def try_all(url: str, written: list[Written]) -> Counter[str]:
    """Call every method of a directory that finds this; how each ended. Whatever is not its own error gets out."""
    return asyncio.run(_try_all(url, written))


def meet(services: Services, url: str, written: list[Written]) -> Counter[str]:
    """Write these beside and in place of what running services have said, and have their orchestrator look.

    AssertionError where that fails anybody. What was an entry that names an address names a drafter's, as a verifier's.
    """
    asyncio.run(_spoil(url, services.drafter, written))
    services.see_registry()
    services.complete()
    asyncio.run(_clear(url))
    logged = services.failures.take()
    assert not logged, f"{written}: {logged}"
    return Counter({"SERVED": 1})


async def _spoil(url: str, address: str, written: list[Written]) -> None:
    async with redis.asyncio.Redis.from_url(url) as client:
        listed = await client.type(INDEX) == b"zset"
        others: list[Any] = await client.zrange(INDEX, 0, -1) if listed else []
        for each in written:
            value = each.value and each.value.replace(ENTRY.address.encode(), address.encode())
            spoilt = replace(each, value=value)
            await _write(client, spoilt)
            if each.key == SERVICE:
                for other in others:
                    await _write(client, spoilt, PREFIX.encode() + other)
        if await client.type(INDEX) in (b"zset", b"none"):
            await client.zadd(INDEX, {ID: 1 << 60})
            await client.pexpire(INDEX, round(LIMIT_S * 1000))


async def _try_all(url: str, written: list[Written]) -> Counter[str]:
    client = redis.asyncio.Redis.from_url(url)
    directory = Directory.at(url)
    seen: Counter[str] = Counter()
    try:
        for name, call in _calls(directory).items():
            await client.delete(*KEYS.values())
            await directory.put(ENTRY, LIMIT_S)
            for each in written:
                await _write(client, each)
            async with asyncio.timeout(LIMIT_S):
                seen[f"{name} {await _outcome(call)}"] += 1
    finally:
        await client.delete(*KEYS.values())
        await directory.close()
        await client.aclose()
    return seen


def _calls(directory: Directory) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "listing": directory.listing,
        "put": lambda: directory.put(ENTRY, LIMIT_S),
        "remove": lambda: directory.remove(ID),
        "home": lambda: directory.affinity_of("s"),
        "note": lambda: directory.note_affinity({"s": "127.0.0.1:1"}),
    }


async def _outcome(call: Callable[[], Awaitable[object]]) -> str:
    try:
        await call()
    except RegistryUnavailable as error:
        return "unavailable" if str(error) else "says nothing"
    return "done"


async def _clear(url: str) -> None:
    """What no service takes back by itself."""
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.delete(KEYS[SERVICE], KEYS[AT])
        if await client.type(INDEX) != b"zset":
            await client.delete(INDEX)


async def _write(client: redis.asyncio.Redis, written: Written, at: bytes = b"") -> None:
    key = at or KEYS[written.key].encode()
    if written.other_type or written.value is None:
        async with client.pipeline(transaction=True) as at_once:  # services that run write there, too
            at_once.delete(key)
            if written.other_type:
                at_once.lpush(key, "x")
            await at_once.execute()
    elif await client.type(key) == b"list":
        return
    elif written.key == LISTED:
        await client.zadd(key, {written.value: 1 << 60})
    else:
        await client.set(key, written.value)
