"""How processes start, say that they are ready, and stop; and on which machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from specwire.rpc import model_info
from specwire.rpc.process import SPINS, Footprint, one_line, say, share_machine, visible

# What every script below begins with. A process that signals itself is one of its own: signals are the whole process's,
# and in the tests' worker what other tests loaded would take part.
PRELUDE = """
import asyncio, os, signal, sys
from specwire.rpc import process

class Service:
    address = "127.0.0.1:1"
    def __init__(self, reason=""):
        self.reason = reason
    async def failed(self):
        if not self.reason:
            await asyncio.Event().wait()
        return self.reason
    async def stop(self, grace):
        print("stopped with", grace)

def signalled(number):
    os.kill(os.getpid(), number)

async def start():
    return Service()

def ready_then(name):
    def ready(running):
        signalled(getattr(signal, name))
        return f"ready on {running.address}"
    return ready

def run(start=start, ready=lambda running: f"ready on {running.address}"):
    async def within():
        return await asyncio.wait_for(process.run_until_signalled(start, ready, "test", grace=0.5), 60.0)
    raise SystemExit(asyncio.run(within()))
"""


def run_script(script: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that runs the prelude and the script."""
    ended = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_drains(name: str) -> None:
    told = (0, "ready on 127.0.0.1:1\nstopped with 0.5\n", "specwire test: draining\n")
    assert run_script(f"run(ready=ready_then({name!r}))") == told


def test_the_collector_passes_over_what_a_service_loaded() -> None:
    code, out, err = run_script("""
        import gc

        class Frozen(Service):
            async def stop(self, grace):
                print(gc.get_freeze_count() > len(gc.get_objects()))

        async def start():
            return Frozen()

        run(start, ready_then("SIGTERM"))
    """)
    assert (code, out, err) == (0, "ready on 127.0.0.1:1\nTrue\n", "specwire test: draining\n")


def test_a_failure_while_running_ends_the_process() -> None:
    code, out, err = run_script("""
        async def start():
            return Service("the engine broke")

        run(start)
    """)
    assert (code, out) == (1, "ready on 127.0.0.1:1\nstopped with 0.0\n")
    assert err == "specwire test: error: the engine broke\n"


def test_a_failure_to_stop_is_told() -> None:
    code, _, err = run_script("""
        class Stuck(Service):
            async def stop(self, grace):
                raise RuntimeError("stuck")

        async def start():
            return Stuck()

        run(start, ready_then("SIGTERM"))
    """)
    assert code == 1
    assert err == "specwire test: draining\nspecwire test: error while stopping: stuck\n"


def test_a_failure_to_start_is_one_line() -> None:
    assert run_script("""
        async def start():
            raise ValueError("no such\\n  model")

        run(start)
    """) == (1, "", "specwire test: error: no such model\n")


def test_a_signal_during_the_start_gives_it_up() -> None:
    assert run_script("""
        async def start():
            signalled(signal.SIGINT)
            try:
                await asyncio.sleep(60)
            finally:
                print("cleaned")
            return Service()

        run(start)
    """) == (0, "cleaned\n", "")


def test_what_started_in_spite_of_the_signal_is_stopped() -> None:
    assert run_script("""
        async def start():
            signalled(signal.SIGINT)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return Service()

        run(start)
    """) == (0, "stopped with 0.0\n", "")


def test_a_start_that_ignores_being_given_up_is_not_waited_for() -> None:
    code, out, err = run_script("""
        process.GIVE_UP_LIMIT = 0.05

        async def start():
            signalled(signal.SIGINT)
            for _ in range(2):
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    pass

        run(start)
    """)
    assert (code, out) == (1, "")
    assert err.startswith("specwire test: error: the start that was given up did not end within 0.05 s\n")


def test_the_second_signal_stops_at_once() -> None:
    code, out, err = run_script("""
        class Stubborn(Service):
            async def stop(self, grace):
                signalled(signal.SIGTERM)
                await asyncio.sleep(60)

        async def start():
            return Stubborn()

        run(start, ready_then("SIGINT"))
    """)
    assert (code, out, err) == (128 + signal.SIGTERM, "ready on 127.0.0.1:1\n", "specwire test: draining\n")


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


def test_what_a_process_takes_is_told() -> None:
    found = Footprint.now()
    assert found.resident_bytes > 1 << 20
    assert found.age_s > 0
    assert str(Footprint(3 << 20, 1.25)) == "3 MiB of memory, 1.2 s after its start"


def test_threads_of_a_forward_spin_briefly_where_they_wait_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It must be said before the libraries are loaded, which read it once."""
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    share_machine()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    share_machine()
    assert os.environ["GOMP_SPINCOUNT"] == "5"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    share_machine()
    assert os.environ["GOMP_SPINCOUNT"] == SPINS
    asked = "import sys, verify_service.server, draft_service.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def test_the_machine_s_id_is_stable_and_depends_on_boot_and_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = model_info.host_id()
    assert model_info.host_id() == mine
    monkeypatch.setattr(model_info, "BOOT_ID", tmp_path / "none")
    without_boot = model_info.host_id()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert len({mine, without_boot, model_info.host_id()}) == 3
    assert socket.gethostname() not in mine
