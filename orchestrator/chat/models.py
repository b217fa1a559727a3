"""How the served models chat: each one's template and family, a chat's prompt, and its answer in a session's text."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.admission import Aside
from orchestrator.chat.talk import Talk
from orchestrator.chat.templates import RemoteTemplate, TemplateInvalid, installed, renderers
from orchestrator.peers.models import Target
from orchestrator.pool import Pool
from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint
from specwire.rpc.convert import constraint_to_wire
from specwire.rpc.model_info import Identity
from specwire.text.sandbox import Busy
from specwire.text.tokenizer import TokenBytes
from specwire.text.tool_calls.formats import FORMATS, THOUGHT, ChatFamily
from specwire.text.tool_calls.parser import (
    CallBegun,
    CallDelta,
    CallEnded,
    ContentDelta,
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    merged_events,
)
from specwire.text.tool_calls.readers import ToolFunction
from specwire.v1 import common_pb2
from specwire.v1 import generation_pb2 as pb

# ----------------------------------------------------------------------------------------------------------------------
# A chat's answer: what it was asked for, kept in the log with the session, and how it is told.

CALL_ID_BYTES = 12
# Characters that are read at a time: a few ms, for which other sessions wait.
PORTION = 4096


def call_id(session_id: str, index: int) -> str:
    """Id of a session's call: the same each time that the session is told again."""
    digest = hashlib.blake2b(f"{session_id}:{index}".encode(), digest_size=CALL_ID_BYTES)
    return f"call_{digest.hexdigest()}"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the text is read. form: of `FORMATS`. functions: that may be called. thinking: as of `OutputParser`."""

    form: str
    functions: tuple[ToolFunction, ...]
    thinking: bool | None

    @classmethod
    def of(cls, family: ChatFamily, talk: Talk, prompt: str) -> AnswerForm:
        """prompt: what the family's template made of the talk."""
        thinking = talk.opens_thought(prompt) if family.thinks else None
        return cls(family.format.name, talk.tools.functions, thinking)

    @classmethod
    def read(cls, text: str) -> AnswerForm | None:
        """None where the session is no chat, or one of another version."""
        try:
            found = json.loads(text) if text else {}
            functions = tuple(ToolFunction(str(name), dict(parameters)) for name, parameters in found["functions"])
            form, thinking = found["form"], found["thinking"]
        except (ValueError, KeyError, TypeError):
            return None
        return cls(form, functions, thinking) if form in FORMATS and isinstance(thinking, bool | None) else None

    def __str__(self) -> str:
        functions = [(each.name, each.parameters) for each in self.functions]
        return json.dumps({"form": self.form, "functions": functions, "thinking": self.thinking})

    @property
    def plain(self) -> bool:
        """The text is the content."""
        return not self.functions and self.thinking is None

    def parser(self) -> OutputParser:
        return OutputParser(FORMATS[self.form] if self.functions else None, self.functions, self.thinking)


def demand(sampling: common_pb2.Sampling, constraint: Constraint | None, thinking: bool | None) -> None:
    """Have the answer follow the tools' grammar, if any, or the form that was asked for; a thought is free.

    thinking: as of `OutputParser`. InvalidParameter: another form is demanded beside the grammar.
    """
    demanded = sampling.WhichOneof("constraint")
    if constraint is not None and demanded is not None:
        raise InvalidParameter(demanded, "contradicts tools that a grammar must see to: an answer has one form")
    sampling.MergeFrom(constraint_to_wire(constraint))
    if thinking and sampling.WhichOneof("constraint"):
        sampling.constraint_behind = THOUGHT


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a session is asked for. constraint: what form its tools demand of the answer, if any."""

    text: str
    constraint: Constraint | None
    form: AnswerForm


class AnswerReader:
    """One session's answer, as its text comes."""

    def __init__(self, form: AnswerForm, session_id: str) -> None:
        self._parser = form.parser()
        self._session_id = session_id

    async def feed(self, text: str) -> pb.ChatDelta | None:
        """What more of the text is; None for nothing yet."""
        return self._delta(await self._read(text))

    async def finish(self, text: str) -> pb.ChatDelta | None:
        """Likewise of its last part, and of what was withheld."""
        return self._delta([*await self._read(text), *self._parser.finish()])

    async def _read(self, text: str) -> list[OutputEvent]:
        events = self._parser.feed(text[:PORTION])
        for start in range(PORTION, len(text), PORTION):
            await asyncio.sleep(0)
            events += self._parser.feed(text[start : start + PORTION])
        return merged_events(events) if len(text) > PORTION else events

    def _delta(self, events: Sequence[OutputEvent]) -> pb.ChatDelta | None:
        reasoning: list[str] = []
        content: list[str] = []
        calls: dict[int, pb.ToolCallDelta] = {}
        for event in events:
            match event:
                case ReasoningDelta():
                    reasoning.append(event.text)
                case ContentDelta():
                    content.append(event.text)
                case CallBegun():
                    name = call_id(self._session_id, event.index)
                    calls[event.index] = pb.ToolCallDelta(index=event.index, id=name, name=event.name)
                case CallDelta():
                    calls.setdefault(event.index, pb.ToolCallDelta(index=event.index)).arguments += event.arguments
                case CallEnded():
                    call = calls.setdefault(event.index, pb.ToolCallDelta(index=event.index))
                    call.end = pb.TOOL_CALL_END_WHOLE if event.whole else pb.TOOL_CALL_END_BROKEN
                    content.append("" if event.whole else event.raw)
        if not events:
            return None
        return pb.ChatDelta(reasoning="".join(reasoning), content="".join(content), tool_calls=calls.values())


