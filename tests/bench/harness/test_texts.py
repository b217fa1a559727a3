"""A differing token passes only where the target itself was undecided."""

from __future__ import annotations

import pytest

from bench.harness.texts import Mismatch, TextScores, judge, mismatches, tolerance
from tests.bench.harness.made_rows import sample


def test_the_first_difference_of_each_text_is_found_once() -> None:
    samples = [
        sample("a", 0, 0, 1.0, (1, 2, 3)),
        *(sample("d", repeat, 0, 1.0, (1, 9, 9)) for repeat in range(2)),
        sample("c", 0, 0, 1.0, (1, 2, 3)),
    ]
    assert mismatches(samples, "a") == [Mismatch("d", 0, at=1, expected=2, got=9)]


@pytest.mark.parametrize(
    ("scores", "near"), [((3.0, 2.99995), True), ((2.99995, 3.0), True), ((3.0, 2.9998), False), ((3.0, -1.0), False)]
)
def test_both_tokens_must_be_as_good_as_the_best(scores: tuple[float, float], near: bool) -> None:
    mismatch = Mismatch("d", 0, 1, 2, 9)
    (judged,) = judge([mismatch], lambda _: TextScores((2, 5), (3.0, 2.99995), scores), tolerance("float32"))
    assert judged.near_tie is near
    assert judged.gap == pytest.approx(5e-5)


@pytest.mark.parametrize(("best", "allowed"), [(1.0, 2**-6), (1.99, 2**-6), (2.0, 2**-5), (-20.0, 2**-2), (0.0, 2**-6)])
def test_two_units_in_the_last_place_of_bfloat16(best: float, allowed: float) -> None:
    assert tolerance("bfloat16")(best) == allowed
