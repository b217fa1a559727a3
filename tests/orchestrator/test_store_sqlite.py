"""What only the log in SQLite can get wrong: files that were cut or damaged, disks that fail, what is forgotten."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import sqlite3
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.store import (
    AppendReply,
    DamagedLog,
    Gap,
    MissingSession,
    SessionRecord,
    StoreError,
    StoreUnavailable,
    open_store,
    sqlite,
)
from orchestrator.store.sqlite import ROW_TOKENS, SqliteStore
from orchestrator.store.sqlite_file import EXPIRING, PAGE_BYTES, WAL_HEAD_BYTES, UnusableFile
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Append, End, FinishReason, TokenLogprobs
from tests.orchestrator.test_store import TTL, A, D, alter, log_of, logs_of, record_of
from tests.wait import raised, until

FULL = "the session log takes no writes: its disk is full"
UNWRITABLE = "the session log takes no writes: its file cannot be written"
TABLES = (*EXPIRING, "records", "texts", "meta")
# A commit of one append: a page of `sessions` and one of `texts`.
COMMIT_BYTES = 2 * (24 + PAGE_BYTES)
Held = dict[str, list[tuple[Any, ...]]]


class LogFile:
    """Where a log is, in a folder of its own."""

    def __init__(self, at: Path) -> None:
        self.at = at
        self.wal = Path(f"{at}-wal")

    def read(self) -> bytes:
        return self.at.read_bytes()

    def write(self, data: bytes) -> None:
        self.at.write_bytes(data)

    def all_bytes(self) -> bytes:
        return self.read() + (self.wal.read_bytes() if self.wal.exists() else b"")

    def beside(self) -> list[str]:
        """The names of all files in the folder."""
        return sorted(each.name for each in self.at.parent.iterdir())

    def copied(self, name: str = "copy") -> LogFile:
        """What a process that is killed now leaves, in a folder of its own."""
        folder = self.at.parent.with_name(name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for each in (self.at, self.wal):
            if each.exists():
                shutil.copyfile(each, folder / each.name)
        return LogFile(folder / self.at.name)


@pytest.fixture
def file(tmp_path: Path) -> LogFile:
    (tmp_path / "box").mkdir()
    return LogFile(tmp_path / "box" / "log")


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def held(store: SqliteStore) -> Held:
    """All that must survive, without what has expired."""
    now = store._clock()
    alive = {table: "WHERE expires > ?" if table in EXPIRING else "WHERE ? > 0" for table in TABLES}
    return {table: alter(store, f"SELECT * FROM {table} {alive[table]} ORDER BY 1, 2", now) for table in TABLES}


async def left(file: LogFile, clock: Clock | None = None) -> Held:
    """What the next process finds in a copy of the file."""
    again = SqliteStore(file.copied().at, clock=clock or Clock())
    found = held(again)
    await again.close()
    return found


async def one_log(file: LogFile) -> tuple[SqliteStore, int]:
    store = SqliteStore(file.at, clock=Clock())
    return store, await store.create(record_of("s"), TTL, "me")


async def output_of(store: SqliteStore, session_id: str) -> list[int]:
    log = await log_of(store, session_id)
    return list(log.tokens)


# What is found again


@dataclass
class Doing:
    """Does anything to the store, as chance says. `fences`: of each session, the newest."""

    store: SqliteStore
    clock: Clock
    chance: random.Random
    fences: dict[str, int] = field(default_factory=dict)

    async def one(self) -> None:
        chance, session = self.chance, f"s{self.chance.randrange(4)}"
        self.clock.now += chance.choice([0.0, 0.01, 1.0, TTL / 3])
        record = record_of(session, request_id=f"r{session}", sampling=Sampling(logprobs=chance.choice([None, 1])))
        log = None
        with suppress(StoreError):
            log = await self.store.read(session)
            record = record if log is None else log.record
        fence, length = self.fences.get(session, 1), 3 if log is None else log.length
        match chance.randrange(12):
            case 0:
                self.fences[session] = await self.store.create(record, TTL, "creator", chance.choice([None, 5.0]))
            case 1:
                self.fences[session] = (await self.store.claim(session, "claimer")).fence
            case 2:
                newer = fence + chance.randrange(2)
                await self.store.recreate(record, self._tokens(record, 3, 4), newer, TTL, "again")
                self.fences[session] = newer
            case 3:
                await self.store.cancel(session)
            case 4 if chance.randrange(3) == 0:
                await self.store.delete(session)
            case 5:
                await self.store.bind_request("a tenant", f"r{session}", session, TTL, "digest")
            case 6:
                await self.store.release_request("a tenant", f"r{session}", session)
            case 7:
                await self.store.shared_secret(chance.randbytes(32), TTL)
            case 8 if chance.randrange(3) == 0:
                end = End(FinishReason.EOS, "", 7)
                await self.store.append(session, fence, replace(self._tokens(record, length, 1), end=end))
            case _:
                await self.store.append(session, fence, self._tokens(record, length, chance.randrange(4)))

    def _tokens(self, record: SessionRecord, position: int, count: int) -> Append:
        tokens = tuple(self.chance.randrange(1 << 32) for _ in range(count))
        told = [TokenLogprobs(-0.5, ((each, -0.25),)) for each in tokens]
        asked = record.sampling.logprobs is not None
        return Append(position, tokens, (A,) * count, logprobs=tuple(told) if asked else ())


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_was_done_is_found_again(file: LogFile, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every call, by a process that begins with what this one has written."""
    monkeypatch.setattr(sqlite, "ERASE_S", 0.0)
    monkeypatch.setattr(sqlite, "ROW_TOKENS", 4)
    clock = Clock()
    store = SqliteStore(file.at, clock=clock)
    doing, done = Doing(store, clock, random.Random(seed)), 0
    for _ in range(100):
        with suppress(StoreError):
            await doing.one()
            done += 1
        if doing.chance.randrange(20) == 0:
            await store.ping()
        assert await left(file, clock) == held(store)
    assert done > 30
    kept = held(store)
    await store.close()
    assert file.beside() == ["log"]
    assert await left(file, clock) == kept


