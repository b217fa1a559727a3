"""A target and a drafter with different tokenizers, every part a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import demo_pair
from tests.faults.parts import Parts, ServiceProcess, parts
from tests.integration.stack_process import running
from tests.orchestrator.stack import plain
from tests.text import other_vocabularies
from tests.wait import asked_blocking

TARGET = str(demo_pair.TARGET)
PROMPT = "# naïve 日本語 🙂\nimport os\n\ndef area(width, height):\n    "
LENGTH = 32
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def owned() -> Iterator[Parts]:
    with parts() as owner:
        yield owner


@pytest.fixture(scope="module")
def verifier(owned: Parts) -> ServiceProcess:
    service = owned.start("verify", TARGET)
    service.ready()
    return service


def expected() -> list[int]:
    tokens = Tokenizer.from_file(f"{TARGET}/tokenizer.json").encode(PROMPT).ids
    return plain(TARGET, tokens, LENGTH)


def generated(address: str) -> list[int]:
    """The tokens, once some of a drafter were accepted in them."""

    def done() -> Any:
        length = ("--max-tokens", str(LENGTH), "--ignore-eos", "--no-ngram", "--json")
        with running("generate", PROMPT, "--address", address, *length) as command:
            assert command.wait(LIMIT_S) == 0, command.said()
            return json.loads(command.line())

    told = asked_blocking(done, lambda told: sum(each["accepted"] for each in told["stats"]["drafters"]))
    tokens: list[int] = told["tokens"]
    return tokens


def test_a_drafter_with_another_tokenizer(owned: Parts, verifier: ServiceProcess, tmp_path: Path) -> None:
    drafter = owned.start("draft", other_vocabularies.save(tmp_path / "pieces", other_vocabularies.sentencepiece))
    at = ("--verifier", verifier.address, "--drafter", drafter.ready(), "--plan", "lockstep:3")
    orchestrator = owned.start("orchestrate", *at)
    assert generated(orchestrator.ready()) == expected()
    assert "are shared (100% of a text); it drafts in these" in drafter.said()
    orchestrator.kill()
    drafter.kill()


def test_an_edge_with_another_tokenizer(verifier: ServiceProcess, tmp_path: Path) -> None:
    draft = other_vocabularies.save(tmp_path / "pieces", other_vocabularies.sentencepiece)
    listen = ("--listen", "127.0.0.1:0", "--json")
    with running("edge", "--verifier", verifier.address, "--draft", draft, *listen) as command:
        line = command.line()
        assert line, command.said()
        assert generated(json.loads(line)["address"]) == expected()
        assert "are shared (100% of a text)" in command.said()
