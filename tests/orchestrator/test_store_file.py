"""What only the log in a file can get wrong: torn and damaged files, full and failing disks, the file written anew."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from orchestrator.store import Gap, SessionRecord, StoreError, StoreUnavailable, memory, open_store
from orchestrator.store import file as module
from orchestrator.store.file import FileStore
from orchestrator.store.journal import (
    HEAD_BYTES,
    MARK,
    MOST_PAYLOAD_BYTES,
    NUMBERS,
    Journal,
    JournalError,
    JournalFile,
)
from orchestrator.store.memory import MemoryBinding, MemoryLog
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Append, End, FinishReason, TokenLogprobs
from tests.orchestrator.test_store import TTL, A, B, D, record_of
from tests.wait import until

FULL = "the session log takes no writes: its disk is full"
Held = tuple[dict[str, MemoryLog], dict[tuple[str, str], MemoryBinding], dict[str, float], bytes]


class LogFile:
    """Where a log is, in a folder of its own."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def read(self) -> bytes:
        return self.at.read_bytes()

    def write(self, data: bytes) -> None:
        self.at.write_bytes(data)

    @property
    def size(self) -> int:
        return self.at.stat().st_size

    @property
    def inode(self) -> int:
        return self.at.stat().st_ino

    @property
    def mode(self) -> int:
        return stat.S_IMODE(self.at.stat().st_mode)

    @property
    def is_link(self) -> bool:
        return self.at.is_symlink()

    def linked(self) -> LogFile:
        """A symbolic link to it."""
        link = self.at.with_name("link")
        link.symlink_to(self.at)
        return LogFile(link)

    def beside(self) -> list[str]:
        """The names of all files in the folder."""
        return sorted(each.name for each in self.at.parent.iterdir())


@pytest.fixture
def file(tmp_path: Path) -> LogFile:
    return LogFile(tmp_path / "log")


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def held(store: FileStore) -> Held:
    """All that must survive, without what has expired."""
    store._forget_expired()
    return dict(store._logs), dict(store._requests), dict(store._deleted), store._secret


def copied(file: LogFile) -> Path:
    """What a process that is killed now leaves."""
    copy = file.at.with_name("copy")
    copy.write_bytes(file.read())
    return copy


async def left(file: LogFile, clock: Clock | None = None) -> Held:
    """What the next process finds in a copy of the file."""
    again = FileStore(copied(file), clock=clock or Clock())
    found = held(again)
    await again.close()
    return found


async def one_log(file: LogFile, clock: Clock | None = None) -> tuple[FileStore, int]:
    store = FileStore(file.at, clock=clock or Clock())
    return store, await store.create(record_of("s"), TTL, "me")


# What is found again


