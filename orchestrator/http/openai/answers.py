"""From sessions' events to an answer: one JSON object, or a stream of them."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple

import grpc
import msgspec
from google.protobuf.message import Message
from starlette.types import Receive, Scope, Send

from orchestrator.admission import Aside
from orchestrator.api.calls import Part
from orchestrator.api.scores import PromptScores
from orchestrator.chat.models import AnswerForm, ChatModel, call_id
from orchestrator.http.errors import failure_of
from orchestrator.http.openai.requests import CompletionRequest
from orchestrator.session.output import SessionView
from orchestrator.session.stats import stats_of
from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import MOST_LOGPROBS, finite
from specwire.core.messages import Emit, EmitEnd, End, FinishReason, TokenLogprobs
from specwire.core.text import extend_hash
from specwire.rpc.errors import StatusError
from specwire.text.output import OutputText
from specwire.text.tokenizer import TokenBytes
from specwire.text.tool_calls.parser import (
    CallBegun,
    CallDelta,
    CallEnded,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    gathered,
)
from specwire.v1 import generation_pb2 as pb

# ----------------------------------------------------------------------------------------------------------------------
# How OpenAI's API writes completions and chats: the two differ in names and in where text and logprobs stand.

Json = dict[str, Any]


class CompletionShape:
    """/v1/completions, which tell the text as it is.

    whole, part: the `object` names of an answer, whole and in a stream. resumable: a reader may come back.
    """

    prefix, whole, part = "cmpl-", "text_completion", "text_completion"
    resumable = True

    def of_choice(self) -> CompletionShape:
        """The shape of one choice: where it reads the text, each has its own."""
        return self

    def begin(self, session_id: str) -> None:
        """Nothing depends on it."""

    def first(self) -> Json:
        """The choice's content that opens its stream."""
        return {"text": ""}

    def delta(self, text: str) -> Json:
        return {"text": text}

    def rest(self) -> Json | None:
        """The content of the event behind the whole text, if there is any."""
        return None

    def last(self) -> Json:
        """The content of the event that says why it ended."""
        return {"text": ""}

    def answer(self, text: str) -> Json:
        return {"text": text}

    def reason(self, reason: str | None) -> str | None:
        """Why it ended, once its text was told."""
        return reason

    def logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], begins: list[int], names: TokenBytes
    ) -> Json:
        """Of decided tokens. begins: where each one's text begins in the answer."""
        return {
            "tokens": [names.text(token) for token in tokens],
            "token_logprobs": [finite(known.logprob) for known in logprobs],
            "top_logprobs": list(by_text(tokens, logprobs, MOST_LOGPROBS, names)),
            "text_offset": begins,
        }


class ChatShape(CompletionShape):
    """/v1/chat/completions."""

    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def first(self) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def last(self) -> Json:
        return {"delta": {}}

    def answer(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None, "annotations": []}}

    def logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], begins: list[int], names: TokenBytes
    ) -> Json:
        pairs = zip(tokens, logprobs, strict=True)
        return {"content": [_chat_token(token, known, names) for token, known in pairs], "refusal": None}


def _chat_token(token: int, known: TokenLogprobs, names: TokenBytes) -> Json:
    alternatives = [_chat_entry(other, logprob, names) for other, logprob in known.top]
    return {**_chat_entry(token, known.logprob, names), "top_logprobs": alternatives}


def _chat_entry(token: int, logprob: float, names: TokenBytes) -> Json:
    data = names.of(token)
    return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


