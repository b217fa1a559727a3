"""Constraints for a service: each is compiled, and answers, in a process of its own (`constraint_process`).

The event loop awaits compilations without being held up, so other sessions are not delayed.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, Mask, Matcher
from specwire.text.sandbox import HEAD, Busy, Closed, ForkServer, Lost, ask, lengths_of, readable, send

PROCESS = "specwire.text.constraint_process"
# Seconds for one constraint.
LIMIT_S = 20.0
# Its process's own limits: seconds of processor time, for compiling it with what there is of the output, and for the
# masks of one window; bytes.
COMPILE_S, ANSWER_S, MOST_MEMORY = 2.0, 1.0, 2 << 30
TOO_MUCH = "took more time or memory than it may: {:g} s of a processor, {} GiB"
# How many constraints are compiled at once, so that they take few cores, and how many of one caller may wait.
AT_ONCE, MOST_WAITING = 4, 256


# The first release whose masks are ours: one before it, which vLLM pins, bounds no white space between the parts of a
# JSON text.
LIBRARY, LEAST = "llguidance", (1, 9)


@cache
def installed_version() -> str:
    """The library's version; empty where it is not there."""
    try:
        return version(LIBRARY)
    except PackageNotFoundError:
        return ""


def lacking() -> str:
    """What a service needs for constraints, and how to get it; empty where it has that."""
    found = installed_version()
    if not found:
        return f"needs {LIBRARY} here (pip install 'specwire[constrained]')"
    if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) >= LEAST:
        return ""
    least = ".".join(map(str, LEAST))
    return f"needs {LIBRARY} {least} here, not {found} (pip install '{LIBRARY}>={least}')"


class NotInstalled(Exception):
    """The library is not there, or too old."""


Found = Matcher | InvalidParameter | NotInstalled | Busy


