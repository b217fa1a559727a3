"""Constraints for a service: each is compiled, and answers, in a process of its own (`specwire.text.nursery`).

The event loop waits for what is being compiled without being held up; the sessions of others notice nothing of it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Callable, Hashable, Sequence

from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, Matcher
from specwire.text.forkserver import Busy, ForkServer
from specwire.text.frames import Lost, packed, receive
from specwire.text.matching import PATIENCE_S, RemoteMatching

NURSERY = "specwire.text.nursery"
# Seconds for one constraint. Its process has a limit of its own, for processor time.
LIMIT_S = 20.0
# Constraints that are being compiled at once, so that they take few of the machine's cores, and those that wait in all.
AT_ONCE, MOST_WAITING = 4, 256


def installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


class NotInstalled(Exception):
    """The library is not there."""


Found = Matcher | InvalidParameter | NotInstalled | Busy


class Compiler:
    """For one model's tokenizer. The process that the others are forked from begins with the first constraint.

    Args: see `specwire.text.constrained.Grammars`.
    """

    def __init__(self, tokenizer_json: bytes, vocabulary: int, eos_ids: Sequence[int]) -> None:
        self._usable = bool(tokenizer_json and eos_ids)
        self._vocabulary = vocabulary
        self._eos_ids = tuple(eos_ids)
        self._forks = ForkServer(NURSERY, [str(each) for each in (vocabulary, *eos_ids)], tokenizer_json)
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def begin(self, constraint: Constraint, output: Sequence[int], limit_s: float = LIMIT_S) -> Matcher:
        """The constraint behind what there is of the output.

        Raises:
            InvalidParameter: it is none, asks for too much, or does not allow the output.
            NotInstalled: this service lacks the library.
            Busy: too much waits to be compiled, or this was not within `limit_s` seconds.
        """
        if not installed():
            raise NotInstalled(f"{constraint.kind}: needs llguidance here (pip install 'specwire[constrained]')")
        if not self._usable:
            raise constraint.invalid("needs a model with a tokenizer and an end-of-sequence id")
        if self._waiting >= MOST_WAITING:
            raise Busy(f"{constraint.kind}: {MOST_WAITING} constraints wait to be compiled")
        self._waiting += 1
        try:
            async with asyncio.timeout(limit_s):
                async with self._turns:
                    return await self._begun(constraint, output)
        except TimeoutError:
            raise Busy(f"{constraint.kind}: was not compiled within {limit_s:g} s") from None
        except Lost as lost:
            raise constraint.invalid(str(lost)) from None
        finally:
            self._waiting -= 1

    async def _begun(self, constraint: Constraint, output: Sequence[int]) -> Matcher:
        asked = {"kind": constraint.kind, "texts": constraint.texts, "output": list(output)}
        with self._forks.connect() as ours:
            ours.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_sendall(ours, packed(asked))
            except OSError as error:
                raise Lost(f"the process that compiles is gone: {error.strerror}") from None
            await _readable(ours)
            said, _ = receive(ours.fileno(), PATIENCE_S)
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


async def _readable(connection: socket.socket) -> None:
    """Return when there is something to read, or the other end is gone."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(connection, settle)
    try:
        await ready
    finally:
        loop.remove_reader(connection)


class Beginnings:
    """Owns a task for each constraint that is being compiled for a link's session."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._tasks: dict[asyncio.Task[None], Hashable] = {}

    def begin(
        self, link: Hashable, constraint: Constraint, output: Sequence[int], tell: Callable[[Found], object]
    ) -> None:
        """`tell` is called with what became of it, unless the link is lost first."""
        task = asyncio.ensure_future(self._begin(constraint, output, tell))
        self._tasks[task] = link
        task.add_done_callback(self._tasks.pop)

    def lost(self, link: Hashable) -> None:
        """Whoever takes its sessions over opens them anew."""
        for task in [task for task, theirs in self._tasks.items() if theirs == link]:
            task.cancel()

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._compiler.started:
            await asyncio.to_thread(self._compiler.stop)

    async def _begin(self, constraint: Constraint, output: Sequence[int], tell: Callable[[Found], object]) -> None:
        found: Found
        try:
            found = await self._compiler.begin(constraint, output)
        except (InvalidParameter, NotInstalled, Busy) as error:
            found = error
        tell(found)
