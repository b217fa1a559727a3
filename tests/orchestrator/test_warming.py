"""What a verifier that has started is told of ended sessions: which ones, in what order, how much, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from orchestrator.peers import warming
from orchestrator.peers.peer import VerifierPeer
from orchestrator.peers.warming import Warming
from orchestrator.store import KnownSession, SessionRecord, StoredSession, StoreUnavailable
from orchestrator.store.sqlite import SqliteStore
from orchestrator.tenants import Access
from specwire.core.law.sampling import Sampling, with_rule
from specwire.core.messages import Append, End, FinishReason, Outcome
from specwire.core.text import Stopping
from specwire.rpc.keys import Keys
from specwire.v1 import common_pb2, verify_pb2
from tests.orchestrator.test_driver import SilentLink
from tests.wait import until

ACCESS = Access(Keys({"the-token-of-ada": "ada", "the-token-of-bob": "bob"}))
TTL = 600.0
WORDS = "v"
LONG = 3 * warming.MESSAGE_TOKENS // 4


def info(instance: int = 1, room: int = 1 << 20, context: int = 1 << 16) -> common_pb2.GetModelInfoResponse:
    return common_pb2.GetModelInfoResponse(
        vocabulary_fingerprint=WORDS, context=context, text_room=room, instance=instance, slots=4
    )


class Rig:
    """A log, and a verifier whose link keeps what is sent. `now`: the log's clock."""

    def __init__(self, access: Access = ACCESS, **told: int) -> None:
        self.now = 1000.0
        self.store = SqliteStore(clock=lambda: self.now)
        self.peer = VerifierPeer(SilentLink(), self._look, lambda _: None)
        self.peers = [self.peer]
        self.warming = Warming(self.store, access, lambda: self.peers)
        self.told = told

    def _look(self) -> None:
        self.warming.look()

    async def ended(
        self, session_id: str, output: int = 3, reason: FinishReason = FinishReason.LENGTH, **changes: Any
    ) -> None:
        fields: dict[str, Any] = {"tenant": "ada", "vocabulary_fingerprint": WORDS, "sampling": Sampling(), **changes}
        record = SessionRecord(session_id=session_id, prompt=(5, 6), stopping=Stopping(output), **fields)
        fence = await self.store.create(record, TTL)
        tokens = tuple(index % 50 for index in range(output))
        end = End(reason, "", output)
        await self.store.append(session_id, fence, Append(2, tokens, (Outcome.DIRECT,) * output, end))
        self.now += 1

    @property
    def sent(self) -> list[verify_pb2.ConnectVerifyRequest]:
        return cast("SilentLink", self.peer.link).sent  # type: ignore[return-value]  # all that is sent here

    @property
    def texts(self) -> list[verify_pb2.EarlierText]:
        return [text for message in self.sent for text in message.texts]

    @property
    def ids(self) -> list[str]:
        return [text.session_id for text in self.texts]

    async def start(self, instance: int = 1) -> list[str]:
        """The verifier starts and is told all that it is to be told; the ids of it."""
        self.sent.clear()
        self.peer.on_up(info(instance, **self.told))
        await until(lambda: not self.peer.wants_texts)
        return self.ids


@asynccontextmanager
async def rig(access: Access = ACCESS, **told: int) -> AsyncGenerator[Rig, None]:
    scene = Rig(access, **told)
    try:
        yield scene
    finally:
        await scene.warming.stop()


async def test_the_whole_texts_of_ended_sessions_in_their_tenants_scopes() -> None:
    async with rig() as on:
        await on.ended("one")
        await on.ended("two", tenant="bob")
        assert await on.start() == ["one", "two"]
        assert [list(text.tokens) for text in on.texts] == [[5, 6, 0, 1, 2]] * 2
        assert [text.cache_scope for text in on.texts] == [ACCESS.cache_scope("ada"), ACCESS.cache_scope("bob")]
        assert {text.vocabulary_fingerprint for text in on.texts} == {WORDS}


@pytest.mark.parametrize(
    "changes",
    [
        {"private": True},
        {"ngram": False},
        {"reason": FinishReason.ERROR},
        {"sampling": with_rule(Sampling(temperature=1.0), "rejection")},
        {"sampling": with_rule(Sampling(temperature=1.0), "threshold(0.1)")},
        {"tenant": ""},
        {"tenant": "eve"},
        {"vocabulary_fingerprint": "w"},
        {"output": 1 << 16},
    ],
    ids=str,
)
async def test_neither_who_keeps_to_himself_nor_what_a_verifier_would_not_keep(changes: dict[str, Any]) -> None:
    async with rig() as on:
        await on.ended("before")
        await on.ended("left out", **changes)
        await on.ended("behind")
        assert await on.start() == ["before", "behind"]


