"""Speculative RAG against a scripted service: what is asked, what is chosen, and what happens where something fails."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from specwire.client import AsyncClient, SpecwireError, TokenLogprobs
from specwire.client.events import Event, PartialCompletion
from specwire.core.invalid import InvalidParameter
from specwire.rag import Document, RagAnswer, RagOptions, Retrieved, Template, answer, drafts
from specwire.rag.drafts import filled, fitted, logprob_of
from specwire.rpc.errors import StatusError
from specwire.v1 import common_pb2, generation_pb2
from tests.client.service import Scripted, serving, set_event
from tests.wait import until

QUESTION = "What is it?"
DOCUMENTS = tuple(Document(name, f"It is {name}. {{question}}") for name in ("red", "green", "blue", "grey"))
TEMPLATE = Template()
TOO_LONG = "prompt: 900 tokens leave no room for another one: this model's maximum context length is 512 tokens"
CONTEXT = 512
Write = Callable[[str], str]


def colours(prompt: str) -> str:
    """A rationale of the first document's colour, and then that colour."""
    colour = re.findall(r"It is (\w+)\.", prompt)[0]
    return f" {colour}" if prompt.endswith("\nAnswer:") else f" Said: {colour}."


@dataclass
class Writer(Scripted):
    """Writes what `write` says, a character a token of log-probability -0.5; judges answers by `liked`.

    A StatusError that `write` raises ends the call. together: calls that it waits for before it answers the first.
    models: served, with a context of CONTEXT each.
    """

    write: Write = colours
    liked: str = " blue"
    models: Sequence[str] = ("large", "small")
    prompts: list[str] = field(default_factory=list)
    together: int = 1
    running: int = 0
    most_running: int = 0

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.asked.append(request)
        self.prompts.append(request.text)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await until(lambda: self.most_running >= self.together)
            *begun, end = told(self.write(request.text))
            for event in begun:
                yield set_event(generation_pb2.GenerateResponse(), event)
            if self.hangs:
                await asyncio.sleep(60)
            yield set_event(generation_pb2.GenerateResponse(), end)
        finally:
            self.running -= 1
            self.left.set()

    async def GetServerInfo(
        self, request: generation_pb2.GetServerInfoRequest, context: object
    ) -> generation_pb2.GetServerInfoResponse:
        targets = [common_pb2.GetModelInfoResponse(model=name, context=CONTEXT) for name in self.models]
        return generation_pb2.GetServerInfoResponse(target=targets[0], targets=targets)

    async def ScoreText(
        self, request: generation_pb2.ScoreTextRequest, context: object
    ) -> generation_pb2.ScoreTextResponse:
        self._ask(request)
        return generation_pb2.ScoreTextResponse(
            prefix_tokens=1,
            scores=[
                generation_pb2.TextScore(parts=[self._judged(part.text) for part in scored.parts])
                for scored in request.continuations
            ],
        )

    def _judged(self, text: str) -> generation_pb2.PartScore:
        return generation_pb2.PartScore(tokens=[1], log_probabilities=[-1.0 if text == self.liked else -9.0])


def told(text: str) -> list[Any]:
    ends = list(range(1, len(text) + 1))
    return [
        generation_pb2.Started(session_id="s", prompt_tokens=1),
        generation_pb2.Chunk(
            position=1,
            tokens=[5] * len(text),
            outcomes=[common_pb2.OUTCOME_DIRECT] * len(text),
            text=text,
            text_ends=ends,
            logprobs=[common_pb2.TokenLogprobs(logprob=-0.5)] * len(text),
        ),
        generation_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP_STRING, text_length=len(text)),
    ]


@dataclass(frozen=True)
class Fixed:
    """Retrieves DOCUMENTS, each unlike the others. `documents`: instead of them."""

    documents: tuple[Document, ...] = DOCUMENTS

    def retrieve(self, question: str, top: int) -> Retrieved:
        found = self.documents[:top]
        return Retrieved(found, (1.0,) * len(found), np.eye(max(1, len(found)))[: len(found)])


@asynccontextmanager
async def asking(servicer: Writer) -> AsyncIterator[AsyncClient]:
    async with serving(servicer) as address, AsyncClient(address, patience=0) as client:
        yield client


