"""/v1/completions and /v1/chat/completions: begun as gRPC's Generate begins sessions, answered as OpenAI's API does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from orchestrator.admission import MOST_REQUEST_ID
from orchestrator.api.calls import merged
from orchestrator.api.requests import check_copies, check_size, checked_request_id, single_requests
from orchestrator.api.scores import PromptScorer, PromptScores
from orchestrator.chat.answer import demand
from orchestrator.chat.fields import is_ids, shown
from orchestrator.chat.talk import check_count, take_talk
from orchestrator.http.endpoint import Call, HttpService, Served
from orchestrator.http.errors import failure_of
from orchestrator.http.openai.answers import (
    FIELD,
    Answer,
    AnswerShape,
    ChatShape,
    CompletionShape,
    Events,
    EventStream,
    Leave,
    ParsedChatShape,
    StreamPlace,
    Told,
)
from orchestrator.http.openai.answers import parse as parse_places
from orchestrator.http.openai.prompts import scored
from orchestrator.http.openai.requests import MOST_CHOICES, CompletionRequest, take_chat, take_completion
from specwire.core.invalid import InvalidParameter
from specwire.rpc.errors import StatusError
from specwire.telemetry.tracing import TRACEPARENT
from specwire.v1 import generation_pb2 as pb

REQUEST_ID = "x-specwire-request-id"
LAST_EVENT_ID = "last-event-id"
# Between a request's id and the number of one of its sessions: nothing that a header can hold.
BETWEEN = "\x1f"

Prompt = str | list[int]


class Completions:
    """The endpoints; each takes a call and gives a response."""

    def __init__(self, service: HttpService) -> None:
        self._service = service
        self._scorer = PromptScorer(service.orchestrator)
        self._quiet = service.orchestrator.options.sse_keep_alive

    async def chat(self, call: Call) -> ASGIApp:
        fields = await self._service.fields(call)
        newer = "max_completion_tokens" in fields.names()
        aside = self._service.orchestrator.admission.of(call.tenant, len(call.body))
        talk = await aside(take_talk, fields)
        request = take_chat(fields, call.headers.get(REQUEST_ID, ""))
        fields.end()
        served = await self._service.served_for(request.template, call.tenant)
        chat = await self._service.chat(served, talk, aside)
        demand(request.template.sampling, chat.constraint, chat.form.thinking)
        shape = ChatShape() if chat.form.plain else ParsedChatShape(chat.form)
        try:
            return await self._answer(call, shape, request, served, [chat.text])
        except (InvalidParameter, StatusError) as error:
            failure, asked = failure_of(error), {"prompt": "messages"}
            if newer:
                asked["max_tokens"] = "max_completion_tokens"
            if chat.constraint is not None:
                asked[chat.constraint.kind] = "tools"
            failure.param = asked.get(failure.param or "", failure.param)  # what the session's own was made of
            raise failure from None

    async def complete(self, call: Call) -> ASGIApp:
        fields = await self._service.fields(call)
        aside = self._service.orchestrator.admission.of(call.tenant, len(call.body))
        prompts = await aside(prompts_of, fields.take("prompt"))
        lengths = self._service.orchestrator.options.lengths
        request = take_completion(fields, call.headers.get(REQUEST_ID, ""), lengths.default)
        fields.end()
        served = await self._service.served_for(request.template, call.tenant)
        return await self._answer(call, CompletionShape(), request, served, prompts)

    async def _answer(
        self, call: Call, shape: AnswerShape, request: CompletionRequest, served: Served, prompts: Sequence[Prompt]
    ) -> ASGIApp:
        for prompt in prompts:  # before it is copied for each of its sessions
            check_size(prompt, served.target, room=0 if request.scores_only else 1)
        requests = sessions_of(request, prompts)
        places = _places(call, request, len(requests), shape.resumable)
        handler, parent = self._service.handler, call.headers.get(TRACEPARENT, "")
        reached = [None if place is None else place.reached for place in places]
        seeds = await handler.seeds.of(request.template, call.tenant, len(prompts))
        asked = list(zip(requests, [seed for seed in seeds for _ in range(request.n)], reached, strict=True))

        def generated(left: float | None) -> Events:
            """left: seconds for everything, None for no limit."""
            more: dict[str, Any] = {"traceparent": parent, "target": served.target}
            return merged([handler.generate(each, call.tenant, left, seed, at, **more) for each, seed, at in asked])

        if request.scores_only or request.scored is not None:
            events = self._scored(call, request, requests, served, generated)
        else:
            events = generated(request.timeout)
        echoed = [_echo(each, served) if request.echo else "" for each in requests]
        aside = partial(self._service.orchestrator.admission.aside, call.tenant)
        answer = Answer(shape, request, served, echoed, aside, places)
        if request.stream:
            begins, leave = await begun(events, self._quiet)
            return EventStream(answer.stream(begins), self._quiet, leave)
        written = await answer.whole(events)
        return Response(written, media_type="application/json")

    async def _scored(
        self,
        call: Call,
        request: CompletionRequest,
        requests: Sequence[pb.GenerateRequest],
        served: Served,
        generated: Callable[[float | None], Events],
    ) -> Events:
        """The prompts' scores, then what the sessions say, in the time that is left."""
        clock = asyncio.get_running_loop().time
        began = clock()
        async with aclosing(scored(self._scorer, request, requests, call.tenant, served)) as scores:
            async for each in scores:
                yield each
        if request.scores_only:
            return
        left = None if request.timeout is None else max(0.0, request.timeout - (clock() - began))
        async with aclosing(generated(left)) as events:
            async for told in events:
                yield told


