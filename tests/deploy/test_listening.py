"""Every command that listens keeps to this machine, unless it encrypts or is told that the network is trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.certificates import Authority
from deploy.cli import main as cli
from deploy.stack import stack
from deploy.stack.options import StackError, StackOptions
from deploy.stack.stack import check_free
from specwire.rpc.keys import TOKEN_VARIABLE

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
        with pytest.raises(StackError) as refused:
            await stack.start(options, tmp_path, pytest.fail)
        # The one before it may be somebody else's by chance: then that is refused.
        taken = [f"metrics: {address} cannot be used: Address already in use" for address in (taken_address, metrics)]
        assert str(refused.value) in taken


async def test_each_door_has_an_address_of_its_own(dead_address: str, tmp_path: Path) -> None:
    options = StackOptions("scripted:7", None, listen="127.0.0.1:0", http=dead_address, metrics=dead_address)
    with pytest.raises(StackError, match=f"metrics: {dead_address} cannot be used: Address already in use"):
        await stack.start(options, tmp_path, pytest.fail)


def test_a_silent_stream_is_kept_alive_by_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("up", "orchestrate", "edge"):
        for seconds in ("0", "nan", "-1"):
            said = refused(capsys, command, *COMMANDS[command], "--sse-keep-alive", seconds)
            assert said.startswith(f"specwire {command}: error: sse-keep-alive: must be above 0 and at most")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--http-host", "http://x", "http-host: must be a host's name without a port, or *, not 'http://x'"),
        ("--http-origin", "x.example", "http-origin: must be SCHEME://HOST[:PORT] or *, not 'x.example'"),
        ("--http-body", "5", "http-body: must be from 1024 to 1073741824 bytes, not 5"),
        ("--max-tokens-default", "4294967296", "max-tokens-default: must be from 0, which is what the context holds"),
        (
            "--max-tokens-limit",
            "-1",
            "max-tokens-limit: must be from 0, which is what the context holds, to 4294967295",
        ),
    ],
)
def test_how_callers_may_call_is_checked_first(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("up", "orchestrate", "edge"):
        told = refused(capsys, command, *COMMANDS[command], option, value)
        assert told.startswith(f"specwire {command}: error: {said}")
        both = refused(capsys, command, *COMMANDS[command], "--max-tokens-default", "9", "--max-tokens-limit", "8")
        assert both == f"specwire {command}: error: max-tokens-default: 9 is more than --max-tokens-limit, 8"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "far.example:1"])
def test_it_is_not_reached_from_elsewhere_unencrypted(
    command: str, listen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, command, *COMMANDS[command], "--listen", listen)
    assert said == (
        f"specwire {command}: error: listen: {listen} can be reached from other machines and the connection is not "
        "encrypted; give --tls-cert and --tls-key, use a loopback address, or --insecure if the network is trusted"
    )


def accepted(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> bool:
    """Whether nothing is wrong with these: what is refused then is an option that is looked at after them."""
    last = ("--traces", "nowhere") if command == "up" else ("--grace", "-1")
    said = refused(capsys, command, *COMMANDS[command], *arguments, *last)
    return said.startswith(f"specwire {command}: error: {'traces' if command == 'up' else '--grace'}: must be ")


@pytest.mark.parametrize("command", COMMANDS)
def test_with_tls_or_where_told_so_it_may_be(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = Authority().sign().save(tmp_path, "server")
    assert not accepted(capsys, command, "--listen", "0.0.0.0:0")
    for allowed in (("--tls-cert", cert, "--tls-key", key), ("--insecure",)):
        assert accepted(capsys, command, "--listen", "0.0.0.0:0", *allowed)


@pytest.mark.parametrize("command", COMMANDS)
def test_figures_are_a_door_like_the_others(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of `up` only the orchestrator encrypts: the services behind it have figures, too."""
    cert, key = Authority().sign().save(tmp_path, "server")
    figures = ("--metrics", "0.0.0.0:9400")
    said = refused(capsys, command, *COMMANDS[command], *figures)
    assert said.startswith(f"specwire {command}: error: metrics: 0.0.0.0:9400 can be reached from other machines")
    assert accepted(capsys, command, *figures, "--tls-cert", cert, "--tls-key", key) == (command != "up")
    assert accepted(capsys, command, *figures, "--insecure")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("grace", ["-1", "nan", "1e9"])
def test_a_grace_is_a_time(command: str, grace: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, command, *COMMANDS[command], "--grace", grace)
    assert said == f"specwire {command}: error: --grace: must be from 0 to 3600 seconds, not {float(grace):g}"


@pytest.mark.parametrize("command", ["up", "orchestrate", "edge"])
def test_a_tenant_has_something(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, command, *COMMANDS[command], "--tenant-sessions", "0")
    assert said == f"specwire {command}: error: --tenant-sessions: must be at least 1, not 0"


@pytest.mark.parametrize("command", ["up", "orchestrate", "edge"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--http", "0.0.0.0:8000"), "http: 0.0.0.0:8000 can be reached from other machines"),
        (("--http", "8000"), "http: must be HOST:PORT"),
        (("--chat-template", "/no/such/file"), "--chat-template: /no/such/file cannot be read: No such file"),
    ],
    ids=["exposed", "address", "template"],
)
def test_http_is_a_door_like_the_other(
    command: str, flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, command, *COMMANDS[command], *flags).startswith(f"specwire {command}: error: {said}")


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


@pytest.mark.parametrize("command", ["verify", "draft", "orchestrate", "edge"])
def test_a_bad_file_is_named_with_its_flag(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority()
    (cert, key), (_, other) = (authority.sign().save(tmp_path, name) for name in ("server", "other"))
    said = refused(capsys, command, *COMMANDS[command], "--tls-cert", "/no/such/file", "--tls-key", key)
    assert said == f"specwire {command}: error: --tls-cert: /no/such/file cannot be read: No such file or directory"
    said = refused(capsys, command, *COMMANDS[command], "--tls-cert", cert, "--tls-key", other)
    assert said == f"specwire {command}: error: --tls-key: {other} is not the key of the certificate in {cert}"


@pytest.mark.parametrize("command", ["up", "orchestrate", "edge"])
def test_too_many_drafters_of_a_session_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, command, *COMMANDS[command], "--drafters-per-session", "9")
    assert said == f"specwire {command}: error: drafters-per-session: must be from 1 to 8, not 9"


@pytest.mark.parametrize("option", ["--verifier", "--listen"])
@pytest.mark.parametrize("command", ["orchestrate", "edge"])
def test_an_address_is_a_host_and_a_port(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, command, *COMMANDS[command], option, "nowhere")
    place = option.removeprefix("--")
    assert said == f"specwire {command}: error: {place}: must be HOST:PORT with a port from 0 to 65535, not 'nowhere'"


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line of a service that cannot start."""
    assert cli.main(arguments) == 1
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["verify", "draft"])
def test_a_port_in_use_is_told(command: str, taken_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = failed(capsys, command, *COMMANDS[command], "--listen", taken_address)
    assert said == f"specwire {command}: error: listen: cannot listen on {taken_address}: the port is in use"


@pytest.mark.parametrize("url", ["redis://:secret@{dead}/0", "unix:///no/such/socket", "http://{dead}", "redis://x:y"])
def test_a_log_that_is_not_there_is_told(url: str, dead_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = failed(capsys, "orchestrate", "--verifier", dead_address, "--redis-url", url.format(dead=dead_address))
    assert said.startswith("specwire orchestrate: error: redis-url: ")
    assert "secret" not in said
