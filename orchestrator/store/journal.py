"""A file of checksummed records: one process has it, a thread of its own writes it, a torn tail is cut.

    head      MAGIC, a random number (salt), the CRC-32 of both: 24 bytes
    frame     MARK, the payload's length, the CRC-32 of salt, length and payload: 12 bytes; then the payload, a
              MessagePack array of what was added in one tick

Numbers have 4 bytes, little-endian. The salt keeps callers from writing bytes into a payload that look like a frame.

A frame that is not whole, with no whole one behind it, was being written when the process or the machine ended: it is
cut. With a whole one behind it the file was damaged, and is refused. A file that ends before its head does was cut by
somebody: it is kept under another name, and a new one is begun, with a warning.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import logging
import mmap
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from orchestrator.store.base import StoreUnavailable, no_answer

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAGIC = b"specwire log 1\n\0"
MARK = b"\xd5log"
NUMBERS = struct.Struct("<II")
HEAD_BYTES = len(MAGIC) + NUMBERS.size
FRAME_BYTES = len(MARK) + NUMBERS.size
# Of one frame, far above what the longest text and all that is reported of it take: a length beyond is damage.
MOST_PAYLOAD_BYTES = 1 << 30
# Bytes that are written at a time: what waits behind them is not held up for long.
AT_ONCE_BYTES = 1 << 20
# A disk with less room than this takes no session: those that run may still fill it.
LEAST_FREE_BYTES = 1 << 20
# Appended to the file's name while another one is written to take its place.
NEXT = ".next"
# Likewise, and a number, to one that was cut within its head.
CUT = ".cut-"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = "the session log was closed"


class JournalError(Exception):
    """The file cannot be used: one sentence."""


class NotSynced(OSError):
    """What the disk holds of the latest writes is unknown, and asking it again would tell nothing."""


# ----------------------------------------------------------------------------------------------------------------------
# The bytes.


def head(salt: int) -> bytes:
    begin = MAGIC + salt.to_bytes(4, "little")
    return begin + zlib.crc32(begin).to_bytes(4, "little")


def frame(records: Sequence[bytes], salt: int) -> bytes:
    """records: MessagePack values."""
    payload = b"".join((struct.pack(">BI", 0xDD, len(records)), *records))
    return MARK + NUMBERS.pack(len(payload), _checksum(payload, salt)) + payload


def _checksum(payload: bytes, salt: int) -> int:
    return zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(4, "little"), salt))


def payload_at(data: mmap.mmap | bytes, at: int, salt: int) -> bytes | None:
    """The payload of the frame that begins at `at`; None where there is no whole one."""
    begin = at + FRAME_BYTES
    if data[at : at + len(MARK)] != MARK or begin > len(data):
        return None
    length, checksum = NUMBERS.unpack(data[at + len(MARK) : begin])
    if length > min(MOST_PAYLOAD_BYTES, len(data) - begin):
        return None
    payload = bytes(data[begin : begin + length])
    return payload if _checksum(payload, salt) == checksum else None


def _next_whole(data: mmap.mmap | bytes, behind: int, salt: int) -> int | None:
    """Where the first whole frame begins behind that byte."""
    at = data.find(MARK, behind + 1)
    while at >= 0:
        if payload_at(data, at, salt) is not None:
            return at
        at = data.find(MARK, at + 1)
    return None


def replayed(data: mmap.mmap | bytes, salt: int, replay: Callable[[bytes], None]) -> int:
    """Have `replay` take every payload in order; returns where the whole frames end.

    Raises:
        JournalError: it is damaged, or `replay` refused a payload with ValueError; names the byte.
    """
    at = HEAD_BYTES
    while (payload := payload_at(data, at, salt)) is not None:
        try:
            replay(payload)
        except ValueError as error:
            raise JournalError(f"its record at byte {at} cannot be read: {error}") from None
        at += FRAME_BYTES + len(payload)
    whole = _next_whole(data, at, salt) if at < len(data) else None
    if whole is not None:
        raise JournalError(
            f"its record at byte {at} is damaged, and whole ones follow from byte {whole} on; "
            f"what stands before it is left by `truncate -s {at}`, of a copy"
        )
    return at


# ----------------------------------------------------------------------------------------------------------------------
# The file.


class JournalFile:
    """An open, locked file. `end`: the bytes in it, where the next frame goes."""

    def __init__(self, descriptor: int, salt: int, end: int) -> None:
        self.end = end
        self._descriptor = descriptor
        self._salt = salt

    @classmethod
    def begun(cls, descriptor: int) -> JournalFile:
        """Of an empty file, which it locks."""
        salt = secrets.randbits(32)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        file = cls(descriptor, salt, 0)
        file._put(head(salt))
        file.sync()
        return file

    def write(self, records: Sequence[bytes]) -> None:
        """Write one frame. The next one overwrites a frame that failed."""
        self._put(frame(records, self._salt))

    def _put(self, data: bytes) -> None:
        view, at = memoryview(data), self.end
        while view:
            written = os.pwrite(self._descriptor, view, at)
            view, at = view[written:], at + written
        self.end = at

    def sync(self) -> None:
        """Return once the disk has it."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Also unlocks it."""
        os.close(self._descriptor)


