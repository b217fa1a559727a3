"""A whole stack of real processes, mended between tests."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

from orchestrator.store import StoredSession, open_store
from specwire.client.requests import RequestOptions
from tests.faults.parts import Parts, ServiceProcess, parts
from tests.faults.streams import Stream
from tests.orchestrator.redis_for_tests import RedisServer

# The delay emulates a slower target: time to interfere while text streams.
TARGET = "scripted:7:vocab=64:delay_ms=8"
DRAFT = "scripted:7:vocab=64:agree=0.8"
PLAIN = "scripted:7:vocab=64"


class Stack:
    """Redis, verifier, drafter and orchestrator, each a process."""

    def __init__(self, owned: Parts, redis: RedisServer) -> None:
        self.parts = owned
        self.redis = redis
        self.verifier = owned.start("verify", TARGET)
        self.drafter = owned.start("draft", DRAFT)
        self.verifier.ready()
        self.drafter.ready()
        self.orchestrator = self.orchestrate(self.drafter.address)
        self.orchestrator.ready()

    def orchestrate(self, drafter: str, *verifiers: str) -> ServiceProcess:
        """Launch an orchestrator with this stack's log, and its verifier if none is named."""
        named = [part for each in verifiers or (self.verifier.address,) for part in ("--verifier", each)]
        return self.parts.start("orchestrate", *named, "--drafter", drafter, "--redis-url", self.redis.url)

    def mend(self) -> None:
        """Start again what a test has ended, wake what it left stopped."""
        self.drafter.send(signal.SIGCONT)
        self.verifier.send(signal.SIGCONT)
        self.redis.mend()
        dead = [s for s in (self.verifier, self.drafter, self.orchestrator) if not s.lives]
        for service in dead:
            service.restart()
        for service in dead:
            service.ready()

    def generate(self, length: int, **options: Unpack[RequestOptions]) -> Stream:
        """A stream of `length` tokens."""
        asked: RequestOptions = {**options, "max_tokens": length}
        return Stream(self.orchestrator.address, **asked)

    def log(self, session_id: str) -> StoredSession:
        """What Redis holds of a session."""
        log = read_log(self.redis.url, session_id)
        assert log is not None
        return log

    def logged(self, session_id: str) -> int:
        """How many tokens Redis holds of a session."""
        log = read_log(self.redis.url, session_id)
        return 0 if log is None else log.length


def read_log(url: str, session_id: str) -> StoredSession | None:
    """What the Redis at `url` holds of a session."""
    return asyncio.run(_read(url, session_id))


async def _read(url: str, session_id: str) -> StoredSession | None:
    store = await open_store(url)
    try:
        return await store.read(session_id)
    finally:
        await store.close()


@contextmanager
def stack() -> Iterator[Stack]:
    with RedisServer() as redis, parts() as owned:
        yield Stack(owned, redis)
