"""Every command that listens keeps to this machine, unless it encrypts or is told that the network is trusted.

What is refused whatever the machine has: refused.txt.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.certificates import Authority
from deploy.cli import main as cli
from deploy.stack import stack
from deploy.stack.options import StackError, StackOptions
from deploy.stack.stack import check_free
from specwire.rpc.keys import TOKEN_VARIABLE
from tests.wait import raised

COMMANDS = {
    "up": (),
    "verify": ("scripted:7",),
    "draft": ("scripted:7",),
    "orchestrate": ("--verifier", "127.0.0.1:1"),
    "edge": ("--verifier", "127.0.0.1:1", "--draft", "scripted:7"),
}
TOKEN = "a-token-of-that-length"


def test_a_port_alone_is_one_of_this_machine(taken_address: str) -> None:
    check_free(":0")
    with pytest.raises(StackError, match="cannot be used: Address already in use"):
        check_free(f":{taken_address.rpartition(':')[2]}")


async def test_figures_ports_are_looked_at_before_anything_is_loaded(taken_address: str, tmp_path: Path) -> None:
    """Also those of the services, which are behind the orchestrator's."""
    host, _, port = taken_address.rpartition(":")
    for metrics in (taken_address, f"{host}:{int(port) - 1}"):
        options = StackOptions("scripted:7", None, listen="127.0.0.1:0", metrics=metrics)
        refused = await raised(StackError, stack.start(options, tmp_path, pytest.fail))
        # The one before it may be somebody else's by chance: then that is refused.
        taken = [f"metrics: {address} cannot be used: Address already in use" for address in (taken_address, metrics)]
        assert str(refused) in taken


async def test_each_door_has_an_address_of_its_own(dead_address: str, tmp_path: Path) -> None:
    options = StackOptions("scripted:7", None, listen="127.0.0.1:0", http=dead_address, metrics=dead_address)
    with pytest.raises(StackError, match=f"metrics: {dead_address} cannot be used: Address already in use"):
        await stack.start(options, tmp_path, pytest.fail)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def accepted(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> bool:
    """Whether nothing is wrong with these: what is refused then is an option that is looked at after them."""
    last = ("--traces", "nowhere") if command == "up" else ("--grace", "-1")
    said = refused(capsys, command, *COMMANDS[command], *arguments, *last)
    return said.startswith(f"specwire {command}: error: {'traces' if command == 'up' else '--grace'}: must be ")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("door", [("--listen", "0.0.0.0:0"), ("--metrics", "0.0.0.0:9400")])
def test_with_tls_or_where_told_so_it_may_be(
    command: str, door: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of `up` only the orchestrator encrypts: the services behind it have figures, too."""
    cert, key = Authority().sign().save(tmp_path, "server")
    encrypts = command != "up" or "--metrics" not in door
    assert not accepted(capsys, command, *door)
    assert accepted(capsys, command, *door, "--tls-cert", cert, "--tls-key", key) is encrypts
    assert accepted(capsys, command, *door, "--insecure")


def test_a_token_stays_on_the_machine_or_is_encrypted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    unencrypted = "is not sent to far.example:1 unencrypted: give --tls or --tls-ca"
    for arguments in (
        ("orchestrate", "--verifier", "far.example:1"),
        ("draft", "scripted:7", "--connect", "far.example:1"),
        ("generate", "x", "--address", "far.example:1"),
    ):
        said = refused(capsys, *arguments, "--token-file", str(file))
        assert said == f"specwire {arguments[0]}: error: token: {unencrypted}"
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert unencrypted in refused(capsys, "generate", "x", "--address", "far.example:1")
    said = refused(capsys, "draft", "scripted:7", "--token-file", str(file))
    assert said == "specwire draft: error: --token-file: is shown to an orchestrator: needs --connect or --cloud"
    monkeypatch.delenv(TOKEN_VARIABLE)
    said = refused(capsys, "generate", "x", "--token-file", str(file))
    assert said == "specwire generate: error: --token-file: is shown to a running stack: give --address"


def test_who_dials_in_listens_for_figures_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = Authority().sign().save(tmp_path, "server")
    dialling, figures = ("--connect", "127.0.0.1:1"), ("--metrics", "0.0.0.0:9400")
    for flags in (("--tls-cert", cert, "--tls-key", key), ("--insecure",)):
        said = refused(capsys, "draft", *COMMANDS["draft"], *dialling, *flags)
        assert said.startswith("specwire draft: error: connect: a drafter that dials in listens for --metrics only")
        assert accepted(capsys, "draft", *dialling, *flags, *figures)
    assert not accepted(capsys, "draft", *dialling, *figures)


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line of a service that cannot start."""
    assert cli.main(arguments) == 1
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_port_in_use_is_told(command: str, taken_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = failed(capsys, command, *COMMANDS[command], "--listen", taken_address)
    several = f"listen: {taken_address} cannot be used: Address already in use"
    one = f"listen: cannot listen on {taken_address}: the port is in use"
    assert said == f"specwire {command}: error: {several if command in ('up', 'edge') else one}"


@pytest.mark.parametrize("url", ["redis://:secret@{dead}/0", "unix:///no/such/socket", "http://{dead}", "redis://x:y"])
def test_a_log_that_is_not_there_is_told(url: str, dead_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = failed(capsys, "orchestrate", "--verifier", dead_address, "--redis-url", url.format(dead=dead_address))
    assert said.startswith("specwire orchestrate: error: redis-url: ")
    assert "secret" not in said
