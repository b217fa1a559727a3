"""Who says how to draft next, told what happened: the controller, or a fixed plan that it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specwire.core.chain import Proposal
from specwire.core.contention import Forward
from specwire.core.plan import Plan
from specwire.core.speed import ForwardTimes


class PlannedVerdict(NamedTuple):
    """What a planner is told of a verdict.

    Attributes:
        position, tokens: the decided tokens and where the first of them stands.
        tested, accepted: draft tokens of the drafter in the window, and of those the accepted ones.
        delay_us: from an earlier verdict to the proposal that answered it, 0 if none came.
        forward: the forward that decided, if it was the session's alone and its times are known.
    """

    position: int
    tokens: Sequence[int]
    tested: int
    accepted: int
    delay_us: int
    forward: Forward | None = None


class Planner(Protocol):
    """One drafter's part of one session: told what happened, it says how to draft next."""

    def successor(self, forward: ForwardTimes, shared_host: bool) -> Planner:
        """That of the session after this one, which starts from what was learnt.

        forward: V(m) of that session's verifier. shared_host: its drafter computes on the verifier's host.
        """

    def observe_proposal(self, proposal: Proposal, draft_us: int, arrived_us: float | None = None) -> None:
        """A chunk came that took `draft_us` to draft. arrived_us: when, on the clock of the verdicts' forwards."""

    def observe_verdict(self, decided: PlannedVerdict) -> None:
        """Tokens were decided."""

    def drafter_changed(self) -> None:
        """Another drafter, or another line to the same one: how far it is must be measured again."""

    @property
    def time_to_plan(self) -> bool:
        """Whether to plan after the last verdict."""

    def plan(self) -> Plan:
        """The settings for what is drafted next."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A `Planner` of one plan: what the controller's choices are compared with."""

    fixed: Plan

    def successor(self, forward: ForwardTimes, shared_host: bool) -> Fixed:
        return self

    def observe_proposal(self, proposal: Proposal, draft_us: int, arrived_us: float | None = None) -> None:
        pass

    def observe_verdict(self, decided: PlannedVerdict) -> None:
        pass

    def drafter_changed(self) -> None:
        pass

    @property
    def time_to_plan(self) -> bool:
        return False

    def plan(self) -> Plan:
        return self.fixed
