"""Which bars a measurement over a line has, and when they hold; its tables and its file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.report import Bar
from bench.harness.runs import Sample
from bench.wan.cells import AT_HOME, AWAY, FAR_AND_FAST, NAMED, SHOWN, WanCell
from bench.wan.disciplines import CHAIN, DEFAULT, PLAIN, TEXTBOOK, ratio, ratio_to_better, speeds
from bench.wan.emulated import EmulatedTimes
from bench.wan.report import WanResults, simulator_error, write
from bench.wan.virtual import Software
from bench.wan.wire import Wire
from scripts.figures.wan import wan_table
from tests.bench.wan.made import SPEEDS, expected, measured, samples, wire


def of(cells: list[EmulatedTimes], bytes_: list[Wire]) -> WanResults:
    grid = [expected(cell) for cell in NAMED] if cells else []
    return WanResults({"tokens": 100}, Software(500, 900, 100), grid, cells, bytes_, ["a note"])


def bars(cells: list[EmulatedTimes]) -> list[Bar]:
    return of(cells, []).bars


def held(one: EmulatedTimes) -> dict[str, bool]:
    return {bar.name.partition(": ")[2]: bar.holds for bar in bars([one])}


def test_a_good_cell_holds_all_bars() -> None:
    found = held(measured())
    assert len(found) == 10
    assert all(found.values())
    short = replace((one := measured()).samples[0].run, tokens=one.samples[0].run.tokens[:10])
    assert replace(one, samples=[replace(one.samples[0], run=short), *one.samples[1:]]).texts_equal  # it is a beginning


def test_a_cell_whose_further_tokens_are_dear_is_held_to_what_it_has() -> None:
    found = held(measured(cell=SHOWN.heavy()))
    assert next(iter(found)) == "default / better of plain"
    assert "default / textbook" not in found
    assert all(found.values())


@pytest.mark.parametrize(
    ("cell", "needed"),
    [
        (SHOWN, 0.98),
        (SHOWN.heavy(), 0.98),
        (AWAY, 1.10),
        (AWAY.heavy(), 0.98),
        (WanCell(20.0, 1.0, 0.8, 0.02), 1.15),
        (WanCell(80.0, 1.0, 0.9, 0.05), 1.15),
        (FAR_AND_FAST, 1.08),
    ],
)
def test_trees_are_held_to_the_chain_more_strictly_where_they_must_show(cell: WanCell, needed: float) -> None:
    for share, holds in ((1.001, True), (0.999, False)):
        one = measured({**SPEEDS, DEFAULT: share * needed * SPEEDS[CHAIN]}, cell)
        assert held(one)["default / chain"] is holds


def test_the_default_away_is_held_to_textbook_speculation_at_home() -> None:
    for textbook, holds in ((39.0, True), (39.2, False)):
        away, home = measured(cell=AWAY), measured({**SPEEDS, TEXTBOOK: textbook}, AT_HOME)
        (bar,) = (bar for bar in bars([away, home]) if bar.name.endswith("default / textbook at 0 ms"))
        assert (bar.holds, bar.needed) == (holds, 1.10)


@pytest.mark.parametrize(
    ("row", "speed", "missed"),
    [
        (
            DEFAULT,
            37.0,
            {
                "default / chain, of the 1.26 simulated",
                "default / plain",
                "default / simulated optimum",
                "simulator's error, worst discipline",
            },
        ),
        (
            PLAIN,
            45.0,
            {"default / better of plain and textbook", "default / plain", "simulator's error, worst discipline"},
        ),
        (TEXTBOOK, 36.5, {"default / textbook", "simulator's error, worst discipline"}),
    ],
)
def test_a_bar_is_missed_where_a_speed_is_wrong(row: str, speed: float, missed: set[str]) -> None:
    found = held(measured({**SPEEDS, row: speed}))
    assert {name for name, holds in found.items() if not holds} == missed


def test_each_row_has_its_own_optimum() -> None:
    """0.9 of 44 for the default, of 35 for the chain, which may be as slow as the default must not be."""
    assert not held(measured({**SPEEDS, CHAIN: 31.4}))["chain / simulated optimum of chains"]
    found = held(measured({**SPEEDS, CHAIN: 31.6, DEFAULT: 39.5}))
    assert found["chain / simulated optimum of chains"]
    assert not found["default / simulated optimum"]


def test_a_late_first_token_and_a_text_that_differs_are_missed() -> None:
    late = EmulatedTimes(expected(), samples({row: [speed] * 7 for row, speed in SPEEDS.items()}, first_s=0.12), {})
    assert [name for name, holds in held(late).items() if not holds] == ["first token less prefill, in round trips"]
    one = measured()
    wrong = replace(one.samples[-1].run, tokens=(*one.samples[-1].run.tokens[:-1], 7))
    other = replace(one, samples=[*one.samples[:-1], replace(one.samples[-1], run=wrong)])
    assert [name for name, holds in held(other).items() if not holds] == ["texts that differ"]


def test_the_interval_decides_not_the_median() -> None:
    uneven = {**{row: [speed] * 7 for row, speed in SPEEDS.items()}, DEFAULT: [43.0] * 5 + [31.0] * 2}
    one = EmulatedTimes(expected(), samples(uneven), {})
    assert not held(one)["default / better of plain and textbook"]


def test_the_simulators_error_is_folded() -> None:
    low = simulator_error(measured({**SPEEDS, PLAIN: 30.0}), PLAIN)
    assert low.value == pytest.approx(0.1)
    assert [low.low, low.high] == pytest.approx([0.1, 0.1])
    around = EmulatedTimes(expected(), samples({PLAIN: [30.0, 33.0, 36.0]}), {})
    error = simulator_error(around, PLAIN)
    assert [error.low, error.high] == pytest.approx([0.0, 0.1])


def test_ratios_take_the_repeats_that_both_had() -> None:
    uneven: list[Sample] = samples({PLAIN: [10.0, 20.0, 30.0], TEXTBOOK: [5.0, 5.0]})
    assert speeds(uneven, TEXTBOOK) == pytest.approx([5.0, 5.0])
    found = ratio(uneven, PLAIN, TEXTBOOK)
    assert [found.low, found.high] == pytest.approx([2.0, 4.0])
    assert ratio_to_better(uneven, PLAIN, (PLAIN, TEXTBOOK)).value == pytest.approx(1.0)


def test_the_wire_has_its_bar() -> None:
    found = of([], [wire(), wire(16.5)]).bars
    assert [bar.holds for bar in found] == [True, False]
    assert found[0].name == "greedy, orchestrator to verifier: bytes per proposed token"
    assert found[0].value == pytest.approx(11.0)


def test_the_file_has_bars_and_raw_sessions(tmp_path: Path) -> None:
    path = tmp_path / "wan.json"
    printed = wan_table(write(of([measured(cell=cell) for cell in NAMED[:3]], [wire()]), path))
    found = json.loads(path.read_text())
    assert printed == wan_table(found)
    for part in ("R0-d8-a0.4-s0", "1.30 (1.30 to 1.30)", "11.0", "bars hold"):
        assert part in printed
    assert found["name"] == "wan"
    assert {"name", "value", "low", "high", "needed", "holds"} <= found["bars"][0].keys()
    assert len(found["raw"]) == 3 * 5 * 7
    assert found["raw"][0]["where"] == NAMED[0].name
    assert [one["name"] for one in found["simulated"]] == [cell.name for cell in NAMED]
    assert found["emulated"][0]["disciplines"]["default"]["to_plain"]["value"] == pytest.approx(43 / 33)
    assert found["wire"][0]["hops"][0]["bytes_per_proposed_token"] == 11.0
    assert found["arguments"] == {"tokens": 100}
    assert {"machine", "commit"} <= found.keys()
