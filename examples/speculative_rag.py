"""Answer a question from documents by Speculative RAG (arXiv 2407.08223): TARGET DRAFTER QUESTION FILE...

TARGET and DRAFTER are the addresses of two services, each with a model of its own. For each of several subsets of the
documents the small model writes a rationale and an answer; the large one, which reads no document, chooses a draft. It
selects, it is not lossless: the text is the small model's. With Q the question, D a subset, beta a rationale, alpha an
answer and R the reflection statement, that draft is chosen of which the product is the greatest (section 3.3):

    draft               P(beta, alpha | Q, D)         by the small model
    self-consistency    P(beta, alpha | Q)            by the large one
    self-reflection     P("Yes" | Q, beta, alpha, R)  by the large one

The paper clusters embeddings of the documents, and a subset has one of each cluster. Here the documents that share rare
words with the question are taken, and subsets are drawn at random.
"""

import asyncio
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from specwire.client import AsyncClient, TextScore

TOP, SIZE, SUBSETS, SEED = 6, 2, 4, 0
DRAFT = (
    "Respond to the instruction. Also provide a rationale for the response.\n\n"
    "## Instruction: {question}\n\n## Evidence:\n{documents}\n## Rationale:"
)
VERIFY = "## Instruction: {question}\n\n## Rationale:"
ANSWER, REFLECTION, YES = "\nAnswer:", "\nDoes the rationale support the answer? (Yes or No):", " Yes"


@dataclass(frozen=True)
class Draft:
    """What was made of a subset of documents. logs: natural logarithms of the paper's probabilities, by name."""

    documents: tuple[str, ...]
    rationale: str
    answer: str
    logs: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Logarithm of their product."""
        return sum(self.logs.values())


def retrieved(question: str, documents: Sequence[str], top: int = TOP) -> list[str]:
    """The documents that share the most with the question, words that few documents have counting more."""
    words = [frozenset(re.findall(r"\w+", text.lower())) for text in documents]
    counts = Counter(word for own in words for word in own)
    asked = frozenset(re.findall(r"\w+", question.lower()))
    worth = [sum(math.log((1 + len(documents)) / counts[word]) for word in own & asked) for own in words]
    order = sorted(range(len(documents)), key=lambda at: -worth[at])
    return [documents[at] for at in order[:top] if worth[at] > 0]


def subsets(documents: Sequence[str], size: int = SIZE, count: int = SUBSETS) -> list[tuple[str, ...]]:
    """Different ones, or all there are; none without documents."""
    every = list(combinations(documents, min(size, len(documents)))) if documents else []
    return random.Random(SEED).sample(every, min(count, len(every)))


async def drafted(drafter: AsyncClient, question: str, documents: tuple[str, ...]) -> Draft | None:
    """What the small model makes of these documents; None where it writes nothing."""
    prompt = DRAFT.format(question=question, documents="\n".join(documents))
    rationale = (await drafter.complete(prompt, max_tokens=96, stop=(ANSWER, "\n##"))).text
    answer = (await drafter.complete(f"{prompt}{rationale}{ANSWER}", max_tokens=32, stop=("\n",))).text
    if not rationale.strip() or not answer.strip():
        return None
    (score,) = await drafter.score_text(prompt, [[rationale, ANSWER, answer]])
    return Draft(documents, rationale, answer, {"draft": of_rationale_and_answer(score)})


def of_rationale_and_answer(score: TextScore) -> float:
    """What stands between the two is not counted."""
    rationale, _, answer, *_ = score.parts
    return rationale.logprob + answer.logprob


async def judged(target: AsyncClient, question: str, drafts: Sequence[Draft]) -> list[Draft]:
    """With the scores of the large model, which computes the question once for all of them."""
    texts = [[each.rationale, ANSWER, each.answer, REFLECTION, YES] for each in drafts]
    scores = await target.score_text(VERIFY.format(question=question), texts)
    found = []
    for draft, score in zip(drafts, scores, strict=True):
        logs = {"self-consistency": of_rationale_and_answer(score), "self-reflection": score.parts[-1].logprob}
        found.append(Draft(draft.documents, draft.rationale, draft.answer, draft.logs | logs))
    return found


async def answered(target: AsyncClient, drafter: AsyncClient, question: str, documents: Sequence[str]) -> list[Draft]:
    """All drafts, the chosen one first; none where no document suits the question, or nothing was written."""
    chosen = subsets(retrieved(question, documents))
    written = await asyncio.gather(*(drafted(drafter, question, subset) for subset in chosen))
    drafts = [draft for draft in written if draft is not None]
    return sorted(await judged(target, question, drafts), key=lambda draft: -draft.total) if drafts else []


async def main(target: str, drafter: str, question: str, documents: Sequence[str]) -> str | None:
    async with AsyncClient(target) as large, AsyncClient(drafter) as small:
        drafts = await answered(large, small, question, documents)
    if not drafts:
        return "no document suits the question, or no draft has an answer"
    for draft in drafts:
        logs = ", ".join(f"{name} {value:.2f}" for name, value in draft.logs.items())
        print(f"log P {draft.total:.2f} ({logs}): {draft.answer.strip()!r}", file=sys.stderr)
    print(drafts[0].answer.strip())
    return None


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(f"usage: {sys.argv[0]} TARGET DRAFTER QUESTION FILE...")
    large_address, small_address, asked, *files = sys.argv[1:]
    sys.exit(asyncio.run(main(large_address, small_address, asked, [Path(file).read_text() for file in files])))
