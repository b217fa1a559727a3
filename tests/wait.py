"""Waiting until something holds, with a deadline, where no event tells of it; and for what is raised."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from inspect import isawaitable
from pathlib import Path
from typing import TypeVar

import pytest

# Seconds: until a test gives up on a machine that is busy with other work, and between two looks.
LIMIT_S = 120.0
PAUSE_S = 0.01

Answer = TypeVar("Answer")
Raised = TypeVar("Raised", bound=BaseException)


async def until(holds: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Raise TimeoutError at the deadline. holds: what it returns may be awaitable."""
    async with asyncio.timeout(limit_s):
        while True:
            answer = holds()
            if await answer if isawaitable(answer) else answer:
                return
            await asyncio.sleep(PAUSE_S)


async def raised(
    error: type[Raised] | tuple[type[Raised], ...], call: Awaitable[object], match: str | None = None
) -> Raised:
    """What the call raises, which is of this kind."""
    with pytest.raises(error, match=match) as caught:
        await call
    return caught.value


def eventually(holds: Callable[[], object], limit_s: float = LIMIT_S, pause_s: float = PAUSE_S) -> bool:
    """Whether it holds before the deadline. Blocks its thread."""
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
    return True


async def asked(ask: Callable[[], Awaitable[Answer]], holds: Callable[[Answer], object]) -> Answer:
    """Ask again until an answer holds, with a deadline: for answers that depend on who was quick."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            answer = await ask()
            if holds(answer):
                return answer
            await asyncio.sleep(PAUSE_S)


def asked_blocking(ask: Callable[[], Answer], holds: Callable[[Answer], object]) -> Answer:
    """As `asked`, in the caller's thread. Raises TimeoutError."""
    end = time.monotonic() + LIMIT_S
    while not holds(answer := ask()):
        if time.monotonic() > end:
            raise TimeoutError(f"the last answer: {answer}")
        time.sleep(PAUSE_S)
    return answer


def limits(first_s: float) -> Iterator[float]:
    """Seconds, longer each time: for what must run into a limit, but on a busy machine not before it has said why."""
    while True:
        yield first_s
        first_s *= 4


def lives(pid: int) -> bool:
    """Whether a process runs. A zombie that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def marked(mark: str) -> list[int]:
    """The processes that live with this NAME=VALUE in their environment, whoever their parents are by now."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