# ----------------------------------------------------------------------------------------------------------------------
# The served models, one object for each.

INSTEAD = "complete a text instead (/v1/completions), or start the service with --chat-template FILE"


class CannotChat(InvalidParameter):
    """The model has no template that could be used. code: of OpenAI's errors."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__("messages", f"{message}; {INSTEAD}")
        self.code = code


# Digits of the identity that are shown: enough to tell versions apart.
FINGERPRINT_DIGITS = 12


@dataclass(frozen=True, slots=True)
class ChatModel:
    """template: None where the model has none. family: what that tells of the model. names: of its tokens."""

    target: Target
    template: RemoteTemplate | None
    family: ChatFamily
    names: TokenBytes

    @property
    def name(self) -> str:
        return self.target.info.model

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: with another one the same seed may give another text."""
        return f"fp_{self.target.identity.digest[:FINGERPRINT_DIGITS]}"

    async def chat(self, talk: Talk, aside: Aside) -> ChatPrompt:
        """What a session is asked for. aside: of the request that the talk is of.

        Raises:
            InvalidParameter: the template refuses the talk, fails on it, or takes too long or too much memory.
            CannotChat: the model has none, or one that does not compile.
            Busy: too many wait.
        """
        if not installed():
            raise CannotChat("chats need Jinja here (pip install 'specwire[http]')", "no_chat_template")
        if self.template is None:
            raise CannotChat(f"model {self.name!r} has no chat template, so it cannot chat", "no_chat_template")
        try:
            messages, more = await aside(talk.told, self.family)
            prompt = talk.prompt(await self.template.render(messages, talk.asks, more))
        except InvalidParameter as error:
            message = str(error).removeprefix(f"{error.field}: ")
            raise InvalidParameter(error.field, f"model {self.name!r}: {message}") from None
        except TemplateInvalid as error:
            raise CannotChat(f"model {self.name!r} cannot chat: {error}", "invalid_chat_template") from None
        form = AnswerForm.of(self.family, talk, prompt)
        return ChatPrompt(prompt, await talk.tools.constraint(self.family, form.thinking), form)


class ChatModels:
    """One object for all callers of an orchestrator. Nothing is started before somebody chats.

    chat_template: instead of the models' own; tool_format: of `FORMATS`; "" takes the models', as it is found.
    """

    def __init__(self, pool: Pool, chat_template: str = "", tool_format: str = "") -> None:
        self._pool = pool
        self._chat_template = chat_template
        self._tool_format = tool_format
        self._known: dict[Identity, ChatModel] = {}
        self._forks = renderers()

    def of(self, target: Target) -> ChatModel:
        known = self._known.get(target.identity)
        if known is None or known.target != target:
            versions = self._pool.models
            for gone in [each for each in self._known if versions.version(each) is None]:
                self._close(self._known.pop(gone))
            self._known[target.identity] = self._described(target, known)
        return self._known[target.identity]

    def source(self, target: Target) -> str:
        """Of the template that its chats are written by; empty where there is none."""
        return self._chat_template or target.info.chat_template

    def _described(self, target: Target, known: ChatModel | None) -> ChatModel:
        """`known`: the same version, as it was described before."""
        if known is not None and _template_of(known.target) == _template_of(target):
            return replace(known, target=target)
        if known is not None:
            self._close(known)
        source = self.source(target)
        template = RemoteTemplate(self._forks, source, target.info.special_tokens) if source else None
        return ChatModel(target, template, ChatFamily.of(source, self._tool_format), TokenBytes(target.tokenizer))

    def _close(self, model: ChatModel) -> None:
        if model.template is not None:
            model.template.close()

    async def check_template(self) -> None:
        """Raises TemplateInvalid: of --chat-template it is known at start, not at the first chat."""
        if self._chat_template:
            template = RemoteTemplate(self._forks, self._chat_template, {})
            try:
                await template.compile()
            except Busy:
                raise TemplateInvalid("the chat template was not compiled in time") from None
            finally:
                template.close()

    async def stop(self) -> None:
        """Idempotent."""
        for model in self._known.values():
            self._close(model)
        if self._forks.process is not None:
            await asyncio.to_thread(self._forks.stop)


def _template_of(target: Target) -> tuple[str, dict[str, str]]:
    return target.info.chat_template, dict(target.info.special_tokens)