class ParsedChatShape(ChatShape):
    """/v1/chat/completions, of a text that may have calls or reasoning; one for each choice."""

    resumable = False

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._session = ""
        # A whole call was told; part of one that broke off was.
        self._called = self._broke = False
        self._parser = form.parser()

    def of_choice(self) -> ParsedChatShape:
        return ParsedChatShape(self._form)

    def begin(self, session_id: str) -> None:
        self._session = session_id

    def delta(self, text: str) -> Json:
        return self._delta(self._parser.feed(text))

    def rest(self) -> Json | None:
        delta = self._delta(self._parser.finish())
        return delta if delta["delta"] else None

    def answer(self, text: str) -> Json:
        parser = self._form.parser()
        found = gathered([*parser.feed(text), *parser.finish()])
        message: Json = {"role": "assistant", "content": found.content, "refusal": None, "annotations": []}
        if found.reasoning:
            message["reasoning_content"] = found.reasoning
        if found.calls:
            self._called = True
            message["content"] = found.content or None
            message["tool_calls"] = [
                {**self._opening(index), "function": {"name": call.name, "arguments": call.arguments}}
                for index, call in enumerate(found.calls)
            ]
        return {"message": message}

    def reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self._called and not self._broke and reason == "stop" else reason

    def _opening(self, index: int) -> Json:
        return {"id": call_id(self._session, index), "type": "function"}

    def _delta(self, events: Sequence[OutputEvent]) -> Json:
        """One delta for all of them: clients merge calls by index, and one delta has each index once."""
        delta: Json = {}
        calls: dict[int, Json] = {}
        for event in events:
            match event:
                case ReasoningDelta():
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
                case ContentDelta():
                    delta["content"] = delta.get("content", "") + event.text
                case CallBegun():
                    function = {"name": event.name, "arguments": ""}
                    calls[event.index] = {"index": event.index, **self._opening(event.index), "function": function}
                case CallDelta():
                    call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += event.arguments
                case CallEnded():
                    self._called |= event.whole
                    self._broke |= not event.whole
        if calls:
            delta["tool_calls"] = list(calls.values())
        return {"delta": delta}


# ----------------------------------------------------------------------------------------------------------------------
# A scored prompt: OpenAI's `echo` with `logprobs`, and vLLM's `prompt_logprobs`.


def echoed(scores: PromptScores, top: int, served: ChatModel) -> Json:
    """As `logprobs` of a completion that begins with its prompt: the first token has none, nothing stands before it."""
    names = served.names
    ends = OutputText(served.target.tokenizer).push(scores.tokens).text_ends
    return {
        "tokens": [names.text(token) for token in scores.tokens],
        "token_logprobs": [None, *(finite(known.logprob) for known in scores.logprobs)],
        "top_logprobs": [None, *by_text(scores.tokens[1:], scores.logprobs, top, names)],
        "text_offset": [0, *ends[:-1]],
    }


def by_text(tokens: Iterable[int], logprobs: Iterable[TokenLogprobs], top: int, names: TokenBytes) -> Iterator[Json]:
    """Of each token the most probable ones and its own, by text. Of several with one text the most probable counts."""
    for token, known in zip(tokens, logprobs, strict=True):
        best = reversed(known.top[:top])
        yield {names.text(each): finite(logprob) for each, logprob in [(token, known.logprob), *best]}


def by_id(scores: PromptScores, top: int, names: TokenBytes) -> list[Json | None]:
    """VLLM's `prompt_logprobs`: for each token the most probable ids and, where it is none of them, its own."""
    own = zip(scores.tokens[1:], scores.logprobs, scores.ranks, strict=True)
    return [None, *(_entries(token, known, rank, top, names) for token, known, rank in own)]


def _entries(token: int, known: TokenLogprobs, rank: int, top: int, names: TokenBytes) -> Json:
    told = [(each, logprob, place) for place, (each, logprob) in enumerate(known.top[:top], 1)]
    if all(each != token for each, _, _ in told):
        told.append((token, known.logprob, rank))
    return {
        str(each): {"logprob": finite(logprob), "rank": place, "decoded_token": names.text(each)}
        for each, logprob, place in told
    }


def joined(first: Json | None, second: Json | None) -> Json | None:
    """The log-probabilities of two texts that follow each other."""
    if first is None or second is None:
        return first or second
    return {name: [*first[name], *second[name]] for name in second}


# ----------------------------------------------------------------------------------------------------------------------
# What a request has used, and what speculation did for it: in OpenAI's usage, and vLLM's metrics.


