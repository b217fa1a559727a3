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
from orchestrator.api.calls import cancel, delete, merged, read_again, runs
from orchestrator.chat.fields import Fields, check_count, shown
from orchestrator.chat.models import ChatModel, demand
from orchestrator.chat.talk import take_reasoning, take_talk
from orchestrator.http.endpoint import Call, HttpService
from orchestrator.http.errors import INVALID, Failure, failure_of, naming
from orchestrator.http.openai.answers import DONE, FAILURES, Events, EventStream, usage_of
from orchestrator.http.openai.completions import begun
from orchestrator.http.openai.requests import take_chat, take_length
from orchestrator.http.openai.response_items import (
    OutputItems,
    flat_name,
    functions_of,
    items_of,
    messages_of,
    served_tools,
)
from orchestrator.session.output import SessionView
from orchestrator.session.stats import stats_of
from orchestrator.sessions import END_LIMIT_S
from orchestrator.store import SessionRecord, StoredSession
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import Emit, EmitEnd, FinishReason, Outcome
from specwire.rpc.errors import StatusError
from specwire.telemetry.tracing import TRACEPARENT
from specwire.text.output import OutputText
from specwire.text.tool_calls.formats import ChatFamily
from specwire.text.tool_calls.parser import OutputParser
from specwire.text.tool_calls.readers import ToolFunction
from specwire.v1 import generation_pb2 as pb

Json = dict[str, Any]

PREFIX = "resp_"
# What goes through of a stored answer, for each token; of an item, beside its text.
TOKEN_BYTES, ITEM_BYTES = 16, 64
VERSION = 1
# Fields that mean here what they mean for a chat.
SHARED = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream", "parallel_tool_calls", "user"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "service_tier"),
    *("timeout", "priority", "rule", "drafting", "specwire", "private", "ignore_eos", "min_tokens"),
    *("chat_template_kwargs", "presence_penalty", "frequency_penalty"),
)
# What `include` may ask for: of tools that nobody calls here, of images, and reasoning that only its maker can read,
# where ours is text.
INCLUDED = (
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results"),
    *("message.input_image.image_url", "reasoning.encrypted_content"),
    *("web_search_call.action.sources", "web_search_call.results"),
)
# Fields that a response repeats, with what holds where a request has none.
DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key")),
}
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
    None: "in_progress",
    FinishReason.EOS: "completed",
    FinishReason.STOP_ID: "completed",
    FinishReason.STOP_STRING: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.CANCELLED: "cancelled",
}
FAILED = "the request's timeout has passed"
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
        known = functions_of(self.shown["tools"])
        tools = {flat_name(namespace, each["name"]): each.get("parameters") or {} for namespace, each in known}
        return [ToolFunction(name, tools.get(name, {})) for name in self.names]

    def namespaced(self) -> dict[str, Json]:
        """As `OutputItems` takes them."""
        return {
            flat_name(namespace, each["name"]): {"name": each["name"], "namespace": namespace}
            for namespace, each in functions_of(self.shown["tools"])
            if namespace is not None
        }


