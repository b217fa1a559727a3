"""The command line of the bench of steps."""

from __future__ import annotations

import pytest

from bench.step import main


@pytest.mark.parametrize(("name", "least"), [("prompts", 1), ("tokens", 16), ("repeats", 1), ("threads", 1)])
def test_nothing_to_measure(name: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--{name}", "0"]) == 2
    assert capsys.readouterr().err == f"bench: error: {name}: must be at least {least}, not 0\n"
