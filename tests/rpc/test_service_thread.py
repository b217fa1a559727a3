"""The thread of a service: it starts, wakes, fails and stops as it should, whatever runs in it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

import pytest

from specwire.rpc import service_thread
from specwire.rpc.service_thread import MOST_BACKLOG, GoOn, Inbox, ServiceThread, StartGivenUp, Stop
from tests.wait import raised

LIMIT_S = 120


@dataclass(frozen=True, slots=True)
class Say:
    """A command: report `words`."""

    words: str
    weight: int = 1


Deliver = Callable[[str], None]
Thread = ServiceThread[Say, str, str]


class Echo:
    """Reports what it is told; "fail" is its end. `blocked`: a step lasts until `go_on`."""

    def __init__(self, deliver: Deliver, blocked: bool = False) -> None:
        self.inbox: Inbox[Say] = Inbox(lambda said: said.weight)
        self.step_began_s: float | None = None
        self.deliver = deliver
        self.stepping, self.go_on = threading.Event(), threading.Event()
        if not blocked:
            self.go_on.set()

    def run(self) -> None:
        while not isinstance(command := self.inbox.get(), Stop):
            self.step_began_s = time.monotonic()
            self.stepping.set()
            self.go_on.wait(LIMIT_S)
            self.step_began_s = None
            if command.words == "fail":
                raise ZeroDivisionError("by nought")
            self.deliver(command.words)


class Lost:
    """Helpers of which one is lost when the test says so."""

    def __init__(self) -> None:
        self.lost: Future[str] = Future()
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class Started:
    """A thread, what runs in it, and what it has reported."""

    def __init__(self, blocked: bool = False, step_limit_s: float = LIMIT_S, helpers: Lost | None = None) -> None:
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self._blocked = blocked
        self.thread: Thread = ServiceThread("echo", self._load, step_limit_s, helpers)
        self.thread.on_reports = self.heard.put_nowait

    async def __aenter__(self) -> Self:
        assert await self.thread.start() == "a model"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.thread.stop()

    def _load(self, deliver: Deliver, _: GoOn) -> tuple[Echo, str]:
        self.echo = Echo(deliver, self._blocked)
        return self.echo, "a model"

    async def hear(self) -> str:
        return await asyncio.wait_for(self.heard.get(), LIMIT_S)


async def test_it_tells_what_it_loaded_and_wakes_for_commands() -> None:
    async with Started() as started:
        for words in ("one", "two", "three"):
            started.thread.send(Say(words))
            assert await started.hear() == words
        await started.thread.stop()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not place threads")
async def test_its_thread_keeps_to_its_cores_once_its_model_is_loaded() -> None:
    own, before = frozenset({max(os.sched_getaffinity(0))}), os.sched_getaffinity(0)
    found: list[set[int]] = []
    runs = threading.Event()

    class Placed(Echo):
        def run(self) -> None:
            found.append(os.sched_getaffinity(0))
            runs.set()
            super().run()

    def load(deliver: Deliver, _: GoOn) -> tuple[Echo, str]:
        found.append(os.sched_getaffinity(0))
        return Placed(deliver), "a model"

    thread: Thread = ServiceThread("echo", load, cores=own)
    await thread.start()
    assert await asyncio.to_thread(runs.wait, LIMIT_S)
    await thread.stop()
    assert found == [before, own]
    assert os.sched_getaffinity(0) == before


async def test_a_command_before_it_is_ready_is_our_own_mistake() -> None:
    with pytest.raises(RuntimeError, match="a command before the echo was ready"):
        Started().thread.send(Say("early"))


async def test_what_loading_raises_is_raised_by_start() -> None:
    helpers = Lost()

    def load(*_: object) -> tuple[Echo, str]:
        raise ValueError("model 'x': there is no such directory")

    await raised(ValueError, ServiceThread("echo", load, helpers=helpers).start(), "no such directory")
    assert helpers.closed.is_set()


async def test_the_collector_makes_no_passes_while_it_loads_and_does_so_again_afterwards() -> None:
    during = list[bool]()

    def load(deliver: Deliver, _: GoOn) -> tuple[Echo, str]:
        during.append(gc.isenabled())
        if len(during) == 2:
            raise ZeroDivisionError
        return Echo(deliver), "loaded"

    thread: Thread = ServiceThread("echo", load)
    await thread.start()
    assert (during, gc.isenabled()) == ([False], True)
    await thread.stop()
    with pytest.raises(ZeroDivisionError):
        await ServiceThread[Say, str, str]("echo", load).start()
    assert (during, gc.isenabled()) == ([False, False], True)


async def test_a_cancelled_start_returns_when_the_thread_has_ended() -> None:
    loading, go_on = threading.Event(), threading.Event()
    before = set(threading.enumerate())

    def load(deliver: Deliver, _: GoOn) -> tuple[Echo, str]:
        loading.set()
        go_on.wait(LIMIT_S)
        return Echo(deliver), "late"

    starting = asyncio.ensure_future(ServiceThread("echo", load).start())
    assert await asyncio.to_thread(loading.wait, LIMIT_S)
    starting.cancel()
    go_on.set()
    await raised(asyncio.CancelledError, asyncio.wait_for(starting, LIMIT_S))
    assert not [one for one in threading.enumerate() if one not in before and one.name == "echo"]


async def test_a_cancelled_start_does_not_wait_for_a_load_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_thread, "GIVE_UP_LIMIT_S", 0.05)
    go_on = threading.Event()

    def load(*_: object) -> tuple[Echo, str]:
        go_on.wait(LIMIT_S)
        raise ValueError("too late")

    starting = asyncio.ensure_future(ServiceThread("echo", load).start())
    await asyncio.sleep(0)
    starting.cancel()
    done, _ = await asyncio.wait({starting}, timeout=LIMIT_S / 3)
    go_on.set()
    assert done
    assert starting.cancelled()


async def test_loading_learns_that_the_start_is_given_up() -> None:
    began, asked = threading.Event(), threading.Event()

    def load(_: Deliver, go_on: GoOn) -> tuple[Echo, str]:
        began.set()
        asked.wait(LIMIT_S)
        go_on()
        raise AssertionError("loaded to the end")

    thread = ServiceThread("echo", load)
    starting = asyncio.create_task(thread.start())
    assert await asyncio.to_thread(began.wait, LIMIT_S)
    stopping = asyncio.create_task(thread.stop())
    await asyncio.sleep(0)
    asked.set()
    await raised(StartGivenUp, asyncio.wait_for(starting, LIMIT_S))
    await stopping


async def test_a_failure_of_the_thread_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async with Started() as started:
        started.thread.send(Say("fail"))
        with caplog.at_level(logging.CRITICAL, logger=service_thread.__name__):
            reason = await asyncio.wait_for(started.thread.failed(), LIMIT_S)
    assert reason == "the echo failed: ZeroDivisionError: by nought"


async def test_a_report_that_cannot_be_told_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Else its sessions would wait for it for ever."""

    def refuse(_: str) -> None:
        raise ValueError("out of range")

    async with Started() as started:
        started.thread.on_reports = refuse
        started.thread.send(Say("hello"))
        with caplog.at_level(logging.CRITICAL, logger=service_thread.__name__):
            reason = await asyncio.wait_for(started.thread.failed(), LIMIT_S)
    assert reason == "a report could not be told: ValueError: out of range"


