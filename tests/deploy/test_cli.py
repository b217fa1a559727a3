"""The command line: what it takes, what it refuses and how, and how fast it answers."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli import main as cli
from deploy.cli.clients import demo, generate
from deploy.cli.completion import SHELLS
from deploy.settings import COMMANDS
from specwire import __version__

ROOT = Path(__file__).resolve().parents[2]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line with which bad usage is refused."""
    with pytest.raises(SystemExit) as exit_:
        sys.exit(cli.main(arguments))  # argparse exits by itself
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[-1]


EVERY_HELP = """
import sys
from deploy.cli.main import main
from deploy.settings import COMMANDS
def tell(words, heavy):
    try:
        main([*words, '--help'])
    except SystemExit:
        print('heavy:', *words, sorted(set(heavy) & set(sys.modules)))
tell([], ['torch', 'ray', 'grpc', 'redis', 'numpy'])
for command in COMMANDS:
    tell([command.name], ['torch', 'transformers', 'ray'])
"""


def test_help_imports_nothing_heavy() -> None:
    """In one process: the first command that brings something heavy is named."""
    done = subprocess.run([sys.executable, "-c", EVERY_HELP], cwd=ROOT, capture_output=True, text=True, timeout=240.0)
    lines = done.stdout.splitlines()
    names = [command.name for command in COMMANDS]
    assert [line.split()[2] for line in lines if line.startswith("usage: specwire ")][1:] == names
    assert [line for line in lines if line.startswith("heavy: ")] == [
        "heavy: []",
        *(f"heavy: {each} []" for each in names),
    ]
    assert all(name in done.stdout.partition("heavy:")[0] for name in names)


# What each command that listens needs beside its options.
NEEDED = {
    "verify": ("scripted:7",),
    "draft": ("scripted:7",),
    "orchestrate": ("--verifier", "127.0.0.1:1"),
    "edge": ("--verifier", "127.0.0.1:1", "--draft", "scripted:7"),
}


def refusals() -> Iterator[tuple[list[str], str]]:
    """The rows of refused.txt: words, and what is said."""
    for row in Path(__file__).with_name("refused.txt").read_text().splitlines():
        if row and not row.startswith("#"):
            line, _, message = row.partition(" | ")
            first, *words = shlex.split(line)
            for name in first.split(","):
                needed = NEEDED.get(name, ()) if "," in first else ()
                yield [name, *needed, *words], f"specwire {name}: error: {message}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *refusals(),
        (["fly"], "specwire: error: argument COMMAND: invalid choice: 'fly'..."),
        ([], "specwire: error: the following arguments are required: COMMAND"),
    ],
    ids=lambda value: shlex.join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *words)
    assert said == message or (message.endswith("...") and said.startswith(message.removesuffix("...")))


def test_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"specwire {__version__}\n"


def test_a_reader_that_leaves_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `| head -1` does: one line where there is more to print, and none at the end."""
    command = [sys.executable, "-m", "deploy", "--help"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait(60.0) == 0
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as nobody:
        monkeypatch.setattr("sys.stdout", nobody)
        assert cli.main(["simulate", "--tokens", "8"]) == 1
    assert capsys.readouterr().err == "specwire: error: stdout: nobody reads it any more\n"


def test_a_prompt_file_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt").write_bytes(b"ab\xff")
    error = refused(capsys, "generate", "--prompt-file", str(tmp_path / "prompt"))
    assert error.endswith("prompt is not UTF-8 at byte 2")


def test_a_prompt_may_be_piped_in(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    monkeypatch.setattr("sys.stdin", io.StringIO("def f():"))
    assert generate.request_of(parser.parse_args(["--address", "127.0.0.1:1"])).prompt == "def f():"
    monkeypatch.setattr("sys.stdin", io.StringIO("def f():"))
    assert generate.request_of(parser.parse_args(["given", "--address", "127.0.0.1:1"])).prompt == "given"
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "prompt: must not be empty" in refused(capsys, "generate")
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        assert "prompt: give PROMPT or --prompt-file, or pipe the prompt in" in refused(capsys, "generate")


def test_prompts_may_be_mere_texts(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    (tmp_path / "prompts.json").write_text(json.dumps(["def f(n):\n" + "x" * 60, {"name": "b", "text": "c"}]))
    args = parser.parse_args(["--prompts", str(tmp_path / "prompts.json")])
    first, second = demo.prompts_of(args)
    assert (first.name, first.text) == ("def f(n): " + "x" * 23 + "...", "def f(n):\n" + "x" * 60)
    assert (second.name, second.text) == ("b", "c")


@pytest.mark.parametrize("content", ["[]", "{", "[1]", '[{"name": "x"}]', '[{"name": "x", "text": 1}]'])
def test_unusable_prompts(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.json").write_text(content)
    assert "prompts.json" in refused(capsys, "demo", "--prompts", str(tmp_path / "prompts.json"))


# ----------------------------------------------------------------------------------------------------------------------
# `specwire simulate`: a table, JSON, and refusals in one line.


def test_one_session(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--tokens", "32", "--policy", "plain", "--rtt", "20", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["simulated"][0]
    assert row["policy"] == "plain"
    assert row["first token ms"] == 50.0


def test_a_head_beside_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    """Always right and three deep: four tokens for a forward and three of the head's."""
    words = ["--forward", "30", "--slope", "0", "--head", "2", "--head-acceptance", "1,1,1"]
    policies = ["--policy", "heads", "--policy", "auto", "--policy", "plain"]
    assert cli.main(["simulate", *words, *policies, "--rtt", "80", "--json"]) == 0
    heads, both, plain = json.loads(capsys.readouterr().out)["simulated"]
    assert [row["policy"] for row in (heads, both, plain)] == ["heads", "auto", "plain"]
    assert heads["accepted"] > 0
    assert heads["tokens/s"] > 2.5 * plain["tokens/s"]
    assert both["tokens/s"] > 2.5 * plain["tokens/s"]
    assert plain["tested"] == 0


def test_a_pool_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--tokens", "8", "--sessions", "3", "--rtt", "5,20", "--policy", "auto"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.startswith("policy")
    assert row.startswith("auto")


# ----------------------------------------------------------------------------------------------------------------------
# Completion scripts, held against the shells that are here: bash always is.

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
