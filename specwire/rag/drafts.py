"""Speculative RAG (Wang et al., arXiv 2407.08223): a small model drafts answers, a target chooses one of them.

For each subset of the retrieved documents (`specwire.rag.retrieval`) the draft model writes a rationale and an answer.
The target reads question, rationale and answer, no documents: all drafts in one call, behind a prefix that is computed
once. With Q a question, D a subset, beta a rationale, alpha an answer and R the reflection statement, a draft has

    draft               P(beta, alpha | Q, D)         by the draft model, while it writes
    self-consistency    P(beta, alpha | Q)            by the target
    self-reflection     P("Yes" | Q, beta, alpha, R)  by the target

and the draft whose product is the greatest is chosen (section 3.3). All are probabilities of texts at temperature 1; of
what stands between the parts, and of an end, none is counted. Probabilities of texts fall with length, so of two drafts
that are as sure word by word the shorter one wins. A text without a word would win always, and is a failed draft.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import grpc

from specwire.client import AsyncClient, Chunk, SpecwireError, TokenLogprobs
from specwire.client.errors import invalid
from specwire.client.events import PartialCompletion
from specwire.client.requests import TIMEOUT_S
from specwire.core.invalid import MOST_SCORED, InvalidParameter
from specwire.core.law.sampling import Sampling, seed_of
from specwire.core.messages import FinishReason
from specwire.rag.retrieval import Document, Retrieved, Retriever, clustered, sampled_subsets
from specwire.v1 import common_pb2

MOST_RETRIEVED = 100
# What every answer says of itself.
SELECTED = "selected, not lossless: the draft model wrote the answer, the target only chose it"
# More characters than this a token hardly stands for: where the cutting of documents begins.
TOKEN_CHARACTERS = 8
# In the service's refusal of a text that does not fit, as clients of OpenAI's API look for it.
DOES_NOT_FIT = "maximum context length"
# A text that ended so is a part of one.
BROKEN = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR)


@dataclass(frozen=True, slots=True)
class Template:
    """The texts around question, documents and drafts. The default is the paper's, for models that continue texts.

    draft: what the draft model goes on behind, with a rationale; has {question} and {documents}.
    document: each of these; has {text}, and may have {number}.
    verify: what the target reads a draft behind; has {question}.
    answer: between a rationale and its answer.
    reflection: behind the answer. yes: what follows where the target approves.
    rationale_stops, answer_stops: a text ends before these.
    """

    draft: str = (
        "Respond to the instruction. Also provide a rationale for the response.\n\n"
        "## Instruction: {question}\n\n## Evidence:\n{documents}\n## Rationale:"
    )
    document: str = "[{number}] {text}\n"
    verify: str = "## Instruction: {question}\n\n## Rationale:"
    answer: str = "\nAnswer:"
    reflection: str = "\nDoes the rationale support the answer? (Yes or No):"
    yes: str = " Yes"
    rationale_stops: tuple[str, ...] = ("\nAnswer:", "\n##")
    answer_stops: tuple[str, ...] = ("\n",)

    def __post_init__(self) -> None:
        needed = {"draft": ("question", "documents"), "document": ("text",), "verify": ("question",)}
        for name, places in needed.items():
            for place in places:
                if f"{{{place}}}" not in getattr(self, name):
                    raise InvalidParameter(f"template.{name}", f"must have {{{place}}}, not {getattr(self, name)!r}")
        if not self.yes:
            raise InvalidParameter("template.yes", "must not be empty")


@dataclass(frozen=True, slots=True)
class RagOptions:
    """How many of what, validated when built.

    top: documents that are retrieved. clusters: of these, and so documents of a subset. subsets: one draft each.
    rationale_tokens: 0 for drafts without a rationale. temperature: of the drafts. seed: of clusters, subsets, drafts.
    """

    top: int = 10
    clusters: int = 2
    subsets: int = 5
    rationale_tokens: int = 96
    answer_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("top", 1, MOST_RETRIEVED),
            ("clusters", 1, MOST_RETRIEVED),
            ("subsets", 1, MOST_SCORED),
            ("rationale_tokens", 0, (1 << 32) - 1),
            ("answer_tokens", 1, (1 << 32) - 1),
        ):
            if not least <= getattr(self, name) <= most:
                raise InvalidParameter(name, f"must be from {least} to {most}, not {getattr(self, name)}")
        Sampling(self.temperature, seed=seed_of(self.seed))  # refuses what no draft could be drawn with


@dataclass(frozen=True, slots=True)
class Scores:
    """Natural logarithms of the paper's three probabilities; the target's are 0 until it has judged."""

    draft: float
    self_consistency: float = 0.0
    self_reflection: float = 0.0

    @property
    def total(self) -> float:
        """Logarithm of their product, by which drafts are compared."""
        return self.draft + self.self_consistency + self.self_reflection


@dataclass(frozen=True, slots=True)
class Draft:
    """What was made of a subset of documents. rationale, answer: as they were written, blanks included.

    scores: None where the draft failed; `error` says why. cut: characters of the documents that did not fit.
    """

    documents: tuple[Document, ...]
    rationale: str = ""
    answer: str = ""
    scores: Scores | None = None
    error: str = ""
    cut: int = 0


@dataclass(frozen=True, slots=True)
class RagAnswer:
    """The chosen draft, and everything that it was chosen from.

    drafts: in the order of their subsets; `best` is the chosen one's index. model, draft_model: as they are served.
    lossy: always: see SELECTED. notes: sentences on what was left out.
    """

    drafts: tuple[Draft, ...]
    best: int
    retrieved: Retrieved
    model: str
    draft_model: str
    lossy: bool = True
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Draft:
        return self.drafts[self.best]

    @property
    def text(self) -> str:
        """The answer, without the blanks around it."""
        return self.chosen.answer.strip()


async def answer(
    client: AsyncClient,
    question: str,
    retriever: Retriever,
    *,
    model: str = "",
    draft_model: str = "",
    drafter: AsyncClient | None = None,
    options: RagOptions | None = None,
    template: Template | None = None,
    timeout: float = TIMEOUT_S,
) -> RagAnswer:
    """Answer a question from documents: retrieve, draft for each subset at the same time, score, choose.

    A draft that fails is left out and says why; the call fails if all do. Cancelling it ends the drafts' sessions.

    Args:
        client: of the service that has the target.
        model: the target's name there; "" takes the only one.
        draft_model: who writes; "" takes the other one of two, or the target itself where it is alone.
        drafter: of the service that has the draft model, where that is another one: a stack, or a drafter
        (`specwire draft`).
        options, template: None for the defaults.
        timeout: seconds for everything.

    Raises:
        SpecwireError: as of `generate` and `score_text`; INVALID_ARGUMENT names the field; ABORTED, no draft has an
        answer; DEADLINE_EXCEEDED.
        MissingExtra: scikit-learn is not installed.
    """
    options, template = options or RagOptions(), template or Template()
    if not question.strip():
        raise invalid("question", "must not be empty")
    try:
        async with asyncio.timeout(timeout):
            target, writing = await _models(client, drafter, model, draft_model, timeout)
            retrieved, subsets = await asyncio.to_thread(evidence, question, retriever, options)
            writer = DraftWriter(drafter or client, writing, question, options, template, timeout)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(writer.attempt(*each)) for each in enumerate(subsets)]
            if len(writer.failures) == len(tasks):
                raise writer.failures[0]
            written = [task.result() for task in tasks]
            drafts = await _scored(client, target.model, question, template, written, timeout)
    except InvalidParameter as error:
        raise SpecwireError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
    except TimeoutError:
        raise SpecwireError(grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline has passed") from None
    totals = {index: draft.scores.total for index, draft in enumerate(drafts) if draft.scores is not None}
    notes = tuple(
        f"draft {number}: {draft.cut} characters of its documents were left out: "
        f"{writing.model} has a context of {writing.context} tokens"
        for number, draft in enumerate(drafts, 1)
        if draft.cut
    )
    best = max(totals, key=totals.__getitem__)
    return RagAnswer(tuple(drafts), best, retrieved, target.model, writing.model, notes=notes)


def evidence(question: str, retriever: Retriever, options: RagOptions) -> tuple[Retrieved, list[tuple[Document, ...]]]:
    """What is retrieved for a question, and the subsets of it. Raises InvalidParameter, MissingExtra."""
    retrieved = retriever.retrieve(question, options.top)
    if not retrieved.documents:
        raise InvalidParameter("documents", "none was retrieved for the question")
    clusters = clustered(retrieved.vectors, options.clusters, options.seed)
    chosen = sampled_subsets(clusters, options.subsets, options.seed)
    return retrieved, [tuple(retrieved.documents[index] for index in subset) for subset in chosen]


# ----------------------------------------------------------------------------------------------------------------------
# Who writes, and who judges.

Info = common_pb2.GetModelInfoResponse


async def _models(
    client: AsyncClient, drafter: AsyncClient | None, model: str, draft_model: str, timeout: float
) -> tuple[Info, Info]:
    """The target and the draft model, as they describe themselves."""
    served = await _served(client, timeout)
    target = _named("model", model, served)
    if drafter is not None:
        return target, _named("draft_model", draft_model, await _served(drafter, timeout))
    others = [each for each in served if each.model != target.model]
    return target, _named("draft_model", draft_model, served if draft_model else others or [target])


async def _served(client: AsyncClient, timeout: float) -> Sequence[Info]:
    info = await client.server_info(timeout=timeout)
    return info.targets or [info.target]


def _named(parameter: str, name: str, served: Sequence[Info]) -> Info:
    """The one of that name, or the only one. Raises SpecwireError, which names the parameter."""
    found = [each for each in served if name in ("", each.model)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(repr(each.model) for each in served)
    if found:
        raise invalid(parameter, f"must be named: {listed} are served there")
    raise SpecwireError(grpc.StatusCode.NOT_FOUND, f"{parameter}: {name!r} is not served there, but {listed}")


# ----------------------------------------------------------------------------------------------------------------------
# Writing.


@dataclass(slots=True)
class DraftWriter:
    """Has a model write drafts for one question.

    model: as its service describes it. timeout: seconds for each text. failures: of `attempt`, in the order of time.
    """

    client: AsyncClient
    model: Info
    question: str
    options: RagOptions
    template: Template
    timeout: float
    failures: list[SpecwireError] = field(default_factory=list)

    async def attempt(self, number: int, documents: tuple[Document, ...]) -> Draft:
        """`write`, or a draft that says why it failed."""
        try:
            return await self.write(number, documents)
        except SpecwireError as error:
            self.failures.append(error)
            return Draft(documents, error=str(error))

    async def write(self, number: int, documents: tuple[Document, ...]) -> Draft:
        """The draft of that number from these documents, which are cut until they fit. Its scores lack the target's.

        Raises:
            SpecwireError: as of `generate`; ABORTED, a text without a word.
        """
        texts = [document.text for document in documents]
        whole = sum(map(len, texts))
        room = min(whole, TOKEN_CHARACTERS * self.model.context)
        while True:
            kept = fitted(texts, room)
            try:
                rationale, text, logprob = await self._rationale_and_answer(number, kept)
            except SpecwireError as error:
                if not room or DOES_NOT_FIT not in error.message:
                    raise
                room = room * 3 // 4
            else:
                return Draft(documents, rationale, text, Scores(logprob), cut=whole - sum(map(len, kept)))

    async def _rationale_and_answer(self, number: int, texts: Sequence[str]) -> tuple[str, str, float]:
        """Both, and the logarithm of their probability. A verifier computes what their prompts share once."""
        template, options = self.template, self.options
        numbered = (filled(template.document, {"number": str(n), "text": text}) for n, text in enumerate(texts, 1))
        prompt = filled(template.draft, {"question": self.question, "documents": "".join(numbered)})
        rationale, first = "", 0.0
        if options.rationale_tokens:
            rationale, first = await self._text(
                "rationale", number, prompt, options.rationale_tokens, template.rationale_stops
            )
        behind = f"{prompt}{rationale}{template.answer}"
        text, second = await self._text("answer", number, behind, options.answer_tokens, template.answer_stops)
        return rationale, text, first + second

    async def _text(self, name: str, number: int, prompt: str, tokens: int, stops: Sequence[str]) -> tuple[str, float]:
        gathered, ends = PartialCompletion(), list[int]()
        events = self.client.generate(
            prompt,
            max_tokens=tokens,
            temperature=self.options.temperature,
            seed=self.options.seed,
            choice=number,
            stop=stops,
            logprobs=0,
            drafting=False,  # it is itself small; its text may well repeat the documents
            ngram=True,
            model=self.model.model,
            timeout=self.timeout,
        )
        async with aclosing(events):
            async for event in events:
                gathered.add(event)
                if isinstance(event, Chunk):
                    ends += event.text_ends
        done = gathered.completion()
        if done.finish_reason in BROKEN:
            why = done.message or done.finish_reason.name.lower()
            raise SpecwireError(grpc.StatusCode.ABORTED, f"{name}: the session ended early: {why}")
        if not done.text.strip():
            raise SpecwireError(grpc.StatusCode.ABORTED, f"{name}: {self.model.model} wrote none")
        return done.text, logprob_of(len(done.text), ends, done.logprobs)


def logprob_of(length: int, ends: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> float:
    """Of the first `length` characters: of the tokens that begin in them, so of no stop string and no end.

    ends: where each token's text ends.
    """
    return sum(told.logprob for begin, told in zip([0, *ends], logprobs, strict=False) if begin < length)


def fitted(texts: Sequence[str], room: int) -> list[str]:
    """The texts with at most `room` characters in all: the longest are cut, to the same length."""
    left = room
    for index, length in enumerate(sorted(map(len, texts))):
        most = left // (len(texts) - index)
        if length > most:
            return [text[:most] for text in texts]
        left -= length
    return list(texts)


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with {name} replaced by its value; other braces stay, also those in values."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), template)


# ----------------------------------------------------------------------------------------------------------------------
# Judging.


async def _scored(
    client: AsyncClient, model: str, question: str, template: Template, drafts: Sequence[Draft], timeout: float
) -> list[Draft]:
    """The drafts with all of their scores; those that failed as they are. Raises SpecwireError."""
    whole = [(index, draft.scores) for index, draft in enumerate(drafts) if draft.scores is not None]
    parts = [_parts(template, drafts[index]) for index, _ in whole]
    prefix = filled(template.verify, {"question": question})
    told = await client.score_text(prefix, [list(each.values()) for each in parts], model=model, timeout=timeout)
    scored = list(drafts)
    for (index, scores), names, score in zip(whole, parts, told, strict=True):
        logprobs = {name: part.logprob for name, part in zip(names, score.parts, strict=True)}
        consistency = logprobs.get("rationale", 0.0) + logprobs["answer"]
        scored[index] = replace(drafts[index], scores=Scores(scores.draft, consistency, logprobs["yes"]))
    return scored


def _parts(template: Template, draft: Draft) -> dict[str, str]:
    """What the target reads of a draft, by name; those that are empty are left out."""
    named = {
        "rationale": draft.rationale,
        "between": template.answer,
        "answer": draft.answer,
        "reflection": template.reflection,
        "yes": template.yes,
    }
    return {name: text for name, text in named.items() if text}
