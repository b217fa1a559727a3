"""The three scores through real services, against transformers' own forwards of the whole texts."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import demo_pair
from specwire.client import AsyncClient
from specwire.rag import Document, Draft, RagOptions, Retrieved, Template, answer
from tests.draft_service.peer import serving
from tests.orchestrator.stack import stack

QUESTION = "def area(width, height):"
DOCUMENTS = (
    Document("area", "def area(width, height):\n    result = width * height\n    return result\n"),
    Document("volume", "def volume(width, height, depth):\n    result = width * height * depth\n    return result\n"),
    Document("perimeter", "def perimeter(width, height):\n    total = width + height\n    return 2 * total\n"),
    Document("mean", "def mean(values):\n    total = sum(values)\n    return total / len(values)\n"),
)
# A rationale is the next line, an answer the one behind it.
TEMPLATE = Template(
    draft="{documents}\n{question}\n",
    document="{text}\n",
    verify="{question}\n",
    answer="\n",
    reflection="\n# This is right:",
    yes=" True",
    rationale_stops=("\n",),
    answer_stops=("\n",),
)
OPTIONS = RagOptions(clusters=2, subsets=3, rationale_tokens=24, answer_tokens=24, seed=3)
# Of sums of up to fifty log-probabilities in float32.
TOLERANCE = 1e-3


class Fixed:
    def retrieve(self, question: str, top: int) -> Retrieved:
        return Retrieved(DOCUMENTS, (1.0,) * len(DOCUMENTS), np.eye(len(DOCUMENTS)))


class Reference:
    """A model by transformers, in float32 and without a cache."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def log_p(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(tokens)])).logits[0]
        found: torch.Tensor = logits.double().log_softmax(dim=1)
        return found

    def decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def written(self, prompt: str, most: int, stop: str) -> tuple[str, float]:
        """Greedy text before `stop`, and the log-probability of the tokens that begin in it."""
        tokens, output, logprobs = self.encoded(prompt), list[int](), list[float]()
        while len(output) < most and stop not in self.decoded(output):
            row = self.log_p([*tokens, *output])[-1]
            if int(row.argmax()) == self._tokenizer.eos_token_id:
                break
            output.append(int(row.argmax()))
            logprobs.append(float(row.max()))
        text = self.decoded(output).partition(stop)[0]
        begins = [len(self.decoded(output[:index])) for index in range(len(output))]
        return text, sum(value for begin, value in zip(begins, logprobs, strict=True) if begin < len(text))

    def scored(self, parts: Sequence[str]) -> list[float]:
        """The log-probability of each part but the first, given all before it."""
        ids = [self.encoded(part) for part in parts]
        log_p, at, found = self.log_p(list(itertools.chain.from_iterable(ids))), len(ids[0]), list[float]()
        for part in ids[1:]:
            found.append(sum(float(log_p[at + index - 1, token]) for index, token in enumerate(part)))
            at += len(part)
        return found


def check(draft: Draft, drafter: Reference, target: Reference) -> None:
    evidence = "".join(f"{document.text}\n" for document in draft.documents)
    prompt = f"{evidence}\n{QUESTION}\n"
    rationale, first = drafter.written(prompt, OPTIONS.rationale_tokens, "\n")
    text, second = drafter.written(f"{prompt}{rationale}\n", OPTIONS.answer_tokens, "\n")
    assert (draft.rationale, draft.answer) == (rationale, text)
    parts = [f"{QUESTION}\n", rationale, TEMPLATE.answer, text, TEMPLATE.reflection, TEMPLATE.yes]
    of_rationale, _, of_answer, _, of_yes = target.scored(parts)
    assert draft.scores is not None
    assert draft.scores.draft == pytest.approx(first + second, abs=TOLERANCE)
    assert draft.scores.self_consistency == pytest.approx(of_rationale + of_answer, abs=TOLERANCE)
    assert draft.scores.self_reflection == pytest.approx(of_yes, abs=TOLERANCE)


@asynccontextmanager
async def drafting(alone: bool) -> AsyncIterator[AsyncClient]:
    """A client of who drafts: a stack whose target is the draft model, or a service that only drafts."""
    if not alone:
        async with stack(str(demo_pair.DRAFT)) as small:
            yield small.client
        return
    async with serving(str(demo_pair.DRAFT)) as running, AsyncClient(running.address) as client:
        yield client


@pytest.mark.parametrize("alone", [False, True], ids=["a stack drafts", "a drafter drafts"])
async def test_scores_are_those_of_the_paper_s_formula(alone: bool) -> None:
    torch.set_num_threads(1)
    async with stack(str(demo_pair.TARGET)) as large, drafting(alone) as small:
        found = await answer(large.client, QUESTION, Fixed(), drafter=small, options=OPTIONS, template=TEMPLATE)
    assert (found.model, found.draft_model, len(found.drafts)) == ("target", "draft", 3)
    target, drafter = Reference(demo_pair.TARGET), Reference(demo_pair.DRAFT)
    for draft in found.drafts:
        assert not draft.error
        check(draft, drafter, target)
    totals = [draft.scores.total for draft in found.drafts if draft.scores is not None]
    assert totals[found.best] == max(totals)
