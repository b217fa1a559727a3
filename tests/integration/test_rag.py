"""`specwire rag` as a user runs it: a stack with two models, documents in a folder, real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import demo_pair
from specwire.client import AsyncClient, Event, Finished, SpecwireError
from specwire.rag import SELECTED, RagAnswer, RagOptions, Template, TfidfRetriever, answer, read_documents
from tests.integration.stack_process import Command, running

QUESTION = "def area(width, height):"
FILES = {
    "area.py": "def area(width, height):\n    result = width * height\n    return result\n",
    "volume.py": "def volume(width, height, depth):\n    result = width * height * depth\n    return result\n",
    "mean.txt": "def mean(values):\n    total = sum(values)\n    return total / len(values)\n",
    "notes.md": "# Notes\n\nThe height of a width is an area.\n",
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a stack that serves the demo pair's drafter as a model of its own."""
    models = ("--target", str(demo_pair.TARGET), "--no-draft", "--also", str(demo_pair.DRAFT))
    apart = ("--listen", "127.0.0.1:0", "--no-ray", "--unlisted", "--json", "--dtype", "float32")
    with running("up", *models, *apart) as command:
        line = command.line()
        assert line, command.said()
        yield str(json.loads(line)["address"])


@contextmanager
def drafting(*options: str) -> Iterator[tuple[Command, str]]:
    """A service that only drafts, and its address."""
    models = (str(demo_pair.DRAFT), "--runtime", "torch", "--dtype", "float32")
    with running("draft", *models, "--listen", "127.0.0.1:0", "--json", *options) as command:
        line = command.line()
        assert line, command.said()
        yield command, str(json.loads(line)["address"])


@pytest.fixture(scope="module")
def drafter() -> Iterator[str]:
    with drafting() as (_, address):
        yield address


@pytest.mark.parametrize("alone", [False, True], ids=["a stack drafts", "a drafter drafts"])
def test_an_answer_with_all_drafts_and_scores(address: str, drafter: str, documents: Path, alone: bool) -> None:
    asked = ("rag", QUESTION, "--documents", str(documents), "--address", address, "--model", "target", "--seed", "5")
    more = ("--draft-address", drafter) if alone else ()
    with running(*asked, *more, "--subsets", "3", "--json") as command:
        assert command.wait() == 0, command.said()
        told = json.loads(command.line())
    assert (told["model"], told["draft_model"], told["lossy"], told["note"]) == ("target", "draft", True, SELECTED)
    assert {Path(each["name"]).name for each in told["documents"]} == set(FILES)
    assert len(told["drafts"]) == 3
    scored = [each["scores"]["total"] for each in told["drafts"] if each["scores"] is not None]
    chosen = told["drafts"][told["best"]]
    assert chosen["scores"]["total"] == max(scored)
    assert chosen["answer"].strip() == told["answer"] != ""
    assert all(value < 0 for value in chosen["scores"].values())
    assert all(len(each["documents"]) == 2 for each in told["drafts"])


def test_the_printed_answer_says_that_it_was_selected(address: str, documents: Path) -> None:
    asked = ("rag", QUESTION, "--documents", str(documents), "--address", address, "--model", "target")
    with running(*asked) as command:
        assert command.wait() == 0, command.said()
        assert command.line().strip()
        assert command.said().rstrip().endswith(SELECTED)
        assert "drafts of draft, judged by target" in command.said()
        assert "self-reflection" in command.said()


def test_two_models_want_one_to_be_named(address: str, documents: Path) -> None:
    with running("rag", QUESTION, "--documents", str(documents), "--address", address) as command:
        assert command.wait() == 1
        expected = "specwire rag: error: model: must be named: 'draft', 'target' are served there"
        assert command.last_line() == expected


def test_a_stack_of_its_own(documents: Path) -> None:
    words = ("rag", "Who is it?", "--documents", str(documents), "--target", "scripted:7", "--draft", "scripted:8")
    with running(*words, "--no-ray", "--json") as command:
        assert command.wait() == 0, command.said()
        told = json.loads(command.line())
        assert (told["model"], told["draft_model"]) == ("scripted:7", "scripted:8")
        assert command.nothing_left()


class Murderer(AsyncClient):
    """Kills its drafter once it has written so many texts."""

    def __init__(self, address: str, drafter: Command, after: int) -> None:
        super().__init__(address, patience=2.0)
        self._drafter = drafter
        self._after = after

    async def generate(self, prompt: Any, **options: Any) -> AsyncGenerator[Event, None]:
        if self._after == 0:
            self._drafter.process.kill()
        async for event in super().generate(prompt, **options):
            if isinstance(event, Finished):
                self._after -= 1
                if self._after == 0:
                    self._drafter.process.kill()
                    await asyncio.to_thread(self._drafter.wait)
            yield event


async def answered(address: str, documents: Path, after: int) -> RagAnswer:
    """By drafts of a drafter that writes one long text at a time, and is killed."""
    options = RagOptions(subsets=3, rationale_tokens=0, answer_tokens=256, seed=5)
    with drafting("--slots", "1") as (process, there):
        async with AsyncClient(address) as client, Murderer(there, process, after) as drafter:
            found = TfidfRetriever(read_documents([documents]))
            asked: dict[str, Any] = {"options": options, "template": Template(answer_stops=()), "timeout": 120.0}
            return await answer(client, QUESTION, found, model="target", drafter=drafter, **asked)


async def test_a_drafter_that_is_killed_costs_the_drafts_that_it_has_not_written(address: str, documents: Path) -> None:
    found = await answered(address, documents, 1)
    assert [draft.scores is None for draft in found.drafts].count(True) == 2
    assert found.text
    failures = [draft.error for draft in found.drafts if draft.error]
    assert all(each.startswith("UNAVAILABLE: ") for each in failures)


async def test_where_no_draft_was_written_the_answer_says_why(address: str, documents: Path) -> None:
    with pytest.raises(SpecwireError) as caught:
        await answered(address, documents, 0)
    assert caught.value.message
