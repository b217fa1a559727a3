"""How a session is to be drafted for in a simulation, by name."""

from __future__ import annotations

from dataclasses import dataclass

from specwire.core.messages import Plan
from specwire.core.policy.controller import Controller, Fixed, InvalidPlan, Planner, parse_plan
from specwire.core.policy.estimates import ForwardTimes


@dataclass(frozen=True, slots=True)
class Policy:
    """plan: None has the core's controller plan. patient: the verifier waits for all that is due, whatever it costs,
    and keeps no ledger. drafting: there is a drafter.
    """

    name: str
    plan: Plan | None = None
    patient: bool = False
    drafting: bool = True

    def planner(self, forward: ForwardTimes, shared_host: bool) -> Planner:
        return Controller(forward, shared_host) if self.plan is None else Fixed(self.plan)


AUTO = Policy("auto")
PLAIN = Policy("plain", parse_plan("off"), drafting=False)


def fixed(spec: str) -> Policy:
    """A plan as `core.policy.controller.parse_plan` reads it: off, lockstep:K, stream:CHUNK,RUN_AHEAD[,DUE]."""
    return Policy(spec, parse_plan(spec))


def textbook(k: int) -> Policy:
    """Draft k tokens, send them, wait for the verdict; the verifier waits for all k."""
    return Policy(f"textbook:{k}", parse_plan(f"lockstep:{k}"), patient=True)


def stream_wait(chunk: int, run_ahead: int) -> Policy:
    """Streaming, with a verifier that never runs without a live draft token."""
    return Policy(f"stream-wait:{chunk},{run_ahead}", parse_plan(f"stream:{chunk},{run_ahead},1"), patient=True)


def parse_policy(spec: str) -> Policy:
    """auto, plain, off, lockstep:K, stream:CHUNK,RUN_AHEAD[,DUE], textbook:K or stream-wait:CHUNK,RUN_AHEAD.

    Raises:
        InvalidPlan: `spec` reads otherwise.
    """
    name, _, numbers = spec.partition(":")
    try:
        match name, [int(number) for number in numbers.split(",")] if numbers else []:
            case "auto", []:
                return AUTO
            case "plain", []:
                return PLAIN
            case "textbook", [k]:
                return textbook(k)
            case "stream-wait", [chunk, run_ahead]:
                return stream_wait(chunk, run_ahead)
        return fixed(spec)
    except ValueError as error:
        raise InvalidPlan(
            f"policy: must be auto, plain, off, lockstep:K, stream:CHUNK,RUN_AHEAD[,DUE], textbook:K or "
            f"stream-wait:CHUNK,RUN_AHEAD, not {spec!r}"
        ) from error
