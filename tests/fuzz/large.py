"""Requests of which one field is as large as it can be: each field of each message of GenerationService, and of each
HTTP route's body. Whoever sends them must not have a neighbour wait.
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from specwire.core.invalid import MOST_PARTS
from specwire.v1 import common_pb2
from specwire.v1 import generation_pb2 as pb
from tests.faults.streams import PROMPT
from tests.fuzz.http import HEALTH, answer_of
from tests.fuzz.messages import Values
from tests.fuzz.requests import POSTED, Raw, written
from tests.fuzz.services import LIMIT_S, Services

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
# Parts of a field that has nothing but these; a bit less than a message may have, beside what else is in it.
PARTS = MOST_PARTS - 4096
TEXT_BYTES = 4 << 20
# How deep fields of messages in messages are made large.
MOST_NESTED = 4
# What a request says beside the field that is large.
BESIDE: Mapping[str, Message] = {
    "GenerateRequest": pb.GenerateRequest(
        tokens=pb.TokenIds(ids=PROMPT), stopping=common_pb2.Stopping(max_tokens=2), sampling=common_pb2.Sampling()
    ),
    "ScoreTextRequest": pb.ScoreTextRequest(
        prefix=pb.TextPart(tokens=pb.TokenIds(ids=PROMPT)),
        continuations=[pb.ScoredText(parts=[pb.TextPart(tokens=pb.TokenIds(ids=PROMPT))])],
    ),
    "Chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="5 6")]),
    "ChatTool": pb.ChatTool(name="f"),
    "ChatMessage": pb.ChatMessage(role="user", content="5"),
    "ToolCall": pb.ToolCall(id="c", name="f", arguments="{}"),
}
# Texts of what is walked character by character, word by word, or as JSON; they fill a text by being repeated.
TEXTS = ("5 6 7 ", "x", '{"a":[', "\u00e9", " ")
# Values of a body's field.
VALUES: tuple[Any, ...] = (
    ["5"] * PARTS,
    [{}] * PARTS,
    [[5]] * (PARTS // 2),
    [5] * 1_000_000,
    {str(number): number for number in range(PARTS // 2)},
    [{"role": "user", "content": "5"}] * (PARTS // 5),
    [{"type": "message", "role": "user", "content": "5"}] * (PARTS // 7),
    [{"type": "function", "function": {"name": f"f{number}"}} for number in range(PARTS // 8)],
    "5 6 7 " * (TEXT_BYTES // 6),
    " " * TEXT_BYTES,
)


@dataclass(frozen=True, slots=True)
class Large:
    """name: of what is large. method: of GenerationService, or a path of HTTP's. make: its bytes, as they are sent."""

    name: str
    method: str
    make: Callable[[], bytes]

    def __repr__(self) -> str:
        return f"{self.method} with {self.name}"


def large_messages() -> Iterator[Large]:
    """One of each field, in each way that it can be large."""
    for method in SERVICE.methods:
        for name, make in _large(method.input_type, MOST_NESTED):
            yield Large(f"{method.input_type.name}.{name}", method.name, make)


def _large(kind: Descriptor, depth: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Messages of a kind, one field large, with its name; others as in BESIDE."""
    made = GetMessageClass(kind)
    beside = BESIDE.get(kind.name, made()).SerializeToString()
    for field in kind.fields:
        inner = field.message_type
        if inner is None:
            for way, value in _values(field):
                yield f"{field.name} ({way})", partial(_with, beside, made, field.name, value)
            continue
        if inner.GetOptions().map_entry:
            yield f"{field.name} (many)", partial(_with, beside, made, field.name, _entries)
            continue
        if field.is_repeated:
            known = BESIDE.get(inner.name)
            one = _tagged(field.number, b"" if known is None else known.SerializeToString())
            yield f"{field.name} (many)", partial(_joined, beside, one, PARTS if known is None else PARTS // 4)
        if depth:
            for name, make in _large(inner, depth - 1):
                yield f"{field.name}.{name}", partial(_around, beside, field.number, make)


def _with(beside: bytes, made: type[Message], field: str, value: Callable[[], Any]) -> bytes:
    return beside + made(**{field: value()}).SerializeToString()


def _joined(beside: bytes, one: bytes, count: int) -> bytes:
    return beside + one * count


def _around(beside: bytes, number: int, make: Callable[[], bytes]) -> bytes:
    return beside + _tagged(number, make())


def _entries() -> dict[int, float]:
    return dict.fromkeys(range(PARTS // 3), 1.0)


def _values(field: FieldDescriptor) -> Iterator[tuple[str, Callable[[], Any]]]:
    is_text = field.type == field.TYPE_STRING
    if field.is_repeated:
        yield "many", lambda: ["5"] * PARTS if is_text else [1] * 1_000_000
    elif is_text:
        for text in TEXTS:
            yield repr(text), partial(operator.mul, text, TEXT_BYTES // len(text.encode()))


def _tagged(number: int, data: bytes) -> bytes:
    """As a message within another one."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def large_bodies() -> Iterator[Large]:
    """Of each route that takes one: each of its fields with each of VALUES, as far as a body may be as long."""
    needed: dict[str, Any] = {"prompt": list(PROMPT), "messages": [{"role": "user", "content": "5"}], "input": "5"}
    for path, (own, beside) in POSTED.items():
        for field in sorted({*own, *beside}):
            for number, value in enumerate(VALUES):
                body = {name: needed[name] for name in own if name in needed} | {"max_tokens": 1, field: value}
                yield Large(f"{field} ({number})", path, partial(_posted, path, body))


def _posted(path: str, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(data)}"]
    return written(head) + data


def requests() -> Values:
    """Any of them."""
    return st.sampled_from([*large_messages(), *large_bodies()])


def tell_large(services: Services, asked: Large) -> tuple[Counter[str], float]:
    """How it is answered, and for how many seconds of computing a neighbour's /health waited at most.

    AssertionError where it is our own failure, or the neighbour was refused.
    """
    data = asked.make()
    with services.watched() as watch, ThreadPoolExecutor(1) as pool:
        told = pool.submit(_told, services, asked, data)
        while True:
            found = answer_of(services.http, Raw(HEALTH, whole=True))
            assert found is not None, f"{asked}: a neighbour was not answered"
            assert found[0] == 200, f"{asked}: a neighbour was answered {found[0]}"
            if told.done():
                break
    logged = services.failures.take()
    assert not logged, f"{asked}: {logged}"
    return Counter({told.result(): 1}), max(0.0, watch.turn)


def _told(services: Services, asked: Large, data: bytes) -> str:
    if asked.method.startswith("/"):
        answer = answer_of(services.http, Raw(data, whole=True))
        return "CLOSED" if answer is None else str(answer[0])
    with services.channel(services.orchestrator) as channel:
        path = f"/{SERVICE.full_name}/{asked.method}"
        streams = SERVICE.methods_by_name[asked.method].server_streaming
        try:
            if streams:
                list(channel.unary_stream(path, bytes, bytes)(data, timeout=LIMIT_S))
            else:
                channel.unary_unary(path, bytes, bytes)(data, timeout=LIMIT_S)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"