class DraftTally(NamedTuple):
    """What became of draft tokens; see `Stats.proposed`."""

    proposed: int
    tested: int
    accepted: int

    @property
    def acceptance(self) -> float | None:
        """Share of the judged draft tokens that was accepted; None where none was judged."""
        return round(self.accepted / self.tested, 4) if self.tested else None


def total(stats: Sequence[pb.Stats], of: str = "") -> DraftTally:
    """of: a kind of source, as the fields of its figures end."""
    return DraftTally(*(sum(getattr(each, name + of) for each in stats) for name in DraftTally._fields))


def by_source(stats: Sequence[pb.Stats]) -> dict[str, DraftTally]:
    """By the names that `specwire.sources` has; `prediction` is what the request brought along."""
    ngram, heads, prediction = (total(stats, of) for of in ("_ngram", "_head", "_prediction"))
    rest = (max(0, whole - sum(others)) for whole, *others in zip(total(stats), ngram, heads, prediction, strict=True))
    return {"drafters": DraftTally(*rest), "ngram": ngram, "heads": heads, "prediction": prediction}


def counts(prompt: int, completion: int) -> Json:
    """Tokens, as OpenAI's usage names them."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage_of(stats: Sequence[pb.Stats], n: int, predicted: bool) -> Json:
    """OpenAI's usage of sessions of which each `n` share a prompt. predicted: the request has a prediction, references.

    Without any, the prediction tokens of `completion_tokens_details` are all draft tokens: there AIPerf looks for them.
    """
    prompt = sum(each.prompt_tokens for each in stats[::n])
    completion = sum(each.output_tokens for each in stats)
    counted = by_source(stats)["prediction"] if predicted else total(stats)
    return {
        **counts(prompt, completion),
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in stats[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": counted.accepted,
            "rejected_prediction_tokens": counted.proposed - counted.accepted,
        },
        "speculative_decoding": _told(stats),
    }


def _told(stats: Sequence[pb.Stats]) -> Json:
    whole = total(stats)
    sources = {name: each._asdict() for name, each in by_source(stats).items()}
    forwards = sum(each.target_forwards for each in stats)
    return {**whole._asdict(), "acceptance": whole.acceptance, "target_forwards": forwards, "sources": sources}


def metrics_of(stats: Sequence[pb.Stats]) -> Json:
    """VLLM's `metrics.speculative_decoding` (--per-request-spec-decode-metrics summary), as AIPerf checks it.

    acceptance_histogram[i]: windows of which i tokens were accepted; the other figures agree with it. So they are of
    windows only: a draft token that came during a forward is in `usage`, not here.
    """
    width = max((len(each.tested_at) for each in stats), default=0)
    tested, accepted = (
        [sum(counts[index] for counts in told if index < len(counts)) for index in range(width)]
        for told in ([each.tested_at for each in stats], [each.accepted_at for each in stats])
    )
    whole, steps = total(stats), tested[0] if tested else 0
    proposed = whole.proposed - whole.tested + sum(tested)
    reached = [steps, *accepted, 0]  # windows of which so many tokens, or more, were accepted
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + sum(accepted) / steps if steps else 1.0,
            "draft_acceptance_rate": sum(accepted) / proposed if proposed else 0.0,
            "acceptance_histogram": [more - beyond for more, beyond in pairwise(reached)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": proposed,
            "num_spec_tokens": width,
        }
    }


# ----------------------------------------------------------------------------------------------------------------------
# Where a reader of a stream stands, so that it can come back: the id of an event.
#
# It says for each of the request's sessions POSITION-HASH-END-STAGE, commas between them, nothing for one that the
# reader has not heard of. The hash is that of the text before the position (PROTOCOL.md, section 4): a reader that has
# another text is told so.

FORM = re.compile(r"([0-9]{1,10})-([0-9a-f]{16})-([0-9]{1,10})-([0-4])")
FIELD = "Last-Event-ID"
MOST_WHOLE = (1 << 32) - 1


class Stage(IntEnum):
    """What a reader has already got, beside the text that came with the tokens before its position."""

    OPENED = 0  # nothing, not even what its text begins with (`echo`)
    GOING = 1  # what the text begins with
    COMPLETE = 2  # also the text that the end released
    ENDED = 3  # also why it ended
    COUNTED = 4  # also the usage of all choices


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """The text before `position`, absolute, has this hash. end: where its last token's text ends in the output."""

    position: int
    hash: int
    end: int = 0
    stage: Stage = Stage.GOING

    @classmethod
    def start(cls, view: SessionView) -> StreamPlace:
        return cls(len(view.record.prompt), view.prompt_hash, 0, Stage.OPENED)

    @property
    def reached(self) -> tuple[int, int]:
        return self.position, self.hash

    def behind(self, chunk: Emit) -> StreamPlace:
        """Where a reader stands that has this chunk, too."""
        value = self.hash
        for token in chunk.tokens:
            value = extend_hash(value, token)
        end = chunk.text_ends[-1] if chunk.text_ends else self.end
        return StreamPlace(chunk.position + len(chunk.tokens), value, end)

    def __str__(self) -> str:
        return f"{self.position}-{self.hash:016x}-{self.end}-{self.stage.value}"