async def answered(servicer: Writer, retriever: Fixed | None = None, **options: Any) -> RagAnswer:
    """Of a draft for each document by itself, unless `options` say otherwise."""
    wanted = RagOptions(**{"clusters": 1, "subsets": 4, **options})
    async with asking(servicer) as client:
        return await answer(client, QUESTION, retriever or Fixed(), model="large", options=wanted)


async def test_the_draft_with_the_greatest_product_is_chosen() -> None:
    servicer = Writer()
    found = await answered(servicer)
    assert (found.text, found.chosen.rationale, found.lossy) == ("blue", " Said: blue.", True)
    assert (found.model, found.draft_model, found.notes) == ("large", "small", ())
    assert sorted(draft.answer for draft in found.drafts) == [" blue", " green", " grey", " red"]
    assert {draft.documents[0].name for draft in found.drafts} == {"red", "green", "blue", "grey"}
    scores = found.chosen.scores
    assert scores is not None
    written = len(" Said: blue.") + len(" blue")
    assert (scores.draft, scores.self_consistency, scores.self_reflection) == (-0.5 * written, -10.0, -9.0)
    assert scores.total == scores.draft - 19.0
    assert all(draft.scores is not None and draft.scores.total <= scores.total for draft in found.drafts)


async def test_what_is_asked() -> None:
    servicer = Writer()
    await answered(servicer, temperature=0.5, seed=7, rationale_tokens=40, answer_tokens=9)
    *texts, judged = servicer.asked
    asked = [request for request in texts if isinstance(request, generation_pb2.GenerateRequest)]
    assert len(asked) == len(texts) == 8
    assert all(request.model == "small" and request.sampling.HasField("logprobs") for request in asked)
    assert {(request.sampling.choice, request.sampling.seed) for request in asked} == {(n, 7) for n in range(4)}
    assert {request.stopping.max_tokens for request in asked} == {40, 9}
    assert {tuple(request.stop) for request in asked} == {TEMPLATE.rationale_stops, TEMPLATE.answer_stops}
    drafting = generation_pb2.DRAFTING_NGRAM
    assert all(request.drafting == drafting for request in asked)
    for document in DOCUMENTS:
        evidence = f"[1] {document.text}\n"
        prompt = TEMPLATE.draft.replace("{question}", QUESTION).replace("{documents}", evidence)
        assert prompt in servicer.prompts
        assert f"{prompt} Said: {document.name}.\nAnswer:" in servicer.prompts
    assert isinstance(judged, generation_pb2.ScoreTextRequest)
    assert (judged.model, judged.prefix.text) == ("large", f"## Instruction: {QUESTION}\n\n## Rationale:")
    parts = {tuple(part.text for part in each.parts) for each in judged.continuations}
    assert parts == {
        (f" Said: {name}.", "\nAnswer:", f" {name}", TEMPLATE.reflection, " Yes")
        for name in ("red", "green", "blue", "grey")
    }


async def test_drafts_are_written_at_the_same_time() -> None:
    await answered(Writer(together=4))


async def test_a_subset_has_a_document_of_each_cluster() -> None:
    found = await answered(Writer(), clusters=4, subsets=5)
    [draft] = found.drafts  # there is but one choice
    assert draft.documents == DOCUMENTS


async def test_without_a_rationale() -> None:
    servicer = Writer()
    found = await answered(servicer, rationale_tokens=0)
    assert (found.text, found.chosen.rationale) == ("blue", "")
    assert len(servicer.prompts) == 4
    scores = found.chosen.scores
    assert scores is not None
    assert (scores.draft, scores.self_consistency) == (-0.5 * len(" blue"), -1.0)


async def test_a_draft_that_fails_is_left_out() -> None:
    def write(prompt: str) -> str:
        if "It is blue." in prompt:
            raise StatusError(grpc.StatusCode.ABORTED, "logits are not finite")
        return colours(prompt)

    found = await answered(Writer(write=write))
    errors = {draft.documents[0].name: draft.error for draft in found.drafts}
    assert errors == {"red": "", "green": "", "blue": "ABORTED: logits are not finite", "grey": ""}
    assert found.text in ("red", "grey", "green")
    assert sum(draft.scores is not None for draft in found.drafts) == 3


