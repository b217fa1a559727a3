"""`python -m tests.conformance`: suites of others, unmodified, against a whole stack with a real model.

They are llm-comply's two, and the tests of resources in openai's source archive, which were written for a server that
takes everything: see EXPECTED. It exits with 1 where a test fails that is not there, or one of those passes. Texts are
drawn, and a test fails whose text reaches the context's end: it is tried again, by itself. Several models are served,
because a request may omit `model` where there is one, and llm-comply has tests that such a request is refused.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.request import urlopen
from xml.etree import ElementTree

import demo_pair
from specwire.named_models import file_of
from tests.integration.stack_process import START_LIMIT, running
from tests.real_models import SMOL
from tests.wait import eventually

PROGRAM = Path(sys.prefix, "conformance", "bin", "llm-comply")
# As `make setup-conformance` unpacks it.
ARCHIVE = Path("build", "conformance", f"openai-{version('openai')}")
RESOURCES = [f"tests/api_resources/{name}" for name in ("chat", "responses", "test_completions.py")]
RESOURCES += [f"tests/api_resources/test_{name}.py" for name in ("models", "responses")]
# What is served, by the names that openai's tests ask for.
REAL = "gpt-6-astra"
# A name for whose models llm-comply has a test of reasoning. In another dtype it is another model: one has one name.
REASONING = "deepseek-r0"
MODELS = {REAL: file_of(SMOL), REASONING: file_of(SMOL), "gpt-3.5-turbo-instruct": demo_pair.TARGET}
OPTIONS = {REASONING: ("--dtype", "float32")}
# What they tell where our door has refused something by name.
REFUSED = re.compile("(HTTP|Error code:) (400|404|405)")
# Tests that are refused, by patterns of their names, and why. Most of openai's come thrice.
EACH = "test_(method|raw_response|streaming_response)_"
EXPECTED = {
    "(chat-)?image-input": "images are not served",
    rf"(chat\.)?test_completions\.{EACH}create_with_all_params.*": "audio, a suffix and the like",
    rf"chat\.(completions\.test_messages|test_completions)\.{EACH}(retrieve|update|list|delete).*": "not kept",
    rf"test_responses\.{EACH}create.*": "no input, or fields as above",
    rf"test_responses\.{EACH}(retrieve|delete|cancel).*": "no response has the id",
    rf"test_responses\.{EACH}compact.*": "compaction is not served",
    rf"responses\.test_input_(items|tokens)\.{EACH}.*": "the path is not served",
    rf"test_models\.{EACH}delete": "models are not deleted over HTTP",
}
# What a test says whose text was cut.
UNENDED = re.compile(r"expected status='completed', got 'incomplete'|expected 'stop', got 'length'")
TRIES = 5
# Tokens: most answers end before, and those that do not take seconds.
LIMITS = ("--context", "640", "--slots", "2")
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
    told, matched = [], set()
    for each in found:
        pattern = next((pattern for pattern in expected if re.fullmatch(pattern, each.name)), None)
        matched.add(pattern)
        if pattern is None and each.status == "failed":
            told.append(f"{each}, which is not expected")
        elif pattern is not None and not (each.status == "failed" and any(map(REFUSED.search, each.told))):
            told.append(f"{each}, where a refusal was expected ({expected[pattern]})")
    return told + [
        f"{pattern}: matches no test ({expected[pattern]})" for pattern in expected if pattern not in matched
    ]


def llm_comply(suite: str, model: str, url: str) -> Ask:
    def ask(test: str | None) -> list[Json]:
        words = ["--format", suite, "--base-url", f"{url}/v1", "--api-key", "any", "--model", model, "--json"]
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


def openai_python(url: str) -> Ask:
    """Its blocking client's tests, with answers checked: the others send the same requests."""

    def ask(_: str | None) -> list[Json]:
        with TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            words = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-k", "strict and not Async", *RESOURCES]
            done = subprocess.run(
                [sys.executable, "-m", "pytest", f"--timeout={TEXT_LIMIT_S}", f"--junitxml={report}", *words],
                cwd=ARCHIVE,
                env={**os.environ, "TEST_API_BASE_URL": f"{url}/v1"},
                capture_output=True,
                text=True,
                timeout=SUITE_LIMIT_S,
            )
            if not report.is_file():
                raise SystemExit(f"conformance: openai-python: {done.stdout}{done.stderr}")
            return [*map(_of_pytest, ElementTree.parse(report).iter("testcase"))]

    return ask


def _of_pytest(case: ElementTree.Element) -> Json:
    module = case.attrib["classname"].removeprefix("tests.api_resources.").rpartition(".")[0]
    wrong = [each.get("message", "") for each in case if each.tag in ("failure", "error")]
    status = "failed" if wrong else "skipped" if case.find("skipped") is not None else "passed"
    return {"id": f"{module}.{case.attrib['name'].removesuffix('[strict]')}", "status": status, "errors": wrong}


SUITES: dict[str, Callable[[str], Ask]] = {
    "open-responses": partial(llm_comply, "open-responses", REAL),
    "openai-chat": partial(llm_comply, "openai-chat", REASONING),
    "openai-python": openai_python,
}


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


def linked(folder: str, name: str, model: Path) -> str:
    """The model by another name: a service calls it as its file or directory is called."""
    link = Path(folder, name + (model.suffix if model.is_file() else ""))
    link.symlink_to(model.resolve())
    return str(link)


def main() -> int:
    found: list[Outcome] = []
    with ExitStack() as started:
        folder = started.enter_context(TemporaryDirectory())
        verifiers = [
            started.enter_context(service("verify", linked(folder, name, model), *LIMITS, *OPTIONS.get(name, ())))[
                "address"
            ]
            for name, model in MODELS.items()
        ]
        peers = [word for address in verifiers for word in ("--verifier", address)]
        url = started.enter_context(service("orchestrate", *peers, "--http", "127.0.0.1:0"))["http"]
        if not eventually(lambda: served(url) == len(verifiers), START_LIMIT):
            raise SystemExit("conformance: the orchestrator has not found its verifiers")
        for suite, ask_of in SUITES.items():
            begun = len(found)
            for each in outcomes(ask_of(url)):
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
