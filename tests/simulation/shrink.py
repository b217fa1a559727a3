"""Makes a failing scenario small: fewer faults, requests and parties, plainer requests; still failing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from tests.simulation.run import Outcome, run
from tests.simulation.scenario import Ask, Fault, Scenario

T = TypeVar("T")

# Runs that making it small may take.
MOST_RUNS = 400
PLAIN_ASK = Ask(0.0, 0, (), 0)
PLAIN = Scenario(0)
# What a scenario is, apart from its script.
SETTINGS = ("verifiers", "drafters", "dialling", "orchestrators", "slots", "delay", "buffer", "shared_host", "plan")


def shrunk(scenario: Scenario, fails: Callable[[Scenario], bool] | None = None) -> Scenario:
    """A scenario from which nothing can be left out (Zeller's ddmin, one piece at a time at the end).

    Args:
        fails: whether a smaller one still shows the failure; by default, anything that does not hold.
    """
    still = fails or (lambda smaller: bool(run(smaller).found))
    runs = 0
    progress = True
    while progress:
        progress = False
        for smaller in candidates(scenario):
            runs += 1
            if runs > MOST_RUNS:
                return scenario
            if still(smaller):
                scenario, progress = smaller, True
                break
    return scenario


def candidates(scenario: Scenario) -> Iterator[Scenario]:
    """Smaller ones, those that leave out most first."""
    for faults in without(scenario.faults):
        yield replace(scenario, faults=faults)
    for asks in without(scenario.asks):
        if asks:
            yield replace(scenario, asks=asks)
    for name in SETTINGS:
        plain = getattr(PLAIN, name)
        if getattr(scenario, name) != plain and possible(smaller := replace(scenario, **{name: plain})):
            yield smaller
    for number, ask in enumerate(scenario.asks):
        for plainer in plainer_asks(ask):
            yield replace(scenario, asks=(*scenario.asks[:number], plainer, *scenario.asks[number + 1 :]))


def without(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """The items but for a half, a quarter, ... one of them."""
    size = len(items)
    while size > 0:
        for start in range(0, len(items), size):
            yield (*items[:start], *items[start + size :])
        size //= 2


def plainer_asks(ask: Ask) -> Iterator[Ask]:
    for each in fields(Ask):
        plain = getattr(PLAIN_ASK, each.name)
        if each.name not in ("start", "prompt", "max_tokens", "at") and getattr(ask, each.name) != plain:
            yield replace(ask, **{each.name: plain})
    if ask.max_tokens > 1:
        yield replace(ask, max_tokens=ask.max_tokens // 2)


def possible(scenario: Scenario) -> bool:
    """Whether all that the script names is there."""
    named = {fault.target for fault in scenario.faults if fault.target}
    return named <= {*scenario.parties, *scenario.lines}


def report(outcome: Outcome, smaller: Scenario) -> str:
    """What did not hold, and a program that shows it."""
    script = "\n".join(
        [
            "from tests.simulation.run import check",
            "from tests.simulation.scenario import Ask, Fault, Scenario",
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
