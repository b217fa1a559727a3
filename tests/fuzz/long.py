"""`python -m tests.fuzz.long MINUTES`: messages and values that were not tried before, for as long as that.

Ends with a table of how often each was tried and how it was answered. Where something fails, hypothesis says how to
repeat it, it is left out from then on, and the exit code is 1.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz import configs, registry
from tests.fuzz.http import tell
from tests.fuzz.logs import meet
from tests.fuzz.messages import Values
from tests.fuzz.requests import endpoints
from tests.fuzz.services import Services, services
from tests.fuzz.targets import Target, targets
from tests.fuzz.values import cases, members, spoil_roll, try_all
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
# Bytes that this process, which holds all services, may grow by after its first round.
MOST_GROWTH = 256 << 20


def main() -> None:
    until = time.monotonic() + 60 * float(sys.argv[1])
    tallies: Tallies = {}
    sizes: list[int] = []
    failed: set[str] = set()
    with RedisServer() as log, services(log.url) as running:
        try:
            while time.monotonic() < until:
                for name, strategy, call in _everything(log, running):
                    late = sizes and time.monotonic() > until  # the first round is whole
                    if not (late or name in failed or _holds(strategy, call, tallies.setdefault(name, Counter()))):
                        failed.add(name)
                running.check()
                sizes.append(_resident())
                assert sizes[-1] < sizes[0] + MOST_GROWTH, f"memory grew: {sizes}"
        finally:
            print(table(tallies))
    print(f"{len(sizes)} rounds; failed: {', '.join(sorted(failed)) or 'none'}")
    print(f"resident memory after the first {sizes[0] >> 20} MiB, after the last {sizes[-1] >> 20} MiB")
    sys.exit(1 if failed else 0)


def _everything(log: RedisServer, running: Services) -> list[tuple[str, Values, Callable[[Any], Counter[str]]]]:
    def telling(target: Target) -> Callable[[Any], Counter[str]]:
        return lambda data: target.call(running, data)

    said = [(target.name, target.strategy, telling(target)) for target in targets(running)]
    asked = [(f"HTTP {name}", sent, partial(tell, running, name)) for name, sent in endpoints().items()]
    return [
        *said,
        *asked,
        ("values in Redis", cases, lambda damage: try_all(log.url, damage)),
        ("logs that are met", cases, partial(meet, running, log.url)),
        ("roll in Redis", members, partial(spoil_roll, log.url, running.weights)),
        ("registry in Redis", registry.cases, partial(registry.try_all, log.url)),
        ("config file and environment", configs.written(), configs.read),
        ("--speculative-config", configs.speculative(), configs.say),
    ]


def _resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _holds(strategy: Values, call: Callable[[Any], Counter[str]], tally: Counter[str]) -> bool:
    try:
        _explore(strategy, call, tally)
    except Exception:
        traceback.print_exc()
        return False
    return True


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
        answers = ", ".join(
            f"{code} {n}" for code, n in sorted(tally.items()) if code.isupper() or code.isdecimal() or " " in code
        )
        lines.append(f"| {name} | {tally['tried']} | {answers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