async def test_a_text_of_many_rows_is_read_from_any_position() -> None:
    store, count = SqliteStore(), 3 * ROW_TOKENS + 5
    told = [TokenLogprobs(-float(each), ((each, -0.5),) * (each % 4)) for each in range(count)]
    fence = await store.create(record_of("s", sampling=Sampling(logprobs=3)), TTL)
    at = 0
    while at < count:
        size = min(1 + at % 7, count - at)
        tokens, logprobs = tuple(range(at, at + size)), tuple(told[at : at + size])
        await store.append("s", fence, Append(3 + at, tokens, (D,) * size, logprobs=logprobs))
        at += size
    assert 1 < len(alter(store, "SELECT * FROM texts WHERE position > 0")) <= count / ROW_TOKENS + 1
    for skipped in range(count + 1):
        tail = await store.tail("s", skipped)
        assert tail is not None
        assert (tail.tokens, tail.logprobs) == (tuple(range(skipped, count)), tuple(told[skipped:]))
        again = tuple(range(skipped, count))[:40]
        assert (await store.append("s", fence, Append(3 + skipped, again, (D,) * len(again)))).length == 3 + count


async def test_a_new_file_is_its_owner_s_only_and_begun_without_a_word(
    file: LogFile, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = await one_log(file)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (file.at, file.wal)] == [0o600, 0o600]
    await store.close()
    assert (file.beside(), caplog.text) == (["log"], "")


