"""`python -m tests.fuzz.long MINUTES`: messages and values that were not tried before, for as long as that.

Ends with a table of how often each was tried and how it was answered; the first failure ends it with exit code 1, and
hypothesis says how to repeat it.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz.messages import Values
from tests.fuzz.services import Services, services
from tests.fuzz.targets import Target, targets
from tests.fuzz.values import cases, try_all
from tests.orchestrator.redis_for_tests import RedisServer

EXAMPLES = 250
FRESH = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
Tallies = dict[str, Counter[str]]


def main() -> None:
    until = time.monotonic() + 60 * float(sys.argv[1])
    tallies: Tallies = {}
    with RedisServer() as log, services(log.url) as running:
        while time.monotonic() < until:
            for name, strategy, call in _everything(log, running):
                tally = tallies.setdefault(name, Counter())
                _explore(strategy, call, tally)
            running.check()
    print(table(tallies))


def _everything(log: RedisServer, running: Services) -> list[tuple[str, Values, Callable[[Any], Counter[str]]]]:
    def telling(target: Target) -> Callable[[Any], Counter[str]]:
        return lambda data: target.call(running, data)

    said = [(target.name, target.strategy, telling(target)) for target in targets(running)]
    return [*said, ("values in Redis", cases, lambda damage: try_all(log.url, damage))]


def _explore(strategy: Values, call: Callable[[Any], Counter[str]], tally: Counter[str]) -> None:
    @seed(secrets.randbits(64))
    @FRESH
    @given(strategy)
    def explore(value: Any) -> None:
        tally["tried"] += 1
        tally.update(call(value))

    explore()


def table(tallies: Tallies) -> str:
    """Of the statuses only: fields of answers are written in small letters."""
    lines = ["| what | tried | answers |", "| --- | --- | --- |"]
    for name, tally in tallies.items():
        answers = ", ".join(f"{code} {n}" for code, n in sorted(tally.items()) if code.isupper() or " " in code)
        lines.append(f"| {name} | {tally['tried']} | {answers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