async def test_a_step_that_does_not_end_is_a_failure() -> None:
    async with Started(blocked=True, step_limit_s=0.05) as started:
        started.thread.send(Say("for ever"))
        assert "under way for more than 0.05 s" in await asyncio.wait_for(started.thread.failed(), LIMIT_S)
        started.echo.go_on.set()


async def test_a_helper_that_is_lost_is_a_failure_and_all_end_with_the_thread() -> None:
    helpers = Lost()
    async with Started(helpers=helpers) as started:
        helpers.lost.set_result("rank 1 of 2 ended by SIGKILL")
        assert await asyncio.wait_for(started.thread.failed(), LIMIT_S) == "rank 1 of 2 ended by SIGKILL"
        assert not helpers.closed.is_set()
    assert helpers.closed.is_set()


async def test_stopping_is_no_failure() -> None:
    async with Started() as started:
        failure = asyncio.ensure_future(started.thread.failed())
    await asyncio.sleep(0)
    assert not failure.done()
    failure.cancel()


async def test_there_is_room_once_enough_of_what_was_sent_is_taken_in() -> None:
    async with Started(blocked=True) as started:
        started.thread.send(Say("first"))
        assert await asyncio.to_thread(started.echo.stepping.wait, LIMIT_S)
        await asyncio.wait_for(started.thread.room(), LIMIT_S)
        started.thread.send(Say("much", weight=MOST_BACKLOG + 1))
        waiting = asyncio.ensure_future(started.thread.room())
        await asyncio.sleep(2 * service_thread.BACKLOG_PAUSE_S)
        assert not waiting.done()
        started.echo.go_on.set()
        await asyncio.wait_for(waiting, LIMIT_S)
        assert (await started.hear(), await started.hear()) == ("first", "much")
