"""The folder of what learns, a drafter or a head: `specwire learn` writes its versions there, services follow them.

    DIR/learner           JSON: whose texts may be learnt from there, and where the learning began
    DIR/versions/0007/    a whole model, as `specwire draft` takes one, or a head, as `specwire verify --heads` does
    DIR/current           JSON: which version is in use, and why (`Current`)
    DIR/history.jsonl     a line for each version (`HistoryEntry`): what it began from, and which texts it saw

A version's folder gets its name once all of it is written, and `current` is renamed into place behind that. So what
`current` names is whole, whenever the learner is killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from specwire.files import UNFINISHED, replaced, to_disk

LEARNER, VERSIONS, CURRENT, HISTORY = "learner", "versions", "current", "history.jsonl"
# Versions whose weights stay, beside the first one, the one in use and the one before it.
KEPT = 4
# What a folder has versions of.
Kind = Literal["draft", "head"]
DRAFT: Kind = "draft"
HEAD: Kind = "head"
# The tenant of whoever calls a service without keys, which must be named on purpose. It is not all tenants.
ANONYMOUS = "*"

Number = Annotated[int, Meta(ge=0, lt=1 << 31)]
Held = TypeVar("Held")


class VersionError(Exception):
    """The folder holds no versions that can be used; one sentence that names the file."""


class Current(Struct, frozen=True):
    """The version in use. why: begun, learnt, fell back or forgot.

    draft: the model or head that the learning began with, as it was named. before, after: acceptance on the texts that
    this was decided by, of the version in use until then and of this one. loss_before, loss_after: of the first and the
    last steps that made it, in nats. None where nothing was measured.
    """

    version: Number
    draft: str
    tenants: tuple[str, ...]
    why: str
    before: float | None = None
    after: float | None = None
    kind: Kind = DRAFT
    loss_before: float | None = None
    loss_after: float | None = None

    @property
    def name(self) -> str:
        """What it is called, by the model that the learning began with."""
        return f"{Path(self.draft).name}@{self.version}"


class HistoryEntry(Struct, frozen=True):
    """A version. since: whose weights it began from; before: what was in use until then. Both are itself of the first.

    sessions: hashes of those it was trained on beyond `since`. written: Unix time in seconds.
    """

    version: Number
    since: Number
    before: Number
    sessions: tuple[str, ...]
    acceptance_before: float | None = None
    acceptance_after: float | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    written: float = 0.0


class _Purpose(Struct, frozen=True):
    """What a folder is for. draft: fingerprint of the first version's weights; of a head, with its target's."""

    tenants: tuple[str, ...]
    draft: str


class VersionFolder:
    """Reading needs nothing; `claim` is for the one who writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._claim: int | None = None

    def version(self, number: int) -> Path:
        """Where a version lies, or would."""
        return self.path / VERSIONS / f"{number:04d}"

    @property
    def begun(self) -> bool:
        """Whether it is a learner's folder."""
        return (self.path / LEARNER).is_file()

    def current(self, kind: Kind | None = None) -> Current | None:
        """The version in use; None where there is none yet. kind: which it must be. Raises VersionError."""
        found = self._read(CURRENT, Current)
        if found is not None and kind not in (None, found.kind):
            raise VersionError(f"{self.path}: has versions of a {found.kind}, not of a {kind}")
        return found

    def history(self) -> list[HistoryEntry]:
        """Every version that there was, the oldest first. A line that was cut off by the learner's end is no version.

        Raises VersionError.
        """
        try:
            whole, _, _ = (self.path / HISTORY).read_bytes().rpartition(b"\n")
            return [msgspec.json.decode(line, type=HistoryEntry) for line in whole.splitlines()]
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            raise VersionError(f"{self.path / HISTORY}: cannot be read: {error}") from error

    def claim(self, tenants: Sequence[str], draft: str, option: str = DRAFT) -> None:
        """Be the one who writes here, for these tenants, from the model of this fingerprint on.

        option: what named that model, for people.

        Raises VersionError: somebody else writes, or the folder was made for others.
        """
        (self.path / VERSIONS).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._claim = os.open(self.path / VERSIONS, os.O_RDONLY)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise VersionError(f"{self.path}: another `specwire learn` writes there") from None
        asked = _Purpose(tuple(sorted(set(tenants))), draft)
        found = self._read(LEARNER, _Purpose)
        if found is None:
            self._write(LEARNER, asked)
        elif found != asked:
            self.release()
            differs = "tenants" if found.tenants != asked.tenants else "draft"
            ours, theirs = getattr(asked, differs), getattr(found, differs)
            name = option if differs == "draft" else differs
            raise VersionError(f"{self.path}: {name}: is for {shown(theirs)}, not for {shown(ours)}: take another")
        for left in (self.path / VERSIONS).glob(f"*{UNFINISHED}"):
            shutil.rmtree(left)

    def release(self) -> None:
        """Write no more. Idempotent."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def add(self, write: Callable[[Path], object], entry: HistoryEntry) -> None:
        """Keep a version, without using it yet. write: puts the model into the folder that it is given."""
        whole = self.version(entry.version)
        unfinished = whole.with_name(whole.name + UNFINISHED)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        write(unfinished)
        for file in unfinished.iterdir():
            to_disk(file)
        unfinished.rename(whole)
        to_disk(whole.parent)
        self._trim_history()
        with (self.path / HISTORY).open("ab") as lines:
            lines.write(msgspec.json.encode(entry) + b"\n")
        to_disk(self.path / HISTORY)

    def use(self, current: Current) -> None:
        """From now on services take this version."""
        self._write(CURRENT, current)

    def forget(self, session: str) -> list[int]:
        """Remove every version that saw a session, by its hash, itself or through what it began from; returns them.

        Where the one in use is among them, the newest of the others is used.
        """
        known = {entry.version: entry for entry in self.history()}
        saw: dict[int, bool] = {}
        for number, entry in sorted(known.items()):  # a version is newer than what it began from
            saw[number] = session in entry.sessions or (entry.since != number and saw.get(entry.since, False))
        gone = [number for number, tainted in saw.items() if tainted]
        current = self.current()
        if current is not None and current.version in gone:
            left = max(number for number in known if number not in gone and self.has(number))
            unknown = dict.fromkeys(("before", "after", "loss_before", "loss_after"))
            self.use(msgspec.structs.replace(current, version=left, why="forgot", **unknown))
        for number in gone:
            shutil.rmtree(self.version(number), ignore_errors=True)
        return gone

    def next_number(self) -> int:
        """Of a version that is to be added: none is given twice."""
        there = [int(each.name) for each in (self.path / VERSIONS).glob("[0-9]*") if each.name.isdecimal()]
        return max([*there, *(entry.version for entry in self.history())], default=-1) + 1

    def prune(self, needed: Sequence[int]) -> None:
        """Remove the weights of old versions. What they saw stays in the history."""
        there = sorted(int(each.name) for each in (self.path / VERSIONS).glob("[0-9]*") if each.name.isdecimal())
        for number in set(there) - {0, *needed, *there[-KEPT:]}:
            shutil.rmtree(self.version(number))

    def has(self, number: int) -> bool:
        """Whether a version's weights are there."""
        return self.version(number).is_dir()

    def _trim_history(self) -> None:
        """Cut off the half line that a learner left that was killed."""
        file = self.path / HISTORY
        if file.exists():
            data = file.read_bytes()
            os.truncate(file, data.rfind(b"\n") + 1)

    def _read(self, name: str, kind: type[Held]) -> Held | None:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise VersionError(f"{self.path / name}: cannot be read: {error}") from error

    def _write(self, name: str, value: Struct) -> None:
        with replaced(self.path / name) as beside:
            beside.write_bytes(msgspec.json.encode(value) + b"\n")


def shown(value: str | Sequence[str]) -> str:
    """Tenants, or a fingerprint, for people."""
    return value[:12] if isinstance(value, str) else ", ".join(value)
