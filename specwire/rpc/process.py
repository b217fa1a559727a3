"""What the processes of specwire share: one ready line, two-stage shutdown, messages for people.

The first SIGINT or SIGTERM drains (or gives up a start that is under way), the second stops at once. A failure is one
line on stderr, never a traceback.

    exit code 0    stopped by a signal
              1    could not start, or could not go on
              2    bad usage
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from specwire.progress import LAST_LINE

DRAIN_GRACE = 3.0

# The model's thread gives up the interpreter lock in every operation of a forward and must get it back from the event
# loop's thread; at Python's default of 5 ms a forward of 2 ms was often stretched by half.
SWITCH_INTERVAL_S = 0.0005
# Turns of the loop in which a thread of libgomp waits before it sleeps: some microseconds.
SPINS = "1000"
STOP_LIMIT = 10.0
# Seconds for a cancelled start to clean up.
GIVE_UP_LIMIT = 5.0
# The logger of these messages, where a log takes them.
SAID = "specwire.say"
SIGNALS = (signal.SIGINT, signal.SIGTERM)

# Characters that command a terminal (C0, DEL, C1) or reorder text (embeddings, overrides, isolates), except for tabs
# and line feeds: shown as Python escapes them.
_CONTROLS = (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_TEXT = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
_LINE = _TEXT | {ord("\n"): " ", ord("\t"): " "}


class Running(Protocol):
    """A service that was started."""

    @property
    def address(self) -> str:
        """HOST:PORT that it listens on."""
        ...

    async def failed(self) -> str:
        """Return, with the reason, once the service cannot go on; otherwise never."""
        ...

    async def stop(self, grace: float) -> None:
        """Refuse new work, let what runs go on for up to `grace` seconds, then end everything. Idempotent."""
        ...


R = TypeVar("R", bound=Running)


class Footprint(NamedTuple):
    """What this process takes by now. resident_bytes: memory that is its own or shared. age_s: since it began.

    0 where the system does not tell.
    """

    resident_bytes: int
    age_s: float

    @classmethod
    def now(cls) -> Footprint:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            up_s = float(Path("/proc/uptime").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return cls(0, 0.0)
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), max(0.0, up_s - began_s))

    def __str__(self) -> str:
        return f"{self.resident_bytes / 2**20:.0f} MiB of memory, {self.age_s:.1f} s after its start"


def share_machine() -> None:
    """Hand the interpreter's lock over quickly, and let threads of a forward wait for each other without a long spin.

    For processes whose event loop and model share the interpreter, and which share their cores with other ones. Called
    before the model's libraries are loaded. OpenMP's threads (llama.cpp's, torch's) would spin for milliseconds where
    they wait, in the way of whoever they wait for. Beside a busy loop on two cores SmolLM2 took 141 ms for four rows
    with threads that spin, 62 with SPINS, 44 with ones that sleep at once; alone 25, 22 and 35.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def keep_loaded() -> None:
    """Let Python's collector pass over what is there now: libraries and models, which stay.

    There are so many objects that a full pass takes as long as many steps, and no text goes on meanwhile. Called again,
    it frees what has gone meanwhile.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """Have no passes of Python's collector, for a while in which hardly anything goes: a load of libraries and models.

    Passes over what stays took a seventh of a start's processor time.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


async def run_until_signalled(
    start: Callable[[], Awaitable[R]], ready: Callable[[R], str], name: str = "", grace: float = DRAIN_GRACE
) -> int:
    """Start, print the ready line on stdout, serve until a signal or a failure, stop; returns the exit code."""
    prefix = f"specwire {name}".rstrip()
    with _signalled() as signalled:
        try:
            running = await _start_unless(signalled, start)
        except Exception as error:  # anything that keeps a process from starting is one line for its user
            say(f"{prefix}: error: {one_line(error)}")
            return 1
        if running is None:
            return 0
        keep_loaded()
        sys.stdout.write(ready(running) + "\n")
        sys.stdout.flush()
        reason = await _failure_unless(signalled, running)
        if reason is None:
            say(f"{prefix}: draining")
        else:
            say(f"{prefix}: error: {reason}")
        return await _stop(running, grace if reason is None else 0.0, prefix, 0 if reason is None else 1)


async def _start_unless(signalled: asyncio.Event, start: Callable[[], Awaitable[R]]) -> R | None:
    """The started service, or None if a signal came first: the start is then cancelled and has cleaned up."""
    starting = asyncio.ensure_future(start())
    await _done_or(signalled, starting)
    if starting.done():
        return starting.result()
    starting.cancel()
    done, _ = await asyncio.wait({starting}, timeout=GIVE_UP_LIMIT)
    if not done:
        raise TimeoutError(f"the start that was given up did not end within {GIVE_UP_LIMIT:g} s")
    if not starting.cancelled() and starting.exception() is None:
        async with asyncio.timeout(STOP_LIMIT):
            await starting.result().stop(0.0)
    return None


async def _failure_unless(signalled: asyncio.Event, running: R) -> str | None:
    failure = asyncio.ensure_future(running.failed())
    try:
        await _done_or(signalled, failure)
        return None if signalled.is_set() else failure.result()
    finally:
        failure.cancel()


async def _done_or(signalled: asyncio.Event, waited: asyncio.Future[Any]) -> None:
    signal_wait = asyncio.ensure_future(signalled.wait())
    try:
        await asyncio.wait({waited, signal_wait}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        signal_wait.cancel()


async def _stop(running: R, grace: float, prefix: str, code: int) -> int:
    try:
        async with asyncio.timeout(grace + STOP_LIMIT):
            await running.stop(grace)
    except Exception as error:
        say(f"{prefix}: error while stopping: {one_line(error)}")
        return 1
    return code


@contextmanager
def _signalled() -> Iterator[asyncio.Event]:
    """An event set by the first signal; the second one ends the process on the spot."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if event.is_set():
            os._exit(128 + number)
        event.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield event
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def one_line(error: BaseException) -> str:
    """An error for a user: its message on one line, with its type where the message alone says too little."""
    message = " ".join(str(error).split())
    terse = type(error).__module__ == "builtins" and not isinstance(error, (ValueError, OSError, RuntimeError))
    return f"{type(error).__name__}: {message}".rstrip(": ") if terse or not message else message


def visible(text: str, *, lines: bool = True) -> str:
    """Text from elsewhere as a terminal may show it: no character of it is a command.

    Each character is replaced by itself, so text that comes in pieces may be shown piece by piece. lines: line feeds
    and tabs stay; otherwise they become blanks.
    """
    return text.translate(_TEXT if lines else _LINE)


def say(line: str) -> None:
    """Progress and errors, for people; a log line where lines are for machines (`specwire.telemetry.logs`)."""
    line = visible(line, lines=False)
    said = logging.getLogger(SAID)
    if said.handlers:
        said.log(logging.ERROR if ": error: " in line else logging.INFO, "%s", line)
        return
    LAST_LINE.say(line)
