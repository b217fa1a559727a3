"""`python -m tests.conformance`: suites of others, unmodified, against a whole stack with a real model.

It exits with 1 where a test fails that is not in EXPECTED, or one of those passes. Texts are drawn, and a test fails
whose text reaches the context's end: it is tried again, by itself. Two models are served, because a request may omit
`model` where there is one, and each suite has a test that such a request is refused.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import demo_pair
from tests.integration.stack_process import START_LIMIT, running
from tests.real_models import SMOL
from tests.wait import eventually

PROGRAM = Path(sys.prefix, "conformance", "bin", "llm-comply")
SUITES = ("open-responses", "openai-chat")
# Tests that fail, and why.
EXPECTED = {"image-input": "images are not served", "chat-image-input": "images are not served"}
# What a test says whose text was cut.
UNENDED = re.compile(r"expected status='completed', got 'incomplete'|expected 'stop', got 'length'")
TRIES = 5
# Tokens: most answers end before, and those that do not take seconds.
CONTEXT = 640
TEXT_LIMIT_S = 120
SUITE_LIMIT_S = 900

Json = dict[str, Any]
# Results of a suite's tests: of all, or of the one with this name.
Ask = Callable[[str | None], list[Json]]


class Outcome(NamedTuple):
    """status: passed, failed or skipped. told: errors, else warnings, of the last try."""

    name: str
    status: str
    told: Sequence[str]
    tries: int = 1

    @property
    def unended(self) -> bool:
        return self.status == "failed" and all(map(UNENDED.search, self.told))

    def __str__(self) -> str:
        tries = "" if self.tries == 1 else f" (try {self.tries})"
        told = f": {'; '.join(self.told[:3])}" if self.told else ""
        return f"{self.name}: {self.status}{tries}{told}"


def outcomes(ask: Ask) -> Iterator[Outcome]:
    for found in map(_outcome, ask(None)):
        last = found
        while last.unended and last.tries < TRIES:
            last = _outcome(ask(found.name)[0])._replace(tries=last.tries + 1)
        yield last


def _outcome(result: Json) -> Outcome:
    return Outcome(result["id"], result["status"], result.get("errors") or result.get("warnings") or [])


def faults(found: Sequence[Outcome], expected: dict[str, str]) -> list[str]:
    """What differs from the table."""
    failed = {each.name for each in found if each.status == "failed"}
    new = [f"{each}, which is not expected" for each in found if each.name in failed - expected.keys()]
    return new + [
        f"{name}: does not fail, which was expected ({expected[name]})" for name in expected if name not in failed
    ]


def asked(url: str, suite: str) -> Ask:
    def ask(test: str | None) -> list[Json]:
        words = ["--format", suite, "--base-url", f"{url}/v1", "--api-key", "any", "--model", SMOL, "--json"]
        only = [] if test is None else ["--filter", test]
        done = subprocess.run(
            [str(PROGRAM), *words, "--timeout", str(TEXT_LIMIT_S), *only],
            capture_output=True,
            text=True,
            timeout=SUITE_LIMIT_S,
        )
        try:
            results: list[Json] = json.loads(done.stdout)["results"]
        except ValueError:
            raise SystemExit(f"conformance: {suite}: {done.stdout}{done.stderr}") from None
        return results

    return ask


@contextmanager
def service(*words: str) -> Iterator[Json]:
    """What the ready line of a service tells."""
    with running(*words, "--listen", "127.0.0.1:0", "--json") as command:
        line = command.line()
        if not line:
            raise SystemExit(f"conformance: {words[0]}: {command.said()}")
        yield json.loads(line)


def served(url: str) -> int:
    """Models."""
    with urlopen(f"{url}/v1/models") as answer:
        return len(json.load(answer)["data"])


def main() -> int:
    found: list[Outcome] = []
    with ExitStack() as started:
        verifiers = [
            started.enter_context(service("verify", model, "--context", str(CONTEXT), "--slots", "2"))["address"]
            for model in (SMOL, str(demo_pair.TARGET))
        ]
        peers = [word for address in verifiers for word in ("--verifier", address)]
        url = started.enter_context(service("orchestrate", *peers, "--http", "127.0.0.1:0"))["http"]
        if not eventually(lambda: served(url) == len(verifiers), START_LIMIT):
            raise SystemExit("conformance: the orchestrator has not found its verifiers")
        for suite in SUITES:
            begun = len(found)
            for each in outcomes(asked(url, suite)):
                print(f"{suite}: {each}", flush=True)
                found.append(each)
            of_suite = [each.status for each in found[begun:]]
            counts = ", ".join(f"{of_suite.count(status)} {status}" for status in ("passed", "failed", "skipped"))
            print(f"{suite}: {counts}", flush=True)
    wrong = faults(found, EXPECTED)
    print(*(f"conformance: {each}" for each in wrong or ["as expected"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
