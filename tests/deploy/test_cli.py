"""The command line: what it takes, what it refuses and how, and how fast it answers."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import main as cli
from deploy.cli.clients import demo, generate
from deploy.settings import COMMANDS
from specwire import __version__

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240.0
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line with which bad usage is refused."""
    with pytest.raises(SystemExit) as exit_:
        sys.exit(cli.main(arguments))  # argparse exits by itself
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[-1]


def test_help_imports_nothing_heavy() -> None:
    source = (
        "import sys; from deploy.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(sorted({'torch', 'ray', 'grpc', 'redis', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=240.0)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in COMMANDS:
        assert command.name in done.stdout


EVERY_HELP = """
import sys
from deploy.cli.main import main
from deploy.settings import COMMANDS
for command in COMMANDS:
    try:
        main([command.name, '--help'])
    except SystemExit:
        print('heavy:', command.name, sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))
"""


def test_each_command_has_help_without_torch_and_ray() -> None:
    """In one process: the first one that brings something heavy is named."""
    done = subprocess.run([sys.executable, "-c", EVERY_HELP], cwd=ROOT, capture_output=True, text=True, timeout=240.0)
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("usage: ")] == [
        ["usage:", "specwire", command.name] for command in COMMANDS
    ]
    assert [line for line in lines if line.startswith("heavy: ")] == [f"heavy: {each.name} []" for each in COMMANDS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "prompt: must not be empty"),
        (("x", "--prompt-file", "y"), "prompt: give either PROMPT or --prompt-file"),
        (("--prompt-file", "no/such"), "prompt_file: no/such cannot be read: No such file or directory"),
        (("x", "--max-tokens", "0"), "max_tokens: must be at least 1, not 0"),
        (("x", "--temperature", "nan"), "temperature: must be a finite number from 0 to 100, not nan"),
        (("x", "--seed", str(1 << 64)), f"seed: must be a whole number of 64 bits, not {1 << 64}"),
        (("x", "--max-tokens", str(1 << 32)), f"max_tokens: must be a number of 32 bits, not {1 << 32}"),
        (
            ("x", "--rule", "magic"),
            "rule: must be one of greedy, coupled, rejection, block, threshold(t), typical(epsilon,delta), not 'magic'",
        ),
        (("x", "--rule", "coupled"), "rule: coupled contradicts temperature 0.0, which needs greedy"),
        (("x", "--stop", ""), "stop: must not be empty"),
        (("x", "--min-tokens", "200"), "min_tokens: must be from 0 to max_tokens, which is 128, not 200"),
        (("x", "--priority", "101"), "priority: must be from -100 to 100, not 101"),
        (("x", "--logit-bias", "seven"), "logit_bias: must be ID=B, not 'seven'"),
        (("x", "--json-schema", "nowhere.json"), "json_schema: nowhere.json cannot be read: No such file or directory"),
        (("x", "--grammar", "nowhere.lark"), "grammar: nowhere.lark cannot be read: No such file or directory"),
        (("x", "--choice", "a", "--choice", ""), "choices: must not be empty"),
        (("x", "--regex", ""), "regex: must not be empty"),
        (
            ("x", "--regex", "a", "--ignore-eos"),
            "ignore_eos: contradicts regex, whose text ends with an end of sequence",
        ),
        (("x", "--logprobs", "2"), "logprobs: are told with --json only"),
        (("x", "--json", "--logprobs", "21"), "logprobs: must be from 0 to 20, not 21"),
        (
            ("x", "--json", "--logprobs-of", "processed"),
            "logprobs_of: says what logprobs are of, which are not asked for",
        ),
        (("x", "--n", "0"), "n: must be from 1 to 64, not 0"),
        (("x", "--timeout", "nan"), "timeout: must be a positive number of seconds, not nan"),
        (("x", "--slots", "0"), "slots: must be from 1 to 1024, not 0"),
        (("x", "--target-threads", "0"), "threads: must be from 1 to 1024, not 0"),
        (
            ("x", "--target", "m", "--address", "h:1"),
            "address: names a running stack, --target and --draft one to start",
        ),
    ],
)
def test_generate_refuses(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "generate", *arguments) == f"specwire generate: error: {message}"


