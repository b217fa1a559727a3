"""A bar holds only with its whole interval."""

from __future__ import annotations

from bench.harness.interval import Estimate
from bench.harness.report import at_least, at_most
from bench.harness.texts import Judged, Mismatch, TextScores
from bench.main.judged import bars
from tests.bench.harness.made_rows import sample


def test_a_bar_needs_the_bound_on_its_side() -> None:
    value = Estimate(1.6, 1.4, 1.9, 0.98)
    assert not at_least("speed", value, 1.5).holds
    assert at_least("speed", value, 1.4).holds
    assert not at_most("ms", value, 1.8).holds
    assert at_most("ms", value, 1.9).holds


def test_only_a_difference_that_is_no_near_tie_fails_the_texts() -> None:
    samples = [sample(row, 0, 0, 1.0) for row in "abcd"]
    judged = [
        Judged(Mismatch(row, 0, 0, 1, 2), 0.0, TextScores((1, 2), (1.0, 1.0), (1.0, 1.0)), near_tie=near)
        for row, near in (("b", False), ("c", True), ("d", False))
    ]
    texts = {bar.name: bar.holds for bar in bars(samples, [], judged) if bar.name.startswith("texts")}
    assert list(texts.values()) == [True, False]


def test_only_what_was_measured_has_a_bar() -> None:
    rows = ("a", "e", "e-lookup", "o-off", "o-on")
    speeds = [bar.name for bar in bars([sample(row, 0, 0, 1.0) for row in rows], [], []) if "speed" in bar.name]
    assert [name.partition(" / ")[2] for name in speeds] == ["OpenVINO GenAI", "OpenVINO GenAI's prompt lookup"]


def test_only_rows_that_were_measured_have_a_bar() -> None:
    names = [[bar.name for bar in bars([sample(row, 0, 0, 1.0) for row in rows], [], [])] for rows in ("abcd", "abcdh")]
    assert [sum("row h" in name for name in each) for each in names] == [0, 1]
