"""The session log behind a line that fails: every orchestrator has its own view of one in-memory store.

Whatever the store's methods are, each call takes time, and its effect and its acknowledgement may be lost apart.
`Books` records, by itself, what was granted and acknowledged: the facts that the invariants are held against.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from orchestrator.store import StoredSession, StoreError, StoreUnavailable
from orchestrator.store.memory import MemoryStore
from tests.simulation.loop import SimLoop

# What a call waits for when its answer does not come.
ANSWER_TIMEOUT = 2.0
WRITES = ("append", "finish")


@dataclass
class Books:
    """newest: fence by session, as far as the log can know.

    acknowledged: length of the log that the owner (session, fence) was told of. claims, restored: how often. losses:
    how often the store has come back without what it had.
    """

    newest: dict[str, int] = field(default_factory=dict)
    acknowledged: dict[tuple[str, int], int] = field(default_factory=dict)
    claims: int = 0
    restored: int = 0
    losses: int = 0

    def granted(self, session_id: str, fence: int, length: int) -> None:
        self.newest[session_id] = max(fence, self.newest.get(session_id, 0))
        self.told(session_id, fence, length)

    def known(self, session_id: str, fence: int | None) -> int:
        """How much the log was known to hold by the owner of that fence; None: by anybody, which is for who follows."""
        if fence is not None:
            return self.acknowledged.get((session_id, fence), 0)
        return max((length for (known, _), length in self.acknowledged.items() if known == session_id), default=0)

    def told(self, session_id: str, fence: int, length: int) -> None:
        key = session_id, fence
        self.acknowledged[key] = max(length, self.acknowledged.get(key, 0))


class SimStore:
    """The log itself. `down_until`: nothing is answered before. `ack_lost`, `effect_lost`: chances, by call."""

    def __init__(self, loop: SimLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.report: Callable[[str], None] = lambda _: None
        self.on_written: Callable[[StoredSession], None] = lambda _: None
        self.memory = MemoryStore(clock=lambda: 1.0 + loop.time())
        self.books = Books()
        self.delay = (0.0001, 0.002)
        self.down_until = 0.0
        self.ack_lost = self.effect_lost = 0.0
        self._saved = self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        return {name: copy.deepcopy(value) for name, value in vars(self.memory).items() if not callable(value)}

    def save(self) -> None:
        """What a restart that loses the latest writes comes back with."""
        self._saved = self._snapshot()

    def restart(self, kept: str) -> None:
        """kept: "all", "saved" (behind) or "nothing"."""
        if kept == "all":
            return
        self.books.losses += 1
        state = copy.deepcopy(self._saved) if kept == "saved" else _empty(self._saved)
        vars(self.memory).update(state)
        logs = self.memory._logs
        self.books.newest = {key: logs[key].fence if key in logs else 0 for key in self.books.newest}

    @property
    def running(self) -> list[str]:
        """Sessions that have no end in the log."""
        return [session_id for session_id, log in self.memory._logs.items() if log.reason is None]

    def view(self) -> StoreView:
        return StoreView(self)


def _empty(state: dict[str, Any]) -> dict[str, Any]:
    return {name: type(value)() if isinstance(value, dict) else value for name, value in state.items()}


class StoreView:
    """Implements SessionStore for one orchestrator, whatever methods that has."""

    durability = "redis"  # as far as an orchestrator can tell: it outlives the process

    def __init__(self, store: SimStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store.memory, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def called(*args: Any, **named: Any) -> Any:
            return await self._call(name, args, named)

        return called

    async def close(self) -> None:
        return

    async def _call(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        store = self._store
        await self._travel()
        effect, answer = store.random.random() >= store.effect_lost, None
        if effect:
            try:
                answer = await self._perform(name, args, named)
            except StoreError as error:
                answer = error
        await self._travel()
        if not effect or store.random.random() < store.ack_lost:
            await asyncio.sleep(ANSWER_TIMEOUT)
            raise StoreUnavailable("the session log does not answer: the connection was lost")
        if isinstance(answer, StoreError):
            raise answer
        self._record(name, args, answer)
        return answer

    async def _travel(self) -> None:
        """One way, at most as long as an answer is waited for."""
        store = self._store
        await asyncio.sleep(store.random.uniform(*store.delay))
        outage = store.down_until - store.loop.time()
        if outage > 0:
            await asyncio.sleep(min(outage, ANSWER_TIMEOUT))
        if outage > ANSWER_TIMEOUT:
            raise StoreUnavailable("the session log does not answer: timed out")

    async def _perform(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Only the newest fence writes, a fence is granted once, and what is not there is not claimed."""
        store, books = self._store, self._store.books
        if name == "claim" and args[0] not in store.memory._logs:
            answer = await store.memory.claim(*args, **named)  # which is to refuse it
            store.report(f"{args[0]} was claimed, and has no log")
            return answer
        answer = await getattr(store.memory, name)(*args, **named)
        if name in WRITES and args[1] != books.newest.get(args[0]):
            store.report(f"{name} of {args[0]} under fence {args[1]}, the newest is {books.newest.get(args[0])}")
        if name == "create":
            self._grant(args[0].session_id, answer, len(args[0].prompt))
        elif name == "claim":
            self._grant(args[0], answer.fence, answer.length)
            books.claims += 1
        elif name == "recreate":
            books.restored += 1
            books.newest[args[0].session_id] = max(args[3], books.newest.get(args[0].session_id, 0))
        if name in WRITES or name == "recreate":
            log = await store.memory.read(args[0] if name in WRITES else args[0].session_id)
            if log is not None:
                store.on_written(log)
        return answer

    def _grant(self, session_id: str, fence: int, length: int) -> None:
        if fence <= self._store.books.newest.get(session_id, 0):
            self._store.report(f"fence {fence} of {session_id} was granted before")
        self._store.books.granted(session_id, fence, length)

    def _record(self, name: str, args: tuple[Any, ...], answer: Any) -> None:
        """The acknowledgement is about to reach the caller."""
        books = self._store.books
        if name in WRITES:
            books.told(args[0], args[1], args[2] + len(args[3]))
        elif name == "recreate":
            books.told(args[0].session_id, args[3], len(args[0].prompt) + len(args[1]))
        elif name in ("read", "tail") and answer is not None:
            books.told(args[0], answer.fence, answer.length)
