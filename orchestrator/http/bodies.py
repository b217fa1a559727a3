"""Requests' bodies: read within a time and a size, and not more of one tenant's at once than memory has for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from orchestrator.http.errors import INVALID, Failure

# For all fields but the prompt, and for each token of a context: a token is some four characters or a number, and JSON
# may spell a character in six bytes.
BASE_BODY_BYTES, TOKEN_BYTES = 1024 * 1024, 64
# As much as a gRPC message.
MOST_BODY_BYTES = 16 * 1024 * 1024
BODY_LIMIT_S = 30.0
# Of all bodies of one tenant that are being read, or whose requests have not begun to be answered.
MOST_TENANT_BYTES = 256 * 1024 * 1024
RETRY_S = 1.0


def most_body_bytes(context: int) -> int:
    """What a request to a model with such a context may need."""
    return min(MOST_BODY_BYTES, BASE_BODY_BYTES + TOKEN_BYTES * context)


def check_length(size: str, most: int) -> None:
    """What Content-Length says, before anything is read. Raises Failure."""
    if size.isdigit() and int(size) > most:
        raise _too_large(most)


async def read_body(parts: AsyncIterator[bytes], space: Space, most: int) -> bytes:
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


class Space:
    """What one body holds of its tenant's space."""

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
    def of(self, tenant: str) -> Iterator[Space]:
        """Space for one body; it is given back at the end."""
        space = Space(self, tenant)
        try:
            yield space
        finally:
            self.held[tenant] -= space.held
            if not self.held[tenant]:
                del self.held[tenant]
