"""`make bench-demo`: runs of the demo become medians, shares of all tokens, and a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from bench import demo
from bench.demo import bars_of, report, rows_of
from bench.harness.runs import BenchError
from scripts.figures.speed import demo_table


def run(ratio: float, tokens: int = 100, text: float = 0.25, parting: bool | None = None) -> dict[str, Any]:
    """What the demo tells of one temperature. parting: None where the texts are one, else whether it is a near-tie."""
    prompt = {"identical": parting is None, "parting": None if parting is None else {"near_tie": parting}}
    whole = {
        "tokens": tokens,
        "tokens_per_second_off": 50.0,
        "tokens_per_second_on": 50.0 * ratio,
        "median_ratio": ratio,
        "tokens_per_forward": 2.0,
        "guessed": {"text": text, "head": 0.125, "drafter": 0.0},
    }
    return {"temperatures": [{"temperature": 0.8, "prompts": [prompt], "all": whole}]}


def test_runs_become_medians_and_shares_of_all_tokens() -> None:
    (row,) = rows_of([run(1.0), run(1.5, tokens=300, text=0.75), run(1.25)])
    assert (row["temperature"], row["tokens"], row["tokens_per_forward"]) == (0.8, 500, 2.0)
    assert (row["median_ratio"]["value"], row["median_ratio"]["low"], row["median_ratio"]["high"]) == (1.25, 1.0, 1.5)
    assert row["tokens_per_second_on"]["value"] == 62.5
    assert row["guessed"] == {"text": (0.25 * 200 + 0.75 * 300) / 500, "head": 0.125, "drafter": 0.0}


def test_its_bar_is_of_texts_that_no_near_tie_explains() -> None:
    rows = rows_of([run(1.0), run(1.0, parting=True), run(1.0, parting=False)])
    assert (rows[0]["texts"], rows[0]["identical"], rows[0]["near_ties"]) == (3, 1, 1)
    (bar,) = bars_of(rows)
    assert (bar.value, bar.holds) == (1.0, False)
    assert bars_of(rows_of([run(1.0), run(1.0, parting=True)]))[0].holds


def test_its_tables_tell_ratio_copies_dtype_and_runtime() -> None:
    rows = rows_of([run(1.25)] * 6)
    found = {"dtype": "bfloat16", "runtime": "openvino", "rows": rows, "bars": [asdict(bar) for bar in bars_of(rows)]}
    printed = report(found, bars_of(rows))
    assert printed.splitlines()[1].split() == ["0.8", "50", "62", "1.25", "1.25", "1.25", "2.00", "25%", "12%", "0%"]
    assert "computed by openvino in bfloat16" in printed
    arguments = {"count": 8, "max_tokens": 64, "repeats": 6}
    page = demo_table({**found, "arguments": arguments, "machine": {"cpu": "a processor"}})
    assert "| 0.8 | 50 | 62 | 1.25 (1.25 to 1.25) | 2.00 | 25% | 12% | 0% |" in page
    assert page.endswith("8 prompts x 64 tokens, 6 runs; openvino in bfloat16, a processor.")


def test_a_demo_that_tells_nothing_is_an_error() -> None:
    with pytest.raises(BenchError, match="the demo ended with 2"):
        demo.told_by_demo(["--count", "0"])


def test_what_cannot_be_measured_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--repeats", "0"]) == 2
    assert "repeats: must be at least 1, not 0" in capsys.readouterr().err
