"""/v1/responses: OpenAI's Responses API. A response is a session; its log is what is stored.

The session's note holds what was asked for and all items before the answer, so a response can be told again, and a
next one can follow it, at every orchestrator with the same log and for as long as that keeps the session.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from orchestrator.admission import MOST_ITEMS
from orchestrator.api.calls import merged
from orchestrator.api.existing_sessions import cancel, delete, read_again, runs
from orchestrator.chat.answer import demand
from orchestrator.chat.fields import Fields, shown
from orchestrator.chat.messages import check_count
from orchestrator.chat.talk import take_talk
from orchestrator.http.endpoint import Call, HttpService, Served
from orchestrator.http.errors import INVALID, Failure, failure_of
from orchestrator.http.openai.answers import FAILURES, Events, EventStream
from orchestrator.http.openai.completions import begun
from orchestrator.http.openai.requests import take_chat
from orchestrator.http.openai.response_items import OutputItems, chat_choice, chat_tools, items_of, messages_of
from orchestrator.http.openai.usage import usage_of
from orchestrator.session.stats import stats_of
from orchestrator.sessions import END_LIMIT_S
from orchestrator.store import StoredSession
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import Outcome
from specwire.rpc import convert
from specwire.rpc.errors import StatusError
from specwire.telemetry.tracing import TRACEPARENT
from specwire.text import OutputText
from specwire.text.tool_calls.formats import ChatFamily
from specwire.text.tool_calls.parser import OutputParser
from specwire.text.tool_calls.readers import ToolFunction
from specwire.v1 import common_pb2
from specwire.v1 import generation_pb2 as pb

Json = dict[str, Any]

PREFIX = "resp_"
# What goes through of a stored answer, for each token; of an item, beside its text.
TOKEN_BYTES, ITEM_BYTES = 16, 64
VERSION = 1
# Fields that mean here what they mean for a chat.
SHARED = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream", "parallel_tool_calls", "user"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "timeout", "priority"),
    *("rule", "drafting", "specwire", "private", "ignore_eos", "min_tokens", "chat_template_kwargs"),
)
# What a chat's request calls some of a response's fields.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "parent": "previous_response_id",
}
STATUS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: "in_progress",
    common_pb2.FINISH_REASON_EOS: "completed",
    common_pb2.FINISH_REASON_STOP_ID: "completed",
    common_pb2.FINISH_REASON_STOP_STRING: "completed",
    common_pb2.FINISH_REASON_LENGTH: "incomplete",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}
FAILED = {common_pb2.FINISH_REASON_DEADLINE: "the request's timeout has passed"}
LAST_EVENT = {"completed": "response.completed", "incomplete": "response.incomplete"}


@dataclass(frozen=True, slots=True)
class ResponseNote:
    """What a response's session keeps of its request.

    items: of the whole conversation up to the answer, those of this request last. shown: what the response repeats.
    names: of the functions that may be called. thinking: as of `OutputParser`.
    """

    items: list[Json]
    shown: Json
    store: bool
    names: list[str] = field(default_factory=list)
    thinking: bool = False

    @classmethod
    def read(cls, text: str) -> ResponseNote | None:
        """None where the session was begun by another call than this API's."""
        try:
            found = json.loads(text) if text else {}
            if found.get("response") != VERSION:
                return None
            return cls(found["items"], found["shown"], found["store"], found["names"], found["thinking"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def __str__(self) -> str:
        kept = {"items": self.items, "shown": self.shown, "store": self.store, "names": self.names}
        return json.dumps({"response": VERSION, **kept, "thinking": self.thinking})

    def parser(self, family: ChatFamily) -> OutputParser:
        form, thinking = family.format if self.names else None, self.thinking if family.thinks else None
        return OutputParser(form, self._functions(), thinking)

    def _functions(self) -> list[ToolFunction]:
        """Those that may be called, with their parameters as the response repeats them."""
        tools = {each["name"]: each.get("parameters") or {} for each in self.shown["tools"]}
        return [ToolFunction(name, tools.get(name, {})) for name in self.names]


class ResponseAnswer:
    """One response as it comes, or as it is told again."""

    def __init__(self, note: ResponseNote, served: Served, session_id: str, created: float) -> None:
        self.session_id = session_id
        self.reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED
        self.message = ""
        self.stats = pb.Stats()
        self._note = note
        self._served = served
        self._created = int(created)
        self._items = OutputItems(session_id)
        self._parser = note.parser(served.family)

    def add(self, text: str) -> Iterator[Json]:
        yield from self._items.take(self._parser.feed(text))

    def finish(self, reason: common_pb2.FinishReason, message: str, stats: pb.Stats) -> Iterator[Json]:
        self.reason, self.message, self.stats = reason, message, stats
        yield from self._items.take(self._parser.finish())
        yield from self._items.end(self.status == "completed")

    @property
    def status(self) -> str:
        return STATUS.get(self.reason, "failed")

    @property
    def output(self) -> list[Json]:
        return self._items.items

    def body(self) -> Json:
        status, length = self.status, self.reason == common_pb2.FINISH_REASON_LENGTH
        message = FAILED.get(self.reason, self.message or "the session has failed")
        return {
            "id": PREFIX + self.session_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": {"code": "server_error", "message": message} if status == "failed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if length else None,
            "model": self._served.name,
            "output": self.output,
            "usage": None if status == "in_progress" else _usage(self.stats),
            "store": self._note.store,
            "truncation": "disabled",
            **self._note.shown,
        }

    def written(self) -> bytes:
        """As JSON."""
        return json.dumps(self.body(), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _usage(stats: pb.Stats) -> Json:
    told = usage_of([stats], 1, predicted=False)
    return {
        "input_tokens": told["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": told["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": told["total_tokens"],
        "speculative_decoding": told["speculative_decoding"],
    }


class Responses:
    """The endpoints; each takes a call and gives a response."""

    def __init__(self, service: HttpService) -> None:
        self._service = service
        self._admission = service.orchestrator.admission
        self._quiet = service.orchestrator.options.sse_keep_alive

    async def create(self, call: Call) -> ASGIApp:
        fields = await self._service.fields(call)
        previous = fields.text("previous_response_id")
        before = await self._items_before(previous, call.tenant)
        items, store = [*before, *items_of(fields.take("input"))], fields.flag("store", default=True)
        check_count("input", len(items), MOST_ITEMS)
        size = len(call.body) + sum(map(_text_bytes, before))
        chat, told = await self._admission.aside(call.tenant, size, _as_chat, fields, items)
        fields.end()
        told["previous_response_id"] = previous
        try:
            return await self._as_chat(call, chat, ResponseNote(items, told, store), size)
        except (InvalidParameter, StatusError) as error:
            failure = failure_of(error)
            name, dot, rest = (failure.param or "").partition(".")
            failure.param = (NAMES.get(name, name) + dot + rest) or None
            raise failure from None

    async def _as_chat(self, call: Call, chat: Fields, note: ResponseNote, size: int) -> ASGIApp:
        """size: bytes of its items."""
        talk, request = await self._admission.aside(call.tenant, size, take_talk, chat), take_chat(chat, "")
        chat.end()
        previous = note.shown["previous_response_id"]
        if previous is not None:
            request.template.parent, request.template.whole_prompt = _session_of(previous), True
        served = await self._service.served_for(request.template, call.tenant)
        prompt = await self._service.prompt(served, talk, self._admission.of(call.tenant, size))
        thinking = talk.opens_thought(prompt, served.family)
        demand(request.template.sampling, await talk.tools.constraint(served.family, thinking), thinking)
        note = replace(note, names=[each.name for each in talk.tools.functions], thinking=thinking)
        asked = request.for_prompt(prompt)
        asked.note = await self._admission.aside(call.tenant, size, str, note)
        seeds = await self._service.handler.seeds.of(request.template, call.tenant)
        more: dict[str, Any] = {"traceparent": call.headers.get(TRACEPARENT, ""), "target": served.target}
        events: Events = merged([self._service.handler.generate(asked, call.tenant, request.timeout, seeds[0], **more)])
        events = events if note.store else self._forgotten(events)
        if request.stream:
            begins, leave = await begun(events, self._quiet)
            return EventStream(self._stream(begins, note, served), self._quiet, leave)
        return await self._whole(events, note, served)

    async def _whole(self, events: Events, note: ResponseNote, served: Served) -> ASGIApp:
        answer: ResponseAnswer | None = None
        async with aclosing(events):
            async for _, part in events:
                if isinstance(part, pb.Started):
                    answer = self._begun(note, served, part)
                elif answer is not None:
                    list(_told(answer, part))
        if answer is None:
            raise Failure(500, "the session told nothing", "server_error")
        if answer.reason in FAILURES:
            raise StatusError(*FAILURES[answer.reason])
        return JSONResponse(answer.body())

    async def _stream(self, events: Events, note: ResponseNote, served: Served) -> AsyncGenerator[bytes, None]:
        """Typed events, each with its number. A failure is the last one."""
        number, answer = 0, None

        def sent(told: Json) -> bytes:
            nonlocal number
            number += 1
            data = json.dumps({**told, "sequence_number": number - 1})
            return f"event: {told['type']}\ndata: {data}\n\n".encode()

        try:
            async with aclosing(events):
                async for _, part in events:
                    if isinstance(part, pb.Started):
                        answer = self._begun(note, served, part)
                        for kind in ("response.created", "response.in_progress"):
                            yield sent({"type": kind, "response": answer.body()})
                    elif answer is not None:
                        for told in _told(answer, part):
                            yield sent(told)
            if answer is not None:
                kind = LAST_EVENT.get(answer.status, "response.failed")
                yield sent({"type": kind, "response": answer.body()})
        except Exception as error:
            failure = failure_of(error)
            yield sent({"type": "error", "code": failure.code, "message": failure.message, "param": failure.param})

    def _begun(self, note: ResponseNote, served: Served, started: pb.Started) -> ResponseAnswer:
        driver = self._service.orchestrator.sessions.get(started.session_id)
        created = time.time() if driver is None else driver.view.record.created
        return ResponseAnswer(note, served, started.session_id, created)

    async def _forgotten(self, events: Events) -> Events:
        """The same events; once they are over, or nobody wants them, the session is deleted."""
        session_id = ""
        try:
            async with aclosing(events):
                async for index, part in events:
                    if isinstance(part, pb.Started):
                        session_id = part.session_id
                    yield index, part
        finally:
            if session_id:
                self._service.soon(delete(self._service.orchestrator, session_id))

    # Those that are there

    async def retrieve(self, call: Call) -> ASGIApp:
        for name in call.query:
            if name not in ("include_obfuscation",):
                raise InvalidParameter(name, "is not served: a stored response is told whole")
        return await self._shown(call, *await self._stored(call))

    async def _shown(self, call: Call, answer: ResponseAnswer, size: int) -> ASGIApp:
        return Response(await self._admission.aside(call.tenant, size, answer.written), media_type="application/json")

    async def cancel(self, call: Call) -> ASGIApp:
        """One that is over stays as it is."""
        orchestrator, field = self._service.orchestrator, "response_id"
        with _not_found(call.path["response"], field):
            running = await runs(orchestrator, _session_of(call.path["response"]), call.tenant, field)
        if running:
            stored, _, _ = await self._read(call.path["response"], call.tenant, field, charged=False)
            session_id = stored.record.session_id
            await cancel(orchestrator, session_id)
            driver = orchestrator.sessions.get(session_id)
            if driver is not None:
                await driver.view.ended(END_LIMIT_S)
        return await self._shown(call, *await self._stored(call))

    async def delete(self, call: Call) -> ASGIApp:
        stored, _, _ = await self._read(call.path["response"], call.tenant, "response_id", charged=False)
        session_id = stored.record.session_id
        await delete(self._service.orchestrator, session_id)
        return JSONResponse({"id": PREFIX + session_id, "object": "response", "deleted": True})

    async def _stored(self, call: Call) -> tuple[ResponseAnswer, int]:
        """The response, and how many bytes it goes through."""
        stored, note, size = await self._read(call.path["response"], call.tenant, "response_id")
        return await self._told_again(stored, note, call.tenant, size), size

    async def _items_before(self, previous: str | None, tenant: str) -> list[Json]:
        """The conversation that a response ends with."""
        if previous is None:
            return []
        stored, note, size = await self._read(previous, tenant, "previous_response_id")
        if stored.reason is None:
            message = f"previous_response_id: {previous!r} is still in progress"
            raise Failure(400, message, INVALID, "previous_response_id", "failed_precondition")
        return [*note.items, *(await self._told_again(stored, note, tenant, size)).output]

    async def _read(
        self, response: str, tenant: str, field: str, charged: bool = True
    ) -> tuple[StoredSession, ResponseNote, int]:
        """What is stored, and how many bytes that is. charged: its tenant is charged for them.

        Raises:
            Failure: 404, there is none, its log is gone, or it was not to be stored.
            StatusError: RESOURCE_EXHAUSTED, the tenant has no tokens left.
        """
        with _not_found(response, field):
            stored = await read_again(self._service.orchestrator, _session_of(response), tenant, field, charged)
        size = len(stored.record.note) + TOKEN_BYTES * len(stored.tokens)
        note = await self._admission.aside(tenant, size, ResponseNote.read, stored.record.note)
        if note is None or not note.store:
            raise _missing(response, field)
        return stored, note, size

    async def _told_again(self, stored: StoredSession, note: ResponseNote, tenant: str, size: int) -> ResponseAnswer:
        record, orchestrator = stored.record, self._service.orchestrator
        served = self._service.served(orchestrator.pool.models.name_of(record))
        answer = ResponseAnswer(note, served, record.session_id, record.created)
        tokenizer = orchestrator.pool.models.tokenizer_of(record)
        text = OutputText(tokenizer, record.stop, record.stopping.min_tokens)
        driver = orchestrator.sessions.get(record.session_id)
        known = stats_of(driver.view.stats, len(record.prompt)) if driver is not None else _counted(stored)
        await self._admission.aside(tenant, size, _tell_again, answer, stored, text, known)
        return answer


def _tell_again(answer: ResponseAnswer, stored: StoredSession, text: OutputText, known: pb.Stats) -> None:
    list(answer.add(text.push(stored.tokens).text))
    if stored.reason is not None:
        list(answer.add(text.finish()))
        list(answer.finish(convert.reason_to_wire(stored.reason), "", known))


def _text_bytes(item: Json) -> int:
    """About as many as it is told in."""
    texts = (item.get("content"), item.get("output"), item.get("arguments"))
    return ITEM_BYTES + sum(len(each) if isinstance(each, str) else ITEM_BYTES for each in texts)


def _told(answer: ResponseAnswer, part: object) -> Iterator[Json]:
    match part:
        case pb.Chunk():
            yield from answer.add(part.text)
        case pb.Finished():
            yield from answer.add(part.text)
            yield from answer.finish(part.reason, part.message, part.stats)


def _counted(stored: StoredSession) -> pb.Stats:
    """What the log tells: tokens and how they were decided, not by whose guesses."""
    count = stored.outcomes.count
    accepted, recovered = count(Outcome.ACCEPTED), count(Outcome.RECOVERED)
    return pb.Stats(
        prompt_tokens=len(stored.record.prompt),
        output_tokens=len(stored.tokens),
        proposed=accepted + recovered,
        tested=accepted + recovered,
        accepted=accepted,
        target_forwards=len(stored.tokens) - accepted,
    )


def _session_of(response: str) -> str:
    return response.removeprefix(PREFIX)


def _as_chat(fields: Fields, items: list[Json]) -> tuple[Fields, Json]:
    """The request as a chat's, and what a response repeats of it. InvalidParameter names what is not served."""
    instructions, metadata = fields.text("instructions"), fields.inner("metadata")
    tools, choice = fields.take("tools"), fields.take("tool_choice")
    most, form, effort = fields.whole("max_output_tokens", least=1), _text_format(fields), _effort(fields)
    fields.fixed("truncation", "disabled")
    fields.fixed("background", False)
    fields.fixed("include", [])
    fields.fixed("top_logprobs", 0)
    options = fields.inner("stream_options")
    if options is not None:
        options.flag("include_obfuscation")  # nothing is added to hide lengths
        options.end()
    shared = {name: fields.take(name) for name in SHARED if name in fields.names()}
    chat = {
        **shared,
        "messages": messages_of(items, instructions),
        "tools": chat_tools(tools),
        "tool_choice": chat_choice(choice),
        "max_completion_tokens": most,
        "response_format": _chat_format(form),
        "reasoning_effort": effort,
    }
    told = {
        "instructions": instructions,
        "metadata": {name: metadata.text(name) for name in metadata.names()} if metadata is not None else {},
        "tools": tools or [],
        "tool_choice": choice or "auto",
        "parallel_tool_calls": shared.get("parallel_tool_calls", True),
        "max_output_tokens": most,
        "temperature": shared.get("temperature", 1.0),
        "top_p": shared.get("top_p", 1.0),
        "text": {"format": form},
        "reasoning": {"effort": effort, "summary": None},
        "user": shared.get("user"),
    }
    return Fields(chat), told


def _text_format(fields: Fields) -> Json:
    """`text.format`, as a response has it."""
    inner = fields.inner("text")
    if inner is None:
        return {"type": "text"}
    form = inner.take("format")
    inner.text("verbosity")  # without effect
    inner.end()
    if form is not None and not isinstance(form, dict):
        raise InvalidParameter("text.format", f"must be an object, not {shown(form)}")
    return form or {"type": "text"}


def _chat_format(form: Json) -> Json:
    """As a chat's `response_format`."""
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: each for name, each in form.items() if name != "type"}}


def _effort(fields: Fields) -> str | None:
    inner = fields.inner("reasoning")
    if inner is None:
        return None
    effort = inner.text("effort")
    inner.end()
    return effort


def _missing(response: str, field: str) -> Failure:
    return Failure(404, f"{field}: no response {shown(response)}", INVALID, field, "not_found")


@contextmanager
def _not_found(response: str, field: str) -> Iterator[None]:
    """What is no session is no response."""
    try:
        yield
    except StatusError as error:
        if error.code is grpc.StatusCode.NOT_FOUND:
            raise _missing(response, field) from None
        raise