@pytest.mark.parametrize(("kind", "text"), [("rationale", ""), ("answer", " \t")])
async def test_a_text_without_a_word_is_a_failed_draft(kind: str, text: str) -> None:
    """Else it would win: there is nothing in it that could be improbable."""

    def write(prompt: str) -> str:
        meant = prompt.endswith("\nAnswer:") == (kind == "answer")
        return text if meant and "It is blue." in prompt else colours(prompt)

    found = await answered(Writer(write=write))
    [failed] = [draft for draft in found.drafts if draft.error]
    assert (failed.documents[0].name, failed.error) == ("blue", f"ABORTED: {kind}: small wrote none")
    assert found.text != "blue"


async def test_where_all_fail_the_first_error_is_the_call_s() -> None:
    def write(_: str) -> str:
        raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "all slots are taken", 2.5)

    servicer = Writer(write=write)
    with pytest.raises(SpecwireError, match="all slots are taken") as raised:
        await answered(servicer)
    assert (raised.value.code, raised.value.retry_after) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 2.5)
    assert not any(isinstance(request, generation_pb2.ScoreTextRequest) for request in servicer.asked)


async def test_a_huge_document_is_cut_until_it_fits_and_that_is_told() -> None:
    room = 600

    def write(prompt: str) -> str:
        if len(prompt) > room:
            raise StatusError(grpc.StatusCode.INVALID_ARGUMENT, TOO_LONG)
        return colours(prompt)

    huge = Document("huge", "It is huge." + "x" * 1_000_000)
    servicer = Writer(write=write)
    found = await answered(servicer, Fixed((huge, DOCUMENTS[0])), clusters=2)
    [draft] = found.drafts
    assert draft.documents == (huge, DOCUMENTS[0])
    assert DOCUMENTS[0].text in servicer.prompts[-1]
    assert max(map(len, servicer.prompts)) < 8 * CONTEXT + room
    assert len(servicer.prompts[-1]) > room // 2
    assert draft.cut > 999_000
    note = f"draft 1: {draft.cut} characters of its documents were left out: small has a context of 512 tokens"
    assert found.notes == (note,)


async def test_a_question_that_does_not_fit_is_the_service_s_error() -> None:
    def write(_: str) -> str:
        raise StatusError(grpc.StatusCode.INVALID_ARGUMENT, TOO_LONG)

    with pytest.raises(SpecwireError, match="maximum context length is 512") as raised:
        await answered(Writer(write=write))
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_that_takes_too_long_ends_with_its_drafts() -> None:
    servicer = Writer(hangs=True)
    async with asking(servicer) as client:
        with pytest.raises(SpecwireError) as raised:
            await answer(client, QUESTION, Fixed(), model="large", timeout=0.5)
        assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: servicer.running == 0)