class _Turns:
    """Lets `most` work at once. Next is who has fewest at work; of equals the one that came first."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._working: Counter[Hashable] = Counter()
        self._waiting: list[tuple[Hashable, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, whose: Hashable) -> AsyncIterator[None]:
        entry = whose, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        self._let()
        try:
            await entry[1]
            yield
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                self._free += 1
                self._working[whose] -= 1
                self._let()

    def _let(self) -> None:
        self._working = +self._working
        while self._free and self._waiting:
            entry = min(self._waiting, key=lambda each: self._working[each[0]])
            self._waiting.remove(entry)
            self._free -= 1
            self._working[entry[0]] += 1
            if not entry[1].done():  # else it was given up at this very moment, and gives its turn back
                entry[1].set_result(None)


class Compiler:
    """For one model's tokenizer. The process that the others are forked from begins with the first constraint.

    Args: see `specwire.text.constraint_process.Grammars`.
    """

    def __init__(self, tokenizer_json: bytes, vocabulary: int, eos_ids: Sequence[int]) -> None:
        self._usable = bool(tokenizer_json and eos_ids)
        self._vocabulary = vocabulary
        self._eos_ids = tuple(eos_ids)
        self._forks = ForkServer(PROCESS, [str(each) for each in (vocabulary, *eos_ids)], tokenizer_json)
        self._turns = _Turns(AT_ONCE)
        self._waiting: Counter[Hashable] = Counter()

    async def begin(
        self, constraint: Constraint, output: Sequence[int], limit_s: float = LIMIT_S, whose: Hashable = None
    ) -> Matcher:
        """The constraint's matcher behind the output so far.

        whose: the caller; callers take turns.

        Raises:
            InvalidParameter: it is none, asks for too much, or does not allow the output.
            NotInstalled: this service lacks the library, or has one whose masks are others.
            Busy: too much waits to be compiled, or this was not within `limit_s` seconds.
        """
        if lacks := lacking():
            raise NotInstalled(f"{constraint.kind}: {lacks}")
        if not self._usable:
            raise constraint.invalid("needs a model with a tokenizer and an end-of-sequence id")
        if self._waiting[whose] >= MOST_WAITING:
            raise Busy(f"{constraint.kind}: {MOST_WAITING} constraints wait to be compiled")
        self._waiting[whose] += 1
        try:
            async with asyncio.timeout(limit_s):
                async with self._turns.turn(whose):
                    return await self._begun(constraint, output)
        except TimeoutError:
            raise Busy(f"{constraint.kind}: was not compiled within {limit_s:g} s") from None
        except Lost as lost:
            told = TOO_MUCH.format(COMPILE_S, MOST_MEMORY >> 30) if isinstance(lost, Closed) else str(lost)
            raise constraint.invalid(told) from None
        finally:
            self._waiting[whose] -= 1
            self._waiting = +self._waiting

    async def _begun(self, constraint: Constraint, output: Sequence[int]) -> Matcher:
        asked = {"constraint": asdict(constraint), "output": list(output)}
        with await self._forks.begun() as ours:
            try:
                said, _ = await ask(ours, asked)
            except OSError as error:
                raise Lost(f"the process that compiles is gone: {error.strerror}") from None
            if "error" in said:
                raise constraint.invalid(said["error"])
            if said["taken"] < len(output):
                raise constraint.invalid(f"does not allow the output as it is, at its token {said['taken']}")
            ours.setblocking(True)
            return RemoteMatching(ours.detach(), output, self._vocabulary, self._eos_ids)

    @property
    def started(self) -> bool:
        return self._forks.process is not None

    def stop(self) -> None:
        """End the process that others are forked from, and those. Idempotent."""
        self._forks.stop()


class Beginnings:
    """Owns a task for each constraint that is being compiled for a link's session."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._tasks: dict[asyncio.Task[None], tuple[Hashable, int]] = {}

    def begin(
        self,
        link: Hashable,
        constraint: Constraint,
        output: Sequence[int],
        tell: Callable[[Found], object],
        handle: int = 0,
        whose: Hashable = None,
    ) -> None:
        """`tell` is called with what became of it, unless the link is lost, or the session is over, first.

        whose: callers take turns; a link is one, unless more is known.
        """
        task = asyncio.ensure_future(self._begin(constraint, output, tell, link if whose is None else whose))
        self._tasks[task] = link, handle
        task.add_done_callback(self._tasks.pop)

    def lost(self, link: Hashable) -> None:
        """The next link opens its sessions anew."""
        for task in [task for task, (theirs, _) in self._tasks.items() if theirs == link]:
            task.cancel()

    def over(self, link: Hashable, handles: Iterable[int]) -> None:
        """Sessions of a link that were closed; others may be among them."""
        gone = {(link, handle) for handle in handles} if self._tasks else ()
        for task in [task for task, whose in self._tasks.items() if whose in gone]:
            task.cancel()

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._compiler.started:
            await asyncio.to_thread(self._compiler.stop)

    async def _begin(
        self, constraint: Constraint, output: Sequence[int], tell: Callable[[Found], object], whose: Hashable
    ) -> None:
        found: Found
        try:
            found = await self._compiler.begin(constraint, output, whose=whose)
        except (InvalidParameter, NotInstalled, Busy) as error:
            found = error
        tell(found)


# ----------------------------------------------------------------------------------------------------------------------
# A constraint that another process holds, as a session sees it.

# Seconds. The other process has a limit on processor time, which it reaches first unless it gets no core.
PATIENCE_S = 10.0
# Tokens that are asked about at once.
MOST_AHEAD = 32
# Bytes that are read at a time.
MOST_READ = 1 << 18


