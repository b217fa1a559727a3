"""Plans: how fixed ones are written."""

from __future__ import annotations

import pytest

from specwire.core.invalid import InvalidParameter
from specwire.core.messages import Discipline, Pace, Plan, branches_of, parse_plan


def test_plans_are_read() -> None:
    assert parse_plan("auto") is None
    assert parse_plan("auto:4") is None
    assert branches_of("auto:4") == 4
    assert parse_plan("off") == Plan(Discipline.OFF, Pace(1, 0), 0, "fixed")
    assert parse_plan("stream:2,32") == Plan(Discipline.STREAM, Pace(2, 32), 0, "fixed")
    assert parse_plan("stream:2,32,0,8") == Plan(Discipline.STREAM, Pace(2, 32, branches=8), 0, "fixed")
    assert parse_plan("stream:2,32,1") == Plan(Discipline.STREAM, Pace(2, 32), 1, "fixed")


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "fast",
        "auto:0",
        "auto:17",
        "auto:1,2",
        "lockstep",
        "lockstep:x",
        "lockstep:0",
        "stream:2",
        "stream:1,2,3,4",
        "stream:1,8,0,0",
        "stream:1,8,0,17",
        "stream:1,8,0,2,2",
        "stream:4,32,-5",
        "stream:1,0",
        "stream:8,4",
        "lockstep:100000000000",
    ],
)
def test_a_plan_that_cannot_be_read_is_refused(spec: str) -> None:
    with pytest.raises(InvalidParameter, match="plan: "):
        parse_plan(spec)