def prompts_of(value: object) -> list[Prompt]:
    """A string, a list of token ids, or several of either. InvalidParameter of `prompt`."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if is_ids(value):
            return [value]
        check_count("prompt", len(value), MOST_CHOICES)
        if all(isinstance(each, str) or (is_ids(each) and each) for each in value):
            return list(value)
    message = f"must be a string, a list of token ids, or a list of such, and not empty; not {shown(value)}"
    raise InvalidParameter("prompt", message)


def sessions_of(request: CompletionRequest, prompts: Sequence[Prompt]) -> list[pb.GenerateRequest]:
    """The sessions' requests, those of one prompt side by side."""
    if len(prompts) * request.n > MOST_CHOICES:
        message = f"{len(prompts)} prompts with {request.n} choices each make more than {MOST_CHOICES}"
        raise InvalidParameter("prompt" if request.n == 1 else "n", message)
    check_copies(request.template, len(prompts) * request.n)
    return named(
        [each for prompt in prompts for each in single_requests(request.for_prompt(prompt))],
        request.template.request_id,
    )


def named(requests: list[pb.GenerateRequest], request_id: str) -> list[pb.GenerateRequest]:
    """The requests with ids of their own, where the request has one: an id stands for one session.

    A long one's digest stands for it, so that there is room for the number. Raises InvalidParameter.
    """
    checked_request_id(request_id)
    stem = request_id
    if len(f"{stem}{BETWEEN}{MOST_CHOICES}") > MOST_REQUEST_ID:
        stem = hashlib.sha256(stem.encode()).hexdigest()
    for index, each in enumerate(requests):
        each.request_id = request_id if len(requests) == 1 or not request_id else f"{stem}{BETWEEN}{index}"
    return requests


def _places(call: Call, request: CompletionRequest, sessions: int, resumable: bool) -> list[StreamPlace | None]:
    """Where a returning caller left off in each session; only streams with a request id have places."""
    shown_id = call.headers.get(LAST_EVENT_ID)
    if shown_id is None or not request.stream:
        return [None] * sessions
    if not resumable:
        message = "is not served where tools or reasoning are told apart: repeat the request_id without it"
        raise InvalidParameter(FIELD, message)
    if not request.template.request_id:
        raise InvalidParameter(FIELD, "needs the request_id of the request that it resumes")
    return parse_places(shown_id, sessions)


def _echo(request: pb.GenerateRequest, served: Served) -> str:
    if request.WhichOneof("prompt") == "text":
        return request.text
    return str(served.target.tokenizer.decode(list(request.tokens.ids), skip_special_tokens=True))


async def begun(events: Events, patience: float) -> tuple[Events, Leave]:
    """The same events, held back until one is more than a session's start: so an early refusal still has a status.

    The caller must call the function that comes with them at the end, because events that were never read cannot close
    their source. After `patience` seconds the answer begins anyway, so that the caller sees that the request has
    arrived.
    """
    head: list[tuple[int, Told]] = []
    first = asyncio.ensure_future(_begin(events, head))
    try:
        await asyncio.wait({first}, timeout=patience)
        if first.done():
            first.result()
    except BaseException:
        await _left(first, events)
        raise
    return _chained(head, first, events), partial(_left, first, events)


async def _begin(events: Events, head: list[tuple[int, Told]]) -> None:
    async for index, part in events:
        head.append((index, part))
        if not isinstance(part, pb.Started | PromptScores):
            break


async def _left(first: asyncio.Future[None], events: Events) -> None:
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await events.aclose()


async def _chained(
    head: list[tuple[int, Told]], first: asyncio.Future[None], events: Events
) -> AsyncGenerator[tuple[int, Told], None]:
    told = 0
    while told < len(head):
        yield head[told]
        told += 1
    await first
    for each in head[told:]:
        yield each
    async for each in events:
        yield each