async def test_instants_in_the_file_are_the_wall_clocks_and_steps_of_it_expire_nothing(
    file: LogFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the wall clock says in the end: the next process has no other clock to read them by."""
    wall, slept = [1_000_000.0], [50.0]
    monkeypatch.setattr(sqlite, "time", SimpleNamespace(time=lambda: wall[0]))
    monkeypatch.setattr(sqlite, "awake_or_asleep_s", lambda: slept[0])
    store = SqliteStore(file.at)
    fence = await store.create(record_of("s"), TTL, "me")
    await store.bind_request("a tenant", "r", "s", TTL)
    wall[0] += 2 * TTL
    slept[0] += 1.0
    reply = await store.append("s", fence, Append(3, (7,), (A,)))
    assert reply.length == 4
    assert await store.bound_request("a tenant", "r") is not None
    again = SqliteStore(file.copied().at)
    assert alter(again, "SELECT expires FROM sessions") == [(pytest.approx(wall[0] + TTL),)]
    assert alter(again, "SELECT expires FROM requests") == [(pytest.approx(wall[0] + TTL - 1.0),)]
    await again.close()
    wall[0] -= 4 * TTL
    assert (await store.claim("s", "me")).fence > fence
    slept[0] += TTL + 1.0
    assert await store.read("s") is None
    await store.close()


# Cut and damaged files


async def three_appends(file: LogFile) -> tuple[LogFile, list[Held]]:
    """What a process left that was killed behind the third of three appends, and what stood after each."""
    store, fence = await one_log(file)
    after = list[Held]()
    for position in (3, 4, 5):
        await store.append("s", fence, Append(position, (position,), (A,)))
        after.append(await left(file))
    killed = file.copied("killed")
    await store.close()
    written = killed.wal.read_bytes()
    heads = [written[at : at + 24] for at in range(32, len(written), 24 + PAGE_BYTES)]
    # Behind those of this use of the file are frames of earlier ones, with another salt.
    count = sum(head[8:16] == written[16:24] for head in heads)
    killed.wal.write_bytes(written[: 32 + count * (24 + PAGE_BYTES)])
    return killed, after


async def test_a_commit_that_was_not_written_whole_is_none(file: LogFile, caplog: pytest.LogCaptureFixture) -> None:
    """At whichever byte; or its end is of another file, as after a power cut. Nobody was told of it."""
    killed, (_, before, _) = await three_appends(file)
    whole = killed.wal.read_bytes()
    for cut in (*range(1, COMMIT_BYTES, 97), COMMIT_BYTES):
        for rest in (b"", b"\0" * 5000):
            torn = killed.copied("torn")
            torn.wal.write_bytes(whole[:-cut] + rest)
            store = SqliteStore(torn.at, clock=Clock())
            assert held(store) == before
            assert await output_of(store, "s") == [3, 4]
            await store.append("s", store._log("s").fence, Append(5, (9,), (D,)))
            await store.close()
            assert (await left(torn))["texts"][-1][2][-4:] == bytes([9, 0, 0, 0])
    assert not caplog.text


async def test_acknowledged_commits_that_cannot_be_read_are_said_and_kept_aside(
    file: LogFile, caplog: pytest.LogCaptureFixture
) -> None:
    """At whichever byte in front of the last commit, or where a disk lost the first sector of what was written last.

    What was written before the damage is there.
    """
    killed, after = await three_appends(file)
    whole, said = killed.wal.read_bytes(), 0
    damages = [(at, bytes([whole[at] ^ 0x55])) for at in range(0, len(whole) - COMMIT_BYTES, 53)]
    for at, hurt in (*damages, (0, bytes(WAL_HEAD_BYTES)), (0, bytes(4096))):
        damaged = killed.copied("hurt")
        data = whole[:at] + hurt + whole[at + len(hurt) :]
        damaged.wal.write_bytes(data)
        caplog.clear()
        store = SqliteStore(damaged.at, clock=Clock())
        if held(store) != after[-1]:
            said += 1
            assert f"{damaged.wal} is damaged, and what was written last is lost" in caplog.text
            assert LogFile(damaged.at.with_name("log-wal.damaged-1")).read() == data
        else:
            assert (len(hurt), caplog.text) == (1, "")
        await store.close()
    assert said > 40


@pytest.mark.parametrize("size", [0, 1, 15, 16, 99])
async def test_a_file_that_was_cut_within_its_head_is_said_and_kept_and_a_new_one_begun(
    size: int, file: LogFile, caplog: pytest.LogCaptureFixture
) -> None:
    """To nothing, too, or gone. Every time: what was kept before stays, and what SQLite has beside it goes with it."""
    for number in (1, 2):
        store, _ = await one_log(file)
        wal = file.wal.read_bytes()
        await store.close()
        cut = file.read()[:size]
        file.write(cut)
        file.wal.write_bytes(wal)
        await assert_kept_aside(file, number, f"has {size} bytes, less than a session log begins with", caplog)
        aside = LogFile(file.at.with_name(f"log.damaged-{number}"))
        assert aside.all_bytes() == cut + wal
    killed, _ = await three_appends(file)
    killed.at.unlink()
    await assert_kept_aside(killed, 1, "has 0 bytes, less than a session log begins with", caplog)


async def assert_kept_aside(file: LogFile, number: int, why: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    again = SqliteStore(file.at, clock=Clock())
    assert not logs_of(again)
    aside = file.at.with_name(f"log.damaged-{number}")
    assert re.search(rf"{re.escape(str(file.at))} {why}", caplog.text)
    assert f"it is kept as {aside}" in caplog.text
    await again.create(record_of("new"), TTL)
    await again.close()
    caplog.clear()
    later = SqliteStore(file.at, clock=Clock())
    assert logs_of(later) == {"new"}
    await later.close()
    assert not caplog.text
    file.at.unlink()


async def test_a_file_that_was_damaged_or_cut_behind_its_head_is_said_and_kept_and_a_new_one_begun(
    file: LogFile, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = await one_log(file)
    for each in range(40):
        await store.create(record_of(str(each)), TTL)
    await store.close()
    whole, garbage = file.read(), bytes(range(256)) * (PAGE_BYTES // 256)
    for number, damaged in enumerate(
        (
            *(whole[:size] for size in (100, PAGE_BYTES - 1, PAGE_BYTES, len(whole) - PAGE_BYTES)),
            *(whole[:at] + garbage + whole[at + PAGE_BYTES :] for at in range(PAGE_BYTES, 8 * PAGE_BYTES, PAGE_BYTES)),
        ),
        1,
    ):
        file.write(damaged)
        await assert_kept_aside(file, number, "is damaged \\(", caplog)
        assert file.at.with_name(f"log.damaged-{number}").read_bytes() == damaged


async def test_a_log_that_cannot_be_read_is_left_to_its_owner(file: LogFile) -> None:
    store, fence = await one_log(file)
    await store.append("s", fence, Append(3, (7,), (A,)))
    alter(store, "UPDATE records SET record = ?", b"{}")
    await raised(DamagedLog, store.claim("s", "other"), "session s: its log cannot be read: ")
    await raised(Gap, store.append("s", fence, Append(4, (8,), (A,))))
    await store.recreate(record_of("s"), Append(3, (7,), (A,)), fence, TTL)
    assert (await store.append("s", fence, Append(4, (8,), (A,)))).length == 5
    for damage in ("DELETE FROM records", "UPDATE texts SET outcomes = x'00'", "DELETE FROM texts WHERE position = 0"):
        alter(store, damage)
        await raised(DamagedLog, store.read("s"))
        await store.recreate(record_of("s"), Append(3, (7, 8), (A, A)), fence, TTL)
        assert await output_of(store, "s") == [7, 8]
    await store.close()


async def test_what_is_no_session_log_is_refused_and_left_alone(file: LogFile, tmp_path: Path) -> None:
    other = sqlite3.connect(file.at)
    other.execute("CREATE TABLE letters (words)")
    other.close()
    for data, why in (
        (file.read(), "it is a database, but no session log"),
        (b"a letter", "it is no session log"),
        (b"\0" * 100, "it is no session log"),
        (b"x", "it is no session log"),
    ):
        file.write(data)
        with pytest.raises(UnusableFile, match=why):
            SqliteStore(file.at)
        assert (file.beside(), file.read()) == (["log"], data)
    os.mkfifo(tmp_path / "pipe")
    for url, why in (
        (f"file:{tmp_path / 'none' / 'log'}", "No such file or directory"),
        (f"file://{tmp_path}", "Is a directory"),
        (f"file:{tmp_path / 'pipe'}", "it is no regular file"),
        (f"file:{tmp_path}/", "path: must name a file"),
        ("file:", "path: must name a file"),
        ("file://host/log", "host: a file is on this machine"),
    ):
        await raised(StoreUnavailable, open_store(url), f"redis-url: .*{why}")


async def test_a_log_of_a_later_version_is_refused(file: LogFile) -> None:
    store, _ = await one_log(file)
    await store.close()
    later = sqlite3.connect(file.at)
    later.execute("PRAGMA user_version = 3")
    later.close()
    with pytest.raises(UnusableFile, match="version: this log has 3, this program reads 2"):
        SqliteStore(file.at)
    assert file.beside() == ["log"]


# One process


async def test_one_process_has_it_and_no_other_program_meanwhile(file: LogFile) -> None:
    store, fence = await one_log(file)
    with pytest.raises(StoreUnavailable, match=f"redis-url: cannot use file:{file.at}: another process has it"):
        await open_store(f"file:{file.at}")
    assert (await store.append("s", fence, Append(3, (7,), (A,)))).length == 4
    other = sqlite3.connect(file.at, timeout=0.0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("SELECT * FROM sessions")
    await store.close()
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UnusableFile, match="another process has it"):
        SqliteStore(file.at)
    other.close()
    again = await open_store(f"file://{file.at}")
    await again.close()


async def test_a_link_stays_one_and_may_not_lead_to_itself(file: LogFile) -> None:
    link = file.at.with_name("link")
    link.symlink_to(link)
    with pytest.raises(UnusableFile):
        SqliteStore(link)
    link.unlink()
    link.symlink_to(file.at)
    store, fence = await one_log(LogFile(link))
    await store.append("s", fence, Append(3, (7,), (A,)))
    assert file.beside() == ["link", "log", "log-wal"]
    for name in (file.at, link):
        with pytest.raises(UnusableFile, match="another process has it"):
            SqliteStore(name)
    await store.close()
    assert link.is_symlink()


# Disks


class Disk:
    """The store's connection, whose commits wait while `held` says so, or fail. commits: how many there were."""

    def __init__(self, store: SqliteStore) -> None:
        self.database = store._db
        self.may_go, self.fails = threading.Event(), False
        self.may_go.set()
        self.waiting = self.commits = 0
        store._db = self  # type: ignore[assignment]  # in its place

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        if statement == "COMMIT":
            self.waiting += 1
            self.may_go.wait(60.0)
            self.waiting -= 1
            if self.fails:
                raise sqlite3.OperationalError("disk I/O error")
            self.commits += 1
        return self.database.execute(statement, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.database, name)


async def hanging(store: SqliteStore, fence: int, timeout_s: float) -> tuple[Disk, asyncio.Task[AppendReply]]:
    """A disk that hangs in the middle of an append."""
    store._timeout_s, disk = timeout_s, Disk(store)
    disk.may_go.clear()
    append = asyncio.create_task(store.append("s", fence, Append(3, (7,), (A,))))
    await until(lambda: disk.waiting == 1)
    return disk, append


async def test_a_full_disk_acknowledges_nothing_and_is_gone_on_with_once_it_has_room(file: LogFile) -> None:
    """SQLite's own bound of its file stands for the disk."""
    store, fence = await one_log(file)
    await store.ping()
    before = await left(file)
    ((pages,),) = alter(store, "PRAGMA page_count")
    alter(store, f"PRAGMA max_page_count = {pages}")
    note = "x" * 100_000
    for _ in range(2):
        refused = await raised(StoreUnavailable, store.create(record_of("t", note=note), TTL), FULL)
        assert refused.refused
        assert refused.detail == f"{file.at}: database or disk is full"
    assert await left(file) == before == held(store)
    assert await output_of(store, "s") == []
    alter(store, "PRAGMA max_page_count = 1000000")
    await store.create(record_of("t", note=note), TTL)
    assert (await store.append("s", fence, Append(3, (7,), (A,)))).length == 4
    await store.ping()
    assert await left(file) == held(store)
    await store.close()


async def test_what_cannot_be_written_is_told_to_all_who_were_to_be_in_it(file: LogFile) -> None:
    store, fence = await one_log(file)
    before, disk = held(store), Disk(store)
    disk.fails = True
    calls = store.append("s", fence, Append(3, (7,), (A,))), store.create(record_of("t"), TTL), store.read("s")
    for refused in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(refused, StoreUnavailable)
        assert (str(refused), refused.detail, refused.refused) == (UNWRITABLE, f"{file.at}: disk I/O error", False)
    assert held(store) == before
    for _ in range(2):
        await raised(StoreUnavailable, store.ping(), UNWRITABLE)
    disk.fails = False
    await store.ping()
    assert (await store.append("s", fence, Append(3, (7,), (A,)))).length == 4
    await store.close()


async def test_what_fails_in_one_call_ends_no_other(file: LogFile) -> None:
    """Nor is a part of it done."""
    for store in (SqliteStore(), SqliteStore(file.at)):
        fence = await store.create(record_of("s"), TTL)
        answers = await asyncio.gather(
            store.append("s", fence, Append(3, (7,), (A,))),
            store.create(record_of("t"), TTL, "\ud800"),
            store.append("s", fence, Append(4, (1 << 40,), (A,))),
            store.append("s", fence, Append(4, (8,), (A,))),
            return_exceptions=True,
        )
        assert [type(each).__name__ for each in answers[1:3]] == ["UnicodeEncodeError", "error"]
        assert [each.length for each in (answers[0], answers[3]) if isinstance(each, AppendReply)] == [4, 5]
        assert logs_of(store) == {"s"}
        assert alter(store, "SELECT session_id FROM rolls") == [("s",)]
        assert await output_of(store, "s") == [7, 8]
        await store.close()


async def test_a_disk_that_is_nearly_full_is_told_while_nothing_is_written(
    file: LogFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = await one_log(file)
    await store.ping()
    data = file.all_bytes()
    await store.ping()
    assert file.all_bytes() == data
    room = SimpleNamespace(f_bavail=5, f_frsize=1, f_blocks=1)
    monkeypatch.setattr("orchestrator.store.sqlite.os.statvfs", lambda path: room)
    refused = await raised(StoreUnavailable, store.ping(), FULL)
    assert refused.detail == f"{file.at}: 5 bytes are free"
    room.f_blocks = 0  # a system that does not tell
    await store.ping()
    await store.close()


async def test_a_disk_that_hangs_holds_up_its_callers_and_not_the_loop(file: LogFile) -> None:
    store, fence = await one_log(file)
    disk, append = await hanging(store, fence, 0.2)
    reading = asyncio.create_task(store.read("s"))
    ticks = 0
    while not append.done():
        await asyncio.sleep(0)
        ticks += 1
    assert ticks > 1
    for late in (append, reading, asyncio.create_task(store.create(record_of("t"), TTL)), store.ping()):
        await raised(StoreUnavailable, late, "the session log does not answer")
    disk.may_go.set()
    store._timeout_s = 60.0
    await store.ping()
    assert logs_of(store) == {"s"}  # what waited behind it was given up
    assert (await store.append("s", fence, Append(3, (7,), (A,)))).length == 4
    await store.close()


async def test_a_read_tells_what_counts_only(file: LogFile) -> None:
    """A reader shows it: it must not be lost by a power cut."""
    store, fence = await one_log(file)
    disk, append = await hanging(store, fence, 60.0)
    reads = [asyncio.create_task(each) for each in (store.read("s"), store.tail("s", 0))]
    done, _ = await asyncio.wait([append, *reads], timeout=0.05)
    assert not done
    disk.may_go.set()
    for log in await asyncio.gather(*reads):
        assert log is not None
        assert log.tokens == (7,)
    assert (await append).length == 4
    await store.close()


@pytest.mark.parametrize("synced", [False, True])
async def test_all_that_is_done_in_one_tick_is_one_transaction(file: LogFile, synced: bool) -> None:
    store = SqliteStore(file.at, synced=synced)
    assert alter(store, "PRAGMA synchronous") == [(2 if synced else 1,)]
    fences = await asyncio.gather(*(store.create(record_of(str(each)), TTL) for each in range(20)))
    disk = Disk(store)
    await asyncio.gather(
        *(store.append(str(each), fence, Append(3, (each,), (A,))) for each, fence in enumerate(fences))
    )
    assert disk.commits == 1
    await store.close()


async def test_a_caller_that_leaves_takes_nothing_back(file: LogFile) -> None:
    store, fence = await one_log(file)
    disk, first = await hanging(store, fence, 60.0)
    second = asyncio.create_task(store.append("s", fence, Append(4, (8,), (A,))))
    await asyncio.sleep(0)
    for append in (first, second):
        append.cancel()
        await raised(asyncio.CancelledError, append)
    disk.may_go.set()
    await raised(Gap, store.append("s", fence, Append(9, (7,), (A,))))
    await store.close()
    again = SqliteStore(file.at, clock=Clock())
    assert await output_of(again, "s") == [7, 8]
    await again.close()


async def test_closing_does_what_was_asked_and_has_no_patience_with_a_disk_that_hangs(
    file: LogFile, caplog: pytest.LogCaptureFixture
) -> None:
    store, fence = await one_log(file)
    append = asyncio.create_task(store.append("s", fence, Append(3, (7,), (A,))))
    await asyncio.sleep(0)
    await store.close()
    assert (await append).length == 4
    again = SqliteStore(file.at, clock=Clock(), timeout_s=0.05)
    disk = Disk(again)
    disk.may_go.clear()
    late = [asyncio.create_task(again.append("s", fence, Append(4, (each,), (A,)))) for each in (1, 2)]
    await until(lambda: disk.waiting == 1)
    await again.close()
    assert f"{file.at}: it may lack its end on the disk" in caplog.text
    for each in late:
        await raised(StoreUnavailable, each)
    disk.may_go.set()
    again._thread.shutdown()


# What is forgotten


async def test_what_has_expired_is_gone_at_once_and_forgotten_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """In portions, between which others are served."""
    monkeypatch.setattr(sqlite, "PORTION", 2)
    clock = Clock()
    store = SqliteStore(clock=clock)
    for each in range(5):
        await store.create(record_of(f"a{each}"), 0.5)
    await store.bind_request("t", "r", "a0", 0.5)
    clock.now += 0.6
    await store.create(record_of("b"), 60.0)
    assert len(logs_of(store)) == 6
    assert await store.read("a0") is None
    assert await store.tail("a0", 0) is None
    assert await store.bound_request("t", "r") is None
    await raised(MissingSession, store.claim("a0", "me"))
    await store.create(record_of("a0"), 60.0)
    turns = list[int]()
    pinging = asyncio.create_task(store.ping())
    while not pinging.done():
        turns.append(len(logs_of(store)))
        await asyncio.sleep(0)
    assert logs_of(store) == {"a0", "b"}
    assert len(set(turns)) > 2
    clock.now += 100.0
    await store.ping()
    assert held(store) == {**{table: [] for table in TABLES}, "meta": [(b"", 0.0, b"")]}
    assert not any(alter(store, f"SELECT * FROM {table}") for table in EXPIRING)


async def test_what_was_deleted_or_has_expired_is_erased(file: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store = SqliteStore(file.at, clock=clock)
    monkeypatch.setattr(sqlite, "ERASE_S", 5.0)
    await store.create(record_of("kept", stop=("kept words",)), 1000.0)
    for name, stop, ttl_s in (("first", "deleted words", 5.0), ("second", "expired words", 10.0)):
        await store.create(record_of(name, stop=(stop,), note="x" * 50_000), ttl_s)
    await store.ping()
    size = file.at.stat().st_size
    await store.delete("first")
    for words in (b"deleted words", b"expired words"):
        assert words in file.all_bytes()
        clock.now += 6.0
        await store.ping()
        assert words not in file.all_bytes()
    assert b"kept words" in file.all_bytes()
    assert file.at.stat().st_size < size - 90_000
    written = file.all_bytes()
    clock.now += 6.0
    await store.ping()
    assert file.all_bytes() == written  # there is nothing more to erase
    await store.close()
