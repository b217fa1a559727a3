"""Messages as they come in: their parts are counted before any is made, and large ones are decoded off the event loop.

A part is whatever has a tag of its own: a field, an entry of a list or a map, what the reader does not know. Each takes
many times its bytes once it is decoded, and is walked by who checks it. So as many are allowed as in JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NoReturn, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message

from specwire.core.invalid import MOST_NUMBERS, MOST_PARTS, InvalidParameter

Deserialize = Callable[[bytes], object]
M = TypeVar("M", bound=Message)

NO_MESSAGE = "is no message of this method's type"
# Bytes below which a message has no more parts than it may have: each has a tag and at least one byte more.
SMALL_BYTES = 2 * MOST_PARTS
# Bytes from which a message of a link takes long enough to go through for others of the event loop to feel it: it may
# have four thousand parts.
LONG_BYTES = 1 << 13
# Parts that a message may have which was asked for: a score has four for each token of a long text.
MOST_ANSWERED_PARTS = 1 << 20
# Parts of a link's message that are taken before others of the event loop go on.
PARTS_AT_ONCE = 64
# Kinds of wire (protobuf's encoding). Groups have a tag at each end.
VARINT, EIGHT_BYTES, COUNTED, GROUP, GROUP_END, FOUR_BYTES = range(6)
FIXED = {EIGHT_BYTES: 8, FOUR_BYTES: 4}
# Bytes of a packed number that is not a varint.
PACKED_BYTES = {
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8),
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4),
}
NO_NUMBERS = (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def message_type(method: str, answer: bool = False) -> Descriptor | None:
    """What is asked of a method as gRPC calls it, /package.Service/Method, or answered; None for an unknown one."""
    try:
        found = Default().FindMethodByName(method.lstrip("/").replace("/", "."))
    except KeyError:
        return None
    kind: Descriptor = found.output_type if answer else found.input_type
    return kind


def check_parts(data: bytes, kind: Descriptor, most: int = MOST_PARTS) -> None:
    """Raises InvalidParameter, also for what is no message: its beginning would be made before that is seen."""
    try:
        _count(data, kind, most)
    except IndexError:
        _refuse(NO_MESSAGE)


def _count(data: bytes, kind: Descriptor, most: int) -> None:
    """Raises InvalidParameter, and IndexError where the message breaks off."""
    parts = numbers = 0
    todo = [(0, len(data), kind)]
    while todo:
        at, end, within = todo.pop()
        messages, packed = _fields(within)
        while at < end:
            parts += 1
            if parts > most:
                _refuse(f"has more than {most} parts")
            tag, at = _varint(data, at)
            field, wire = tag >> 3, tag & 7
            if wire == COUNTED:
                size, at = _varint(data, at)
                if field in messages:
                    todo.append((at, min(at + size, end), messages[field]))
                elif field in packed:
                    numbers += _numbers(data, at, min(at + size, end), packed[field])
                at += size
            elif wire == VARINT:
                _, at = _varint(data, at)
            elif wire in FIXED:
                at += FIXED[wire]
            elif wire not in (GROUP, GROUP_END):
                raise IndexError
            if numbers > MOST_NUMBERS:
                _refuse(f"has more than {MOST_NUMBERS} numbers in lists")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number there, and where it ends."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    value, shift = byte & 127, 7
    while byte >= 128:
        at += 1
        byte = data[at]
        value |= (byte & 127) << shift
        shift += 7
        if shift > 70:
            raise IndexError
    return value, at + 1


def _numbers(data: bytes, start: int, end: int, width: int) -> int:
    """How many are packed there. width: of each in bytes, 0 for varints, which end where the highest bit is 0."""
    if width:
        return (end - start) // width
    return int(np.count_nonzero(np.frombuffer(data, np.uint8, max(0, end - start), start) < 128))


@cache
def _fields(kind: Descriptor) -> tuple[dict[int, Descriptor], dict[int, int]]:
    """Of a message's fields by number: types of messages, widths of numbers that may be packed."""
    messages = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
    packed = {
        field.number: PACKED_BYTES.get(field.type, 0)
        for field in kind.fields
        if field.is_repeated and field.type not in NO_NUMBERS
    }
    return messages, packed


def _refuse(message: str) -> NoReturn:
    raise InvalidParameter("request", message)


@cache
def _lists(kind: Descriptor) -> tuple[str, ...]:
    """Names of a message's lists, in the order of their declaration."""
    return tuple(field.name for field in kind.fields if field.is_repeated)


def portions(message: M, order: Sequence[str] = ()) -> Iterator[M]:
    """The message; one whose lists have more than PARTS_AT_ONCE parts as several, which say the same one by one.

    order: of the lists, as they are to be taken; by default as they are declared. What is no list stands in each.
    """
    lists = _lists(message.DESCRIPTOR)
    if sum(len(getattr(message, name)) for name in lists) <= PARTS_AT_ONCE:
        yield message
        return
    frame = type(message)()
    for field, value in message.ListFields():
        if not field.is_repeated and field.message_type is None:
            setattr(frame, field.name, value)
        elif not field.is_repeated:
            getattr(frame, field.name).CopyFrom(value)
    for name in order or lists:
        parts = getattr(message, name)
        for at in range(0, len(parts), PARTS_AT_ONCE):
            portion = type(message)()
            portion.CopyFrom(frame)
            getattr(portion, name).extend(parts[at : at + PARTS_AT_ONCE])
            yield portion
