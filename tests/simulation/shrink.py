"""Makes a failing scenario small: fewer faults, requests and parties, plainer requests; still failing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from tests.simulation.asks import Ask
from tests.simulation.run import Outcome, Violation, run
from tests.simulation.scenario import Fault, Scenario

T = TypeVar("T")

# Runs that making it small may take.
MOST_RUNS = 400
# And seconds, in a test, which is ended after a minute: less is left out then.
IN_A_TEST_S = 20.0
PLAIN_ASK = Ask(0.0, 0, (), 0)
PLAIN = Scenario(0)
# What a scenario is, apart from its script.
SETTINGS = (
    "verifiers", "drafters", "dialling", "orchestrators", "slots", "delay", "buffer", "shared_host", "plan", "tenants",
    "queue", "queue_wait", "grace", "detach_grace", "drafters_per_session", "spread", "session_ttl", "retention",
    "configs", "versions",
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
    for numbers in without(range(len(scenario.asks))):
        if numbers:
            yield replace(scenario, asks=kept(scenario.asks, numbers))
    for name in SETTINGS:
        plain = getattr(PLAIN, name)
        if getattr(scenario, name) != plain and possible(smaller := replace(scenario, **{name: plain})):
            yield smaller
    for number, ask in enumerate(scenario.asks):
        for plainer in filter(_is_possible, plainer_asks(ask)):
            yield replace(scenario, asks=(*scenario.asks[:number], plainer, *scenario.asks[number + 1 :]))


def without(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """The items but for a half, a quarter, ... one of them."""
    size = len(items)
    while size > 0:
        for start in range(0, len(items), size):
            yield (*items[:start], *items[start + size :])
        size //= 2


def kept(asks: Sequence[Ask], numbers: Sequence[int]) -> tuple[Ask, ...]:
    """Those of these numbers. One whose turn before is left out begins a conversation."""
    places: dict[int | None, int] = {number: place for place, number in enumerate(numbers)}
    return tuple(replace(asks[number], follows=places.get(asks[number].follows)) for number in numbers)


def _is_possible(ask: Ask) -> bool:
    return ask.possible


def plainer_asks(ask: Ask) -> Iterator[Ask]:
    for each in fields(Ask):
        plain = getattr(PLAIN_ASK, each.name)
        if each.name not in ("start", "prompt", "max_tokens", "at") and getattr(ask, each.name) != plain:
            yield replace(ask, **{each.name: plain})
    if ask.max_tokens > 1:
        most = ask.max_tokens // 2
        yield replace(ask, max_tokens=most, min_tokens=min(most, ask.min_tokens))


def possible(scenario: Scenario) -> bool:
    """Whether all that the script names is there."""
    named = {fault.target for fault in scenario.faults if fault.target}
    tenants = {ask.tenant for ask in scenario.asks}
    there = named <= {*scenario.parties, *scenario.lines} and max(tenants, default=0) < scenario.tenants
    return there and len(scenario.configs) in (0, scenario.verifiers)


def check_and_shrink(scenario: Scenario) -> None:
    """For tests. Violation where something did not hold: what, and a small program that shows it."""
    outcome = run(scenario)
    if outcome.found:
        raise Violation(report(outcome, shrunk(scenario, limit_s=IN_A_TEST_S)))


def report(outcome: Outcome, smaller: Scenario) -> str:
    """What did not hold, and a program that shows it."""
    script = "\n".join(
        [
            "from tests.simulation.asks import Ask",
            "from tests.simulation.run import check",
            "from tests.simulation.scenario import Fault, Scenario",
            "",
            f"check({formatted(smaller)})",
        ]
    )
    return "\n".join([*outcome.found[:5], "", "To see it again:", "", script])


def formatted(scenario: Scenario) -> str:
    """Its repr, without what is as usual, an ask and a fault a line."""
    parts = [f"    {scenario.seed},"]
    for each in fields(Scenario)[1:]:
        value = getattr(scenario, each.name)
        if value == getattr(PLAIN, each.name):
            continue
        if each.name in ("asks", "faults"):
            lines = "".join(f"        {item(part)},\n" for part in value)
            parts.append(f"    {each.name}=(\n{lines}    ),")
        else:
            parts.append(f"    {each.name}={value!r},")
    return "Scenario(\n" + "\n".join(parts) + "\n)"


def item(part: Ask | Fault) -> str:
    usual = {each.name: each.default for each in fields(part)}
    shown = [f"{name}={getattr(part, name)!r}" for name in usual if getattr(part, name) != usual[name]]
    return f"{type(part).__name__}({', '.join(shown)})"
