"""`python -m tests.conformance`: suites of others, unmodified, against whole stacks with a real model.

They are llm-comply's two, the tests of resources in openai's source archive, which were written for a server that
takes everything, and of llama.cpp's and vLLM's own tests those that look at what is sent and answered. Each has a table
of the tests that are to fail. It exits with 1 where another one fails, or one of those passes. Texts are drawn, and a
test fails whose text reaches the context's end: it is tried again, by itself. The first three are served several
models, because a request may omit `model` where there is one, and llm-comply has tests that such a request is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.request import urlopen
from xml.etree import ElementTree

import demo_pair
from bench.harness import machine
from bench.harness.record import save
from specwire.named_models import file_of
from tests.integration.stack_process import START_LIMIT, running
from tests.real_models import SMOL
from tests.wait import eventually

PROGRAM = Path(sys.prefix, "conformance", "bin", "llm-comply")
# As `make setup-conformance` unpacks them.
ARCHIVES = Path("build", "conformance").absolute()
RECORD = Path("bench", "results", "conformance.json").absolute()
RESOURCES = [f"tests/api_resources/{name}" for name in ("chat", "responses", "test_completions.py")]
RESOURCES += [f"tests/api_resources/test_{name}.py" for name in ("models", "responses")]
LLAMACPP_FILES = [f"unit/test_{name}.py" for name in ("basic", "chat_completion", "compat_oai_responses")]
VLLM_FILES = [f"openai/chat_completion/test_chat{name}.py" for name in ("", "_completion", "_logit_bias_validation")]
VLLM_FILES += ["openai/chat_completion/test_completion_with_function_calling.py", "serve/instrumentator/test_basic.py"]
VLLM_FILES += [f"openai/completion/test_{name}.py" for name in ("completion", "prompt_validation")]
VLLM_FILES += [f"openai/responses/test_{name}.py" for name in ("simple", "function_call")]
# What is served to the first three, by the names that openai's tests ask for.
REAL = "gpt-6-astra"
# A name for whose models llm-comply has a test of reasoning. In another dtype it is another model: one has one name.
REASONING = "deepseek-r0"
# And to the others, by a name that llama.cpp's know.
TINY = "tinyllama-2"
MODELS = {REAL: file_of(SMOL), REASONING: file_of(SMOL), "gpt-3.5-turbo-instruct": demo_pair.TARGET}
OPTIONS = {REASONING: ("--dtype", "float32")}
# What they tell where our door has refused something by name.
REFUSED = re.compile("(HTTP|Error code:) (400|404|405)")
# What they tell where our door is broken.
BROKEN = re.compile(r"(HTTP|Error code:|assert|\() ?5\d\d|[Tt]imeout|[Tt]imed out")
# Tests that fail, by patterns of their names, and why. Most of openai's come thrice.
EACH = "test_(method|raw_response|streaming_response)_"
IMAGES = {"(chat-)?image-input": "images are not served"}
OF_OPENAI = {
    rf"(chat\.)?test_completions\.{EACH}create_with_all_params.*": "audio, a suffix and the like",
    rf"chat\.(completions\.test_messages|test_completions)\.{EACH}(retrieve|update|list|delete).*": "not kept",
    rf"test_responses\.{EACH}create.*": "no input, or fields as above",
    rf"test_responses\.{EACH}(retrieve|delete|cancel).*": "no response has the id",
    rf"test_responses\.{EACH}compact.*": "compaction is not served",
    rf"responses\.test_input_(items|tokens)\.{EACH}.*": "the path is not served",
    rf"test_models\.{EACH}delete": "models are not deleted over HTTP",
}


def of(module: str, names: str) -> str:
    """Tests of a file, with whatever arguments."""
    return rf"(.*\.)?test_{module}\.test_({names})(\[.*)?"


# A server's own tests also look at what only it has, or its model says.
OF_LLAMACPP = {
    of("basic", "server_(multiple_addresses|props|slots|model_aliases_and_tags)|load_split_model|no_ui"): "its paths",
    of("chat_completion", "chat_completion(_stream|_with_openai_library|_cached_tokens)?"): "its model's words, counts",
    of("chat_completion", "(chat_template(|_assistant_prefill|_continue.*compat)|verbose_debug)"): "__verbose: a field",
    of("chat_completion", "apply_chat_template|chat_completions_token_count"): "its paths",
    of("chat_completion", "completion_with_(json_schema|grammar)"): "json_schema, and grammar as GBNF: fields",
    of("chat_completion", ".*_timings_per_token|return_progress|chat_completions_multiple_choices"): "fields",
    of("chat_completion", r"invalid_chat_completion_req\[messages7\]"): "answers in a row are the template's to refuse",
    of("chat_completion", "logprobs_stream"): "a stream's first content is empty, as OpenAI's, not null",
    of("chat_completion", "logit_bias"): "/tokenize by the name content",
    of("chat_completion", "context_size_exceeded(_stream)?"): "its type of this error",
    of("compat_oai_responses", "responses_(with_openai_library|stream_with_llama_telemetry)"): "words, fields",
}
OF_VLLM = {
    of("chat", ".*prompt_logprobs_chat"): "prompt_logprobs of chats: a field",
    of("chat", "single_chat_session"): "usage has details",
    of("chat", "chat_streaming"): "the event with the reason has no content, as OpenAI's",
    of("chat", "chat_completion_stream_options"): "that event counts no further token",
    of("chat", "structured_outputs_(json|choice|regex)_chat|response_format_json_.*"): "its model's words",
    of("chat", "complex_message_content"): "its model's words",
    of("completion_with_function_calling", "named_tool_use"): "its model ends its call",
    of("chat", "custom_role"): "roles are OpenAI's",
    of("chat", "long_seed"): "its phrases",
    of("chat", "invocations"): "its paths",
    of("chat_completion", "kv_transfer_.*|per_request_metrics_.*"): "return_token_ids, metrics: fields",
    of("chat_logit_bias_validation", "chat_logit_bias_(multiple_non_integer_keys|invalid)"): "its phrases",
    of("basic", "show_version|server_load"): "its version and paths",
    of("basic", "request_cancellation"): "its model's context",
    of("completion", "single_completion|prompt_logprobs_completion"): "prompt_logprobs is there where it was asked for",
    of("completion", "completion_truncation_side.*|logprob_token_ids.*|batch_completions"): "fields, beam search",
    of("completion", "completion_streaming|echo_logprob_completion"): "its model's words and tokens",
    of("completion", "completion_stream_options|parallel_streaming"): "the first event and the last one have no token",
    of("prompt_validation", "empty_prompt|out_of_vocab_token_ids"): "its phrases",
    of("simple", "enable_response_messages|extra_sampling_params"): "fields",
    of("simple", "streaming_logprobs"): "responses have no log-probabilities",
    of("simple", "reasoning_item|.*_reasoning_tokens_e2e"): "its model reasons",
    of("simple", "basic"): "its model ends its text",
    of("function_call", r"function_tool_use\[required.*"): "its model reasons",
    of("function_call", r"function_calling_with_streaming_(expected_.*|types|.*\[auto.*)"): "its model calls, and ends",
}
# What a test says whose text was cut.
UNENDED = re.compile(r"expected status='completed', got 'incomplete'|expected 'stop', got 'length'")
TRIES = 5
# Tokens: most answers end before, and those that do not take seconds.
LIMITS = ("--context", "640", "--slots", "2")
# Requests of llama.cpp's and vLLM's tests ask for more, some for no limit.
WIDE = ("--context", "1536", "--slots", "8")
SOON = ("--max-tokens-default", "256")
TEXT_LIMIT_S = 120
SUITE_LIMIT_S = 1800

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


def faults(found: Sequence[Outcome], expected: dict[str, str], *, refused: bool = True) -> list[str]:
    """What differs from the table.

    refused: tests that are in it fail by a refusal; else they may, by anything but a broken door: texts are drawn.
    """
    told, matched = [], set()
    for each in found:
        pattern = pattern_of(each, expected)
        matched.add(pattern)
        broken = each.status == "failed" and any(map(BROKEN.search, each.told))
        if each.status == "failed" and (pattern is None or (broken and not refused)):
            told.append(f"{each}, which is not expected")
        elif pattern is not None and refused and not any(map(REFUSED.search, each.told)):
            told.append(f"{each}, where a refusal was expected ({expected[pattern]})")
    return told + [
        f"{pattern}: matches no test ({expected[pattern]})" for pattern in expected if pattern not in matched
    ]


def pattern_of(test: Outcome, expected: dict[str, str]) -> str | None:
    return next((pattern for pattern in expected if re.fullmatch(pattern, test.name)), None)


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


def pytest_suite(archive: str, words: Sequence[str], url: str) -> Ask:
    """Of tests in an archive's folder; those that have a plugin are told our address, and what is served there."""

    def ask(_: str | None) -> list[Json]:
        (folder,) = ARCHIVES.glob(archive)
        with TemporaryDirectory() as reports:
            report = Path(reports, "report.xml")
            # Without sources in tracebacks: Python 3.11's own parser fails at one now and then.
            always = ["-q", "--tb=native", "-o", "addopts=", "-p", "no:cacheprovider", f"--timeout={TEXT_LIMIT_S}"]
            told = {"TEST_API_BASE_URL": f"{url}/v1", "SPECWIRE_URL": url, "SPECWIRE_MODEL": TINY}
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *always, f"--junitxml={report}", *words],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **told},
                capture_output=True,
                text=True,
                timeout=SUITE_LIMIT_S,
            )
            if done.returncode not in (0, 1):  # all passed, or some did not
                raise SystemExit(f"conformance: {folder}: {done.stdout}{done.stderr}")
            return [*map(_of_pytest, ElementTree.parse(report).iter("testcase"))]

    return ask


