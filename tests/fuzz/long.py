"""`python -m tests.fuzz.long MINUTES`: messages and values that were not tried before, for as long as that.

Says how often each was tried and how it was answered; a run of 30 minutes or more is recorded (`--out`). Where
something fails, hypothesis says how to repeat it, it is left out from then on, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz import configs, quotas, registry
from tests.fuzz.files import read_spoilt, spoilt
from tests.fuzz.http import tell, tell_figures, tell_flood, tell_template
from tests.fuzz.large import Large, tell_large
from tests.fuzz.large import requests as large_requests
from tests.fuzz.logs import meet
from tests.fuzz.messages import Values
from tests.fuzz.record import MINUTES, MOST_WAIT_MS, OUT, Record, lines, started
from tests.fuzz.requests import endpoints, figures, floods, sources
from tests.fuzz.services import Services, services
from tests.fuzz.targets import Target, targets
from tests.fuzz.values import cases, members, spoil_roll, try_all
from tests.orchestrator.redis_for_tests import RedisServer
from tests.verify_service.test_contained import hurt_nobody, neighbours

EXAMPLES = 250
FRESH = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
MOST_TOLD = 200
# Of a large request behind which a neighbour waited too long.
MORE_TRIES = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    asked = parser().parse_args(arguments)
    ran_on, record = started(), Record(EXAMPLES)
    began = time.monotonic()
    try:
        with RedisServer() as log, services(log.url, registered=True) as running:
            try_until(began + 60 * asked.minutes, log, running, record)
    finally:
        record.minutes = (time.monotonic() - began) / 60
        print("\n".join(lines(record)))
    out = asked.out or (OUT if asked.minutes >= MINUTES else None)
    if out is not None:
        record.write(out, *ran_on)
    return 0 if record.clean else 1


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m tests.fuzz.long", description="Tell every service, and write into Redis, anything."
    )
    line.add_argument("minutes", type=float, metavar="MINUTES", help="the first round is whole, however long it takes")
    line.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"JSON (default: {OUT.name} in bench/results/ from {MINUTES:g} minutes on)",
    )
    return line


def try_until(until: float, log: RedisServer, running: Services, record: Record) -> None:
    """until: on the monotonic clock."""
    failed: set[str] = set()
    while not record.sizes or time.monotonic() < until:
        for name, strategy, call in _everything(log, running, record):
            late = record.sizes and time.monotonic() > until  # the first round is whole
            if late or name in failed:
                continue
            found = _found(strategy, call, record.tallies.setdefault(name, Counter()))
            if found:
                failed.add(name)
                record.findings.append(f"{name}: {found}")
        record.sizes.append(_resident())
        try:
            running.check()
        except AssertionError as error:
            record.findings.append(f"after a round the services did not serve as before: {error}"[:MOST_TOLD])
            return


def _everything(
    log: RedisServer, running: Services, record: Record
) -> list[tuple[str, Values, Callable[[Any], Counter[str]]]]:
    def telling(target: Target) -> Callable[[Any], Counter[str]]:
        return lambda data: target.call(running, data)

    def large(asked: Large) -> Counter[str]:
        answers, wait_s = tell_large(running, asked)
        if wait_s > MOST_WAIT_MS / 1000:  # what else goes on in this process may have come between
            wait_s = min(wait_s, *(tell_large(running, asked)[1] for _ in range(MORE_TRIES)))
        record.waited(f"{asked!r}", wait_s)
        return answers

    said = [(target.name, target.strategy, telling(target)) for target in targets(running)]
    asked = [(f"HTTP {name}", sent, partial(tell, running, name)) for name, sent in endpoints().items()]
    return [
        *said,
        *asked,
        ("options of sessions in one step", neighbours, hurt_nobody),
        ("large requests", large_requests(running.fingerprint), large),
        ("quotas of a tenant", quotas.asked(), quotas.hold),
        ("HTTP floods", floods(), partial(tell_flood, running)),
        ("chat templates", sources, partial(tell_template, running)),
        ("HTTP figures", figures(), partial(tell_figures, running)),
        ("keys of the log in Redis", cases, lambda damage: try_all(log.url, damage)),
        ("a session's damaged log, met by calls", cases, partial(meet, running, log.url)),
        ("the roll of sessions in Redis", members, partial(spoil_roll, log.url, running.weights)),
        ("keys of the registry in Redis", registry.cases, partial(registry.try_all, log.url)),
        ("the registry beside services that use it", registry.cases, partial(registry.meet, running, log.url)),
        ("config file and environment", configs.written(), configs.read),
        ("files of models and tables", spoilt(), read_spoilt),
        ("command lines with control characters", configs.command_lines(), configs.type_line),
    ]


def _resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _found(strategy: Values, call: Callable[[Any], Counter[str]], tally: Counter[str]) -> str:
    """What is wrong, "" for nothing."""
    try:
        _explore(strategy, call, tally)
    except Exception as error:
        traceback.print_exc()
        return " ".join(f"{type(error).__name__}: {error}".split())[:MOST_TOLD]
    return ""


def _explore(strategy: Values, call: Callable[[Any], Counter[str]], tally: Counter[str]) -> None:
    @seed(secrets.randbits(64))
    @FRESH
    @given(strategy)
    def explore(value: Any) -> None:
        tally["tried"] += 1
        tally.update(call(value))

    explore()


if __name__ == "__main__":
    sys.exit(main())