def _locked(path: Path) -> tuple[int, bool]:
    """A descriptor of the file at `path`, which no other process gets meanwhile; and whether it was made here."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
    while True:
        made = False
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            try:
                descriptor, made = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
            except FileExistsError:
                continue
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise JournalError("it is no regular file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have put another file in its place before it was locked here.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor, made
        except BlockingIOError:
            os.close(descriptor)
            raise JournalError("another process has it") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(path: Path, replay: Callable[[bytes], None]) -> JournalFile:
    """The file at `path`, its payloads told to `replay`. Raises JournalError, OSError."""
    descriptor, made = _locked(path)
    try:
        size = os.fstat(descriptor).st_size
        begin = os.pread(descriptor, HEAD_BYTES, 0)
        if made:
            file = JournalFile.begun(descriptor)
            _sync_folder(path)
            return file
        if size < HEAD_BYTES and MAGIC.startswith(begin[: len(MAGIC)]):
            _keep_aside(path, size)
            file = _opened(path, replay)
            os.close(descriptor)
            return file
        salt = NUMBERS.unpack(begin[len(MAGIC) :])[0] if len(begin) == HEAD_BYTES else 0
        if begin != head(salt):
            raise JournalError("it does not begin as a session log of this version does")
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as data:
            end = replayed(data, salt, replay)
        if end < size:
            logger.warning("%s: its last %d bytes, from byte %d on, were not written whole: cut", path, size - end, end)
            os.ftruncate(descriptor, end)
            os.fdatasync(descriptor)
        return JournalFile(descriptor, salt, end)
    except BaseException:
        os.close(descriptor)
        raise


def _keep_aside(path: Path, size: int) -> None:
    """Rename a file of `size` bytes, which is less than any log has: what it held may be had from elsewhere."""
    names = (path.with_name(f"{path.name}{CUT}{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    _sync_folder(path)
    logger.warning(
        "%s has %d bytes, less than a session log begins with: it was cut, and the sessions in it are lost (or its "
        "first process was killed at once); it is kept as %s, and a new log begins",
        *(path, size, aside),
    )


def _sync_folder(path: Path) -> None:
    """Return once the disk knows the file by its name."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# ----------------------------------------------------------------------------------------------------------------------
# What is written by whom, and when.


def _again(error: StoreUnavailable) -> StoreUnavailable:
    """One exception for each who is told, because raising adds a traceback."""
    return StoreUnavailable(str(error), error.detail, error.refused)