class RemoteMatching:
    """Implements `specwire.core.law.constraint.Matcher`; once its process is lost it allows nothing.

    Tokens taken or taken back are told with the next question. The last answer also covers the tokens that are decided
    next, so a step costs one question, asked before its forward and answered after it.

    Invariant: rows[i] is what may stand behind tokens[:at] and window[:i]; the other process has tokens[:told].

    Args:
        fd: of the connection, owned from now on; closing it ends the process.
        tokens: of the output, that the other process has taken.
    """

    def __init__(self, fd: int, tokens: Sequence[int], vocabulary: int, eos_ids: Sequence[int]) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._tokens = list(tokens)
        self._told = len(self._tokens)
        self._vocabulary = vocabulary
        self._eos_ids = frozenset(eos_ids)
        self._at = 0
        self._window: tuple[int, ...] = ()
        self._rows: list[Mask | None] = []
        self._asked: tuple[int, tuple[int, ...]] | None = None
        self._give_up_s = 0.0
        # Of the answer, so far.
        self._said = bytearray()
        self._trouble, self._broken = "", False

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def trouble(self) -> str:
        return self._trouble

    @property
    def broken(self) -> bool:
        return self._broken

    @property
    def _ended(self) -> bool:
        return bool(self._tokens) and self._tokens[-1] in self._eos_ids

    def take(self, tokens: Sequence[int]) -> int:
        for taken, token in enumerate(tokens):
            mask = self._next(tokens[taken : taken + MOST_AHEAD])
            if mask is None or not mask[token]:
                return taken
            self._tokens.append(token)
        return len(tokens)

    def rollback(self, length: int) -> None:
        if length < self.length:
            del self._tokens[length:]
            self._told = min(self._told, length)
            if length < self._at:
                self._rows = []
            self._asked = self._asked and (-1, ())  # its answer is of another text

    def ask(self, window: Sequence[int]) -> None:
        if self._asked is None and not self._ended and not self._trouble and not self._knows(tuple(window)):
            said = {"back": self._told, "take": self._tokens[self._told :], "window": list(window)}
            self._told, self._asked = self.length, (self.length, tuple(window))
            self._give_up_s = time.monotonic() + PATIENCE_S
            try:
                send(self._fd, said)
            except Lost as lost:
                self._lose(lost)

    def heard(self, limit_s: float) -> bool:
        """A process that stands still, in the middle of an answer, too, is lost after PATIENCE_S."""
        until_s = time.monotonic() + limit_s
        while self._asked is not None and readable(self._fd, max(0.0, until_s - time.monotonic())):
            self._read()
        if self._asked is not None and time.monotonic() > self._give_up_s:
            self._lose(Lost(f"did not answer within {PATIENCE_S:g} s"))
        return self._asked is None

    @property
    def known(self) -> tuple[int, ...] | None:
        there = bool(self._rows) and self._at == self.length and self._asked is None
        return self._window if there and not self._ended else None

    def masks(self, window: Sequence[int]) -> list[Mask | None]:
        nothing: list[Mask | None] = [None] * (len(window) + 1)
        if self._ended:
            return nothing
        window = tuple(window)
        self._hear()
        if not self._knows(window):
            self.ask(window)
            self._hear()
        if self._trouble:
            return [np.zeros(self._vocabulary, dtype=np.bool_), *nothing[1:]]
        return [*self._rows, *nothing][: len(window) + 1]

    def _knows(self, window: tuple[int, ...]) -> bool:
        return bool(self._rows) and self._at == self.length and self._window[: len(window)] == window

    def _next(self, tokens: Sequence[int]) -> Mask | None:
        """What may stand behind what is taken. Where that must be asked for, so is what may stand behind `tokens`."""
        known = self.length - self._at
        if 0 <= known < len(self._rows) and tuple(self._tokens[self._at :]) == self._window[:known] and not self._ended:
            return self._rows[known]
        return self.masks(tokens)[0]

    def _hear(self) -> None:
        """Wait for the answer that is due, if one is."""
        while not self.heard(max(0.0, self._give_up_s - time.monotonic())):
            pass  # the limit has just passed

    def _read(self) -> None:
        """Take in what is there of the answer."""
        try:
            part = os.read(self._fd, MOST_READ)
        except OSError as error:
            self._lose(Lost(f"the process that holds it is gone: {error.strerror}"))
            return
        if not part:
            self._lose(Closed(TOO_MUCH.format(ANSWER_S, MOST_MEMORY >> 30)))
            return
        self._said += part
        if len(self._said) >= HEAD:
            object_size, data_size = lengths_of(bytes(self._said[:HEAD]))
            if len(self._said) >= HEAD + object_size + data_size:
                said = json.loads(self._said[HEAD : HEAD + object_size])
                self._answered(said, bytes(self._said[HEAD + object_size :]))

    def _answered(self, said: dict[str, Any], data: bytes) -> None:
        """Take in an answer."""
        if self._asked is None:
            return
        (self._at, self._window), self._asked = self._asked, None
        self._said.clear()
        bits = np.frombuffer(data, dtype=np.uint8).reshape(said["rows"], -1)
        rows = np.unpackbits(bits, axis=1, count=self._vocabulary).view(np.bool_)
        known = [*rows, *[None] * (len(self._window) + 1 - len(rows))]
        self._rows = known if self._at >= 0 else []
        self._trouble = said["trouble"]

    def _lose(self, lost: Lost) -> None:
        self._trouble, self._rows, self._asked = str(lost), [], None
        self._broken = not isinstance(lost, Closed)
