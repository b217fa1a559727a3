"""What only the log in memory can get wrong: what it looks at, and when it forgets."""

from __future__ import annotations

import pytest

from orchestrator.store import MissingSession
from orchestrator.store.memory import LOOK_S, MemoryStore
from tests.orchestrator.test_store import record_of


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_what_has_expired_is_gone_at_once_and_forgotten_a_little_later() -> None:
    """A new session does not look at all others."""
    clock = Clock()
    store = MemoryStore(clock)
    await store.create(record_of("a"), 0.5)
    await store.bind_request("t", "r", "a", 0.5)
    clock.now += 0.6
    await store.create(record_of("b"), 60.0)
    assert set(store._logs) == {"a", "b"}
    assert await store.read("a") is None
    assert await store.tail("a", 0) is None
    assert await store.bound_request("t", "r") is None
    with pytest.raises(MissingSession):
        await store.claim("a", "me")
    await store.create(record_of("a"), 0.1)
    clock.now += LOOK_S
    await store.create(record_of("c"), 60.0)
    assert set(store._logs) == {"b", "c"}
    clock.now += 100.0
    await store.ping()
    assert (store._logs, store._requests) == ({}, {})
