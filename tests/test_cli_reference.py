"""docs/CLI.md and the reference of `make docs` say what the command line says: commands, options, exit codes."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy.cli import main as cli
from deploy.settings import COMMANDS, CONFIGURABLE, DEFAULT, add_command
from scripts import cli_reference

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "CLI.md").read_text()
REFERENCE = cli_reference.page()
NAMES = [command.name for command in COMMANDS]
LINE = re.compile(r"^  (-.*?)(?:  |$)", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]*|-[a-z])\b")


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        cli.parse([*words, "--help"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def section(command: str) -> str:
    _, found, rest = REFERENCE.partition(f"### specwire {command}\n")
    assert found
    return rest.partition("\n### ")[0]


def test_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    said = " ".join(help_of(capsys).split())
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \|$", REFERENCE.partition("\n## Options\n")[0], re.MULTILINE)
    assert [name for name, _ in rows] == NAMES
    assert all(f"{name} {what}" in said for name, what in rows)


@pytest.mark.parametrize("command", NAMES)
def test_the_options_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"^\| (`.+?`) \| (.*) \|$", section(command), re.MULTILINE)
    inner = [name for name, _ in rows if " " not in name and name.strip("`").islower()]
    said = "\n".join(help_of(capsys, command, *words) for words in ([], *([name.strip("`")] for name in inner)))
    listed = {option for names, _ in rows for option in OPTION.findall(names)}
    offered = {option for line in LINE.findall(said) for option in OPTION.findall(line)}
    assert listed == offered - {"-h", "--help"}
    assert not [what for _, what in rows if unwrapped(what) not in unwrapped(said)]


def unwrapped(text: str) -> str:
    """Without what wrapping a line may add or take."""
    return "".join(text.replace("\\|", "|").split())


def test_the_reference_is_written_on_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "docs" / "OPTIONS.md"
    monkeypatch.setattr(cli_reference, "PAGE", file)
    for option, there in (("--check", False), ("--write", True)):
        monkeypatch.setattr(sys, "argv", ["cli_reference", option])
        assert cli_reference.main() == 0
        assert file.exists() == there
    assert file.read_text() == REFERENCE
    assert capsys.readouterr().out == f"{file}\n"


def test_the_file_of_options_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each section's options are read, under the names and with the values that they have there."""
    for variable in ("SPECWIRE_DTYPE", "SPECWIRE_RUNTIME"):  # which tests have (tests/conftest.py)
        monkeypatch.delenv(variable)
    file = tmp_path / "specwire.yaml"
    file.write_text(PAGE.partition("```yaml\n")[2].partition("```")[0])
    for command, options in yaml.safe_load(file.read_text()).items():
        parser = argparse.ArgumentParser()
        served = add_command(CONFIGURABLE[command], parser)
        assert served is not None
        settings = served.complete(parser.parse_args(["--config", str(file)]))
        found = {each.name: each for each in settings if each.origin != DEFAULT}
        assert found.keys() - {"config"} == options.keys()
        for name, value in options.items():
            assert found[name].value == value, name


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["simulate", "--tokens", "8"], 0),
        (["generate", "1 2 3", "--address", "127.0.0.1:1", "--timeout", "0.5"], 1),
        (["generate", "1 2 3", "--max-tokens", "0"], 2),
    ],
)
def test_exit_codes(words: list[str], code: int) -> None:
    """Those of signals: tests/integration/test_stack.py, tests/integration/test_stack_ends.py."""
    done = subprocess.run(
        [sys.executable, "-m", "deploy", *words], cwd=ROOT, capture_output=True, text=True, timeout=120.0, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == (0 if code == 0 else 1)
    codes = re.findall(r"^\| ([\d, ]+) \| ", PAGE.partition("## Exit codes")[2].partition("\n## ")[0], re.MULTILINE)
    assert str(code) in codes
    assert codes == ["0", "1", "2", "130, 143"]
