"""Scenarios in which a mistake can show: among the random ones, or made for it."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.asks import Ask
from tests.simulation.scenario import Fault, Scenario


def has(*kinds: str) -> Callable[[Scenario], bool]:
    return lambda scenario: any(fault.kind in kinds for fault in scenario.faults)


def always(_: Scenario) -> bool:
    return True


def late_openings(seed: int) -> Scenario:
    """Sessions open while what is said to the verifier arrives late; they open again on the next connection."""
    asks = (Ask(0.3, 0, (3, 4), 60, request_id="a"), Ask(0.32, 0, (3, 5), 60))
    faults = (Fault(0.28, "late", "orchestrator-0-verifier-0", 0.4),)
    return Scenario(seed, forward=0.05, delay=(0.0002, 0.02), asks=asks, faults=faults)


def away_and_back(seed: int) -> Scenario:
    """A session moves to the other verifier, and back to the first one, which still has it as it was."""
    asks = tuple(Ask(0.1, 0, (number + 1, 4), 80, request_id=f"{number}") for number in range(3))
    faults = (
        Fault(0.6, "close", "orchestrator-0-verifier-0", 3.0),
        Fault(4.2, "close", "orchestrator-0-verifier-1", 20.0),
    )
    return Scenario(seed, verifiers=2, forward=0.1, asks=asks, faults=faults)


def taken_over(seed: int) -> Scenario:
    """Clients lose their connections to an orchestrator that goes on, and turn to the other one."""
    asks = tuple(Ask(0.5, 0, (number + 1, 4), 100, request_id=f"{number}", library=number > 1) for number in range(3))
    faults = (Fault(0.9, "cut", "orchestrator-0-client"), Fault(2.4, "cut", "orchestrator-1-client"))
    return Scenario(seed, orchestrators=2, forward=0.1, delay=(0.0002, 0.02), asks=asks, faults=faults)


def links_cut_and_a_slow_log(seed: int) -> Scenario:
    """Much is decided that is not durable when the links are cut."""
    asks = tuple(Ask(0.5, 0, (number + 1, 4), 100, request_id=f"{number}") for number in range(3))
    cuts = tuple(Fault(0.7 + number / 10, "cut", "orchestrator-0-verifier-0") for number in range(5))
    return Scenario(seed, agree=1.0, asks=asks, faults=(Fault(0.5, "log_slow", "", 3.0), *cuts))


def short_and_well_drafted(seed: int) -> Scenario:
    asks = tuple(Ask(0.5, 0, (number + 1, seed % 9 + 1), 7 + number) for number in range(3))
    return Scenario(seed, agree=1.0, plan="stream:4,8", forward=0.05, asks=asks)


def left_behind(seed: int) -> Scenario:
    """Sessions whose clients have gone wait for the log when everything stops."""
    asks = tuple(Ask(0.5, 0, (number + 1, 4), 100, request_id=f"{number}", leave_after=0) for number in range(3))
    lasting = Ask(0.5, 0, (5, 5), 100, request_id="lasting", timeout=1.0)
    return Scenario(seed, forward=0.05, asks=(*asks, lasting), faults=(Fault(0.53, "log_down", "", 10.0),))


def drafted(scenario: Scenario) -> bool:
    return scenario.drafters + scenario.dialling > 0


LINK_LOST = has("cut", "break", "close", "late", "pause", "crash")
