"""`specwire simulate`: a table, JSON, and refusals in one line."""

from __future__ import annotations

import json

import pytest

from deploy.cli import main as cli


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
