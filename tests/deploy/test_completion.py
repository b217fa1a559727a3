"""Completion scripts, held against the shells that are here: bash always is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.cli import main as cli
from deploy.cli.completion import SHELLS
from deploy.settings import COMMANDS

ASK = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_specwire; echo "${COMPREPLY[*]}"'
CHECKS = {"bash": ["-n"], "zsh": ["-f", "-n"], "fish": ["--no-config", "-n"]}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    found = {}
    for shell in SHELLS:
        with pytest.MonkeyPatch.context() as patch, (folder / shell).open("w") as script:
            patch.setattr("sys.stdout", script)
            assert cli.main(["completion", shell]) == 0
        found[shell] = folder / shell
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120.0)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_shells_take_their_scripts(scripts: dict[str, Path]) -> None:
    for shell in filter(shutil.which, CHECKS):
        assert run(shell, *CHECKS[shell], str(scripts[shell])) == ""


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("do",), "doctor"),
        (("up", "--dty"), "--dtype"),
        (("up", "--dtype", ""), "auto float32 bfloat16"),
        (("verify", "--conf"), "--config"),
        (("completion", "b"), "bash"),
        (("up", "--target", "x"), ""),
    ],
)
def test_what_bash_offers(words: tuple[str, ...], offered: str, scripts: dict[str, Path]) -> None:
    assert run("bash", "-c", ASK, "ask", str(scripts["bash"]), "specwire", *words) == offered


def test_bash_offers_all_commands(scripts: dict[str, Path]) -> None:
    offered = run("bash", "-c", ASK, "ask", str(scripts["bash"]), "specwire", "").split()
    assert offered == [command.name for command in COMMANDS]


def test_what_fish_offers(scripts: dict[str, Path]) -> None:
    """Where there is no fish, its script's lines say the same."""
    if shutil.which("fish"):
        asked = f"source {scripts['fish']}; complete -C 'specwire up --dty'"
        assert run("fish", "--no-config", "-c", asked).startswith("--dtype\t")
    assert re.search(
        r'using up\W.* -l dtype .*"auto float32 bfloat16" .*of weights and arithmetic', scripts["fish"].read_text()
    )


def test_every_script_names_every_command_and_its_flags(scripts: dict[str, Path]) -> None:
    for script in scripts.values():
        text = script.read_text()
        assert "%(" not in text
        assert all(command.name in text for command in COMMANDS)
        assert "drafters-per-session" in text
