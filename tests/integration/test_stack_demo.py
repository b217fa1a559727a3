"""The demo and a completion that starts its own stack, with known logits."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.stack_process import running

PROMPTS = [{"name": "one", "text": "1 2 3"}, {"name": "two", "text": "5 6"}]
PAIR = ("--target", "scripted:7:delay_ms=10", "--draft", "scripted:7:agree=0.8")


def test_demo_compares_texts_and_speeds(tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    with running("demo", "--prompts", str(tmp_path / "prompts.json"), "--max-tokens", "40", *PAIR) as command:
        assert command.process.stdout is not None
        output = command.process.stdout.read()
        assert command.wait() == 0, command.said()
        assert command.nothing_left(), command.family()
    assert "--- temperature 0, one\n1 2 3" in output
    assert "--- temperature 0.8, two\n5 6" in output
    assert output.count("[40 tokens, ") == 4
    assert "head" not in output
    assert output.rstrip().endswith("texts identical, token for token: 4 of 4")
    assert "\x1b" not in output


def test_generate_starts_a_stack_of_its_own_and_ends_it() -> None:
    with running("generate", "1 2 3", "--max-tokens", "30", "--stop", "no such text", *PAIR) as command:
        assert len(command.line().split()) == 30
        assert command.wait() == 0, command.said()
        assert "30 tokens in " in command.last_line()
        assert command.nothing_left(), command.family()
