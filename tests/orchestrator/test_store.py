"""The session log's contract, for every store."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.store import (
    LEASE_S,
    Bound,
    ContentMismatch,
    DeletedSession,
    Fenced,
    Gap,
    MissingSession,
    SessionExists,
    SessionRecord,
    SessionStore,
    StaleLog,
    StoredSession,
    StoreUnavailable,
    open_store,
)
from orchestrator.store.base import random_step
from orchestrator.store.sqlite import SqliteStore, Work
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Append, End, FinishReason, Outcome, TokenLogprobs
from specwire.core.text import Stopping
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.redis_groups import cluster, cluster_url
from tests.wait import asked, raised, until

TTL = 60.0
A, R, B, D = Outcome.ACCEPTED, Outcome.RECOVERED, Outcome.BONUS, Outcome.DIRECT


@pytest.fixture(scope="module")
def several() -> Iterator[str]:
    with cluster() as nodes:
        yield cluster_url(nodes)


@pytest.fixture(params=["memory", "file", "file-fsync", "redis", "cluster"])
async def store(
    request: pytest.FixtureRequest, server: RedisServer, several: str, tmp_path: Path
) -> AsyncIterator[SessionStore]:
    file = f"file:{tmp_path / 'log'}"
    urls = {"memory": "memory:", "file": file, "file-fsync": file, "redis": server.url, "cluster": several}
    level = request.param if request.param == "file-fsync" else ""
    opened = await open_store(urls[request.param], durability=level)
    yield opened
    await opened.close()


def record_of(session_id: str, **changes: object) -> SessionRecord:
    fields: dict[str, object] = {
        "session_id": session_id,
        "prompt": (5, 0, 4_000_000_000),
        "sampling": Sampling(0.7, 40, 0.9, seed=(1 << 64) - 1, choice=3),
        "stopping": Stopping(16, frozenset({9, 2}), ignore_eos=True),
        "tenant": "a tenant",
        "request_id": "r:1",
        "stop": ("\n\n", "ende ü"),
        "drafting": False,
        "weights_fingerprint": "w",
        "vocabulary_fingerprint": "v",
        "tokenizer_fingerprint": "t",
        "dtype": "bfloat16",
        "created": 1_700_000_000.25,
    }
    return SessionRecord(**{**fields, **changes})  # type: ignore[arg-type]  # any field, by name


def alter(store: SqliteStore, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """Behind the store's back; the rows that it finds, if any."""
    return store._db.execute(statement, values).fetchall()


def lose_logs(store: SqliteStore) -> None:
    alter(store, "DELETE FROM sessions")


def logs_of(store: SqliteStore) -> set[str]:
    """The sessions that have a log, what has expired and is not yet forgotten among them."""
    return {session_id for (session_id,) in alter(store, "SELECT session_id FROM sessions")}


def replace_output(store: SqliteStore, session_id: str, *tokens: int) -> None:
    log = store._held(session_id)
    assert log is not None
    alter(store, "DELETE FROM texts WHERE session = ? AND position >= ?", log.id, log.prompt)
    store._add(log.id, log.prompt, tokens, (A,) * len(tokens), ())
    alter(store, "UPDATE sessions SET length = ?, last = prompt WHERE id = ?", log.prompt + len(tokens), log.id)


class UnsteadyStore(SqliteStore):
    """In memory; its clock goes on by itself and by what a test adds.

    asked: how often, by call. silent: calls that it does not answer. lost_before, lost_after: so many appends are not
    answered, before they take effect or after. refuses: the former are refused.
    """

    def __init__(self) -> None:
        self.late_s = 0.0
        super().__init__(clock=lambda: time.time() + self.late_s)
        self.asked: Counter[str] = Counter()
        self.silent: set[str] = set()
        self.lost_before = self.lost_after = 0
        self.refuses = False

    async def done(self, work: Work) -> object:
        name: str = work.func.__name__  # type: ignore[attr-defined]  # of a partial method
        self.asked[name] += 1
        if name in self.silent:
            raise StoreUnavailable("no answer")
        if name == "append" and self.lost_before:
            self.lost_before -= 1
            raise StoreUnavailable("lost before", refused=self.refuses)
        answer = await super().done(work)
        if name == "append" and self.lost_after:
            self.lost_after -= 1
            raise StoreUnavailable("lost after")
        return answer


