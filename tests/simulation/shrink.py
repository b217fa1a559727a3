"""Makes a failing scenario small: fewer faults, requests and parties, plainer requests; still failing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from tests.simulation.requests import SimRequest
from tests.simulation.run import Outcome, Violation, run
from tests.simulation.scenario import Fault, Scenario

T = TypeVar("T")

# Runs that making it small may take.
MOST_RUNS = 400
# And seconds, in a test, which is ended after a minute: less is left out then.
IN_A_TEST_S = 20.0
PLAIN_REQUEST = SimRequest(0.0, 0, (), 0)
PLAIN = Scenario(0)
# What a scenario is, apart from its script.
SETTINGS = (
    "verifiers", "drafters", "dialling", "orchestrators", "slots", "delay", "buffer", "shared_host", "plan", "tenants",
    "queue", "queue_wait", "grace", "detach_grace", "drafters_per_session", "spread", "session_ttl", "retention",
    "configs", "heads", "versions",
)  # fmt: skip


def shrunk(scenario: Scenario, fails: Callable[[Scenario], bool] | None = None, limit_s: float = math.inf) -> Scenario:
    """A scenario from which nothing can be left out (Zeller's ddmin, one piece at a time at the end).

    Args:
        fails: whether a smaller one still shows the failure; by default, anything that does not hold.
        limit_s: then it is small enough.
    """
    still = fails or (lambda smaller: bool(run(smaller).found))
    runs, until = 0, time.monotonic() + limit_s
    progress = True
    while progress:
        progress = False
        for smaller in candidates(scenario):
            runs += 1
            if runs > MOST_RUNS or time.monotonic() > until:
                return scenario
            if still(smaller):
                scenario, progress = smaller, True
                break
    return scenario


def candidates(scenario: Scenario) -> Iterator[Scenario]:
    """Smaller ones, those that leave out most first."""
    for faults in without(scenario.faults):
        yield replace(scenario, faults=faults)
    for numbers in without(range(len(scenario.requests))):
        if numbers:
            yield replace(scenario, requests=kept(scenario.requests, numbers))
    for name in SETTINGS:
        plain = getattr(PLAIN, name)
        if getattr(scenario, name) != plain and possible(smaller := replace(scenario, **{name: plain})):
            yield smaller
    for number, request in enumerate(scenario.requests):
        for plainer in filter(_is_possible, plainer_requests(request)):
            yield replace(scenario, requests=(*scenario.requests[:number], plainer, *scenario.requests[number + 1 :]))


def without(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """The items without a half, a quarter, ... one of them."""
    size = len(items)
    while size > 0:
        for start in range(0, len(items), size):
            yield (*items[:start], *items[start + size :])
        size //= 2


def kept(requests: Sequence[SimRequest], numbers: Sequence[int]) -> tuple[SimRequest, ...]:
    """Those of these numbers. One whose turn before is left out begins a conversation."""
    places: dict[int | None, int] = {number: place for place, number in enumerate(numbers)}
    return tuple(replace(requests[number], follows=places.get(requests[number].follows)) for number in numbers)


def _is_possible(request: SimRequest) -> bool:
    return request.possible


def plainer_requests(request: SimRequest) -> Iterator[SimRequest]:
    for each in fields(SimRequest):
        plain = getattr(PLAIN_REQUEST, each.name)
        if each.name not in ("start", "prompt", "max_tokens", "at") and getattr(request, each.name) != plain:
            yield replace(request, **{each.name: plain})
    if request.max_tokens > 1:
        most = request.max_tokens // 2
        yield replace(request, max_tokens=most, min_tokens=min(most, request.min_tokens))


def possible(scenario: Scenario) -> bool:
    """Whether all that the script names is there."""
    named = {fault.target for fault in scenario.faults if fault.target}
    tenants = {request.tenant for request in scenario.requests}
    there = named <= {*scenario.parties, *scenario.lines} and max(tenants, default=0) < scenario.tenants
    return there and {len(scenario.configs), len(scenario.heads)} <= {0, scenario.verifiers}


def check_and_shrink(scenario: Scenario) -> None:
    """For tests. Violation where something did not hold: what, and a small program that shows it."""
    outcome = run(scenario)
    if outcome.found:
        raise Violation(report(outcome, shrunk(scenario, limit_s=IN_A_TEST_S)))


def report(outcome: Outcome, smaller: Scenario) -> str:
    """What did not hold, and a program that shows it."""
    script = "\n".join(
        [
            "from tests.simulation.requests import SimRequest",
            "from tests.simulation.run import check",
            "from tests.simulation.scenario import Fault, Scenario",
            "",
            f"check({formatted(smaller)})",
        ]
    )
    return "\n".join([*outcome.found[:5], "", "To see it again:", "", script])


def formatted(scenario: Scenario) -> str:
    """Its repr, without what is as usual, a request and a fault a line."""
    parts = [f"    {scenario.seed},"]
    for each in fields(Scenario)[1:]:
        value = getattr(scenario, each.name)
        if value == getattr(PLAIN, each.name):
            continue
        if each.name in ("requests", "faults"):
            lines = "".join(f"        {item(part)},\n" for part in value)
            parts.append(f"    {each.name}=(\n{lines}    ),")
        else:
            parts.append(f"    {each.name}={value!r},")
    return "Scenario(\n" + "\n".join(parts) + "\n)"


def item(part: SimRequest | Fault) -> str:
    usual = {each.name: each.default for each in fields(part)}
    shown = [f"{name}={getattr(part, name)!r}" for name in usual if getattr(part, name) != usual[name]]
    return f"{type(part).__name__}({', '.join(shown)})"
