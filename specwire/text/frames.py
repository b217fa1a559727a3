"""Messages between a service and the processes that it has of its own: a length, then so many bytes."""

from __future__ import annotations

import json
import os
import select
import struct
from typing import Any

LENGTHS = struct.Struct("<II")
HEAD = LENGTHS.size


class Lost(Exception):
    """The other end is gone, or does not answer in time."""


def packed(said: dict[str, Any], data: bytes = b"") -> bytes:
    """An object, and bytes behind it."""
    head = json.dumps(said).encode()
    return LENGTHS.pack(len(head), len(data)) + head + data


def lengths_of(head: bytes) -> tuple[int, int]:
    """Bytes of the object and of the data behind it, as the first HEAD bytes say."""
    object_size, data_size = LENGTHS.unpack(head)
    return object_size, data_size


def send(fd: int, said: dict[str, Any], data: bytes = b"") -> None:
    """Raises Lost."""
    left = memoryview(packed(said, data))
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError as error:
        raise Lost(f"the process that holds it is gone: {error.strerror}") from None


def receive(fd: int, limit_s: float | None = None) -> tuple[dict[str, Any], bytes]:
    """What was sent. Raises Lost, also where it does not come within `limit_s` seconds (None: for ever)."""
    head, data = lengths_of(_read(fd, HEAD, limit_s))
    return json.loads(_read(fd, head, limit_s)), _read(fd, data, limit_s)


def _read(fd: int, size: int, limit_s: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        if limit_s is not None and not readable(fd, limit_s):
            raise Lost(f"did not answer within {limit_s:g} s")
        try:
            part = os.read(fd, size - len(parts))
        except OSError as error:
            raise Lost(f"the process that holds it is gone: {error.strerror}") from None
        if not part:
            raise Lost("took more time or memory than it may")
        parts += part
    return bytes(parts)


def readable(fd: int, limit_s: float) -> bool:
    """Whether something can be read, or will never be, within so many seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))