def places_of(text: str, sessions: int) -> list[StreamPlace | None]:
    """A place for each session, None where the reader has not heard of it. Raises InvalidParameter."""
    parts = text.split(",")
    if len(parts) != sessions:
        raise InvalidParameter(FIELD, f"is of {len(parts)} sessions, and the request makes {sessions}")
    return [_place(part) if part else None for part in parts]


def _place(text: str) -> StreamPlace:
    found = FORM.fullmatch(text)
    if found is None or max(int(found[1]), int(found[3])) > MOST_WHOLE:
        raise InvalidParameter(FIELD, "must be the id of an event of this stream")
    return StreamPlace(int(found[1]), int(found[2], 16), int(found[3]), Stage(int(found[4])))


# ----------------------------------------------------------------------------------------------------------------------
# Server-sent events (the WHATWG's HTML standard, section 9.2), as OpenAI's API ends them: with [DONE].

DONE = b"data: [DONE]\n\n"
# A line that every reader of events skips. No blank line follows: openai's clients take one for an event without data
# once an `id` has come (Python), or always (Go), and fail.
COMMENT = b": nothing yet\n"

Leave = Callable[[], Awaitable[object]]
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that gather an answer would undo the stream
]


def event(data: object, place: str | None = None) -> bytes:
    """place: the event's id, which a client that comes back shows as Last-Event-ID."""
    head = b"" if place is None else f"id: {place}\n".encode()
    return b"%sdata: %s\n\n" % (head, msgspec.json.encode(data))


