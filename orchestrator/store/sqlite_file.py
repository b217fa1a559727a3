"""The file of a session log: its schema, one process that has it, and what happens to one that was cut or damaged."""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import shutil
import sqlite3
import stat
from pathlib import Path

from orchestrator.store.base import StoreError

logger = logging.getLogger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# What a log holds. Record, tokens, outcomes and log-probabilities have the bytes of `encoding.py`. Instants are in
# seconds: claimed and ended Unix time, as they are told; all others by the store's own clock (see `sqlite.py`).
#
# sessions   length: of the log in tokens, the prompt's first; -1 of one that somebody could not read. last: where the
#            newest row of its text begins. reason, ended, text_length: once it has ended. read: once it is read at
#            another orchestrator
# texts      tokens from that position on, the prompt in a row of its own
# requests   bound: 0 once the session has begun
# rolls      sessions that run, by when they are missed
# meta       ahead: by so many seconds the wall clock was ahead of the store's own. probe: see `SqliteStore.ping`

SCHEMA = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, expires REAL NOT NULL, fence INTEGER NOT NULL,
    owner TEXT NOT NULL, prompt INTEGER NOT NULL, length INTEGER NOT NULL, last INTEGER NOT NULL, ttl_s REAL NOT NULL,
    retention_s REAL NOT NULL, claimed REAL NOT NULL, ended REAL, reason INTEGER, text_length INTEGER NOT NULL,
    cancelled INTEGER NOT NULL, read REAL, tenant TEXT NOT NULL, request_id TEXT NOT NULL
);
CREATE TABLE records (
    session INTEGER PRIMARY KEY REFERENCES sessions ON DELETE CASCADE, record BLOB NOT NULL
);
CREATE TABLE texts (
    session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE, position INTEGER NOT NULL, tokens BLOB NOT NULL,
    outcomes BLOB NOT NULL, logprobs BLOB NOT NULL, PRIMARY KEY (session, position)
) WITHOUT ROWID;
CREATE TABLE deleted (session_id TEXT PRIMARY KEY, expires REAL NOT NULL);
CREATE TABLE requests (
    tenant TEXT NOT NULL, request_id TEXT NOT NULL, session_id TEXT NOT NULL, digest TEXT NOT NULL, bound REAL NOT NULL,
    expires REAL NOT NULL, PRIMARY KEY (tenant, request_id)
);
CREATE TABLE rolls (
    roll TEXT NOT NULL, session_id TEXT NOT NULL, missed REAL NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (roll, session_id)
);
CREATE TABLE meta (secret BLOB NOT NULL, ahead REAL NOT NULL, probe BLOB NOT NULL);
INSERT INTO meta VALUES (x'', 0.0, x'');
"""
# What has instants by the store's own clock, `expires` among them.
EXPIRING = {
    "sessions": ("expires", "read"),
    "deleted": ("expires",),
    "requests": ("expires", "bound"),
    "rolls": ("expires", "missed"),
}
# In the file's head: that it is a session log ("splg"), and of which version.
APPLICATION = 0x73706C67
VERSION = 2
# An append writes two pages, a row of `sessions` and one of `texts`, both short.
PAGE_BYTES = 1024
SETTINGS = (
    "locking_mode = EXCLUSIVE",
    "temp_store = MEMORY",  # else there are texts in other files, too
    "secure_delete = ON",
    "foreign_keys = ON",
    f"wal_autocheckpoint = {(4 << 20) // PAGE_BYTES}",
)

# ----------------------------------------------------------------------------------------------------------------------
# The file.

MAGIC = b"SQLite format 3\0"
HEAD_BYTES = 100
APPLICATION_AT = slice(68, 72)
# Of SQLite's write-ahead log: its head, then frames, each a head and a page.
WAL = "-wal"
WAL_HEAD_BYTES, FRAME_HEAD_BYTES = 32, 24
WAL_MAGICS = bytes.fromhex("377f0682"), bytes.fromhex("377f0683")
WAL_SALT_AT, FRAME_SALT_AT, COMMIT_AT = slice(16, 24), slice(8, 16), slice(4, 8)
# Appended to the name of a file that was cut or damaged, and a number.
ASIDE = ".damaged-"


class UnusableFile(StoreError):
    """The file cannot be used: one sentence."""


def in_memory() -> sqlite3.Connection:
    database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    database.executescript(f"PRAGMA foreign_keys = ON; {SCHEMA}")
    return database


def open_file(path: Path, synced: bool) -> tuple[sqlite3.Connection, int]:
    """The database at `path`, and a descriptor that keeps it locked, to be closed behind it.

    synced: a transaction counts once the disk has it, not only the system.

    Raises:
        UnusableFile: the file cannot be used.
    """
    try:
        return _opened(path, synced)
    except OSError as error:
        raise UnusableFile(error.strerror or str(error)) from error


def _opened(path: Path, synced: bool) -> tuple[sqlite3.Connection, int]:
    lock, made = _locked(path)
    try:
        head, wal = os.pread(lock, HEAD_BYTES, 0), Path(f"{path}{WAL}")
        _check_kind(head)
        if len(head) < HEAD_BYTES and (wal.exists() or not made):
            _keep_aside(path, f"has {len(head)} bytes, less than a session log begins with")
        else:
            database = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
            try:
                _prepare(database, wal, synced)
                return database, lock
            except (sqlite3.OperationalError, UnusableFile) as error:
                database.close()
                busy = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY
                raise UnusableFile("another process has it" if busy else str(error)) from error
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the second where it tells of damaged names
                _keep_aside(path, f"is damaged ({error})")
                database.close()  # not before: that changes the files that have its names
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return _opened(path, synced)


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
                raise UnusableFile("it is no regular file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have put it aside before it was locked here.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor, made
        except BlockingIOError:
            os.close(descriptor)
            raise UnusableFile("another process has it") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _check_kind(head: bytes) -> None:
    """Raises UnusableFile unless the file begins as a log does, or is too short to tell."""
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise UnusableFile("it is no session log")
    if len(head) == HEAD_BYTES and head[APPLICATION_AT] != APPLICATION.to_bytes(4, "big"):
        raise UnusableFile("it is a database, but no session log")


def _prepare(database: sqlite3.Connection, wal: Path, synced: bool) -> None:
    """Raises UnusableFile, sqlite3.OperationalError where it cannot be used now, else sqlite3.DatabaseError."""
    written = wal.read_bytes() if wal.exists() else b""
    for setting in (*SETTINGS, f"synchronous = {'FULL' if synced else 'NORMAL'}"):
        database.execute(f"PRAGMA {setting}")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if not version:
        _begin(database)
    elif version != VERSION:
        raise UnusableFile(f"version: this log has {version}, this program reads {VERSION}")
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)
    try:
        # Behind this the disk has what a former process could not force to it, which reading does not tell.
        _, frames, _ = database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.OperationalError as error:
        logger.warning("%s: the disk may not have all of it: %s", wal, error)
        return
    if _lacks_commits(written, frames):
        aside = _aside(wal)
        shutil.copyfile(wal, aside)
        logger.warning("%s is damaged, and what was written last is lost; it is kept as %s", wal, aside)


def _begin(database: sqlite3.Connection) -> None:
    """Make what an empty database needs; begun again, what it still needs."""
    database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    database.execute("PRAGMA journal_mode = MEMORY")  # nothing beside the file is left of this, and its head is whole
    database.executescript(f"BEGIN; PRAGMA auto_vacuum = INCREMENTAL; PRAGMA application_id = {APPLICATION}; COMMIT")
    database.execute("PRAGMA journal_mode = WAL")
    database.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT")


def _lacks_commits(wal: bytes, frames: int) -> bool:
    """Whether SQLite, which took so many frames, left out a commit behind which others stand: it was acknowledged.

    The last one may have been under way when its process ended. Frames of earlier uses of the file have another salt.
    Where its head is gone nothing tells whose frames they are.
    """
    size = FRAME_HEAD_BYTES + PAGE_BYTES
    if len(wal) >= WAL_HEAD_BYTES + size and wal[: len(WAL_MAGICS[0])] not in WAL_MAGICS:
        return True
    heads = [wal[at : at + FRAME_HEAD_BYTES] for at in range(WAL_HEAD_BYTES, len(wal), size)]
    salts = {wal[WAL_SALT_AT], *(head[FRAME_SALT_AT] for head in heads[:1])}
    left = [head for head in heads[frames:] if head[FRAME_SALT_AT] in salts]
    return any(any(head[COMMIT_AT]) for head in left[:-1])


def _aside(path: Path) -> Path:
    names = (path.with_name(f"{path.name}{ASIDE}{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _keep_aside(path: Path, why: str) -> None:
    """Rename the file, and with it what SQLite has beside it: what it holds may be had from there."""
    aside, wal = _aside(path), Path(f"{path}{WAL}")
    path.rename(aside)
    if wal.exists():
        wal.rename(f"{aside}{WAL}")
    logger.warning(
        "%s %s: the sessions in it are lost; it is kept as %s (`sqlite3 %s .recover` tells what can be read), and a "
        "new log begins",
        *(path, why, aside, aside),
    )