EDGE = ("edge", "--draft", "a.gguf", "--verifier", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("up", "--listen", "nowhere"), "specwire up: error: listen: must be HOST:PORT with a port from 0 to 65535"),
        (("up", "--draft", "x", "--no-draft"), "specwire up: error: argument --no-draft: not allowed with"),
        (("demo", "--count", "0"), "specwire demo: error: count: must be at least 1, not 0"),
        (("demo", "--max-tokens", "0"), "specwire demo: error: max_tokens: must be at least 1, not 0"),
        (
            ("demo", "--no-draft", "--no-ngram", "--no-heads"),
            "specwire demo: error: draft: there is nothing to compare without anything that guesses",
        ),
        (
            ("demo", "--target", "scripted:7", "--no-draft", "--no-ngram"),
            "specwire demo: error: draft: there is nothing to compare without anything that guesses",
        ),
        (("demo", "--prompts", "no/such"), "specwire demo: error: prompts: no/such cannot be used: "),
        (("up", "--slotz=3"), "specwire up: error: unrecognized arguments: --slotz=3: --slots?"),
        (
            ("generate", "x", "--tempature", "3"),
            "specwire generate: error: unrecognized arguments: --tempature 3: --temp",
        ),
        (("generate", "x", "y"), "specwire generate: error: unrecognized arguments: y"),
        (
            ("edge", "--draft", "scripted:7"),
            "specwire edge: error: verifiers: at least one address is needed, or --registry",
        ),
        (("edge", "--draft", "scripted:7", "--registry", "radish://a"), "specwire edge: error: registry: "),
        ((*EDGE, "--kv-memory", "much"), "specwire edge: error: kv-memory: "),
        ((*EDGE, "--context", "1"), "specwire edge: error: context: "),
        (("draft", "m", "--connect", "127.0.0.1:1", "--connect", "nowhere"), "specwire draft: error: connect: "),
        (("draft", "m", "--tls"), "specwire draft: error: --tls: "),
        (("generate", "x", "--tls"), "specwire generate: error: --tls: "),
        (("verify", "scripted:7", "--threads", "0"), "specwire verify: error: threads: must be from 1 to 1024, not 0"),
        (("orchestrate",), "specwire orchestrate: error: verifiers: at least one address is needed, or --registry"),
        (
            ("orchestrate", "--verifier", "a:1", "--drafter", "b"),
            "specwire orchestrate: error: drafter: must be HOST:PORT with a port from 0 to 65535, not 'b'",
        ),
        (
            ("orchestrate", "--verifier", "a:1", "--start-timeout", "0"),
            "specwire orchestrate: error: start_timeout: must be positive, not 0.0",
        ),
        (
            ("orchestrate", "--verifier", "a:1", "--start-timeout", "nan"),
            "specwire orchestrate: error: start_timeout: must be positive, not nan",
        ),
        (
            ("orchestrate", "--verifier", "a:1", "--region", "a b"),
            "specwire orchestrate: error: region: must be at most 64 of A-Z a-z 0-9 . _ -, not 'a b'",
        ),
        (
            ("up", "--slots", "x"),
            "specwire up: error: argument --slots: must be a whole number, not 'x'",
        ),
        (("fly",), "specwire: error: argument COMMAND: invalid choice: 'fly'"),
        ((), "specwire: error: the following arguments are required: COMMAND"),
    ],
)
def test_bad_usage_is_refused(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *arguments).startswith(message)


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


def test_services_run_through_the_command_as_by_themselves() -> None:
    done = run("verify", "./no/such/model")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.rstrip().rpartition("\n")[2].startswith("specwire verify: error: ")