class EventStream:
    """A response whose events are closed with it, whatever ends it.

    It waits for a client that reads slowly: it takes no more from `events` than the connection takes. After `quiet`
    seconds without an event it sends a comment, because proxies cut silent connections. leave: is called at the end.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], quiet: float, leave: Leave | None = None) -> None:
        self._events = events
        self._quiet = quiet
        self._leave = leave
        self._sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as held:
            if self._leave is not None:
                held.push_async_callback(self._leave)
            await held.enter_async_context(aclosing(self._events))
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            beating = asyncio.create_task(self._beat(send))
            try:
                async for data in self._events:
                    await self._send(send, data)
            finally:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent = asyncio.get_running_loop().time()

    async def _beat(self, send: Send) -> None:
        """A comment whenever nothing was sent for long enough; waits where the client does not read, as events do."""
        clock = asyncio.get_running_loop().time
        self._sent = clock()
        while True:
            await asyncio.sleep(self._sent + self._quiet - clock())
            if clock() >= self._sent + self._quiet:
                await self._send(send, COMMENT)


# ----------------------------------------------------------------------------------------------------------------------
# The answer.

# The scores of a prompt come before its session's own parts.
Told = Part | PromptScores
Events = AsyncGenerator[tuple[int, Told], None]

REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_ID: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}
FAILURES = {
    FinishReason.CANCELLED: (grpc.StatusCode.CANCELLED, "the session was cancelled"),
    FinishReason.DEADLINE: (grpc.StatusCode.DEADLINE_EXCEEDED, "the request's timeout has passed"),
}
# Of a token's log-probabilities, about.
LOGPROBS_BYTES = 16


@dataclass(slots=True)
class AnswerChoice:
    """One session, as far as it has been told.

    before: what its text begins with. end: where the newest token's text ends in the output, in code points. decided:
    tokens of the output up to there, in a stream.
    place: how far its reader has come; None where it cannot come back. scores: of its prompt, if asked for.
    of_prompt: what is told of them before the output's own log-probabilities. opening: what is told of the session
    first. view: None where nothing is generated.
    """

    before: str
    text: str = ""
    end: int = 0
    decided: int = 0
    prompt_tokens: int = 0
    chunks: list[Emit] = field(default_factory=list)
    stats: pb.Stats = field(default_factory=pb.Stats)
    opening: Json = field(default_factory=dict)
    view: SessionView | None = None
    reason: str | None = None
    place: StreamPlace | None = None
    scores: PromptScores | None = None
    of_prompt: Json | None = None

    def lacks(self, stage: Stage) -> bool:
        """Whether this is new to its reader; from now on it is not."""
        if self.place is None:
            return True
        lacks = self.place.stage < stage
        self.place = replace(self.place, stage=max(stage, self.place.stage))
        return lacks

    def open(self, session_id: str, seed: int, rule: str, lossy: bool) -> None:
        self.opening = {"session_id": session_id, "seed": seed, "rule": rule, "lossy": lossy}


def _bytes_of(told: Sequence[TokenLogprobs]) -> int:
    return LOGPROBS_BYTES * sum(1 + len(each.top) for each in told)


def _bytes_of_scores(scores: PromptScores) -> int:
    return LOGPROBS_BYTES * sum(1 + len(each.top_ids) for each in scores.told)


class Answer:
    """One request's answer.

    before: for each choice, what its text begins with (`echo`). aside: `Admission.aside` of the tenant. places: for
    each choice, where its reader left off; None for one that it has not heard of. Empty: None for all.
    """

    def __init__(
        self,
        shape: CompletionShape,
        request: CompletionRequest,
        served: ChatModel,
        before: Sequence[str],
        aside: Aside,
        places: Sequence[StreamPlace | None] = (),
    ) -> None:
        self._aside = aside
        self._shape = shape
        self._shapes = [shape.of_choice() for _ in before]
        self._resumable = shape.resumable and bool(request.template.request_id)
        self._request = request
        self._served = served
        self._model = {"model": served.name, "system_fingerprint": served.fingerprint}
        self._id = shape.prefix + secrets.token_hex(16)
        self._created = int(time.time())
        known = places or [None] * len(before)
        ends = [0 if place is None else place.end for place in known]
        self._choices = [
            AnswerChoice(text, text, end, place=place) for text, end, place in zip(before, ends, known, strict=True)
        ]

    # All at once

    async def whole(self, events: Events) -> bytes:
        """The answer when everything is there, as JSON. Raises what a session fails with."""
        async with aclosing(events):
            async for index, part in events:
                self._gather(self._choices[index], part)
        chunks = [chunk for choice in self._choices for chunk in choice.chunks]
        size = sum(len(each.text) + LOGPROBS_BYTES * len(each.tokens) + _bytes_of(each.logprobs) for each in chunks)
        size += sum(_bytes_of_scores(each.scores) for each in self._choices if each.scores is not None)
        written: bytes = await self._aside(size, self._written)
        return written

    def _written(self) -> bytes:
        for choice in self._choices:
            self._tell_prompt(choice)
        choices = [self._answered(index, choice) for index, choice in enumerate(self._choices)]
        told = {"usage": self._usage(), "metrics": metrics_of(self.stats)}
        return msgspec.json.encode({**self._envelope(self._shape.whole, choices), **told})

    def _gather(self, choice: AnswerChoice, part: Told) -> None:
        match part:
            case PromptScores():
                self._score(choice, part)
            case SessionView():
                self._begin(choice, part)
            case Emit():
                choice.text += part.text
                choice.chunks.append(part)
            case EmitEnd():
                choice.text += part.text
                self._finish(choice, part.end)

    def _score(self, choice: AnswerChoice, scores: PromptScores) -> None:
        """The prompt's scores; where nothing is generated, what a session would say that ends behind it, too."""
        choice.scores = scores
        if self._request.scores_only:
            choice.prompt_tokens, sampling = len(scores.tokens), self._request.template.sampling
            choice.open("", sampling.seed, sampling.rule, lossy=False)
            choice.stats, choice.reason = pb.Stats(prompt_tokens=choice.prompt_tokens), "length"

    def _begin(self, choice: AnswerChoice, view: SessionView) -> None:
        record = view.record
        choice.view, choice.prompt_tokens = view, len(record.prompt)
        choice.open(record.session_id, record.sampling.seed, record.sampling.rule_name, record.sampling.lossy)

    def _finish(self, choice: AnswerChoice, end: End) -> None:
        if choice.view is not None:
            choice.stats = stats_of(choice.view.stats, choice.prompt_tokens)
        choice.reason = REASONS.get(end.reason)
        if choice.reason is None:
            code, message = FAILURES.get(end.reason, (grpc.StatusCode.ABORTED, end.message))
            raise StatusError(code, message)

    def _answered(self, index: int, choice: AnswerChoice) -> Json:
        more = {**choice.opening, "stats": figures(choice.stats)}
        if self._request.details:
            more["tokens"] = [token for chunk in choice.chunks for token in chunk.tokens]
            more["outcomes"] = [each.name.lower() for chunk in choice.chunks for each in chunk.outcomes]
        told = joined(choice.of_prompt, self._told(choice, choice.chunks))
        shape = self._shapes[index]
        shape.begin(choice.opening["session_id"])
        content = shape.answer(choice.text)
        answer = self._choice(index, content, told, shape.reason(choice.reason), more)
        top = self._request.prompt_logprobs
        if choice.scores is None or top is None:
            return answer
        return {**answer, "prompt_logprobs": by_id(choice.scores, top, self._served.names)}

    # As it comes

    async def stream(self, events: Events) -> AsyncGenerator[bytes, None]:
        """Server-sent events; a failure is the last one but [DONE]."""
        try:
            async with aclosing(events):
                async for index, part in events:
                    for each in await self._events(index, self._choices[index], part):
                        yield each
            lacking = [choice.lacks(Stage.COUNTED) for choice in self._choices]
            if self._request.include_usage and any(lacking):
                told = {"usage": self._usage(), "metrics": metrics_of(self.stats)}
                yield event({**self._envelope(self._shape.part, []), **told}, self._place())
        except Exception as error:
            yield event(failure_of(error).body())
        yield DONE

    async def _events(self, index: int, choice: AnswerChoice, part: Told) -> list[bytes]:
        match part:
            case PromptScores():
                self._score(choice, part)
                await self._aside(_bytes_of_scores(part), self._tell_prompt, choice)
                alone = self._request.scores_only
                return [*self._first(index, choice), *self._last(index, choice, "")] if alone else []
            case SessionView():
                self._begin(choice, part)
                if self._resumable and choice.place is None:
                    choice.place = StreamPlace.start(part)
                return self._first(index, choice)
            case Emit():
                return self._chunk(index, choice, part)
            case EmitEnd():
                self._finish(choice, part.end)
                return self._last(index, choice, part.text)

    def _first(self, index: int, choice: AnswerChoice) -> list[bytes]:
        self._shapes[index].begin(choice.opening["session_id"])
        if choice.place is not None:
            choice.decided = choice.place.position - choice.prompt_tokens
        told = [self._part(index, self._shape.first(), None, None, choice.opening)]
        if choice.before and choice.lacks(Stage.GOING):
            told.append(self._part(index, self._shape.delta(choice.before), choice.of_prompt))
        return told

    def _chunk(self, index: int, choice: AnswerChoice, part: Emit) -> list[bytes]:
        told = self._told(choice, [part])
        choice.decided = part.position + len(part.tokens) - choice.prompt_tokens
        if choice.place is not None:
            _check_goes_on(choice.place)
            choice.place = choice.place.behind(part)
        elif not (part.text or told or self._request.details):
            return []
        more = _details(part) if self._request.details else None
        delta = self._shapes[index].delta(part.text)
        if not (self._shape.resumable or told or more or any(delta.values())):
            return []  # it is held back
        return [self._part(index, delta, told, None, more)]

    def _last(self, index: int, choice: AnswerChoice, text: str) -> list[bytes]:
        """text: what the end releases."""
        shape, told = self._shapes[index], []
        if text and choice.lacks(Stage.COMPLETE):
            told.append(self._part(index, shape.delta(text)))
        rest = shape.rest()
        if rest is not None:
            told.append(self._part(index, rest))
        if choice.lacks(Stage.ENDED):
            more = {"stats": figures(choice.stats)}
            told.append(self._part(index, shape.last(), None, shape.reason(choice.reason), more))
        return told

    # Parts of both

    def _tell_prompt(self, choice: AnswerChoice) -> None:
        top = self._request.echo_logprobs
        if choice.scores is not None and top is not None:
            choice.of_prompt = echoed(choice.scores, top, self._served)

    def _told(self, choice: AnswerChoice, chunks: Sequence[Emit]) -> Json | None:
        tokens = [token for chunk in chunks for token in chunk.tokens]
        logprobs = [known for chunk in chunks for known in chunk.logprobs]
        if not self._request.logprobs or len(logprobs) < len(tokens):
            return None  # a request id may stand for a session that was asked for without
        ends = [end for chunk in chunks for end in chunk.text_ends]
        begins = [len(choice.before) + begin for begin in [choice.end, *ends][: len(ends)]]
        choice.end = ends[-1] if ends else choice.end
        return self._shape.logprobs(tokens, logprobs, begins, self._served.names)

    def _part(
        self, index: int, content: Json, told: Json | None = None, reason: str | None = None, more: Json | None = None
    ) -> bytes:
        choice = self._choice(index, content, told, reason, more)
        part = self._envelope(self._shape.part, [choice])
        if self._request.include_usage:
            part["usage"] = self._usage_so_far() if self._request.usage_so_far else None
        return event(part, self._place())

    def _place(self) -> str | None:
        """The reader's place after everything sent so far, this event included."""
        told = ("" if choice.place is None else str(choice.place) for choice in self._choices)
        return ",".join(told) if self._resumable else None

    def _choice(self, index: int, content: Json, told: Json | None, reason: str | None, more: Json | None) -> Json:
        choice = {"index": index, **content, "logprobs": told, "finish_reason": reason}
        return choice if more is None else {**choice, "specwire": more}

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, **self._model, "choices": choices}

    def _usage(self) -> Json:
        template = self._request.template
        predicted = template.WhichOneof("prediction") is not None or len(template.references) > 0
        return usage_of(self.stats, self._request.n, predicted)

    def _usage_so_far(self) -> Json:
        prompts = sum(choice.prompt_tokens for choice in self._choices[:: self._request.n])
        return counts(prompts, sum(choice.decided for choice in self._choices))

    @property
    def stats(self) -> list[pb.Stats]:
        """Of each choice; empty ones before it has ended."""
        return [choice.stats for choice in self._choices]


def _check_goes_on(place: StreamPlace) -> None:
    """Refuse a place behind the end where more text follows: its reader cannot have seen the end there."""
    if place.stage > Stage.GOING:
        raise StatusError(grpc.StatusCode.DATA_LOSS, f"{FIELD}: the text goes on behind {place.position}")


def _details(chunk: Emit) -> Json:
    outcomes = [outcome.name.lower() for outcome in chunk.outcomes]
    return {"position": chunk.position, "tokens": chunk.tokens, "outcomes": outcomes, "text_ends": chunk.text_ends}


def figures(message: Message) -> Json:
    """A message of numbers and texts as JSON; unlike protobuf's own, 64-bit numbers stay numbers."""
    return {known.name: _plain(getattr(message, known.name)) for known in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return figures(value)
    return value if isinstance(value, int | float | str) else [_plain(each) for each in value]