async def log_of(store: SessionStore, session_id: str) -> StoredSession:
    log = await store.read(session_id)
    assert log is not None
    return log


async def bound(store: SessionStore, tenant: str, request_id: str, session_id: str) -> str:
    return (await store.bind_request(tenant, request_id, session_id, TTL)).session_id


async def started(store: SessionStore, name: str) -> tuple[str, int]:
    session_id = f"{name}-{id(store)}"
    return session_id, await store.create(record_of(session_id), TTL)


async def test_what_is_written_is_read(store: SessionStore) -> None:
    session_id, fence = await started(store, "round")
    first = await store.append(session_id, fence, Append(3, (7, 0), (A, R)))
    last = await store.append(session_id, fence, Append(5, (1,), (D,)))
    assert (first.length, last.length, last.cancelled) == (5, 6, False)
    log = await log_of(store, session_id)
    assert log.record == record_of(session_id)
    assert (log.fence, log.tokens, log.outcomes, log.reason, log.length) == (fence, (7, 0, 1), (A, R, D), None, 6)
    assert await store.read("nobody") is None


async def test_a_claim_s_fence_is_above_all_that_the_claimer_knows(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the log's clock says, and whatever claim it has lost: by one and a step."""
    session_id, first = await started(store, "newest")
    ahead = first + 3_600_000_000
    steps = iter([5, 0])
    monkeypatch.setattr(store, "_step", lambda: next(steps))
    assert (await store.claim(session_id, "second", ahead)).fence == ahead + 1 + 5
    assert (await store.claim(session_id, "third", first)).fence == ahead + 1 + 5 + 1


async def test_a_claim_s_fence_is_its_time_by_the_clock_that_is_ahead(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no step later: two claims of the same second have their order, whoever has lost the first of them."""
    session_id, first = await started(store, "clock")
    ahead = first + 3_600_000_000
    monkeypatch.setattr(store, "_step", lambda: 1_000_000)
    assert (await store.claim(session_id, "second", first, ahead)).fence == ahead
    assert (await store.claim(session_id, "third", ahead, ahead + 1)).fence == ahead + 1
    assert (await store.claim(session_id, "fourth", first, ahead)).fence == ahead + 1 + 1 + 1_000_000


async def test_a_claim_that_the_log_has_lost_has_another_fence_than_the_next() -> None:
    """Whose claimer knows nothing of it, and whose clocks are all behind: the step is what keeps them apart."""
    steps = iter([3, 0])
    behind = SqliteStore(clock=lambda: 5.0, step=lambda: next(steps))
    fence = await behind.create(record_of("s"), TTL)
    lost = (await behind.claim("s", "second")).fence
    alter(behind, "UPDATE sessions SET fence = ?", fence)
    assert (await behind.claim("s", "third")).fence != lost
    assert len({random_step() for _ in range(8)}) > 1


async def test_no_fence_brings_a_deleted_session_back(store: SessionStore) -> None:
    """A claim may have been lost whose fence a quicker clock gave."""
    session_id, fence = await started(store, "gone")
    await store.delete(session_id)
    ahead = fence + 3_600_000_000
    await raised(Fenced, store.append(session_id, ahead, Append(3, (7,), (A,))))
    await raised(Fenced, store.recreate(record_of(session_id), Append(3, (7,), (A,)), ahead, TTL))
    await raised(DeletedSession, store.read(session_id))


async def test_what_is_reported_of_tokens_is_kept_with_them(store: SessionStore) -> None:
    """Written in pieces, repeated, ended, claimed, and written again after a loss."""
    told = tuple(TokenLogprobs(-0.5 * index, ((index, -0.5 * index), (9, -4.0))[: index % 3]) for index in range(5))
    session_id = f"reports-{id(store)}"
    record = record_of(session_id, sampling=Sampling(repetition_penalty=1.25, logit_bias=((3, -1.5),), logprobs=2))
    fence = await store.create(record, TTL)
    await store.append(session_id, fence, Append(3, (7, 8), (A, B), logprobs=told[:2]))
    await store.append(session_id, fence, Append(4, (8, 9), (B, B), logprobs=told[1:3]))
    await store.append(session_id, fence, Append(6, (), ()))
    claimed = await store.claim(session_id, "second")
    assert (claimed.tokens, claimed.logprobs, claimed.record) == ((7, 8, 9), told[:3], record)
    await store.recreate(record, Append(3, (7, 8, 9, 1), (A, B, B, D), logprobs=told[:4]), claimed.fence, TTL, "second")
    await store.append(
        session_id, claimed.fence, Append(7, (2,), (D,), End(FinishReason.LENGTH, "", 9), logprobs=told[4:])
    )
    log = await log_of(store, session_id)
    assert (log.tokens, log.logprobs) == ((7, 8, 9, 1, 2), told)
    await store.recreate(record, Append(3, (7,), (A,), logprobs=told[:1]), claimed.fence + 1, TTL, "third")
    log = await log_of(store, session_id)
    assert (log.tokens, log.logprobs, log.fence) == ((7, 8, 9, 1, 2), told, claimed.fence + 1)


async def test_an_equal_append_repeated_changes_nothing(store: SessionStore) -> None:
    session_id, fence = await started(store, "repeat")
    for _ in range(2):
        assert (await store.append(session_id, fence, Append(3, (7, 8), (A, B)))).length == 5
    assert (await store.append(session_id, fence, Append(3, (7,), (A,)))).length == 5
    assert (await store.append(session_id, fence, Append(4, (8, 9), (A, B)))).length == 6
    assert (await store.append(session_id, fence, Append(6, (), ()))).length == 6
    log = await log_of(store, session_id)
    assert (log.tokens, log.outcomes) == ((7, 8, 9), (A, B, B))


async def test_the_log_wins_over_what_does_not_fit(store: SessionStore) -> None:
    """Other content, a gap, or an end that is none: whatever it is changes nothing."""
    session_id, fence = await started(store, "unfit")
    await store.append(session_id, fence, Append(3, (7, 8), (A, R)))
    end = End(FinishReason.EOS, "", 1)
    for position, tokens, ends in (
        *((3, (7, 9), None), (4, (9, 9), None), (0, (5, 1), None), (2, (1, 7, 8, 9), None)),
        *((3, (7,), end), (4, (9,), end)),
    ):
        with pytest.raises(ContentMismatch, match=session_id):
            await store.append(session_id, fence, Append(position, tokens, (A,) * len(tokens), ends))
    for ends in (None, end):
        await raised(Gap, store.append(session_id, fence, Append(6, (9,), (A,), ends)), "ends at 5, before 6")
    log = await log_of(store, session_id)
    assert (log.tokens, log.reason) == ((7, 8), None)


async def test_only_the_newest_fence_writes(store: SessionStore) -> None:
    session_id, old = await started(store, "fence")
    await store.append(session_id, old, Append(3, (7,), (A,)))
    claimed = await store.claim(session_id, "second")
    assert claimed.fence > old
    assert (claimed.tokens, claimed.owner) == ((7,), "second")
    for fence, refusal in ((old, Fenced), (claimed.fence + 1, StaleLog)):
        await raised(refusal, store.append(session_id, fence, Append(4, (8,), (A,))))
        await raised(refusal, store.append(session_id, fence, Append(4, (8,), (A,), End(FinishReason.EOS, "", 1))))
    assert (await store.append(session_id, claimed.fence, Append(4, (8,), (A,)))).length == 5


async def test_claims_race_to_distinct_fences(store: SessionStore) -> None:
    session_id, first = await started(store, "race")
    claims = await asyncio.gather(*(store.claim(session_id, str(owner)) for owner in range(8)))
    fences = [first, *(claim.fence for claim in claims)]
    assert len(set(fences)) == 9
    log = await log_of(store, session_id)
    assert log.fence == max(fences)


async def test_a_missing_log_is_never_claimed_nor_appended_to(store: SessionStore) -> None:
    await raised(MissingSession, store.claim("nobody", "me"), "nobody")
    await raised(MissingSession, store.append("nobody", 1, Append(0, (1,), (A,))))
    await raised(MissingSession, store.cancel("nobody"))
    await raised(MissingSession, store.delete("nobody"))
    assert await store.tail("nobody", 0) is None
    assert await store.read("nobody") is None


async def test_a_lost_log_is_written_again_and_the_highest_fence_wins(store: SessionStore) -> None:
    session_id = f"lost-{id(store)}"
    record = record_of(session_id)
    await store.recreate(record, Append(3, (7, 8), (A, B)), 1000, TTL)
    await store.recreate(record, Append(3, (7, 8), (A, B)), 1000, TTL)  # its answer was lost: again
    await store.recreate(record, Append(3, (7,), (A,)), 2000, TTL, owner="newer")
    await raised(Fenced, store.recreate(record, Append(3, (7, 8), (A, B)), 1999, TTL))
    log = await log_of(store, session_id)
    assert (log.record, log.tokens, log.outcomes, log.fence, log.owner) == (record, (7, 8), (A, B), 2000, "newer")
    assert (await store.append(session_id, 2000, Append(4, (8, 9), (A, D)))).length == 6


async def test_what_a_log_lost_at_its_end_is_supplied_and_never_taken_away(store: SessionStore) -> None:
    session_id, fence = await started(store, "behind")
    record = record_of(session_id)
    await store.append(session_id, fence, Append(3, (7,), (A,)))
    await raised(Gap, store.append(session_id, fence, Append(5, (9,), (D,))))
    await store.recreate(record, Append(3, (7, 8), (A, B)), fence, TTL)
    assert (await store.append(session_id, fence, Append(5, (9,), (D,)))).length == 6
    await store.recreate(record, Append(3, (7, 8), (A, B)), fence, TTL)  # it comes late: the append stays
    await raised(ContentMismatch, store.recreate(record, Append(3, (7, 9), (A, B)), fence, TTL))
    log = await log_of(store, session_id)
    assert (log.tokens, log.outcomes) == ((7, 8, 9), (A, B, D))
    await store.append(session_id, fence, Append(6, (), (), End(FinishReason.EOS, "", 3)))
    await store.recreate(record, Append(3, (7, 8), (A, B)), fence, TTL)
    await raised(ContentMismatch, store.recreate(record, Append(3, (7, 8, 9, 1), (A, B, D, D)), fence, TTL))
    ended = await log_of(store, session_id)
    assert (ended.tokens, ended.reason) == ((7, 8, 9), FinishReason.EOS)


async def test_an_older_state_that_came_back_gives_way_to_the_newest_fence(store: SessionStore) -> None:
    session_id, old = await started(store, "older")
    await store.append(session_id, old, Append(3, (7,), (A,)))
    newer = old + 5_000_000
    await raised(StaleLog, store.append(session_id, newer, Append(5, (9,), (A,))), f"older fence {old}, not {newer}")
    await store.recreate(record_of(session_id), Append(3, (7, 8), (A, B)), newer, TTL, owner="newest")
    log = await log_of(store, session_id)
    assert (log.tokens, log.fence, log.owner) == ((7, 8), newer, "newest")
    await raised(Fenced, store.append(session_id, old, Append(5, (3,), (A,))))


@pytest.mark.parametrize("ends", [False, True])
async def test_what_an_owner_of_an_older_fence_wrote_is_never_taken_away(store: SessionStore, ends: bool) -> None:
    """Its claim may be the later one, on a log that had lost the other: its readers have seen what it wrote."""
    session_id, fence = await started(store, f"wrote-{ends}")
    record, newer = record_of(session_id), fence + 5_000_000
    end = End(FinishReason.EOS, "", 2) if ends else None
    await store.append(session_id, fence, Append(3, (1, 2), (A, R), end))
    for other in ((1, 3), (1, 3, 4), (2,)):
        with pytest.raises(ContentMismatch, match=session_id):
            await store.recreate(record, Append(3, other, (A,) * len(other)), newer, TTL, owner="lost")
    if ends:
        with pytest.raises(ContentMismatch, match=session_id):
            await store.recreate(record, Append(3, (1, 2, 5), (A, R, D)), newer, TTL, owner="lost")
    log = await log_of(store, session_id)
    assert (log.tokens, log.fence, log.owner, log.reason is not None) == ((1, 2), fence, "", ends)
    await store.recreate(record, Append(3, (1,), (D,)), newer, 30.0, owner="newest")
    log = await log_of(store, session_id)
    assert (log.tokens, log.outcomes, log.fence, log.owner) == ((1, 2), (A, R), newer, "newest")
    assert (log.reason is not None, log.text_length) == (ends, 2 if ends else 0)
    await raised(Fenced, store.append(session_id, fence, Append(5, (5,), (D,))))
    refusal = pytest.raises(ContentMismatch) if ends else nullcontext()
    with refusal:
        await store.append(session_id, newer, Append(4, (2, 5), (A, D)))


async def test_a_deleted_session_is_gone_and_comes_back_from_nobodys_memory(store: SessionStore) -> None:
    session_id, tenant = f"deleted-{id(store)}", f"tenant-{id(store)}"
    record = record_of(session_id, tenant=tenant)
    fence = await store.create(record, TTL)
    assert await bound(store, tenant, "r:1", session_id) == session_id
    await store.append(session_id, fence, Append(3, (7,), (A,)))
    await store.delete(session_id)
    await raised(DeletedSession, store.read(session_id))
    await raised(MissingSession, store.claim(session_id, "me"))
    await raised(MissingSession, store.cancel(session_id))
    await store.delete(session_id)  # its answer was lost: again
    await raised(Fenced, store.append(session_id, fence, Append(4, (), ())))
    await raised(Fenced, store.append(session_id, fence, Append(4, (), (), End(FinishReason.EOS, "", 1))))
    await raised(Fenced, store.recreate(record, Append(3, (7,), (A,)), fence, TTL))
    await raised(SessionExists, store.create(record, TTL))
    await raised(DeletedSession, store.read(session_id))
    assert await bound(store, tenant, "r:1", "another") == "another"


async def test_an_owner_gives_signs_of_life_and_is_missed_without(store: SessionStore) -> None:
    session_id, fence = await started(store, "life")
    await asyncio.sleep(0.05)
    log = await log_of(store, session_id)
    assert log.silent_s >= 0.04
    assert not log.abandoned
    assert replace(log, silent_s=LEASE_S + 1).abandoned
    assert not replace(log, silent_s=LEASE_S + 1, reason=FinishReason.EOS).abandoned
    await asyncio.sleep(0.2)
    spoken = time.monotonic()
    await store.append(session_id, fence, Append(3, (), ()))
    again = await log_of(store, session_id)
    assert again.silent_s <= time.monotonic() - spoken + 0.1  # and not the silence before
    assert (await store.claim(session_id, "me")).silent_s < 0.05


async def test_instants_are_kept(store: SessionStore) -> None:
    before = time.time()
    session_id, fence = await started(store, "instants")
    log = await log_of(store, session_id)
    assert before - 1 < log.claimed < time.time() + 1
    assert log.ended is None
    await store.append(session_id, fence, Append(3, (), (), End(FinishReason.EOS, "", 0)))
    log = await log_of(store, session_id)
    assert log.ended is not None
    assert log.claimed <= log.ended < time.time() + 1


async def is_gone(store: SessionStore, session_id: str) -> bool:
    return await store.read(session_id) is None


async def is_bound_anew(store: SessionStore, tenant: str) -> bool:
    return await bound(store, tenant, "r", "new") == "new"


async def test_an_ended_log_is_kept_for_its_retention_which_a_claim_tells(store: SessionStore) -> None:
    session_id = f"retention-{id(store)}"
    await store.create(record_of(session_id), TTL, "first", 0.05)
    claimed = await store.claim(session_id, "second")
    assert claimed.retention_s == 0.05
    await store.append(session_id, claimed.fence, Append(3, (7,), (A,), End(FinishReason.EOS, "", 1)))
    await until(lambda: is_gone(store, session_id))


async def test_the_end_is_one_with_the_last_append(store: SessionStore) -> None:
    session_id, fence = await started(store, "end")
    end = Append(3, (7, 8), (A, R), End(FinishReason.STOP_STRING, "", 12))
    assert (await store.append(session_id, fence, end)).length == 5
    assert (await store.append(session_id, fence, end)).length == 5  # repeated: equal
    log = await log_of(store, session_id)
    assert (log.tokens, log.reason, log.text_length) == ((7, 8), FinishReason.STOP_STRING, 12)
    await raised(ContentMismatch, store.append(session_id, fence, Append(5, (9,), (A,))))
    with pytest.raises(ContentMismatch):
        await store.append(session_id, fence, Append(3, (7, 8), (A, R), End(FinishReason.EOS, "", 12)))
    assert (await store.append(session_id, fence, Append(4, (8,), (R,)))).length == 5


async def test_the_owner_learns_of_a_reader_elsewhere_from_its_append(store: SessionStore) -> None:
    session_id, fence = await started(store, "read-elsewhere")
    assert (await store.append(session_id, fence, Append(3, (7,), (A,)))).read_s == math.inf
    await store.note_reader(session_id)
    first = (await store.append(session_id, fence, Append(4, (8,), (A,)))).read_s
    await asyncio.sleep(0.05)
    assert 0.0 <= first < (await store.append(session_id, fence, Append(5, (), ()))).read_s < 60.0
    await store.note_reader(session_id)
    ended = await store.append(session_id, fence, Append(5, (), (), End(FinishReason.LENGTH, "", 2)))
    assert (ended.length, ended.cancelled) == (5, False)
    await store.note_reader(session_id)  # of one that has ended there is nothing to say
    await store.note_reader("nobody")
    assert await store.read("nobody") is None


async def test_a_request_id_is_bound_to_what_was_asked_for_with_it(store: SessionStore) -> None:
    tenant = f"asking-{id(store)}"
    assert await store.bound_request(tenant, "r") is None
    assert await store.bind_request(tenant, "r", "first", TTL, "one") == Bound("first", "one")
    assert await store.bind_request(tenant, "r", "second", TTL, "two") == Bound("first", "one")
    assert await store.bind_request(tenant, "r", "first", TTL) == Bound("first", "one")
    assert await store.bound_request(tenant, "r") == Bound("first", "one")
    assert await bound(store, tenant, "unknown", "third") == "third"
    assert await store.bound_request(tenant, "unknown") == Bound("third", "")


async def test_a_request_id_is_released_by_the_session_it_stands_for_only(store: SessionStore) -> None:
    tenant = f"releasing-{id(store)}"
    await bound(store, tenant, "r", "first")
    await store.release_request(tenant, "r", "second")
    assert await bound(store, tenant, "r", "second") == "first"
    await store.release_request(tenant, "r", "first")
    await store.release_request(tenant, "r", "first")
    assert await bound(store, tenant, "r", "second") == "second"


async def test_what_a_session_without_a_log_is_bound_to_is_free_after_a_while(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at once: its log may be about to be written. And of two who find it gone, one has it."""
    tenant = f"gone-{id(store)}"
    await bound(store, tenant, "r", "first")
    assert await store.bind_request(tenant, "r", "second", TTL, "two", "first") == Bound("first")
    for module in ("sqlite", "redis"):
        monkeypatch.setattr(f"orchestrator.store.{module}.BEGINNING_S", 0.0)
    await asyncio.sleep(0.01)
    assert await store.bind_request(tenant, "r", "second", TTL, "two", "another") == Bound("first")
    assert await store.bind_request(tenant, "r", "second", TTL, "two", "first") == Bound("second", "two")
    assert await store.bind_request(tenant, "r", "third", TTL, "three", "first") == Bound("second", "two")


async def test_a_session_that_has_begun_leaves_its_request_id_at_once(store: SessionStore) -> None:
    """Its owner has bound it again: that it has no log means that it was forgotten, not that it is about to begin."""
    tenant = f"begun-{id(store)}"
    for _ in range(2):
        assert await store.bind_request(tenant, "r", "first", TTL, "one") == Bound("first", "one")
    assert await store.bind_request(tenant, "r", "second", TTL, "two", "another") == Bound("first", "one")
    assert await store.bind_request(tenant, "r", "second", TTL, "two", "first") == Bound("second", "two")


async def test_a_request_id_stays_bound_as_long_as_it_is_bound_again(store: SessionStore) -> None:
    tenant = f"renewed-{id(store)}"
    await store.bind_request(tenant, "r", "first", 0.2)
    await store.bind_request(tenant, "r", "first", TTL)
    await store.bind_request(tenant, "r", "first", 0.2)  # never for less long
    await asyncio.sleep(0.3)
    assert await store.bound_request(tenant, "r") == Bound("first")


async def test_all_who_use_a_log_have_one_secret(store: SessionStore) -> None:
    held = await store.shared_secret(b"1" * 32, TTL)  # of whichever test of this log came first
    assert len(held) == 32
    assert await store.shared_secret(b"2" * 32, TTL) == held


async def test_who_is_not_called_is_missed(store: SessionStore) -> None:
    roll = f"roll-{id(store)}"
    await store.call_roll(roll, ["a", "b", "c"], 0.0, TTL)
    await store.call_roll(roll, ["b"], TTL, TTL)
    await asyncio.sleep(0.01)
    assert await store.missed("another", 0.0, 9) == []
    assert sorted(await store.missed(roll, TTL, 9)) == ["a", "c"]
    assert await store.missed(roll, TTL, 9) == []  # somebody else looks after them
    await store.call_roll(roll, ["a", "c"], 0.0, TTL)
    await store.strike(roll, ["a", "nobody"])
    await asyncio.sleep(0.01)
    assert await store.missed(roll, 0.0, 9) == ["c"]
    await asyncio.sleep(0.01)
    assert await store.missed(roll, 0.0, 9) == ["c"]  # who was told of it did nothing


async def test_at_most_so_many_are_told_at_once(store: SessionStore) -> None:
    roll, names = f"many-{id(store)}", [f"s-{index}" for index in range(1200)]
    await store.call_roll(roll, names, 0.0, TTL)
    await asyncio.sleep(0.01)
    told = [name for _ in range(4) for name in await store.missed(roll, TTL, 400)]
    assert sorted(told) == sorted(names)
    await store.strike(roll, names)


async def test_a_session_is_in_its_models_roll_from_its_beginning(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sqlite", "redis"):
        monkeypatch.setattr(f"orchestrator.store.{module}.CALLED_WITHIN_S", 0.0)
    session_id, weights = f"entered-{id(store)}", f"weights-{id(store)}"
    await store.create(record_of(session_id, weights_fingerprint=weights), TTL)
    # In a cluster another server has the roll, and is not waited for.
    assert await asked(lambda: store.missed(weights, TTL, 9), bool) == [session_id]


async def test_the_end_of_a_log_is_read_from_a_position(store: SessionStore) -> None:
    told = tuple(TokenLogprobs(-float(index)) for index in range(3))
    session_id = f"tail-{id(store)}"
    fence = await store.create(record_of(session_id, sampling=Sampling(logprobs=0)), TTL, "me")
    await store.append(session_id, fence, Append(3, (7, 8, 9), (A, R, B), logprobs=told))
    for skipped in range(5):
        tail = await store.tail(session_id, skipped)
        assert tail is not None
        assert (tail.fence, tail.owner, tail.skipped, tail.length) == (fence, "me", skipped, 6)
        assert (tail.tokens, tail.outcomes) == ((7, 8, 9)[skipped:], (A, R, B)[skipped:])
        assert tail.logprobs == tuple(told[skipped:])
        assert (tail.reason, tail.cancelled, tail.abandoned) == (None, False, False)
    await store.cancel(session_id)
    assert (await store.append(session_id, fence, Append(6, (), (), End(FinishReason.CANCELLED, "", 5)))).cancelled
    tail = await store.tail(session_id, 3)
    assert tail is not None
    assert (tail.reason, tail.text_length, tail.cancelled) == (FinishReason.CANCELLED, 5, True)
    await store.delete(session_id)
    await raised(DeletedSession, store.tail(session_id, 0))


@pytest.mark.parametrize("newer", [0, 5_000_000])
async def test_who_asked_for_the_end_is_not_forgotten_when_a_log_is_written_again(
    store: SessionStore, newer: int
) -> None:
    """What the log still says of it stays, and what its owner says of it is added."""
    session_id, fence = await started(store, f"asked-{newer}")
    record = record_of(session_id)
    await store.cancel(session_id)
    await store.recreate(record, Append(3, (7,), (A,)), fence + newer, TTL)
    assert (await store.append(session_id, fence + newer, Append(4, (8,), (A,)))).cancelled
    other = f"told-{newer}-{id(store)}"
    fence = await store.create(record_of(other), TTL)
    await store.recreate(record_of(other), Append(3, (7,), (A,)), fence + newer, TTL, cancelled=True)
    assert (await store.append(other, fence + newer, Append(4, (8,), (A,)))).cancelled


async def test_a_log_expires_after_its_last_write(store: SessionStore) -> None:
    session_id = f"ttl-{id(store)}"
    await store.create(record_of(session_id), 0.05)
    await store.bind_request(session_id, "r", "first", 0.05)
    await until(lambda: is_gone(store, session_id))
    await until(lambda: is_bound_anew(store, session_id))
    await raised(MissingSession, store.claim(session_id, "me"))


async def test_a_closed_log_takes_nothing_and_closing_twice_is_harmless(store: SessionStore) -> None:
    session_id, fence = await started(store, "closed")
    for _ in range(2):
        await store.close()
    for call in (store.append(session_id, fence, Append(3, (7,), (A,))), store.read(session_id), store.ping()):
        await raised(StoreUnavailable, call, "closed")
