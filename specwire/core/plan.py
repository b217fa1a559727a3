"""How a drafter and its verifier are to share time: what a controller chooses, or a measurement fixes. Pure.

lockstep   they take turns; the drafter sends one chunk per verdict and the verifier waits for it when that pays
stream     the drafter streams small chunks, as far ahead as the round trip needs; the verifier need not wait
off        plain decoding
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from specwire.core.drafting import Pace

# Draft tokens ahead of the decided text.
MOST_RUN_AHEAD = 128

OFF_PACE = Pace(1, 0)


class Discipline(StrEnum):
    """How drafter and verifier share time."""

    STREAM = "stream"
    LOCKSTEP = "lockstep"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Plan:
    """`due`: draft tokens that the verifier may expect after each verdict; 0 = none. `reason`: for metrics."""

    discipline: Discipline
    pace: Pace
    due: int
    reason: str

    def __str__(self) -> str:
        return f"{self.discipline}: {self.reason}"


def off(reason: str) -> Plan:
    """Nothing is drafted."""
    return Plan(Discipline.OFF, OFF_PACE, 0, reason)


def in_turns(window: int, reason: str, floor: float = 0.0) -> Plan:
    """One chunk of `window` tokens a verdict, which the verifier waits for.

    floor: a chain's probability below which the drafter ends the chunk; 0 ends none.
    """
    return Plan(Discipline.LOCKSTEP, Pace(window, window, floor), window, reason)


class InvalidPlan(ValueError):
    """A fixed plan that cannot be read."""


def parse_plan(spec: str) -> Plan | None:
    """A fixed plan: off, lockstep:K or stream:CHUNK,RUN_AHEAD[,DUE]; None for auto, where a controller plans.

    Raises:
        InvalidPlan: `spec` reads otherwise.
    """
    name, _, numbers = spec.partition(":")
    try:
        values = [int(number) for number in numbers.split(",")] if numbers else []
        match name, values:
            case "auto", []:
                return None
            case "off", []:
                return off("fixed")
            case "lockstep", [window]:
                return _checked(in_turns(window, "fixed"))
            case "stream", [chunk, run_ahead, *due] if len(due) <= 1:
                return _checked(Plan(Discipline.STREAM, Pace(chunk, run_ahead), due[0] if due else 0, "fixed"))
    except ValueError as error:
        raise InvalidPlan(f"plan: {spec!r}: {error}") from error
    raise InvalidPlan(f"plan: must be auto, off, lockstep:K or stream:CHUNK,RUN_AHEAD[,DUE], not {spec!r}")


def _checked(plan: Plan) -> Plan:
    """ValueError for one that no drafter could follow."""
    if not plan.pace.chunk <= plan.pace.run_ahead <= MOST_RUN_AHEAD:
        raise ValueError(f"the run-ahead must be from the chunk to {MOST_RUN_AHEAD}, not {plan.pace.run_ahead}")
    if not 0 <= plan.due <= plan.pace.run_ahead:
        raise ValueError(f"due must be from 0 to the run-ahead, not {plan.due}")
    return plan
