"""Ratios, bars and tables of real models, from made turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.speed.report import Measured, SpeedPlace, fastest, report, results_of, write
from bench.speed.rows import DEFAULT, FAR_20, FAR_OFF, HEAD, LLAMACPP, OFF, OPENVINO
from scripts.figures.speed import stack_table

NAME = "smollm2-135m"
LOOKUP, DRAFTING = f"{OPENVINO}, prompt lookup", f"{LLAMACPP}, draft model"
# Seconds of a text, by piece and row. The second piece was measured while the machine was twice as slow.
SECONDS = {
    "main": {OFF: 2.0, DEFAULT: 1.0, LLAMACPP: 1.6, OPENVINO: 2.5},
    "openvino": {OFF: 4.0, LOOKUP: 2.5},
    "llama.cpp": {OFF: 4.0, DRAFTING: 3.6},
    "far": {OFF: 2.0, FAR_OFF: 3.0, FAR_20: 2.0},
    "many": {OFF: 8.0, DEFAULT: 4.0},
    "long": {OFF: 5.0, DEFAULT: 5.5},
}
PROMPTS = 8
TASKS = ["chat", "code"] * (PROMPTS // 2)
GREEDY = SpeedPlace(1, 0.0, 96)
FACTS = {"ready_seconds": 9.0, "resident": 300.0, "peak": 400.0, "runtime": "openvino"}


def run(seconds: float, row: str) -> dict[str, Any]:
    ours = row in (OFF, DEFAULT, FAR_OFF, FAR_20)
    forwards = 48 if row == DEFAULT else 96
    found: dict[str, Any] = {"tokens": 96, "seconds": seconds, "first": 0.1 * seconds, "forwards": forwards, "text": 7}
    found |= {"tested": 96, "accepted": 48} if row == DEFAULT else {"tested": 0, "accepted": 0}
    parts = {"forward": 16_000 * forwards, "gap": 480}
    if ours:
        found |= {"tested_at": [64, 32], "accepted_at": [32, 16], "v": {"1": [96, 16_000]}, "parts": parts}
        found |= {"sources": {"head": [96, 48]} if row == DEFAULT else {}, "steps": forwards, "plan": ""}
    return found


def lines() -> Iterator[dict[str, Any]]:
    asked = {"arguments": {"model": NAME}, "tasks": TASKS}
    yield {"head": {"commit": "c0ffee", "machine": {"cpu": "A CPU", "cores": 2}, **asked}}
    yield {"note": "HumanEval was not asked."}
    for piece, rows in SECONDS.items():
        level = 4 if piece == "many" else 1
        for temperature in (0.0, 0.8):
            for first in range(0, PROMPTS, level):
                # Half of the prompts take twice as long, under every row; default is slow in one task.
                factors = {row: (1 + first % 4 // 2) * (1.8 if row == DEFAULT and first % 2 else 1) for row in rows}
                took = {
                    row: {
                        "seconds": seconds * factors[row],
                        "runs": [run(seconds * factors[row], row) for _ in range(level)],
                    }
                    for row, seconds in rows.items()
                }
                place = {"level": level, "temperature": temperature, "tokens": 256 if piece == "long" else 96}
                yield {"turn": {"piece": piece, **place, "prompts": [*range(first, first + level)]}, "rows": took}
        yield {"facts": FACTS, "row": OFF, "piece": piece}
        yield {"facts": FACTS, "row": DEFAULT, "piece": piece}
    yield {"failed": {"vLLM": "not set up"}, "piece": "vllm"}
    yield {"failed": {LLAMACPP: "it was not there at first"}, "piece": "main"}
    yield {"facts": FACTS, "row": LLAMACPP, "piece": "main"}


LINES = list(lines())


def test_rows_of_one_piece_are_compared_there() -> None:
    found = Measured(LINES)
    ratio = found.ratio(LLAMACPP, OFF, GREEDY)
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.25,) * 3)
    default = found.ratio(DEFAULT, OFF, GREEDY)
    assert default is not None
    assert default.value == pytest.approx(2 / 1.4)
    assert default.low < default.value < default.high


def test_rows_of_two_pieces_are_compared_through_off() -> None:
    """Off took 2 s beside the one and 4 s beside the other: lookup is 1.6 times off, not 0.8."""
    found = Measured(LINES)
    ratio = found.ratio(DEFAULT, LOOKUP, GREEDY, "chat")
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0 / 1.6)


def test_the_fastest_is_chosen_by_its_ratio_to_off() -> None:
    found = Measured(LINES)
    assert fastest(found, (LLAMACPP, OPENVINO), GREEDY) == LLAMACPP
    assert fastest(found, (DRAFTING, LOOKUP), GREEDY) == LOOKUP
    assert fastest(found, ("nobody",), GREEDY) is None


def test_no_ratio_without_a_turn_in_common() -> None:
    found = Measured([line for line in LINES if line.get("turn", {}).get("piece") != "openvino"])
    assert found.ratio(DEFAULT, LOOKUP, GREEDY) is None
    assert found.ratio(DEFAULT, OFF, GREEDY, "music") is None


def test_bars_take_the_faster_of_off_and_the_best_library() -> None:
    bars = {bar.name: bar for bar in results_of(NAME, LINES).bars}
    at = "1 at once, 0, 96 tokens: "
    values = {name.removeprefix(at): bar.value for name, bar in bars.items() if name.startswith(at)}
    assert values == pytest.approx(
        {
            f"{OFF} / {LLAMACPP}": 0.8,
            f"{DEFAULT} / {LLAMACPP}": 1.6 / 1.4,
            f"{DEFAULT} / {LLAMACPP}, the worst task (code)": 1.6 / 1.8,
            f"{DEFAULT} / the best library's ({LOOKUP})": 2 / 1.4 / 1.6,
            f"{FAR_20} / {FAR_OFF}": 1.5,
        }
    )
    assert bars["4 at once, 0, 96 tokens: default / off"].needed == 1.2
    assert not bars["1 at once, 0, 256 tokens: default / off of it"].holds
    assert (bars["seconds to ready, default"].value, bars["seconds to ready, default"].holds) == (9.0, False)
    assert bars[f"{at}{FAR_20} / {FAR_OFF}"].holds


def test_a_suite_is_held_to_its_needs() -> None:
    """Default has 2 / 1.4 of off alone; nothing is needed of a row that is not there."""
    held = {bar.name: bar for bar in results_of("heads", LINES).bars}
    assert held["1 at once, 0, 96 tokens: default / off"].needed == 0.97
    assert held["1 at once, 0, 96 tokens: default / off"].value == pytest.approx(2 / 1.4)
    assert "4 at once, 0.8, 96 tokens: default / off" in held
    assert not any(HEAD in name.partition(": ")[2] for name in held)


def test_a_row_has_its_figures() -> None:
    by_place = {(line.piece, line.row, line.temperature): line for line in results_of(NAME, LINES).lines}
    line = by_place["main", DEFAULT, 0.0]
    assert (line.turns, line.tokens_per_forward, line.acceptance, line.accepted_at) == (8, 2.0, 0.5, (0.5, 0.5))
    assert line.sources == {"head": (768, 384)}
    assert (line.v_ms, line.step_ms["forward"]) == ({1: 16.0}, 16.0)
    assert line.decoding is not None
    assert line.decoding.value == pytest.approx(line.to_off.value)
    assert by_place["far", FAR_20, 0.8].to_off.value == pytest.approx(1.5)
    assert by_place["many", OFF, 0.0].decoding is None
    text = by_place["many", DEFAULT, 0.0].text_to_off
    assert text is not None
    assert text.value == pytest.approx(2.0)
    assert line.to[LLAMACPP].value == pytest.approx(1.6 / 1.4)


def test_what_is_written_is_what_is_printed(tmp_path: Path) -> None:
    found = results_of(NAME, LINES)
    printed = report(found)
    assert "vllm: vLLM was not measured: not set up" in printed
    assert "at first" not in printed
    assert "HumanEval was not asked." in printed
    path = tmp_path / "real.json"
    write(found, LINES, path)
    record = json.loads(path.read_text())
    assert len(record["raw"]) == len([line for line in LINES if "turn" in line])
    table = stack_table(record)
    assert "vllm: vLLM was not measured: not set up" in table
    assert "| main | default | 8 |" in table
