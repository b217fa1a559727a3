"""Which stack a command finds: files of this user's running stacks, stale ones told apart by their lock."""

from __future__ import annotations

import argparse
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from deploy.cli.diagnosis.top import add_arguments as add_top_arguments
from deploy.cli.diagnosis.top import request_of
from deploy.cli.stack_address import (
    ListedStack,
    add_address_arguments,
    explained,
    listed,
    listed_stacks,
    stack_address_of,
)
from deploy.stack.processes import AT_END
from specwire.client import SpecwireError
from specwire.core.invalid import InvalidParameter
from specwire.options import DEFAULT_LISTEN
from tests.orchestrator.http.front import front
from tests.orchestrator.stack import TARGET

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
HERE = ListedStack("127.0.0.1:50051", "http://127.0.0.1:8000", "a-model", tls=False)
OTHER = ListedStack("127.0.0.1:50052", None, "another", tls=False)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SPECWIRE_ADDRESS", raising=False)
    return tmp_path


def parsed(add: Callable[[argparse.ArgumentParser], None], *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args(words)


def address_of(*words: str) -> str | None:
    return stack_address_of(parsed(add_address_arguments, *words)).address


def test_a_running_stack_is_found_while_it_runs(runtime: Path) -> None:
    assert (listed_stacks(), address_of()) == ([], None)
    with listed(HERE):
        assert listed_stacks() == [HERE]
        assert address_of() == HERE.address
        (file,) = (runtime / "specwire").iterdir()
        assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
    assert (listed_stacks(), address_of(), list(runtime.iterdir())) == ([], None, [])


def test_a_process_that_ends_on_the_spot_is_listed_no_longer(runtime: Path) -> None:
    """Its last signal may come at any moment, also while the listing is removed."""
    with listed(HERE):
        (clean,) = AT_END
        clean()
        assert list(runtime.iterdir()) == []
        clean()
    assert not AT_END


def test_a_listing_that_is_being_written_goes_with_its_process(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []

    def interrupted(*_: object) -> None:
        found.append([file.suffix for file in (runtime / "specwire").iterdir()])
        for clean in AT_END:
            clean()
        found.append([file.name for file in runtime.iterdir()])

    monkeypatch.setattr(os, "write", interrupted)
    with listed(HERE):
        pass
    assert found == [[".new"], []]


def test_what_is_named_goes_before_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with listed(HERE):
        assert address_of("--address", OTHER.address) == OTHER.address
        assert address_of("--target", "scripted:7") is None  # asks for a stack of its own
        monkeypatch.setenv("SPECWIRE_ADDRESS", OTHER.address)
        assert address_of() == OTHER.address


def test_of_several_one_must_be_named() -> None:
    with listed(HERE), listed(OTHER):
        with pytest.raises(InvalidParameter, match="address: is needed where several stacks run: ") as error:
            address_of()
        assert "127.0.0.1:50051 (a-model)" in str(error.value)
        assert "127.0.0.1:50052 (another)" in str(error.value)


def test_top_looks_at_it_too() -> None:
    assert request_of(parsed(add_top_arguments)).address == DEFAULT_LISTEN
    with listed(OTHER):
        assert request_of(parsed(add_top_arguments)).address == OTHER.address


def test_a_stack_that_encrypts_is_not_called_in_the_clear() -> None:
    with (
        listed(ListedStack("127.0.0.1:50051", None, "m", tls=True)),
        pytest.raises(
            InvalidParameter, match="--tls-ca: or --tls: the stack that runs here, 127.0.0.1:50051, encrypts"
        ),
    ):
        address_of()


def test_a_killed_stack_is_not_found(runtime: Path) -> None:
    script = """
from deploy.cli.stack_address import ListedStack, listed
with listed(ListedStack("127.0.0.1:1", None, "m", False)):
    print("listed", flush=True)
    input()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listed\n"
        assert [each.address for each in listed_stacks()] == ["127.0.0.1:1"]
        process.send_signal(signal.SIGKILL)
    assert len(list((runtime / "specwire").iterdir())) == 1
    assert listed_stacks() == []
    assert list((runtime / "specwire").iterdir()) == []


def test_a_folder_that_others_can_see_into_is_not_believed_nor_is_a_link(
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever can write there could have prompts sent to an address of their choice."""
    with listed(HERE):
        for mode in (0o777, 0o755):
            (runtime / "specwire").chmod(mode)
            assert listed_stacks() == []
            with listed(OTHER):
                assert listed_stacks() == []
            assert "is not this user's alone" in capsys.readouterr().err
    (runtime / "elsewhere").mkdir(0o700)
    (runtime / "specwire").symlink_to(runtime / "elsewhere")
    with listed(HERE):
        assert listed_stacks() == []
    assert list((runtime / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"address": "127.0.0.1:1"})])
def test_what_another_release_lists_is_passed_over(runtime: Path, text: str) -> None:
    with listed(HERE), listed(OTHER):
        file = next((runtime / "specwire").iterdir())
        file.write_text(text)
        assert len(listed_stacks()) == 1


def test_without_a_runtime_folder_it_is_in_that_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with listed(HERE):
        assert (tmp_path / f"specwire-{os.geteuid()}").is_dir()
        assert listed_stacks() == [HERE]


def refusal(*words: str) -> str:
    """Run a command that must fail; what it says."""
    command = [sys.executable, "-m", "deploy", *words]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1, done
    return done.stderr.removeprefix(f"specwire {words[0]}: error: ")


def test_the_port_for_http_is_told_from_that_for_grpc() -> None:
    with front(TARGET) as door:
        http = door.url.removeprefix("http://")
        for command in (["generate", "x"], ["chat"], ["top"]):
            said = refusal(*command, "--address", http)
            assert said == f"{http} speaks HTTP, the other address of its ready line is for gRPC\n"
        with listed(ListedStack("127.0.0.1:50051", door.url, "m", tls=False)):
            assert (
                refusal("generate", "x", "--address", http) == f"{http} speaks HTTP: its gRPC is on 127.0.0.1:50051\n"
            )


async def test_where_nobody_answers_nothing_is_guessed(dead_address: str) -> None:
    error = SpecwireError(grpc.StatusCode.UNAVAILABLE, f"cannot connect to {dead_address}", reached=False)
    assert await explained(error, dead_address, None) == error.message
