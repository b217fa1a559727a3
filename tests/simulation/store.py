"""The session log behind a line that fails: every orchestrator has its own view of one in-memory store.

Each call takes time. Its effect may be lost, or come after its caller has given up; its acknowledgement may be lost.
Here is also what only Redis can suffer: a clock of its own, memory that is full, logs of which a key is gone or
damaged. `Books` records, by itself, what was granted and acknowledged: the facts that the invariants are held against.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from orchestrator.store import LEASE_S, DamagedLog, SessionRecord, StoredSession, StoreError, StoreUnavailable
from orchestrator.store.sqlite import UNREADABLE, SessionRow, SqliteStore
from tests.simulation.loop import EPOCH, WORLD, SimLoop, in_strand

# What a call waits for when its answer does not come.
ANSWER_TIMEOUT = 2.0
# What needs memory; a sign of life, an append of no tokens and no end, needs none.
GROWING = ("create", "recreate", "claim", "append", "cancel", "bind_request", "call_roll", "missed", "ping")
# What reads a log.
READS = ("read", "tail", "claim")
NEED_RECORD = ("read", "claim")
# Seconds of silence after which neither a session's owner nor a reader comes back.
ORPHANED_AFTER = LEASE_S + 30.0
# The part of a log that only those need who do not own it.
RECORD = "record"
# Seconds after which a late effect comes, beside those that its caller waits for its answer.
LATEST = 15.0


@dataclass
class Books:
    """newest: fence by session, as far as the log can know.

    ever: all that were granted. acknowledged: length of the log that the owner (session, fence) was told of. claims,
    restored: how often. losses: how often the store has come back without what it had. alive: when a session's owner
    last wrote. orphaned: those whose owner was silent, by the time that has really passed, until nobody waited for it.
    """

    newest: dict[str, int] = field(default_factory=dict)
    ever: set[tuple[str, int]] = field(default_factory=set)
    acknowledged: dict[tuple[str, int], int] = field(default_factory=dict)
    alive: dict[str, float] = field(default_factory=dict)
    orphaned: set[str] = field(default_factory=set)
    claims: int = 0
    restored: int = 0
    losses: int = 0

    def granted(self, session_id: str, fence: int, length: int) -> None:
        self.newest[session_id] = max(fence, self.newest.get(session_id, 0))
        self.ever.add((session_id, fence))
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
    """The log itself. `down_until`: nothing is answered before. `cut_until`: nor, before, to that orchestrator.

    `full_until`: nothing more fits before. `ack_lost`, `effect_lost`, `effect_late`: chances, by call. `off`:
    seconds by which its clock is ahead. `damaged`: sessions of whose log a key is gone, or cannot be read, by its name.
    """

    def __init__(self, loop: SimLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.report: Callable[[str], None] = lambda _: None
        self.on_written: Callable[[StoredSession], None] = lambda _: None
        self.off = 0.0
        # Of all steps the worst: claims may get equal fences, as they would once in a million times.
        self.memory = SqliteStore(clock=lambda: EPOCH + loop.time() + self.off, step=lambda: 0)
        self.books = Books()
        self.delay = (0.0001, 0.002)
        self.down_until = self.full_until = 0.0
        self.cut_until: dict[str, float] = {}
        self.ack_lost = self.effect_lost = self.effect_late = 0.0
        self.damaged: dict[str, str] = {}
        self._outages: list[tuple[float, float]] = []
        self.save()

    def _snapshot(self) -> sqlite3.Connection:
        saved = sqlite3.connect(":memory:")
        self.memory._db.backup(saved)
        return saved

    def held(self, session_id: str) -> SessionRow | None:
        return self.memory._held(session_id)

    def fail(self, seconds: float) -> None:
        """Answer nobody for so long."""
        now = self.loop.time()
        self.down_until = max(self.down_until, now + seconds)
        self._outages.append((now, now + seconds))

    def recover(self) -> None:
        """Nothing goes wrong any more. Clocks, and what is damaged, stay as they are."""
        now = self.loop.time()
        self._outages = [(began, min(until, now)) for began, until in self._outages]
        self.down_until = self.full_until = self.ack_lost = self.effect_lost = self.effect_late = 0.0
        self.cut_until.clear()

    def troubled(self, party: str) -> bool:
        """Whether it takes nothing now that this orchestrator would write."""
        return max(self.down_until, self.full_until, self.cut_until.get(party, 0.0)) > self.loop.time()

    def down_for(self, since: float) -> float:
        """Seconds, of those since then, in which it answered nobody."""
        total, reached = 0.0, since
        for began, until in self._outages:
            total += max(0.0, min(until, self.loop.time()) - max(began, reached))
            reached = max(reached, until)
        return total

    def damage(self, session_id: str, key: str) -> None:
        """Have it lose a key of the session: `meta`, `tokens` or `outcomes`; or have its RECORD make no sense."""
        self.books.losses += 1
        if key == "meta":  # what is left says nothing, and is overwritten
            self.memory._forget(session_id)
            self.books.newest[session_id] = 0
            return
        self.damaged[session_id] = key
        if key != RECORD:
            self._clear(session_id)

    def _clear(self, session_id: str) -> None:
        """A log of which only a part is left, or that nobody can read, has a gap from its start for its owner."""
        self.memory._db.execute("UPDATE sessions SET length = ? WHERE session_id = ?", (UNREADABLE, session_id))

    def notice_damage(self, name: str, session_id: str) -> None:
        """Whoever cannot read the record says so in the log."""
        if name in NEED_RECORD and self.damaged.get(session_id) == RECORD:
            self.damaged[session_id] = "damaged record"
            self._clear(session_id)

    def check(self, name: str, args: tuple[Any, ...]) -> None:
        """Raises StoreError where Redis refuses what a log in memory would take."""
        if (
            self.full_until > self.loop.time()
            and name in GROWING
            and (name != "append" or args[2].tokens or args[2].end)
        ):
            raise StoreUnavailable("the session log takes no writes: Redis has no memory left", "OOM", refused=True)
        damage = self.damaged.get(subject_of(args))
        needed = NEED_RECORD if damage == RECORD else READS
        if damage and name in needed and self.held(args[0]) is not None:
            raise DamagedLog(f"session {args[0]}: its {damage} cannot be read")

    def state_of(self, session_id: str) -> tuple[object, ...] | None:
        log = self.held(session_id)
        return None if log is None else (log.fence, log.owner, log.length, log.reason, log.cancelled)

    def record_of(self, session_id: str) -> SessionRecord:
        """Of a log that can be read."""
        return self.memory._whole(self.memory._log(session_id)).record

    def save(self) -> None:
        """What a restart that loses the latest writes comes back with."""
        self._saved, self._saved_damage = self._snapshot(), dict(self.damaged)

    def restart(self, kept: str) -> None:
        """kept: "all", "saved" (behind) or "nothing"."""
        if kept == "all":
            return
        self.books.losses += 1
        (self._saved if kept == "saved" else SqliteStore()._db).backup(self.memory._db)
        self.damaged = dict(self._saved_damage) if kept == "saved" else {}
        fences = dict(self.memory._db.execute("SELECT session_id, fence FROM sessions"))
        self.books.newest = {key: fences.get(key, 0) for key in self.books.newest}

    @property
    def running(self) -> list[str]:
        """Sessions that have no end in the log."""
        query = "SELECT session_id FROM sessions WHERE reason IS NULL AND expires > ? ORDER BY id"
        found = self.memory._db.execute(query, (self.memory._clock(),))
        return [session_id for (session_id,) in found if session_id not in self.damaged]

    def view(self, party: str) -> StoreView:
        return StoreView(self, party)


def subject_of(args: tuple[Any, ...]) -> str:
    """The session that a call is about, by its first argument; "" where that is something else."""
    first = args[0] if args else ""
    return first if isinstance(first, str) else getattr(first, "session_id", "")


class StoreView:
    """Implements SessionStore for one orchestrator, `party`, whatever methods that has."""

    durability = "redis"  # as far as an orchestrator can tell: it outlives the process

    def __init__(self, store: SimStore, party: str) -> None:
        self._store = store
        self._party = party

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
        if store.effect_late and store.random.random() < store.effect_late:
            effect = False
            in_strand(store.loop, WORLD, self._perform_late(name, args, named))
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
        outage = max(store.down_until, store.cut_until.get(self._party, 0.0)) - store.loop.time()
        if outage > 0:
            await asyncio.sleep(min(outage, ANSWER_TIMEOUT))
        if outage > ANSWER_TIMEOUT:
            raise StoreUnavailable("the session log does not answer: timed out")

    async def _perform_late(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """The server gets to it when its caller has long given up."""
        await asyncio.sleep(ANSWER_TIMEOUT + self._store.random.uniform(0.0, LATEST))
        with suppress(StoreError):
            await self._perform(name, args, named)

    async def _perform(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What is refused has changed nothing."""
        store, session_id = self._store, subject_of(args)
        store.notice_damage(name, session_id)
        before = store.state_of(session_id)
        try:
            store.check(name, args)
            return await self._perform_whole(name, args, named)
        except StoreError:
            after = store.state_of(session_id)
            if after != before:
                store.report(f"{name} was refused, and has changed {before} to {after}")
            raise

    async def _perform_whole(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Only the newest fence writes, a fence is granted once, and what is not there is not claimed."""
        store, books, session_id = self._store, self._store.books, subject_of(args)
        if name == "claim" and store.held(args[0]) is None:
            answer = await store.memory.claim(*args, **named)  # which is to refuse it
            store.report(f"{args[0]} was claimed, and has no log")
            return answer
        answer = await getattr(store.memory, name)(*args, **named)
        if name == "delete" or (name == "recreate" and store.damaged.get(session_id) != RECORD):
            store.damaged.pop(session_id, None)
        if name == "append" and args[1] != books.newest.get(args[0]):
            store.report(f"{name} of {args[0]} under fence {args[1]}, the newest is {books.newest.get(args[0])}")
        if name == "create":
            if store.full_until > store.loop.time():
                store.report("a session was begun that cannot be logged")
            self._grant(args[0].session_id, answer, len(args[0].prompt))
        elif name == "claim":
            if store.loop.time() - books.alive.get(session_id, 0.0) > ORPHANED_AFTER:
                books.orphaned.add(session_id)
            self._grant(args[0], answer.fence, answer.length)
            books.claims += 1
        elif name == "recreate":
            books.restored += 1
            books.newest[args[0].session_id] = max(args[2], books.newest.get(args[0].session_id, 0))
        if name in ("append", "create", "claim", "recreate"):
            books.alive[session_id] = store.loop.time()
        if name in ("append", "recreate"):
            log = await store.memory.read(args[0] if name == "append" else args[0].session_id)
            if log is not None:
                store.on_written(log)
        return answer

    def _grant(self, session_id: str, fence: int, length: int) -> None:
        books = self._store.books
        if fence <= books.newest.get(session_id, 0) or (session_id, fence) in books.ever:
            self._store.report(f"fence {fence} of {session_id} was granted before")
        books.granted(session_id, fence, length)

    def _record(self, name: str, args: tuple[Any, ...], answer: Any) -> None:
        """The acknowledgement is about to reach the caller."""
        books = self._store.books
        if name == "append":
            books.told(args[0], args[1], args[2].position + len(args[2].tokens))
        elif name == "recreate":
            books.told(args[0].session_id, args[2], len(args[0].prompt) + len(args[1].tokens))
        elif name in ("read", "tail") and answer is not None:
            books.told(args[0], answer.fence, answer.length)
