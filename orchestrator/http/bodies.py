"""Requests' bodies: read within a time and a size, and not more of one tenant's at once than memory has for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from orchestrator.http.errors import INVALID, Failure

# As much as a gRPC message.
MOST_BODY_BYTES = 16 * 1024 * 1024
BODY_LIMIT_S = 30.0
# Of all bodies of one tenant that are being read, or whose requests have not begun to be answered.
MOST_TENANT_BYTES = 256 * 1024 * 1024
RETRY_S = 1.0


async def read_body(parts: AsyncIterator[bytes], space: Space | None) -> bytes:
    """The whole body, within BODY_LIMIT_S; empty where it is not to be kept: without `space`.

    Raises:
        Failure: 413, it is too long; 408, it did not come; 429, there is no space for it now.
    """
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            async for part in parts:
                size += len(part)
                if size > MOST_BODY_BYTES:
                    message = f"body: more than {MOST_BODY_BYTES} bytes"
                    raise Failure(413, message, INVALID, None, "too_large", close=True)
                if space is not None:
                    space.take(len(part))
                    body += part
    except TimeoutError:
        message = f"body: did not come within {BODY_LIMIT_S:g} s"
        raise Failure(408, message, INVALID, None, "timeout", close=True) from None
    return bytes(body)


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
