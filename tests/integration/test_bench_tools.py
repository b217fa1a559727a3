"""`make bench-tools`, a short run: real processes, every format, and not one call that drafting has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import tools
from bench.tools import ToldCall
from specwire.text.tool_calls.formats import FORMATS

# Of each format two greedy ones and two sampled ones.
CALLS = 4 * len(FORMATS)


@pytest.mark.bench
@pytest.mark.timeout(900)
def test_a_short_run_finds_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tools.json"
    code = tools.main(["--calls", str(CALLS), "--out", str(out)])
    assert code == 0, capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [row["form"] for row in found["rows"]] == [form for form in FORMATS for _ in range(2)]
    assert sum(row["calls"] for row in found["rows"]) == CALLS
    assert all(row["tokens"] > 0 and row["forwards_off"] >= row["calls"] for row in found["rows"])
    assert [(bar["value"], bar["holds"]) for bar in found["bars"]] == [(0, True)] * 4


def test_what_is_counted() -> None:
    """Each mistake by itself is one."""
    good = ToldCall("", (("say", '{"text":"a"}'),), "tool_calls", (5, 6), 2)
    assert good.parsed
    assert good.meets_schema
    for wrong in (
        ToldCall("x", good.calls, "tool_calls", (5, 6), 2),
        ToldCall("", (), "stop", (5, 6), 2),
        ToldCall("", good.calls, "length", (5, 6), 2),
        ToldCall("", (("say", "{"),), "tool_calls", (5, 6), 2),
    ):
        assert not wrong.parsed
        assert wrong.told != good.told
    assert not ToldCall("", (("say", '{"text":5}'),), "tool_calls", (5, 6), 2).meets_schema
    assert ToldCall("", good.calls, "tool_calls", (5, 7), 2).told != good.told