async def test_cancelling_ends_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the client has heard of by name; one that it has not ends with its call."""
    heard: list[Event] = []

    class Heard(PartialCompletion):
        def add(self, event: Event) -> None:
            super().add(event)
            heard.append(event)

    monkeypatch.setattr(drafts, "PartialCompletion", Heard)
    servicer = Writer(hangs=True)
    async with asking(servicer) as client:
        call = asyncio.create_task(answer(client, QUESTION, Fixed(), model="large"))
        await until(lambda: servicer.running > 1 and heard)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: servicer.running == 0)
        await until(lambda: any(isinstance(each, generation_pb2.CancelRequest) for each in servicer.asked))


async def test_who_writes_may_be_served_elsewhere() -> None:
    judge, writer = Writer(models=("large",)), Writer(models=("small",))
    async with asking(judge) as client, asking(writer) as drafter:
        found = await answer(client, QUESTION, Fixed(), drafter=drafter)
    assert (found.model, found.draft_model) == ("large", "small")
    assert judge.prompts == []
    assert writer.prompts


@pytest.mark.parametrize(
    ("models", "model", "draft_model", "code", "message"),
    [
        (("a", "b"), "", "", grpc.StatusCode.INVALID_ARGUMENT, "model: must be named: 'a', 'b' are served there"),
        (("a", "b"), "c", "", grpc.StatusCode.NOT_FOUND, "model: 'c' is not served there, but 'a', 'b'"),
        (("a", "b"), "a", "c", grpc.StatusCode.NOT_FOUND, "draft_model: 'c' is not served there, but 'a', 'b'"),
        (
            ("a", "b", "c"),
            "a",
            "",
            grpc.StatusCode.INVALID_ARGUMENT,
            "draft_model: must be named: 'b', 'c' are served there",
        ),
    ],
)
async def test_models_that_are_not_clear_are_named(
    models: tuple[str, ...], model: str, draft_model: str, code: grpc.StatusCode, message: str
) -> None:
    servicer = Writer(models=models)
    async with asking(servicer) as client:
        with pytest.raises(SpecwireError) as raised:
            await answer(client, QUESTION, Fixed(), model=model, draft_model=draft_model)
    assert (raised.value.code, raised.value.message) == (code, message)
    assert servicer.prompts == []


async def test_a_model_that_is_alone_drafts_for_itself() -> None:
    async with asking(Writer(models=("large",))) as client:
        found = await answer(client, QUESTION, Fixed())
    assert (found.model, found.draft_model) == ("large", "large")


async def test_what_is_wrong_with_the_question_is_named() -> None:
    async with asking(Writer()) as client:
        with pytest.raises(SpecwireError, match="question: must not be empty"):
            await answer(client, " \n", Fixed(), model="large")
        with pytest.raises(SpecwireError, match="documents: none was retrieved for the question"):
            await answer(client, QUESTION, Fixed(()), model="large")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("top", 0, "top: must be from 1 to 100, not 0"),
        ("clusters", 101, "clusters: must be from 1 to 100, not 101"),
        ("subsets", 65, "subsets: must be from 1 to 64, not 65"),
        ("rationale_tokens", -1, f"rationale_tokens: must be from 0 to {(1 << 32) - 1}, not -1"),
        ("answer_tokens", 0, f"answer_tokens: must be from 1 to {(1 << 32) - 1}, not 0"),
        ("temperature", -1.0, "temperature: must be a finite number from 0 to 100, not -1.0"),
        ("seed", 1 << 64, f"seed: must be a whole number of 64 bits, not {1 << 64}"),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, value: float, message: str) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidParameter) as raised:
        RagOptions(**options)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("draft", "{question}", "template.draft: must have {documents}, not '{question}'"),
        ("verify", "x", "template.verify: must have {question}, not 'x'"),
        ("document", "", "template.document: must have {text}, not ''"),
        ("yes", "", "template.yes: must not be empty"),
    ],
)
def test_templates_without_a_place_are_refused(name: str, text: str, message: str) -> None:
    options: dict[str, Any] = {name: text}
    with pytest.raises(InvalidParameter) as raised:
        Template(**options)
    assert str(raised.value) == message


def test_braces_of_values_stay() -> None:
    values = {"question": "{documents}?", "documents": "{question}"}
    assert filled("{question} {documents} {other} {}", values) == "{documents}? {question} {other} {}"


@pytest.mark.parametrize(
    ("texts", "room", "kept"),
    [
        (["aaaa", "b"], 9, ["aaaa", "b"]),
        (["aaaa", "b"], 3, ["aa", "b"]),
        (["aaaa", "bbb", "c"], 5, ["aa", "bb", "c"]),
        (["aaaa", "b"], 0, ["", ""]),
        ([], 3, []),
    ],
)
def test_the_longest_texts_are_cut(texts: list[str], room: int, kept: list[str]) -> None:
    assert fitted(texts, room) == kept


def test_tokens_of_a_stop_string_and_an_end_count_for_nothing() -> None:
    logprobs = [TokenLogprobs(-1.0), TokenLogprobs(-2.0), TokenLogprobs(-4.0), TokenLogprobs(-8.0)]
    # "ab" + "c\n" + "\n" + the end; the text is cut before "\n\n"
    assert logprob_of(3, [2, 4, 5, 5], logprobs) == -3.0
    assert logprob_of(5, [2, 4, 5, 5], logprobs) == -7.0
    assert logprob_of(0, [], []) == 0.0
