"""What a further row of a drafter costs: a short run, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.branching import draft_rows


def test_a_short_run_writes_every_width(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert draft_rows.main(["--repeats", "2", "--length", "8", "--dtype", "float32", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {name: len(each) for name, each in found["ms"].items()} == {str(width): 2 for width in draft_rows.WIDTHS}
    assert "1.000 [1.000, 1.000]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "repeats: must be at least 1, not 0"),
        (["--length", "100000"], "length: no held-out prompt has 100000 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert draft_rows.main(words) == 2
    assert message in capsys.readouterr().err
