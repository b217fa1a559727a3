"""A chat's answer in a session's text: what it was asked for, kept in the log with the session, and how it is told."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.chat.talk import Talk
from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint
from specwire.rpc.convert import constraint_to_wire
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

    async def skip(self, text: str) -> None:
        """Read what was told before."""
        await self._read(text)

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
