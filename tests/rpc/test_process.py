"""How processes start, say that they are ready, and stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from specwire.rpc.process import one_line, run_until_signalled, say, visible


class Fake:
    """A service that fails when told to."""

    address = "127.0.0.1:1"

    def __init__(self, reason: str = "", stop_error: Exception | None = None) -> None:
        self.reason = reason
        self.stop_error = stop_error
        self.stopped_with: float | None = None

    async def failed(self) -> str:
        if not self.reason:
            await asyncio.Event().wait()
        return self.reason

    async def stop(self, grace: float) -> None:
        self.stopped_with = grace
        if self.stop_error:
            raise self.stop_error


async def run(fake: Fake, *signals: signal.Signals) -> int:
    def ready(running: Fake) -> str:
        for number in signals:
            os.kill(os.getpid(), number)
        return f"ready on {running.address}"

    async def start() -> Fake:
        return fake

    return await asyncio.wait_for(run_until_signalled(start, ready, "test", grace=0.5), 60.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_drains(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake()
    assert await run(fake, number) == 0
    assert fake.stopped_with == 0.5
    assert capsys.readouterr() == ("ready on 127.0.0.1:1\n", "specwire test: draining\n")


async def test_the_collector_passes_over_what_a_service_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    gc.unfreeze()
    try:
        assert await run(Fake(), signal.SIGTERM) == 0
        assert gc.get_freeze_count() > len(gc.get_objects())
    finally:
        gc.unfreeze()


async def test_a_failure_while_running_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake("the engine broke")
    assert await run(fake) == 1
    assert fake.stopped_with == 0.0
    assert capsys.readouterr().err == "specwire test: error: the engine broke\n"


async def test_a_failure_to_stop_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(Fake(stop_error=RuntimeError("stuck")), signal.SIGTERM) == 1
    assert "error while stopping: stuck" in capsys.readouterr().err


async def test_a_failure_to_start_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def start() -> Fake:
        raise ValueError("no such\n  model")

    assert await run_until_signalled(start, lambda _: "", "test") == 1
    assert capsys.readouterr() == ("", "specwire test: error: no such model\n")


async def test_a_signal_during_the_start_gives_it_up(capsys: pytest.CaptureFixture[str]) -> None:
    cleaned = False

    async def start() -> Fake:
        nonlocal cleaned
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            cleaned = True
        return Fake()

    assert await asyncio.wait_for(run_until_signalled(start, lambda _: "ready"), 60.0) == 0
    assert cleaned
    assert capsys.readouterr().out == ""


async def test_what_started_in_spite_of_the_signal_is_stopped() -> None:
    fake = Fake()

    async def start() -> Fake:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return fake
        return fake

    assert await asyncio.wait_for(run_until_signalled(start, lambda _: "ready"), 60.0) == 0
    assert fake.stopped_with == 0.0


async def test_a_start_that_ignores_being_given_up_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specwire.rpc.process.GIVE_UP_LIMIT", 0.05)
    go_on = asyncio.Event()

    async def start() -> Fake:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            await go_on.wait()
        return Fake()

    assert await asyncio.wait_for(run_until_signalled(start, lambda _: "ready", "test"), 60.0) == 1
    assert "given up did not end within 0.05 s" in capsys.readouterr().err
    go_on.set()


def test_the_second_signal_stops_at_once() -> None:
    script = """
        import asyncio, os, signal
        from specwire.rpc.process import run_until_signalled

        class Stubborn:
            address = "x"
            async def failed(self):
                await asyncio.Event().wait()
            async def stop(self, grace):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(60)

        async def start():
            return Stubborn()

        def ready(running):
            os.kill(os.getpid(), signal.SIGINT)
            return "ready"

        asyncio.run(run_until_signalled(start, ready))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120.0
    )
    assert ended.returncode == 128 + signal.SIGTERM
    assert ended.stdout == "ready\n"
    assert "Traceback" not in ended.stderr


def test_what_is_said_is_one_line_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """What a service says of itself may stand in it."""
    say("error: \x1b]0;X\x07\x9b2J\r\nspecwire: ready\u202e")
    assert capsys.readouterr().err == r"error: \x1b]0;X\x07\x9b2J\x0d specwire: ready\u202e" + "\n"


def test_other_scripts_are_shown_as_they_are() -> None:
    for text in ("漢字\u0301 \u05d0\u200f", "\U0001f469\u200d\U0001f4bb", "a\tb\n"):
        assert visible(text) == text


def test_errors_fit_on_one_line() -> None:
    assert one_line(OSError("a\nb")) == "a b"
    assert one_line(KeyError("x")) == "KeyError: 'x'"
    assert one_line(TimeoutError()) == "TimeoutError"
