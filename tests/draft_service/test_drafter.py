"""The drafter's thread: it starts, wakes, fails and stops as it should, whatever the model does."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from draft_service.commands import CloseSession, Command
from draft_service.drafter import Book, Drafter
from tests.draft_service.test_sessions import Recorder

LIMIT_S = 120


class Counter:
    """Wants `steps` tokens for every command; delivers nothing."""

    def __init__(self, steps: int = 1, fails: bool = False) -> None:
        self.steps = steps
        self.fails = fails
        self.left = 0
        self.applied: list[Command] = []
        self.stepped = threading.Event()

    @property
    def wanting(self) -> bool:
        return self.left > 0

    def apply(self, command: Command) -> None:
        self.applied.append(command)
        self.left += self.steps

    def step(self) -> None:
        if self.fails:
            raise ZeroDivisionError("by nought")
        self.left -= 1
        self.stepped.set()

    def deliver(self) -> None:
        pass


def started(book: Book) -> Drafter[str]:
    return Drafter(lambda: (book, "a model"))


def a_command() -> Command:
    return CloseSession(Recorder(), 1)


async def test_it_tells_what_it_loaded_and_wakes_for_commands() -> None:
    book = Counter()
    drafter = started(book)
    assert await drafter.start() == "a model"
    for _ in range(3):
        book.stepped.clear()
        drafter.send(a_command())
        assert await asyncio.to_thread(book.stepped.wait, LIMIT_S)
    await drafter.stop()
    await drafter.stop()
    assert len(book.applied) == 3


async def test_it_looks_for_commands_between_tokens() -> None:
    """Endless drafting does not keep it from stopping."""
    book = Counter(steps=1 << 60)
    drafter = started(book)
    await drafter.start()
    drafter.send(a_command())
    assert await asyncio.to_thread(book.stepped.wait, LIMIT_S)
    await asyncio.wait_for(drafter.stop(), LIMIT_S)
    assert drafter.backlog == 0


async def test_what_loading_raises_is_raised_by_start() -> None:
    def load() -> tuple[Book, str]:
        raise ValueError("model 'x': there is no such directory")

    with pytest.raises(ValueError, match="no such directory"):
        await Drafter(load).start()


async def test_a_cancelled_start_returns_when_the_thread_has_ended() -> None:
    loading, go_on = threading.Event(), threading.Event()
    before = set(threading.enumerate())

    def load() -> tuple[Book, str]:
        loading.set()
        go_on.wait(LIMIT_S)
        return Counter(), "late"

    starting = asyncio.ensure_future(Drafter(load).start())
    assert await asyncio.to_thread(loading.wait, LIMIT_S)
    starting.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, LIMIT_S)
    assert not [one for one in threading.enumerate() if one not in before and one.name == "drafter"]


async def test_a_failure_of_the_thread_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    drafter = started(Counter(fails=True))
    await drafter.start()
    drafter.send(a_command())
    with caplog.at_level(logging.CRITICAL, logger="draft_service.drafter"):
        reason = await asyncio.wait_for(drafter.failed(), LIMIT_S)
    assert reason == "the drafter failed: ZeroDivisionError: by nought"
    await drafter.stop()


async def test_stopping_is_no_failure() -> None:
    drafter = started(Counter())
    await drafter.start()
    failure = asyncio.ensure_future(drafter.failed())
    await drafter.stop()
    await asyncio.sleep(0)
    assert not failure.done()
    failure.cancel()


async def test_a_cancelled_start_does_not_wait_for_a_load_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draft_service.drafter.GIVE_UP_LIMIT", 0.05)
    go_on = threading.Event()

    def load() -> tuple[Book, str]:
        go_on.wait(LIMIT_S)
        return Counter(), "late"

    starting = asyncio.ensure_future(Drafter(load).start())
    await asyncio.sleep(0)
    starting.cancel()
    done, _ = await asyncio.wait({starting}, timeout=LIMIT_S / 2)
    go_on.set()
    assert done
    assert starting.cancelled()
