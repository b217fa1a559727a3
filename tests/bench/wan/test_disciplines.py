"""What the disciplines' names stand for, and how often each is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.harness.runs import Run
from bench.wan.cells import SHOWN
from bench.wan.disciplines import (
    CHAIN,
    DEFAULT,
    PLAIN,
    STREAM_WAIT,
    TEXTBOOK,
    DisciplineRow,
    orchestration,
    repeats_of,
    take_turns,
)
from bench.wan.emulated import expected_seconds, repeats_by_discipline
from bench.wan.rig import Orchestration
from specwire.client import Client
from tests.bench.wan.made import expected


@pytest.mark.parametrize(
    ("policy", "plan", "patient"),
    [
        ("auto", "auto", False),
        ("auto:1", "auto:1", False),
        ("plain", "auto", False),
        ("textbook:4", "lockstep:4", True),
        ("stream-wait:2,16", "stream:2,16,1", True),
    ],
)
def test_a_policy_stands_for_a_plan(policy: str, plan: str, patient: bool) -> None:
    assert orchestration(policy) == Orchestration(plan, patient)


def test_a_policy_without_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="policy: 'stream:2,16' is not measured"):
        orchestration("stream:2,16")


@pytest.mark.parametrize(("seconds", "repeats", "wanted"), [(1.0, 7, 7), (8.0, 7, 3), (40.0, 7, 2), (40.0, 1, 1)])
def test_what_lasts_is_repeated_less_often(seconds: float, repeats: int, wanted: int) -> None:
    assert repeats_of(seconds, repeats, most_seconds=24.0) == wanted


def test_plain_and_default_have_all_repeats_and_where_a_bar_is_about_it_textbook_too() -> None:
    assert repeats_by_discipline(expected(), 7, 256) == dict.fromkeys((PLAIN, TEXTBOOK, STREAM_WAIT, CHAIN, DEFAULT), 7)
    elsewhere = expected(replace(SHOWN, rtt_ms=50.0))
    assert repeats_by_discipline(elsewhere, 7, 256) == {PLAIN: 7, TEXTBOOK: 2, STREAM_WAIT: 3, CHAIN: 7, DEFAULT: 7}
    assert expected_seconds(elsewhere, 1, 330) == pytest.approx(330 / 33 + 330 / 24 + 330 / 32 + 330 / 34 + 330 / 43)
    heavy = expected(replace(SHOWN, rtt_ms=50.0).heavy())
    assert repeats_by_discipline(heavy, 7, 256) == {PLAIN: 3, CHAIN: 7, DEFAULT: 7}


def test_rows_take_turns_each_repeat_on_the_next_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []

    def run(row: DisciplineRow, prompt: tuple[int, ...], tokens: int) -> Run:
        asked.append((row.key, prompt))
        return Run(tuple(range(tokens)), 1.0, 0.1, tokens)

    monkeypatch.setattr(DisciplineRow, "run", run)
    with Client("127.0.0.1:1") as client:
        rows = [DisciplineRow(client, False, PLAIN), DisciplineRow(client, True, DEFAULT)]
        found = take_turns(rows, [(1,), (2,)], 4, {PLAIN: 3, DEFAULT: 2})
    assert asked == [(PLAIN, (1,)), (DEFAULT, (1,)), (DEFAULT, (2,)), (PLAIN, (2,)), (PLAIN, (1,))]
    assert [(one.repeat, one.prompt, one.row) for one in found] == [
        *((0, 0, PLAIN), (0, 0, DEFAULT)),
        *((1, 1, DEFAULT), (1, 1, PLAIN)),
        (2, 0, PLAIN),
    ]