def _of_pytest(case: ElementTree.Element) -> Json:
    parts = [part for part in case.attrib["classname"].split(".") if not part[0].isupper()]
    module = (
        ".".join(parts).removeprefix("tests.api_resources.").removeprefix("unit.").removeprefix("tests.entrypoints.")
    )
    wrong = [each.get("message", "") for each in case if each.tag in ("failure", "error")]
    status = "failed" if wrong else "skipped" if case.find("skipped") is not None else "passed"
    return {"id": f"{module}.{case.attrib['name'].removesuffix('[strict]')}", "status": status, "errors": wrong}


class Suite(NamedTuple):
    """expected: as `faults` takes it, and whether each of those is a refusal."""

    package: str
    ask_of: Callable[[str], Ask]
    expected: dict[str, str]
    refused: bool = True


PLUGIN = ("-p", "conformance_plugin")
LLAMACPP = "llama_cpp_python-*/vendor/llama.cpp/tools/server/tests"
VLLM = ("--confcutdir=tests/entrypoints", *(f"tests/entrypoints/{name}" for name in VLLM_FILES))
SUITES = {
    "Open Responses": Suite("llm-comply", partial(llm_comply, "open-responses", REAL), IMAGES),
    "chats": Suite("llm-comply", partial(llm_comply, "openai-chat", REASONING), IMAGES),
    # Its blocking client's tests, with answers checked: the others send the same requests.
    "resources": Suite(
        "openai", partial(pytest_suite, "openai-*/", ("-k", "strict and not Async", *RESOURCES)), OF_OPENAI
    ),
}
SERVERS = {
    "its server": Suite(
        "llama-cpp-python", partial(pytest_suite, LLAMACPP, (*PLUGIN, *LLAMACPP_FILES)), OF_LLAMACPP, refused=False
    ),
    "entrypoints": Suite("vllm", partial(pytest_suite, "vllm-*/", (*PLUGIN, *VLLM)), OF_VLLM, refused=False),
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


@contextmanager
def stack(models: dict[str, Path], limits: Sequence[str], lengths: Sequence[str]) -> Iterator[str]:
    """Its HTTP address."""
    with ExitStack() as started:
        folder = started.enter_context(TemporaryDirectory())
        words = [(linked(folder, name, model), *limits, *OPTIONS.get(name, ())) for name, model in models.items()]
        verifiers = [started.enter_context(service("verify", *each))["address"] for each in words]
        peers = [word for address in verifiers for word in ("--verifier", address)]
        url: str = started.enter_context(service("orchestrate", *peers, *lengths, "--http", "127.0.0.1:0"))["http"]
        if not eventually(lambda: served(url) == len(verifiers), START_LIMIT):
            raise SystemExit("conformance: the orchestrator has not found its verifiers")
        yield url


def version(package: str) -> str:
    """As it is pinned."""
    pinned = Path("tests", "conformance.txt").read_text() + Path("constraints.txt").read_text()
    found = re.search(rf"\b{package}==([0-9.]+)", pinned)
    assert found is not None
    return found[1]


def keep(row: Json) -> None:
    """Put what a suite has found into the record, in the place of what it had found before."""
    have = json.loads(RECORD.read_text())["raw"] if RECORD.exists() else []
    found = {each["suite"]: each for each in (*have, {**row, "commit": machine.commit()})}
    save(RECORD, {}, {}, raw=[*found.values()])


def played(name: str, suite: Suite, url: str) -> tuple[Json, list[str]]:
    """Its row of the record, and what is not as expected."""
    found = []
    for each in outcomes(suite.ask_of(url)):
        print(f"{suite.package}: {each}", flush=True)
        found.append(each)
    wrong = faults(found, suite.expected, refused=suite.refused)
    passed, skipped = ([each.status for each in found].count(status) for status in ("passed", "skipped"))
    row = {
        "suite": f"{suite.package} {version(suite.package)}: {name}",
        "passed": passed,
        "by_design": sum(each.status == "failed" and pattern_of(each, suite.expected) is not None for each in found),
        "failed": len(wrong),
        "told": f"{skipped} skipped" if skipped else "",
    }
    print(json.dumps(row), flush=True)
    return row, wrong


def main(argv: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    line.add_argument("--only", default="", metavar="PACKAGE", help="(default: all)")
    only = line.parse_args(argv).only
    wrong = []
    of_others = {TINY: file_of(SMOL)}
    for models, limits, lengths, suites in ((MODELS, LIMITS, (), SUITES), (of_others, WIDE, SOON, SERVERS)):
        asked = {name: suite for name, suite in suites.items() if only in suite.package}
        if asked:
            with stack(models, limits, lengths) as url:
                for name, suite in asked.items():
                    row, told = played(name, suite, url)
                    keep(row)
                    wrong += told
    print(*(f"conformance: {each}" for each in wrong or ["as expected"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
