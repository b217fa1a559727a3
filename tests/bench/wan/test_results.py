"""The table, the file and the picture of a measurement over a line."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench.relay.gauge import Gauge, RoundTrip
from bench.wan.cells import NAMED
from bench.wan.judged import bars
from bench.wan.plot import draw
from bench.wan.report import report
from bench.wan.results import WanResults, earlier, write
from bench.wan.virtual import Software
from tests.bench.wan.made import expected, measured, measured_pair, wire


@pytest.fixture
def results() -> WanResults:
    cells = [measured(cell=cell) for cell in NAMED[:3]]
    return WanResults(
        arguments={"tokens": 100},
        machine={"cores": 2},
        commit="0" * 40,
        gauge=Gauge((RoundTrip(20.0, 20.3, 20.9),), 900.0, {"0.5": 0.1, "0.99": 0.3}),
        software=Software(500.0, 900.0, 100.0),
        grid=[expected(cell) for cell in NAMED],
        cells=cells,
        pair=[measured_pair(rtt_ms=20.0), measured_pair(rtt_ms=80.0)],
        wire=[wire()],
        bars=bars(cells, [measured_pair()], [wire()]),
        notes=["a note"],
    )


def test_the_table_says_everything(results: WanResults) -> None:
    said = report(results)
    for part in (
        "R0-d8-a0.4-s0",
        "R 80 ms",
        "textbook:8",
        "1.30 [1.30, 1.30]",
        "d 8 ms, a 0.8, s 0",
        "holds",
        "a note",
    ):
        assert part in said
    assert "11.0" in said
    assert "software of ours: 0.50 ms a step, 0.90 ms a hop, 0.10 ms a draft token" in said
    assert max(map(len, said.splitlines())) < 250


def test_parts_that_were_not_measured_are_left_out(results: WanResults) -> None:
    nothing = WanResults({}, {}, None, results.gauge, results.software, [], [], [], [], [], [])
    said = report(nothing)
    assert "demo pair" not in said
    assert "bar" not in said
    assert nothing.texts_hold


def test_the_file_has_bars_and_raw_sessions(results: WanResults, tmp_path: Path) -> None:
    path = tmp_path / "wan.json"
    write(results, path)
    found = json.loads(path.read_text())
    assert found["name"] == "wan"
    assert {"name", "value", "low", "high", "needed", "holds"} <= found["bars"][0].keys()
    assert len(found["raw"]) == (3 + 2) * 5 * 7
    assert found["raw"][0]["where"] == NAMED[0].name
    assert [one["name"] for one in found["simulated"]] == [cell.name for cell in NAMED]
    assert found["emulated"][0]["disciplines"]["default"]["to_plain"]["value"] == pytest.approx(43 / 33)
    assert found["wire"][0]["hops"][0]["bytes_per_proposed_token"] == 11.0


def test_the_demo_pair_of_an_earlier_run_is_what_it_was(results: WanResults, tmp_path: Path) -> None:
    """Up to the microseconds to which sessions are rounded."""
    paths = [tmp_path / name for name in ("wan.json", "again.json", "once_more.json")]
    write(results, paths[0])
    for earlier_one, path in pairwise(paths):
        before = earlier(earlier_one)
        assert before.commit == "0" * 40
        write(replace(results, pair=before.pair, pair_commit=before.commit, commit="1" * 40), path)
    first, again, once_more = (json.loads(path.read_text()) for path in paths)
    assert again["raw"] == first["raw"]
    assert again["demo_pair"] == once_more["demo_pair"]
    for old, new in zip(first["demo_pair"], again["demo_pair"], strict=True):
        assert new["disciplines"]["default"]["to_plain"] == pytest.approx(old["disciplines"]["default"]["to_plain"])


@pytest.mark.parametrize("text", ["{", "{}", '{"demo_pair": [], "demo_pair_commit": null, "commit": "a", "raw": []}'])
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "wan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"wan\.json: "):
        earlier(path)


def test_the_picture_is_drawn_whatever_was_measured(results: WanResults, tmp_path: Path) -> None:
    draw(results, tmp_path / "whole.png")
    nothing = WanResults({}, {}, None, results.gauge, results.software, [], [], [], [], [], [])
    draw(nothing, tmp_path / "nothing.png")
    for name in ("whole.png", "nothing.png"):
        assert (tmp_path / name).stat().st_size > 10_000