@dataclass
class Doing:
    """Does anything to the store, as chance says. `fences`: of each session, the newest."""

    store: FileStore
    clock: Clock
    chance: random.Random
    fences: dict[str, int] = field(default_factory=dict)

    async def one(self) -> None:
        chance, session = self.chance, f"s{self.chance.randrange(4)}"
        self.clock.now += chance.choice([0.0, 0.01, 1.0, TTL / 3])
        record = record_of(session, request_id=f"r{session}", sampling=Sampling(logprobs=chance.choice([None, 1])))
        log = self.store._logs.get(session)
        kept = record if log is None else log.record
        fence, length = self.fences.get(session, 1), 3 if log is None else len(log.tokens)
        match chance.randrange(12):
            case 0:
                self.fences[session] = await self.store.create(record, TTL, "creator", chance.choice([None, 5.0]))
            case 1:
                self.fences[session] = (await self.store.claim(session, "claimer")).fence
            case 2:
                await self.store.recreate(kept, self._tokens(kept, 3, 4), fence + chance.randrange(2), TTL, "again")
                self.fences[session] = self.store._logs[session].fence
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
                await self.store.append(session, fence, replace(self._tokens(kept, length, 1), end=end))
            case _:
                await self.store.append(session, fence, self._tokens(kept, length, chance.randrange(4)))

    def _tokens(self, record: SessionRecord, position: int, count: int) -> Append:
        tokens = tuple(self.chance.randrange(1 << 32) for _ in range(count))
        told = [TokenLogprobs(-0.5, ((each, -0.25),)) for each in tokens]
        asked = record.sampling.logprobs is not None
        return Append(position, tokens, (A,) * count, logprobs=tuple(told) if asked else ())


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_was_done_is_found_again(file: LogFile, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every call, by a process that begins with what this one has written; with a file that is written anew."""
    monkeypatch.setattr(module, "LEAST_BYTES", 3000)
    monkeypatch.setattr(module, "ERASE_S", 0.0)
    monkeypatch.setattr(module, "PORTION_BYTES", 100)
    clock = Clock()
    store = FileStore(file.at, clock=clock)
    doing, done = Doing(store, clock, random.Random(seed)), 0
    for _ in range(200):
        with suppress(StoreError):
            await doing.one()
            done += 1
        if doing.chance.randrange(20) == 0:
            await store.ping()
        assert await left(file, clock) == held(store)
    assert done > 50
    await store.close()
    assert await left(file, clock) == held(store)


async def test_fences_rise_over_a_restart_whatever_the_clock_says(file: LogFile) -> None:
    clock = Clock()
    store, first = await one_log(file, clock)
    second = (await store.claim("s", "second")).fence
    await store.close()
    clock.now = 5.0
    again = FileStore(file.at, clock=clock)
    third = (await again.claim("s", "third")).fence
    assert first < second < third
    with pytest.raises(StoreError):
        await again.append("s", second, Append(3, (7,), (A,)))
    await again.close()


async def test_a_running_session_of_a_lost_owner_is_missed(file: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = await one_log(file)
    await store.create(record_of("ended"), TTL)
    await store.append("ended", store._logs["ended"].fence, Append(3, (), (), End(FinishReason.EOS, "", 0)))
    await store.close()
    monkeypatch.setattr(module, "CALLED_WITHIN_S", 0.0)
    again = FileStore(file.at, clock=Clock())
    assert await again.missed("w", TTL, 9) == ["s"]
    await again.close()


async def test_a_file_is_readable_by_its_owner_only(file: LogFile) -> None:
    store, _ = await one_log(file)
    assert file.mode == 0o600
    await store.close()


# Torn and damaged files


async def two_records(file: LogFile) -> tuple[bytes, int, Held]:
    """The file's bytes, where its last record begins, and what stood before that."""
    store, fence = await one_log(file)
    await store.append("s", fence, Append(3, (7, 8), (A, B)))
    before, begin = await left(file), file.size
    await store.append("s", fence, Append(5, (9,), (D,)))
    await store.close()
    return file.read(), begin, before


async def test_a_record_that_was_not_written_whole_is_cut(file: LogFile, caplog: pytest.LogCaptureFixture) -> None:
    """At whichever byte; or its end is of another file, as after a power cut."""
    data, begin, before = await two_records(file)
    for end in range(begin, len(data)):
        for rest in (b"", b"\0" * 5000):
            file.write(data[:end] + rest)
            caplog.clear()
            store = FileStore(file.at, clock=Clock())
            assert held(store) == before
            await store.close()
            assert file.read() == data[:begin]
            torn = end - begin + len(rest)
            said = f"{file.at}: its last {torn} bytes, from byte {begin} on, were not written whole: cut"
            assert caplog.messages == ([said] if torn else [])


async def test_what_comes_after_a_cut_is_kept(file: LogFile) -> None:
    data, _, _ = await two_records(file)
    file.write(data[:-1])
    store = FileStore(file.at, clock=Clock())
    await store.append("s", store._logs["s"].fence, Append(5, (1, 2), (A, A)))
    await store.close()
    logs, *_ = await left(file)
    assert logs["s"].tokens[3:] == [7, 8, 1, 2]


async def test_a_damaged_record_with_others_behind_it_is_refused(file: LogFile) -> None:
    """At whichever byte, the length's included. The file stays as it is."""
    data, begin, _ = await two_records(file)
    for at in range(HEAD_BYTES, begin):
        damaged = bytearray(data)
        damaged[at] ^= 0x55
        file.write(bytes(damaged))
        with pytest.raises(JournalError, match=r"its record at byte \d+ is damaged, and whole ones follow"):
            FileStore(file.at)
        assert file.read() == damaged
    with pytest.raises(StoreUnavailable, match=rf"redis-url: cannot use file:{file.at}: its record at byte \d+ is dam"):
        await open_store(f"file:{file.at}")


async def test_a_length_that_nobody_wrote_takes_no_memory(file: LogFile) -> None:
    store, _ = await one_log(file)
    await store.close()
    whole = file.size
    for length in (1 << 20, MOST_PAYLOAD_BYTES + 1, (1 << 32) - 1):
        file.write(file.read() + MARK + NUMBERS.pack(length, 0) + b"x" * 100)
        again = FileStore(file.at, clock=Clock())
        assert set(again._logs) == {"s"}
        await again.close()
        assert file.size == whole


async def test_a_record_that_fits_no_log_is_refused(file: LogFile) -> None:
    """Whole, by its checksum: somebody else's program wrote it, or a mistake of ours."""
    store, _ = await one_log(file)
    size = file.size
    store._journal.add(module.ENCODER.encode(["change", "nobody"]), to_next=False)
    await store._journal.settled()
    await store.close()
    with pytest.raises(JournalError, match=f"its record at byte {size} cannot be read: "):
        FileStore(file.at)


async def test_what_is_no_session_log_is_refused_and_left_alone(file: LogFile, tmp_path: Path) -> None:
    store, _ = await one_log(file)
    await store.close()
    data = file.read()
    for at in range(HEAD_BYTES):
        file.write(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(JournalError, match="it does not begin as a session log"):
            FileStore(file.at)
    for other in (b"a letter", b"\0" * HEAD_BYTES, b"x"):
        file.write(other)
        with pytest.raises(JournalError, match="it does not begin as a session log"):
            FileStore(file.at)
        assert file.read() == other
    os.mkfifo(tmp_path / "pipe")
    for url, why in (
        (f"file:{tmp_path / 'none' / 'log'}", "No such file or directory"),
        (f"file://{tmp_path}", "Is a directory"),
        (f"file:{tmp_path / 'pipe'}", "it is no regular file"),
        (f"file:{tmp_path}/", "path: must name a file"),
        ("file:", "path: must name a file"),
        ("file://host/log", "host: a file is on this machine"),
    ):
        with pytest.raises(StoreUnavailable, match=f"redis-url: .*{why}"):
            await open_store(url)


@pytest.mark.parametrize("left_over", range(HEAD_BYTES))
async def test_a_file_that_was_cut_within_its_head_is_said_and_kept_and_a_new_one_begun(
    left_over: int, file: LogFile, caplog: pytest.LogCaptureFixture
) -> None:
    """To nothing, too. Every time: what was kept before stays."""
    for number in (1, 2):
        store, _ = await one_log(file)
        await store.close()
        cut = file.read()[:left_over]
        file.write(cut)
        caplog.clear()
        again = FileStore(file.at, clock=Clock())
        assert held(again) == ({}, {}, {}, b"")
        aside = file.at.with_name(f"log.cut-{number}")
        assert aside.read_bytes() == cut
        assert f"{file.at} has {left_over} bytes, less than a session log begins with" in caplog.text
        assert f"it is kept as {aside}" in caplog.text
        await again.create(record_of("new"), TTL)
        await again.close()
        assert set((await left(file))[0]) == {"new"}
        file.at.unlink()


async def test_a_new_file_is_begun_without_a_word(file: LogFile, caplog: pytest.LogCaptureFixture) -> None:
    store, _ = await one_log(file)
    await store.close()
    assert (file.beside(), caplog.text) == (["log"], "")


async def test_of_two_that_find_a_cut_file_one_has_the_new_one(file: LogFile) -> None:
    file.write(b"")
    store = FileStore(file.at)
    with pytest.raises(JournalError, match="another process has it"):
        FileStore(file.at)
    await store.close()


# One process


async def test_one_process_has_it(file: LogFile) -> None:
    store, fence = await one_log(file)
    with pytest.raises(StoreUnavailable, match=f"redis-url: cannot use file:{file.at}: another process has it"):
        await open_store(f"file:{file.at}")
    assert (await store.append("s", fence, Append(3, (7,), (A,)))).length == 4
    await store.close()
    again = await open_store(f"file://{file.at}")
    await again.close()


async def test_a_link_stays_one_and_the_file_that_was_written_anew_is_locked_too(file: LogFile) -> None:
    link = file.linked()
    store, fence = await one_log(link)
    before = file.inode
    await store._rewrite()
    assert link.is_link
    assert file.inode != before
    for name in (file.at, link.at):
        with pytest.raises(JournalError, match="another process has it"):
            FileStore(name)
    await store.append("s", fence, Append(3, (7,), (A,)))
    await store.close()
    logs, *_ = await left(file)
    assert logs["s"].tokens[3:] == [7]


async def test_a_closed_log_takes_nothing(file: LogFile) -> None:
    store, fence = await one_log(file)
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.append("s", fence, Append(3, (7,), (A,)))
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.ping()


# Disks


class Disk:
    """What the files do while it says so. `held`: syncs wait for it. `writes`, `syncs`: how many there were."""

    def __init__(self) -> None:
        self.full = self.broken = False
        self.held = threading.Event()
        self.held.set()
        self.writes = self.syncs = 0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    told, put, sync = Disk(), JournalFile._put, JournalFile.sync

    def putting(file: JournalFile, data: bytes) -> None:
        told.writes += 1
        if told.full:
            os.pwrite(file._descriptor, data[: len(data) // 2], file.end)
            raise OSError(errno.ENOSPC, "No space left on device")
        put(file, data)

    def syncing(file: JournalFile) -> None:
        told.syncs += 1
        told.held.wait(60.0)
        if told.broken:
            raise OSError(errno.EIO, "Input/output error")
        sync(file)

    monkeypatch.setattr(JournalFile, "_put", putting)
    monkeypatch.setattr(JournalFile, "sync", syncing)
    yield told
    told.held.set()


async def test_a_full_disk_acknowledges_nothing_and_is_gone_on_with_once_it_has_room(file: LogFile, disk: Disk) -> None:
    store, fence = await one_log(file)
    before = await left(file)
    disk.full = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=FULL) as refused:
            await store.append("s", fence, Append(3, (7,), (A,)))
        assert refused.value.refused
        assert refused.value.detail == f"{file.at}: No space left on device"
    for refuse in (store.create(record_of("t"), TTL), store.ping(), store.read("s"), store.claim("s", "other")):
        with pytest.raises(StoreUnavailable, match=FULL):
            await refuse
    assert "t" not in store._logs
    disk.full = False
    assert await left(file) == before
    disk.full = True
    with pytest.raises(StoreUnavailable, match=FULL):
        await store.append("s", fence, Append(3, (7,), (A,)))
    disk.full = False
    assert (await store.append("s", fence, Append(3, (7,), (A,)))).length == 4
    await store.ping()
    assert await left(file) == held(store)
    await store.close()


async def test_a_disk_that_is_nearly_full_is_told_while_nothing_is_written(
    file: LogFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = await one_log(file)
    size = file.size
    await store.ping()
    assert file.size == size
    monkeypatch.setattr(Journal, "_free_bytes", lambda self: 5)
    with pytest.raises(StoreUnavailable, match=FULL) as refused:
        await store.ping()
    assert refused.value.detail == f"{file.at}: 5 bytes are free"
    await store.close()


async def test_a_disk_that_failed_is_refused_until_a_restart(file: LogFile, disk: Disk) -> None:
    store = FileStore(file.at, synced=True)
    fence = await store.create(record_of("s"), TTL)
    disk.broken = True
    failed = "its disk failed, and what it holds is unknown until a restart"
    with pytest.raises(StoreUnavailable, match=failed) as refused:
        await store.append("s", fence, Append(3, (7,), (A,)))
    assert refused.value.refused
    disk.broken = False
    for refuse in (store.append("s", fence, Append(3, (7,), (A,))), store.create(record_of("t"), TTL), store.ping()):
        with pytest.raises(StoreUnavailable, match=failed):
            await refuse
    assert len(store._journal._staged) == 1
    await store.close()
    again = FileStore(file.at)
    assert set(again._logs) == {"s"}
    await again.close()


async def test_a_disk_that_hangs_holds_up_its_callers_and_not_the_loop(file: LogFile, disk: Disk) -> None:
    store = FileStore(file.at, synced=True, timeout_s=0.2)
    fence = await store.create(record_of("s"), TTL)
    disk.held.clear()
    append = asyncio.create_task(store.append("s", fence, Append(3, (7,), (A,))))
    reading = asyncio.create_task(store.read("s"))
    ticks = 0
    while not append.done():
        await asyncio.sleep(0)
        ticks += 1
    assert ticks > 1
    for late in (append, reading, asyncio.create_task(store.create(record_of("t"), TTL))):
        with pytest.raises(StoreUnavailable, match="the session log does not answer"):
            await late
    assert "t" not in store._logs
    disk.held.set()
    store._journal._timeout_s = 60.0
    await store.ping()
    assert (await store.append("s", fence, Append(3, (7,), (A,)))).length == 4
    await store.close()


async def test_a_read_tells_what_is_on_the_disk_only(file: LogFile, disk: Disk) -> None:
    """A reader shows it: it must not be lost by a power cut."""
    store = FileStore(file.at, synced=True, timeout_s=60.0)
    fence = await store.create(record_of("s"), TTL)
    disk.held.clear()
    append = asyncio.create_task(store.append("s", fence, Append(3, (7,), (A,))))
    await until(lambda: disk.syncs > 2)
    reads = [asyncio.create_task(each) for each in (store.read("s"), store.tail("s", 0))]
    done, _ = await asyncio.wait([append, *reads], timeout=0.05)
    assert not done
    disk.held.set()
    for log in await asyncio.gather(*reads):
        assert log is not None
        assert log.tokens == (7,)
    assert (await append).length == 4
    await store.close()


@pytest.mark.parametrize("synced", [False, True])
async def test_all_that_is_done_in_one_tick_is_one_write(file: LogFile, disk: Disk, synced: bool) -> None:
    store = FileStore(file.at, synced=synced)
    fences = await asyncio.gather(*(store.create(record_of(str(each)), TTL) for each in range(20)))
    writes, syncs = disk.writes, disk.syncs
    await asyncio.gather(
        *(store.append(str(each), fence, Append(3, (each,), (A,))) for each, fence in enumerate(fences))
    )
    assert (disk.writes - writes, disk.syncs - syncs) == (1, int(synced))
    await store.close()


async def test_a_caller_that_leaves_takes_nothing_back(file: LogFile, disk: Disk) -> None:
    store = FileStore(file.at, synced=True, timeout_s=60.0)
    fence = await store.create(record_of("s"), TTL)
    disk.held.clear()
    append = asyncio.create_task(store.append("s", fence, Append(3, (7,), (A,))))
    await until(lambda: disk.syncs > 2)
    append.cancel()
    with pytest.raises(asyncio.CancelledError):
        await append
    disk.held.set()
    with pytest.raises(Gap):
        await store.append("s", fence, Append(9, (7,), (A,)))
    await store.close()
    logs, *_ = await left(file)
    assert logs["s"].tokens[3:] == [7]


# Written anew


@contextmanager
def anew_at(monkeypatch: pytest.MonkeyPatch, size: int, portion: int = 400) -> Iterator[list[bool]]:
    """A file of that size is written anew. Yields how each time ended."""
    ends: list[bool] = []
    rewrite = Journal.rewrite

    async def noting(journal: Journal, portions: object) -> bool:
        ends.append(await rewrite(journal, portions))  # type: ignore[arg-type]  # as it came
        return ends[-1]

    monkeypatch.setattr(module, "LEAST_BYTES", size)
    monkeypatch.setattr(module, "PORTION_BYTES", portion)
    monkeypatch.setattr(Journal, "rewrite", noting)
    yield ends


async def test_a_file_is_written_anew_under_load_and_lacks_nothing_at_any_time(
    file: LogFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every session appends, some are begun and deleted; whoever is killed leaves all that was acknowledged."""
    told: dict[str, int] = {}
    clock = Clock()
    with anew_at(monkeypatch, 20_000) as ends:
        store = FileStore(file.at, clock=clock)

        async def write(name: str) -> None:
            fence = await store.create(record_of(name, request_id=name), TTL)
            await store.bind_request("a tenant", name, name, TTL)
            for position in range(3, 103):
                await store.append(name, fence, Append(position, (position,), (A,)))
                told[name] = position - 2
            other = f"{name}-gone"
            await store.create(record_of(other), TTL)
            await store.delete(other)

        async def look() -> None:
            await store.ping()
            acknowledged = dict(told)
            again = FileStore(copied(file), clock=clock)
            for name, count in acknowledged.items():
                assert again._logs[name].tokens[3:][:count] == list(range(3, 3 + count))
            await again.close()

        for number in range(4):
            writing = asyncio.gather(*(write(f"{number}-{each}") for each in range(10)))
            while not writing.done():
                await look()
                await asyncio.sleep(0)
            await writing
        await until(lambda: store._rewriting is not None and store._rewriting.done())
        assert len(ends) > 1
        assert all(ends)
        await store.close()
    again = FileStore(file.at, clock=clock)
    assert held(again)[:3] == held(store)[:3]
    await again.close()
    assert file.beside() == ["copy", "log"]


async def test_it_is_as_large_as_what_is_live_allows(file: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    with anew_at(monkeypatch, 5000) as ends:
        store, fence = await one_log(file)
        for _ in range(600):
            await store.append("s", fence, Append(3, (), ()))
            await store.ping()
            await asyncio.sleep(0)
        await until(lambda: store._rewriting is None or store._rewriting.done())
        assert len(ends) > 2
        assert file.size < 20_000
        await store.close()


async def test_what_was_deleted_or_has_expired_is_erased(file: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store = FileStore(file.at, clock=clock)
    monkeypatch.setattr(module, "ERASE_S", 0.0)
    await store.create(record_of("kept", stop=("kept words",)), 1000.0)
    for name, stop in (("first", "deleted words"), ("second", "expired words")):
        await store.create(record_of(name, stop=(stop,)), 5.0)
    await store.delete("first")

    async def erased(words: bytes) -> bool:
        await store.ping()
        return words not in file.read() and store._rewriting is not None and store._rewriting.done()

    for words in (b"deleted words", b"expired words"):
        assert words in file.read()
        await until(lambda words=words: erased(words))  # type: ignore[misc]  # its own
        clock.now += 10.0
    assert b"kept words" in file.read()
    inode = file.inode
    await erased(b"")
    assert file.inode == inode  # there is nothing more to erase
    await store.close()


def fails_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of writing the file anew finds the disk full; of several, the second."""
    original, times = cast("Callable[..., object]", getattr(Journal, name)), list[int]()

    def failing(journal: Journal, *rest: object) -> object:
        times.append(1)
        if len(times) > 1 or name != "_write_next":
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(journal, *rest)

    monkeypatch.setattr(Journal, name, failing)


@pytest.mark.parametrize("name", ["_begin_next", "_write_next", "_replace"])
async def test_a_file_that_cannot_be_written_anew_goes_on(
    file: LogFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    store, fence = await one_log(file)
    for each in range(20):
        await store.create(record_of(str(each)), TTL)
    monkeypatch.setattr(module, "PORTION_BYTES", 500)
    fails_at(name, monkeypatch)
    before = file.inode
    await store._rewrite()
    assert caplog.messages[-1] == f"{file.at} cannot be written anew, and grows: [Errno 28] No space left on device"
    assert file.inode == before
    assert file.beside() == ["log"]
    assert (await store.append("s", fence, Append(3, (7,), (A,)))).length == 4
    assert await left(file) == held(store)
    monkeypatch.undo()
    await store._rewrite()
    assert file.inode != before
    assert await left(file) == held(store)
    await store.close()


async def test_a_file_that_was_being_written_anew_is_begun_again(file: LogFile) -> None:
    store, _ = await one_log(file)
    await store.close()
    beside = LogFile(file.at.with_name("log.next"))
    beside.write(b"half of it")
    again = FileStore(file.at)
    assert file.beside() == ["log"]
    await again.close()


async def test_closing_in_the_middle_of_it_leaves_the_old_file(file: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PORTION_BYTES", 1)
    store, _ = await one_log(file)
    for each in range(50):
        await store.create(record_of(str(each)), TTL)
    store._stale = True
    await store.ping()
    await asyncio.sleep(0)
    await store.close()
    assert file.beside() == ["log"]
    assert len((await left(file))[0]) == 51


async def test_instants_in_the_file_are_the_wall_clocks_and_steps_of_it_expire_nothing(
    file: LogFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the wall clock says when they are written: the next process has no other clock to read them by."""
    wall, slept = [1_000_000.0], [50.0]
    monkeypatch.setattr(memory, "time", SimpleNamespace(time=lambda: wall[0]))
    monkeypatch.setattr(memory, "awake_or_asleep_s", lambda: slept[0])
    store = FileStore(file.at)
    fence = await store.create(record_of("s"), TTL, "me")
    await store.bind_request("a tenant", "r", "s", TTL)
    wall[0] += 2 * TTL
    slept[0] += 1.0
    reply = await store.append("s", fence, Append(3, (7,), (A,)))
    assert reply.length == 4
    assert await store.bound_request("a tenant", "r") is not None
    again = FileStore(copied(file))
    assert again._logs["s"].expires == pytest.approx(wall[0] + TTL)
    await again.close()
    wall[0] -= 4 * TTL
    assert (await store.claim("s", "me")).fence > fence
    slept[0] += TTL + 1.0
    assert await store.read("s") is None
    await store.close()
