"""`examples/speculative_rag.py`: what is retrieved, and the three scores, against transformers' own forwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import demo_pair
from examples import speculative_rag as rag
from specwire.client import AsyncClient, Completion
from tests.orchestrator.stack import stack

QUESTION = "def area(width, height):"
DOCUMENTS = [
    "def area(width, height):\n    result = width * height\n    return result\n",
    "def volume(width, height, depth):\n    result = width * height * depth\n    return result\n",
    "def perimeter(width, height):\n    total = width + height\n    return 2 * total\n",
    "import os\n",
]
# Of sums of up to a hundred log-probabilities in float32.
TOLERANCE = 2e-3


def test_documents_that_share_rare_words_come_first() -> None:
    assert rag.retrieved(QUESTION, DOCUMENTS) == DOCUMENTS[:3]
    assert rag.retrieved(QUESTION, DOCUMENTS, top=1) == DOCUMENTS[:1]
    assert rag.retrieved("nothing of it", DOCUMENTS) == []


def test_subsets_are_different_ones() -> None:
    found = rag.subsets("abcd", size=2, count=5)
    assert len(set(found)) == 5
    assert all(len(set(subset)) == 2 for subset in found)
    assert sorted(rag.subsets("ab", size=3, count=5)) == [("a", "b")]
    assert rag.subsets([]) == []


class Reference:
    """A model by transformers, in float32 and without a cache."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def scored(self, *parts: str) -> list[float]:
        """The log-probability of each part but the first, given all before it."""
        ids = [list(self._tokenizer.encode(part, add_special_tokens=False)) for part in parts]
        logits = self._model(torch.tensor([[*chain.from_iterable(ids)]])).logits[0]
        log_p, at, found = logits.double().log_softmax(dim=1), len(ids[0]), list[float]()
        for part in ids[1:]:
            found.append(sum(float(log_p[at + index - 1, token]) for index, token in enumerate(part)))
            at += len(part)
        return found


def check(draft: rag.Draft, drafter: Reference, target: Reference) -> None:
    prompt = rag.DRAFT.format(question=QUESTION, documents="\n".join(draft.documents))
    written = (draft.rationale, rag.ANSWER, draft.answer)
    of_rationale, _, of_answer = drafter.scored(prompt, *written)
    assert draft.logs["draft"] == pytest.approx(of_rationale + of_answer, abs=TOLERANCE)
    verify = rag.VERIFY.format(question=QUESTION)
    of_rationale, _, of_answer, _, of_yes = target.scored(verify, *written, rag.REFLECTION, rag.YES)
    assert draft.logs["self-consistency"] == pytest.approx(of_rationale + of_answer, abs=TOLERANCE)
    assert draft.logs["self-reflection"] == pytest.approx(of_yes, abs=TOLERANCE)


async def test_scores_are_those_of_the_paper_s_formula_and_the_greatest_is_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.set_num_threads(1)
    async with stack(str(demo_pair.TARGET)) as large, stack(str(demo_pair.DRAFT)) as small:
        drafts = await rag.answered(large.client, small.client, QUESTION, DOCUMENTS)
        addresses = (large.orchestrator.address, small.orchestrator.address)
        assert await rag.main(*addresses, QUESTION, DOCUMENTS) is None
        assert await rag.main(*addresses, "nothing of it", DOCUMENTS) == (
            "no document suits the question, or no draft has an answer"
        )
    assert len(drafts) == 3
    target, drafter = Reference(demo_pair.TARGET), Reference(demo_pair.DRAFT)
    for draft in drafts:
        check(draft, drafter, target)
    totals = [sum(draft.logs.values()) for draft in drafts]
    assert totals[0] == max(totals)
    printed = capsys.readouterr()
    assert printed.out == f"{drafts[0].answer.strip()}\n"
    assert printed.err.count("log P ") == 3


class Silent(AsyncClient):
    async def complete(self, prompt: Any, **options: Any) -> Completion:
        raise AssertionError("nothing was to be written")


async def test_without_a_document_nothing_is_written() -> None:
    async with Silent("127.0.0.1:9") as nobody:
        assert await rag.answered(nobody, nobody, "nothing of it", DOCUMENTS) == []


@pytest.mark.parametrize("words", [(), ("127.0.0.1:1", "127.0.0.1:2", "Who is it?")])
def test_without_documents_it_says_how_it_is_called(words: Sequence[str]) -> None:
    command = [sys.executable, rag.__file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, f"usage: {rag.__file__} TARGET DRAFTER QUESTION FILE...\n")