class Journal:
    """Owns the file and the thread that writes it; used by one event loop, and opened before that, which blocks.

    What is added in one tick of the loop is one frame, and so is what is added while an earlier one is written. What
    could not be written is written before anything else: its callers were told that its outcome is unknown.

    Args:
        synced: a record counts once the disk has it; otherwise once the system has it.
        timeout_s: who waits for longer is told that the log does not answer.
        replay: is told every payload that the file holds; refuses one with ValueError.

    Raises:
        JournalError: the file cannot be used.
    """

    def __init__(self, path: Path, synced: bool, timeout_s: float, replay: Callable[[bytes], None]) -> None:
        try:
            self.path = path.resolve()
            self._beside = self.path.with_name(self.path.name + NEXT)
            self._file = _opened(self.path, replay)
            self._beside.unlink(missing_ok=True)
        except OSError as error:
            raise JournalError(error.strerror or str(error)) from error
        self._synced = synced
        self._timeout_s = timeout_s
        self._next: JournalFile | None = None
        # Each with whether it belongs into the next file, too.
        self._staged: list[tuple[bytes, bool]] = []
        self._added = self._written = 0
        self._writing: asyncio.Task[StoreUnavailable | None] | None = None
        self._troubled = self._closed = False
        self._lost: StoreUnavailable | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session-log")

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.end

    async def ready(self) -> None:
        """To be awaited before what is to be added is done: StoreUnavailable while nothing can be written."""
        if self._closed:
            raise StoreUnavailable(CLOSED)
        if self._lost is not None:
            raise _again(self._lost)
        if self._troubled:
            await self.settled()

    def add(self, record: bytes, to_next: bool) -> None:
        """Have a MessagePack value written with the others of this tick; `settled` says when it counts.

        to_next: into the file of a `rewrite` that is under way, too.
        """
        self._staged.append((record, to_next))
        self._added += 1

    async def settled(self) -> None:
        """Return once all that was added until now counts. StoreUnavailable, and its outcome is unknown."""
        wanted = self._added
        if self._written >= wanted:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._written < wanted:
                    if self._closed:
                        raise StoreUnavailable(CLOSED)
                    if self._writing is None or self._writing.done():
                        self._writing = asyncio.create_task(self._write_staged(), name="session log")
                    error = await asyncio.shield(self._writing)
                    if error is not None:
                        raise _again(error)
        except TimeoutError:
            self._troubled = True
            raise no_answer(f"{self.path}: not written within {self._timeout_s:g} s") from None

    async def _write_staged(self) -> StoreUnavailable | None:
        """Write a portion of what waits; what went wrong."""
        if self._lost is None:
            count = self._portion()
            try:
                await self._run(self._write, self._staged[:count])
            except OSError as error:
                self._troubled = True
                return self._failed(error)
            del self._staged[:count]
            self._written += count
            self._troubled = False
        return self._lost

    def _portion(self) -> int:
        """How many of the records that wait are written at once."""
        size = 0
        for count, (record, _) in enumerate(self._staged):
            size += len(record)
            if count and size > AT_ONCE_BYTES:
                return count
        return len(self._staged)

    def _failed(self, error: OSError) -> StoreUnavailable:
        detail = f"{self.path}: {error.strerror or error}"
        if isinstance(error, NotSynced):
            why = "the session log takes no writes: its disk failed, and what it holds is unknown until a restart"
            self._lost = StoreUnavailable(why, detail, refused=True)
            return self._lost
        if error.errno in FULL:
            return StoreUnavailable("the session log takes no writes: its disk is full", detail, refused=True)
        return StoreUnavailable("the session log takes no writes: its file cannot be written", detail)

    async def check(self) -> None:
        """Raises StoreUnavailable if nothing can be written, or the disk is full but for little."""
        await self.ready()
        await self.settled()
        try:
            async with asyncio.timeout(self._timeout_s):
                free = await self._run(self._free_bytes)
        except TimeoutError:
            raise no_answer(f"{self.path}: its disk does not answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise self._failed(error) from error
        if free < LEAST_FREE_BYTES:
            raise self._failed(OSError(errno.ENOSPC, f"{free} bytes are free"))

    async def rewrite(self, portions: Iterable[Sequence[bytes]]) -> bool:
        """Write what `portions` tell, and what is added meanwhile, into another file, and put it in this one's place.

        Each portion is taken, and handed to the thread, in one tick: what it tells of is as it was then, and what is
        added of that from then on goes `to_next`. Returns whether it succeeded; this file goes on if not.
        """
        try:
            await self._run(self._begin_next)
            for records in portions:
                await self._run(self._write_next, records)
            await self.settled()
            await self._run(self._replace)
        except (OSError, StoreUnavailable) as error:
            logger.warning("%s cannot be written anew, and grows: %s", self.path, error)
            return False
        finally:
            await asyncio.shield(self._run(self._drop_next))
        return True

    async def close(self) -> None:
        """Write what waits, force it to the disk, unlock. Idempotent."""
        with suppress(StoreUnavailable):
            await self.settled()
        if self._closed:
            return
        self._closed = True
        ended = self._run(self._end)
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(ended)
        except (OSError, TimeoutError) as error:
            logger.warning("%s: it may lack its end on the disk: %s", self.path, error)
        self._thread.shutdown(wait=ended.done())

    def _run(self, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Have the thread do it, behind what it was given before."""
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # In the thread

    def _write(self, staged: Sequence[tuple[bytes, bool]]) -> None:
        self._file.write([record for record, _ in staged])
        if self._synced:
            self._sync()
        moved = [record for record, to_next in staged if to_next]
        if self._next is not None and moved:
            try:
                self._next.write(moved)
            except OSError:  # this file has them, and goes on
                self._drop_next()

    def _sync(self) -> None:
        try:
            self._file.sync()
        except OSError as error:
            raise NotSynced(error.errno, error.strerror) from error

    def _begin_next(self) -> None:
        descriptor = os.open(self._beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._next = JournalFile.begun(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def _write_next(self, records: Sequence[bytes]) -> None:
        """The disk is waited for at once, so that there is little to wait for at the end, when appends do."""
        new = self._begun_next()
        new.write(records)
        new.sync()

    def _begun_next(self) -> JournalFile:
        if self._next is None:
            raise OSError(errno.EIO, f"{self._beside} could not be written")
        return self._next

    def _replace(self) -> None:
        new = self._begun_next()
        new.sync()
        self._beside.replace(self.path)
        old, self._file, self._next = self._file, new, None
        old.close()
        try:
            _sync_folder(self.path)
        except OSError as error:
            self._lost = self._failed(NotSynced(error.errno, error.strerror))
            raise

    def _drop_next(self) -> None:
        """Remove the file that a rewrite had begun, if there is one."""
        if self._next is not None:
            new, self._next = self._next, None
            new.close()
        with suppress(OSError):
            self._beside.unlink()

    def _free_bytes(self) -> int:
        """Of the disk; a system that does not tell how large it is counts as large."""
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize if disk.f_blocks else LEAST_FREE_BYTES

    def _end(self) -> None:
        self._drop_next()
        try:
            self._file.sync()
        finally:
            self._file.close()
