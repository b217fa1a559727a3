"""The credit's buffer: no pause for credit while the largest steps run, and a bound."""

from __future__ import annotations

import pytest

from specwire.core.messages import MOST_WINDOW
from specwire.core.session import MOST_BUFFER, buffer_for


def test_near_and_slow_verifiers_get_the_least() -> None:
    assert buffer_for(0.0, 2_000.0, 64) == 64
    assert buffer_for(300.0, 30_000.0, 64) == 64


def test_half_of_it_lasts_a_round_trip_of_the_largest_steps() -> None:
    for round_trip_us, step_us in ((80_000.0, 30_000.0), (20_000.0, 2_000.0), (200_000.0, 30_000.0)):
        steps = round_trip_us / step_us
        assert buffer_for(round_trip_us, step_us, 64) / 2 >= steps * (MOST_WINDOW + 1)


def test_it_is_bounded() -> None:
    assert buffer_for(1e9, 1.0, 64) == MOST_BUFFER
    with pytest.raises(ValueError, match="step_us"):
        buffer_for(1.0, 0.0, 64)