class ResponseAnswer:
    """One response as it comes, or as it is told again."""

    def __init__(self, note: ResponseNote, served: ChatModel, record: SessionRecord) -> None:
        self.session_id = record.session_id
        self.reason: FinishReason | None = None
        self.message = ""
        self.stats = pb.Stats()
        self._note = note
        self._served = served
        self._created = int(record.created)
        self._ended = 0
        self._items = OutputItems(record.session_id, note.namespaced())
        self._parser = note.parser(served.family)

    def add(self, text: str) -> Iterator[Json]:
        yield from self._items.take(self._parser.feed(text))

    def finish(self, reason: FinishReason, message: str, stats: pb.Stats, ended: float) -> Iterator[Json]:
        """ended: Unix time, in seconds."""
        self.reason, self.message, self.stats, self._ended = reason, message, stats, int(ended)
        yield from self._items.take(self._parser.finish())
        yield from self._items.end(self.status == "completed")

    @property
    def status(self) -> str:
        return STATUS.get(self.reason, "failed")

    @property
    def output(self) -> list[Json]:
        return self._items.items

    def body(self) -> Json:
        status, length = self.status, self.reason == FinishReason.LENGTH
        message = FAILED if self.reason is FinishReason.DEADLINE else self.message or "the session has failed"
        return {
            "id": PREFIX + self.session_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._ended if status == "completed" else None,
            "status": status,
            "background": False,
            "error": {"code": "server_error", "message": message} if status == "failed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if length else None,
            "model": self._served.name,
            "output": self.output,
            "usage": None if status == "in_progress" else _usage(self.stats),
            "store": self._note.store,
            "truncation": "disabled",
            "service_tier": "default",
            "top_logprobs": 0,
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
        with naming(NAMES):
            return await self._as_chat(call, chat, ResponseNote(items, told, store), size)

    async def _as_chat(self, call: Call, chat: Fields, note: ResponseNote, size: int) -> ASGIApp:
        """size: bytes of its items."""
        talk, request = await self._admission.aside(call.tenant, size, take_talk, chat), take_chat(chat, "")
        chat.end()
        previous = note.shown["previous_response_id"]
        if previous is not None:
            request.template.parent, request.template.whole_prompt = _session_of(previous), True
        served = await self._service.served_for(request.template, call.tenant)
        told = await served.chat(talk, self._admission.of(call.tenant, size))
        demand(request.template.sampling, told.constraint, told.form.thinking)
        note = replace(note, names=[each.name for each in talk.tools.functions], thinking=bool(told.form.thinking))
        asked = request.for_prompt(told.text)
        asked.note = await self._admission.aside(call.tenant, size, str, note)
        seeds = await self._service.handler.seeds.of(request.template, call.tenant)
        more: dict[str, Any] = {"traceparent": call.headers.get(TRACEPARENT, ""), "target": served.target}
        events: Events = merged([self._service.handler.generate(asked, call.tenant, request.timeout, seeds[0], **more)])
        events = events if note.store else self._forgotten(events)
        if request.stream:
            begins, leave = await begun(events, self._quiet)
            return EventStream(self._stream(begins, note, served), self._quiet, leave)
        return await self._whole(events, note, served)

    async def _whole(self, events: Events, note: ResponseNote, served: ChatModel) -> ASGIApp:
        answer = view = None
        async with aclosing(events):
            async for _, part in events:
                if isinstance(part, SessionView):
                    view, answer = part, ResponseAnswer(note, served, part.record)
                elif answer is not None and view is not None:
                    list(_told(answer, view, part))
        if answer is None:
            raise Failure(500, "the session told nothing", "server_error")
        if answer.reason in FAILURES:
            raise StatusError(*FAILURES[answer.reason])
        return JSONResponse(answer.body())

    async def _stream(self, events: Events, note: ResponseNote, served: ChatModel) -> AsyncGenerator[bytes, None]:
        """Typed events, each with its number. Behind a failure's comes the response as it failed."""
        number, answer, view = 0, None, None

        def sent(told: Json) -> bytes:
            nonlocal number
            number += 1
            data = json.dumps({**told, "sequence_number": number - 1})
            return f"event: {told['type']}\ndata: {data}\n\n".encode()

        try:
            async with aclosing(events):
                async for _, part in events:
                    if isinstance(part, SessionView):
                        view, answer = part, ResponseAnswer(note, served, part.record)
                        for kind in ("response.created", "response.in_progress"):
                            yield sent({"type": kind, "response": answer.body()})
                    elif answer is not None and view is not None:
                        for told in _told(answer, view, part):
                            yield sent(told)
        except Exception as error:
            failure = failure_of(error)
            told = {"code": failure.code, "message": failure.message, "param": failure.param}
            # OpenAI's events have these themselves, those of Open Responses in an object: its clients know both.
            yield sent({"type": "error", **told, **failure.body()})
            if answer is not None:
                for event in answer.finish(FinishReason.ERROR, failure.message, answer.stats, time.time()):
                    yield sent(event)
        if answer is not None:
            kind = LAST_EVENT.get(answer.status, "response.failed")
            yield sent({"type": kind, "response": answer.body()})
        yield DONE

    async def _forgotten(self, events: Events) -> Events:
        """The same events; once they are over, or nobody wants them, the session is deleted."""
        session_id = ""
        try:
            async with aclosing(events):
                async for index, part in events:
                    if isinstance(part, SessionView):
                        session_id = part.record.session_id
                    yield index, part
        finally:
            if session_id:
                self._service.soon(delete(self._service.orchestrator, session_id))

    async def compact(self, call: Call) -> ASGIApp:
        """OpenAI's API has this beside the paths of responses, whose method it would be refused for."""
        raise Failure(404, "compaction is not served: send the conversation as it is", INVALID, None, "not_found")

    # Those that are there

    async def retrieve(self, call: Call) -> ASGIApp:
        for name, value in call.query:
            if name in ("include", "include[]"):
                _check_included(Fields({"include": value}))
            elif name != "include_obfuscation" and (name, value) != ("stream", "false"):
                raise InvalidParameter(name, "is not served: a stored response is told whole")
        return await self._shown(call)

    async def _shown(self, call: Call) -> ASGIApp:
        stored, note, size = await self._read(call.path["response"], call.tenant, "response_id")
        answer = await self._told_again(stored, note, call.tenant, size)
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
        return await self._shown(call)

    async def delete(self, call: Call) -> ASGIApp:
        stored, _, _ = await self._read(call.path["response"], call.tenant, "response_id", charged=False)
        session_id = stored.record.session_id
        await delete(self._service.orchestrator, session_id)
        return JSONResponse({"id": PREFIX + session_id, "object": "response", "deleted": True})

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
        answer = ResponseAnswer(note, served, record)
        tokenizer = orchestrator.pool.models.tokenizer_of(record)
        text = OutputText(tokenizer, record.stop, record.stopping.min_tokens)
        driver = orchestrator.sessions.get(record.session_id)
        known = stats_of(driver.view.stats, len(record.prompt)) if driver is not None else _counted(stored)
        ended = (driver.view.ended_at if driver is not None else 0.0) or stored.ended or 0.0
        await self._admission.aside(tenant, size, _tell_again, answer, stored, text, known, ended)
        return answer


def _told(answer: ResponseAnswer, view: SessionView, part: object) -> Iterator[Json]:
    match part:
        case Emit():
            yield from answer.add(part.text)
        case EmitEnd():
            yield from answer.add(part.text)
            stats = stats_of(view.stats, len(view.record.prompt))
            yield from answer.finish(part.end.reason, part.end.message, stats, view.ended_at or time.time())


def _tell_again(answer: ResponseAnswer, stored: StoredSession, text: OutputText, known: pb.Stats, ended: float) -> None:
    list(answer.add(text.push(stored.tokens).text))
    if stored.reason is not None:
        list(answer.add(text.finish()))
        list(answer.finish(stored.reason, "", known, ended))


def _text_bytes(item: Json) -> int:
    """About as many as it is told in."""
    texts = (item.get("content"), item.get("output"), item.get("arguments"))
    return ITEM_BYTES + sum(len(each) if isinstance(each, str) else ITEM_BYTES for each in texts)


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
    tools, choice = served_tools(fields.take("tools")), fields.take("tool_choice")
    most, text, reasoning = take_length(fields, "max_output_tokens"), _text(fields), take_reasoning(fields)
    most_calls = fields.whole("max_tool_calls", least=1)  # of tools that the server runs: there are none
    fields.choice("truncation", ("auto", "disabled"))  # what is too long is refused
    fields.fixed("background", False)
    fields.fixed("top_logprobs", 0)
    fields.inner("client_metadata")  # without effect
    _check_included(fields)
    _stream_options(fields)
    shared = {name: fields.take(name) for name in SHARED if name in fields.names()}
    chat = {
        **shared,
        "messages": messages_of(items, instructions),
        "tools": tools.chat,
        "tool_choice": tools.choice(choice),
        "max_completion_tokens": most,
        "response_format": _chat_format(text["format"]),
        "reasoning_effort": reasoning["effort"],
    }
    told = {
        "instructions": instructions,
        "metadata": {name: metadata.text(name) for name in metadata.names()} if metadata is not None else {},
        "tools": tools.told,
        "tool_choice": choice or "auto",
        "parallel_tool_calls": shared.get("parallel_tool_calls", True),
        "max_output_tokens": most,
        "max_tool_calls": most_calls,
        **{name: shared.get(name, value) for name, value in DEFAULTS.items()},
        "text": text,
        "reasoning": reasoning,
    }
    return Fields(chat), told


def _check_included(fields: Fields) -> None:
    for name in fields.texts("include", MOST_ITEMS):
        if name not in INCLUDED:
            raise InvalidParameter("include", f"{shown(name)} is not served")


def _stream_options(fields: Fields) -> None:
    options = fields.inner("stream_options")
    if options is not None:
        options.flag("include_obfuscation")  # nothing is added to hide lengths
        options.end()


def _text(fields: Fields) -> Json:
    """`text`, as a response has it."""
    inner = fields.inner("text") or Fields({})
    form, verbosity = inner.take("format"), inner.text("verbosity")  # the latter without effect
    inner.end()
    if form is not None and not isinstance(form, dict):
        raise InvalidParameter("text.format", f"must be an object, not {shown(form)}")
    return {"format": form or {"type": "text"}, **({"verbosity": verbosity} if verbosity else {})}


def _chat_format(form: Json) -> Json:
    """As a chat's `response_format`."""
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: each for name, each in form.items() if name != "type"}}


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