async def test_neither_what_was_deleted_nor_what_runs() -> None:
    async with rig() as on:
        await on.ended("deleted")
        await on.ended("kept")
        await on.store.delete("deleted")
        await on.store.create(SessionRecord("runs", (5, 6), Sampling(), Stopping(9), tenant="ada"), TTL)
        assert await on.start() == ["kept"]


async def test_nothing_without_keys_and_nothing_to_one_without_room() -> None:
    for access, room in ((Access(), 1 << 20), (ACCESS, 0)):
        async with rig(access, room=room) as on:
            await on.ended("one", tenant="" if access.keys is None else "ada")
            on.peer.on_up(info(room=room))
            await asyncio.sleep(0.05)
            assert not on.sent


async def test_the_latest_that_fit_come_the_oldest_first() -> None:
    async with rig(room=warming.PART * 400) as on:
        for number in range(8):
            await on.ended(str(number), output=98)
        assert await on.start() == ["4", "5", "6", "7"]


async def test_tenants_take_turns() -> None:
    async with rig(room=warming.PART * 400) as on:
        await on.ended("bob's", output=98, tenant="bob")
        for number in range(8):
            await on.ended(str(number), output=98)
        assert await on.start() == ["bob's", "5", "6", "7"]


async def test_of_many_sessions_the_latest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "MOST_OF_A_TENANT", 3)
    async with rig() as on:
        for number in range(20):
            await on.ended(str(number))
        assert await on.start() == ["17", "18", "19"]


async def test_in_small_messages() -> None:
    async with rig() as on:
        for number in range(3):
            await on.ended(str(number), output=LONG)
        for number in range(3, 7):
            await on.ended(str(number))
        await on.start()
        assert [len(message.texts) for message in on.sent] == [1, 1, 5]


async def test_once_for_each_start_whatever_becomes_of_the_link() -> None:
    async with rig() as on:
        await on.ended("one")
        assert await on.start() == ["one"]
        on.sent.clear()
        on.peer.on_down()
        on.peer.on_up(info())
        await asyncio.sleep(0.05)
        assert not on.sent
        assert await on.start(instance=2) == ["one"]


class Held(SqliteStore):
    """Reads wait until `go`, or fail."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self.reading, self.go = asyncio.Event(), asyncio.Event()
        self.fails = False

    async def read(self, session_id: str) -> StoredSession | None:
        self.reading.set()
        await self.go.wait()
        if self.fails:
            raise StoreUnavailable("the session log does not answer")
        return await super().read(session_id)


async def held_rig(on: Rig) -> Held:
    store = Held(lambda: on.now)
    on.store = on.warming._store = store
    await on.ended("one")
    on.peer.on_up(info())
    await store.reading.wait()
    return store


async def test_a_link_that_is_lost_meanwhile_ends_it_and_the_next_one_begins_anew() -> None:
    async with rig() as on:
        store = await held_rig(on)
        on.peers.clear()  # as one whose link is down
        on.warming.look()
        await until(lambda: not on.warming._tasks)
        assert on.peer.wants_texts
        on.peers.append(on.peer)
        store.go.set()
        assert await on.start() == ["one"]


async def test_it_ends_with_the_orchestrator() -> None:
    async with rig() as on:
        await held_rig(on)
        await on.warming.stop()
        assert not on.warming._tasks
        on.warming.look()
        assert not on.warming._tasks


async def test_a_log_that_does_not_answer_is_not_asked_again_for_the_same_start() -> None:
    async with rig() as on:
        store = await held_rig(on)
        store.fails = True
        store.go.set()
        await until(lambda: not on.peer.wants_texts)
        assert not on.sent


async def test_what_was_read_at_the_deadline_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "READING_LIMIT_S", 0.2)
    async with rig() as on:
        store = await held_rig(on)

        async def slow(session_id: str) -> StoredSession | None:
            if session_id == "slow":
                await asyncio.sleep(60.0)
            return await SqliteStore.read(store, session_id)

        store.go.set()
        await until(lambda: not on.peer.wants_texts)
        monkeypatch.setattr(store, "read", slow)
        await on.ended("slow")
        await on.ended("latest")
        assert await on.start(instance=2) == ["latest"]


async def test_a_session_that_is_told_twice_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as on:
        await on.ended("one")
        known = on.store.known_sessions

        async def twice() -> AsyncGenerator[KnownSession, None]:
            async for each in known():
                yield each
                yield each

        monkeypatch.setattr(on.store, "known_sessions", twice)
        assert await on.start() == ["one"]
