"""How OpenAI's API writes completions and chats: the two differ in names and in where text and logprobs stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specwire.core.logprobs import finite
from specwire.text.tokens import TokenBytes
from specwire.v1 import common_pb2

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """Decided tokens with their log-probabilities, and where each one's text begins in what is answered."""

    tokens: Sequence[int]
    logprobs: Sequence[common_pb2.TokenLogprobs]
    offsets: Sequence[int]


class AnswerShape(Protocol):
    """whole, part: the names of an answer's object, all at once and in a stream."""

    prefix: str
    whole: str
    part: str

    def first(self) -> Json | None:
        """The choice's content that opens its stream, if there is one."""
        ...

    def delta(self, text: str) -> Json: ...

    def last(self) -> Json:
        """The content of the event that says why it ended."""
        ...

    def answer(self, text: str) -> Json: ...

    def logprobs(self, told: Told, names: TokenBytes) -> Json: ...


class ChatShape:
    """/v1/chat/completions."""

    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def first(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def last(self) -> Json:
        return {"delta": {}}

    def answer(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, told: Told, names: TokenBytes) -> Json:
        pairs = zip(told.tokens, told.logprobs, strict=True)
        return {"content": [_chat_token(token, known, names) for token, known in pairs], "refusal": None}


def _chat_token(token: int, known: common_pb2.TokenLogprobs, names: TokenBytes) -> Json:
    top = zip(known.top_ids, known.top_logprobs, strict=True)
    alternatives = [_chat_entry(other, logprob, names) for other, logprob in top]
    return {**_chat_entry(token, known.logprob, names), "top_logprobs": alternatives}


def _chat_entry(token: int, logprob: float, names: TokenBytes) -> Json:
    data = names.of(token)
    return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


class CompletionShape:
    """/v1/completions."""

    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def first(self) -> Json | None:
        return None

    def delta(self, text: str) -> Json:
        return {"text": text}

    def last(self) -> Json:
        return {"text": ""}

    def answer(self, text: str) -> Json:
        return {"text": text}

    def logprobs(self, told: Told, names: TokenBytes) -> Json:
        return {
            "tokens": [names.text(token) for token in told.tokens],
            "token_logprobs": [finite(known.logprob) for known in told.logprobs],
            "top_logprobs": [_by_text(known, names) for known in told.logprobs],
            "text_offset": list(told.offsets),
        }


def _by_text(known: common_pb2.TokenLogprobs, names: TokenBytes) -> Json:
    """Of tokens that read the same the most probable counts."""
    pairs = zip(known.top_ids, known.top_logprobs, strict=True)
    return {names.text(token): finite(logprob) for token, logprob in reversed(list(pairs))}
