"""Requests' bodies: read within bounds on time, size and each tenant's memory.

They are parsed as JSON into a small multiple of their size, without holding up the event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from orchestrator.admission import LONG_BYTES, MOST_DEPTH, Admission
from orchestrator.chat.fields import JsonBounds, no_number
from orchestrator.http.errors import INVALID, Failure
from specwire.core.invalid import MOST_PARTS, InvalidParameter

# For all fields but the prompt, and for each token of a context: a token is some four characters or a number, and JSON
# may spell a character in six bytes.
BASE_BODY_BYTES, TOKEN_BYTES = 1024 * 1024, 64
# As much as a gRPC message.
MOST_BODY_BYTES = 16 * 1024 * 1024
BODY_LIMIT_S = 30.0
# Most bytes of one tenant's bodies that are being read or whose answers have not begun. Parsed they take up to 16 times
# as much.
MOST_TENANT_BYTES = 64 * 1024 * 1024
RETRY_S = 1.0
# JSON escapes that may be half a character (surrogates).
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def most_body_bytes(context: int) -> int:
    """Bytes that a request to a model with such a context may need."""
    return min(MOST_BODY_BYTES, BASE_BODY_BYTES + TOKEN_BYTES * context)


def check_length(size: str, most: int) -> None:
    """Refuse a Content-Length beyond `most`, before anything is read. Raises Failure."""
    if size.isdecimal() and int(size) > most:
        raise _too_large(most)


async def read_body(parts: AsyncIterator[bytes], space: BodyReservation, most: int) -> bytes:
    """The whole body, within BODY_LIMIT_S and `most` bytes.

    Raises:
        Failure: 413, it is too long; 408, it did not come; 429, there is no space for it now.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            async for part in parts:
                if len(body) + len(part) > most:
                    raise _too_large(most)
                space.take(len(part))
                body += part
    except TimeoutError:
        message = f"body: did not come within {BODY_LIMIT_S:g} s"
        raise Failure(408, message, INVALID, None, "timeout", close=True) from None
    return bytes(body)


def _too_large(most: int) -> Failure:
    message = (
        f"body: more than {most} bytes, which is what this model's context may need; --http-body sets another limit"
    )
    return Failure(413, message, INVALID, None, "too_large", close=True)


class BodyReservation:
    """The memory that one body takes of its tenant's share."""

    def __init__(self, bodies: Bodies, tenant: str) -> None:
        self._bodies = bodies
        self._tenant = tenant
        self.held = 0

    def take(self, size: int) -> None:
        """Raises Failure."""
        if self._bodies.held[self._tenant] + size > MOST_TENANT_BYTES:
            message = f"body: this tenant's requests have {MOST_TENANT_BYTES} bytes of bodies under way already"
            raise Failure(429, message, "rate_limit_error", None, "rate_limit_exceeded", RETRY_S, close=True)
        self._bodies.held[self._tenant] += size
        self.held += size


class Bodies:
    """Bytes of bodies that are in memory, by tenant."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()

    @contextmanager
    def of(self, tenant: str) -> Iterator[BodyReservation]:
        """Space for one body; it is given back at the end."""
        space = BodyReservation(self, tenant)
        try:
            yield space
        finally:
            self.held[tenant] -= space.held
            if not self.held[tenant]:
                del self.held[tenant]


async def parse(admission: Admission, body: bytes, tenant: str) -> dict[str, Any]:
    """The JSON object in a request's body; NaN and infinities are no JSON. InvalidParameter of `body`."""
    return await admission.aside(tenant, len(body), parsed, body, *(HOOKS if len(body) >= LONG_BYTES else ()))


def parsed(
    body: bytes, parse_int: Callable[[str], int] = int, parse_float: Callable[[str], float] = float
) -> dict[str, Any]:
    """See `parse`."""
    try:
        _check_body(body)
        found = json.loads(body.decode(), parse_int=parse_int, parse_float=parse_float, parse_constant=no_number)
        if SURROGATE.search(body):
            json.dumps(found, ensure_ascii=False).encode()  # half a character is no text, though JSON can spell it
    except InvalidParameter:
        raise
    except RecursionError:
        raise InvalidParameter("body", "is nested too deeply") from None
    except ValueError as error:  # also what is no text: UnicodeError is one
        raise InvalidParameter("body", f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidParameter("body", "must be a JSON object")
    return found


def _int(text: str) -> int:
    return int(text)


def _float(text: str) -> float:
    return float(text)


# The parser releases the interpreter's lock only when it calls Python functions: then other threads run.
HOOKS = _int, _float


def _check_body(body: bytes) -> None:
    """Most bodies have so few quotes and brackets that it does not matter which of them are within strings."""
    if body.count(b"[") + body.count(b"{") > MOST_DEPTH or body.count(b'"') // 2 > MOST_PARTS:
        JsonBounds().check(body, "body")
