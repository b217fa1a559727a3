"""What a session leaves behind is told from noise, from steps, and from nothing."""

from __future__ import annotations

from random import Random

import pytest

from bench.soak.memory import MOST_KEPT, Point, kept_bytes

RATE, SAMPLES, EVERY_S = 30, 300, 2


def a_run(kept: float, seed: int = 1) -> list[Point]:
    """Memory that wanders within a mebibyte or so, settles in the first half, and keeps so many bytes of a session."""
    random, wander, points = Random(seed), 0.0, []
    for number in range(SAMPLES):
        ended = RATE * EVERY_S * number
        wander = 0.9 * wander + random.gauss(0.0, 0.1)
        settling = 30.0 * min(1.0, number / (SAMPLES / 3))
        points.append(Point(ended, 200.0 + settling + wander + kept * ended / 2**20))
    return points


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_kept(seed: int) -> None:
    found = kept_bytes(a_run(0.0, seed))
    assert found.low <= found.value <= found.high <= MOST_KEPT


@pytest.mark.parametrize("kept", [2.0 * MOST_KEPT, 5_000.0])
def test_a_leak_is_found(kept: float) -> None:
    found = kept_bytes(a_run(kept))
    assert found.high > MOST_KEPT
    assert found.low <= kept <= found.high


def test_steps_are_no_certainty() -> None:
    """One step of an allocator, late: the interval says that it is not known what it comes from."""
    points = [Point(100.0 * n, 200.0 + (1.0 if n > 240 else 0.0)) for n in range(300)]
    found = kept_bytes(points)
    assert found.low == 0.0 < found.high


@pytest.mark.parametrize("points", [[], [Point(1, 2.0)], [Point(5, 1.0)] * 9])
def test_what_cannot_be_told(points: list[Point]) -> None:
    with pytest.raises(ValueError, match="too few samples, or no session ended"):
        kept_bytes(points)
