"""/v1/completions and /v1/chat/completions: begun as gRPC's Generate begins sessions, answered as OpenAI's API does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from orchestrator.admission import MOST_REQUEST_ID
from orchestrator.api.calls import merged
from orchestrator.api.requests import check_copies, check_size, checked_request_id, single_requests
from orchestrator.api.scores import PromptScorer, PromptScores
from orchestrator.chat.fields import check_count, is_ids, shown
from orchestrator.chat.models import ChatModel, demand
from orchestrator.chat.talk import take_talk
from orchestrator.http.endpoint import Call, HttpService
from orchestrator.http.errors import naming
from orchestrator.http.openai.answers import (
    FIELD,
    Answer,
    ChatShape,
    CompletionShape,
    Events,
    EventStream,
    Leave,
    ParsedChatShape,
    StreamPlace,
    Told,
    places_of,
)
from orchestrator.http.openai.requests import MOST_CHOICES, CompletionRequest, take_chat, take_completion
from orchestrator.session.output import SessionView
from specwire.core.invalid import InvalidParameter
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
        talk = await call.aside(take_talk, fields)
        request = take_chat(fields, call.headers.get(REQUEST_ID, ""))
        fields.end()
        served = await self._service.served_for(request.template, call.tenant)
        chat = await served.chat(talk, call.aside)
        demand(request.template.sampling, chat.constraint, chat.form.thinking)
        shape = ChatShape() if chat.form.plain else ParsedChatShape(chat.form)
        asked = {"prompt": "messages"} | ({"max_tokens": "max_completion_tokens"} if newer else {})
        if chat.constraint is not None:
            asked[chat.constraint.kind] = "tools"
        with naming(asked):
            return await self._answer(call, shape, request, served, [chat.text])

    async def complete(self, call: Call) -> ASGIApp:
        fields = await self._service.fields(call)
        prompts = await call.aside(prompts_of, fields.take("prompt"))
        lengths = self._service.orchestrator.options.lengths
        request = take_completion(fields, call.headers.get(REQUEST_ID, ""), lengths.default)
        fields.end()
        served = await self._service.served_for(request.template, call.tenant)
        return await self._answer(call, CompletionShape(), request, served, prompts)

    async def _answer(
        self,
        call: Call,
        shape: CompletionShape,
        request: CompletionRequest,
        served: ChatModel,
        prompts: Sequence[Prompt],
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
            begins, leave = await begun(events, self._quiet, request.scores_only)
            return EventStream(answer.stream(begins), self._quiet, leave)
        written = await answer.whole(events)
        return Response(written, media_type="application/json")

    async def _scored(
        self,
        call: Call,
        request: CompletionRequest,
        requests: Sequence[pb.GenerateRequest],
        served: ChatModel,
        generated: Callable[[float | None], Events],
    ) -> Events:
        """The prompts' scores, for each of their sessions; then what the sessions say, in the time that is left.

        requests: those of one prompt side by side. One prompt at a time: each needs a verifier's slot.
        """
        clock = asyncio.get_running_loop().time
        until = None if request.timeout is None else clock() + request.timeout
        for first, after in pairwise(range(0, len(requests) + 1, request.n)):
            left = None if until is None else until - clock()
            asked = requests[first], served.target, call.tenant, request.scored, left
            scores = await self._scorer.score(*asked, request_id=request.request_id)
            for index in range(first, after):
                yield index, scores
        if request.scores_only:
            return
        async with aclosing(generated(None if until is None else max(0.0, until - clock()))) as events:
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
    """The sessions' requests, those of one prompt side by side.

    An id stands for one session: where the request has one, each of several has its own. A long one's digest stands for
    it, so that there is room for the number.
    """
    if len(prompts) * request.n > MOST_CHOICES:
        message = f"{len(prompts)} prompts with {request.n} choices each make more than {MOST_CHOICES}"
        raise InvalidParameter("prompt" if request.n == 1 else "n", message)
    check_copies(request.template, len(prompts) * request.n)
    requests = [each for prompt in prompts for each in single_requests(request.for_prompt(prompt))]
    stem = request_id = checked_request_id(request.template.request_id)
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
    return places_of(shown_id, sessions)


def _echo(request: pb.GenerateRequest, served: ChatModel) -> str:
    if request.WhichOneof("prompt") == "text":
        return request.text
    return str(served.target.tokenizer.decode(list(request.tokens.ids), skip_special_tokens=True))


async def begun(events: Events, patience: float, scores_only: bool = False) -> tuple[Events, Leave]:
    """The same events, held back until one is more than a session's start: so an early refusal still has a status.
    Where there are scores alone, the first prompt's are.

    The caller must call the function that comes with them at the end, because events that were never read cannot close
    their source. After `patience` seconds the answer begins anyway, so that the caller sees that the request has
    arrived.
    """
    head: list[tuple[int, Told]] = []

    async def begin() -> None:
        async for each in events:
            head.append(each)
            if scores_only or not isinstance(each[1], SessionView | PromptScores):
                break

    first = asyncio.ensure_future(begin())

    async def leave() -> None:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()

    try:
        await asyncio.wait({first}, timeout=patience)
        if first.done():
            first.result()
    except BaseException:
        await leave()
        raise
    return _chained(head, first, events), leave


async def _chained(head: list[tuple[int, Told]], first: asyncio.Future[None], events: Events) -> Events:
    told = 0
    while told < len(head):
        yield head[told]
        told += 1
    await asyncio.wait({first})
    for each in head[told:]:
        yield each
    first.result()
    async for each in events:
        yield each
