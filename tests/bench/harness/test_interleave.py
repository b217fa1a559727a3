"""Every row runs on every prompt in every repeat, and has every turn equally often."""

from __future__ import annotations

from collections import Counter

from bench.harness.interleave import interleave, schedule
from bench.harness.runs import Sample
from tests.bench.harness.made_rows import FakeRow


def test_the_order_rotates() -> None:
    assert [row for _, _, row in schedule(1, 3, 4)] == [0, 1, 2, 3, 1, 2, 3, 0, 2, 3, 0, 1]


def test_every_row_has_every_turn_equally_often() -> None:
    turns = Counter((turn % 4, row) for turn, (_, _, row) in enumerate(schedule(4, 8, 4)))
    assert set(turns.values()) == {8}
    assert len(turns) == 16


def test_each_run_keeps_its_place() -> None:
    heard: list[Sample] = []
    samples = interleave([FakeRow("a"), FakeRow("b")], [[5], [6]], 9, 2, heard.append)
    assert samples == heard
    assert sorted((one.repeat, one.prompt, one.row) for one in samples) == [
        (repeat, prompt, row) for repeat in (0, 1) for prompt in (0, 1) for row in "ab"
    ]
    assert all(one.run.tokens == (5 + one.prompt, 9) for one in samples)
