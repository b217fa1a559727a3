"""What callers may have an orchestrator do for them: one object, which every door uses.

Whatever a caller can choose the size of is counted before it is walked (`LIMITS`), is computed beside the event loop if
that takes more than some milliseconds, and is charged when it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from orchestrator.tenants import MOST_TENANT_REFERENCES
from specwire.core.invalid import (
    MOST_NUMBERS,
    MOST_PARTS,
    MOST_REFERENCE_TOKENS,
    MOST_REFERENCES,
    MOST_SCORED,
    MOST_SCORED_PARTS,
)
from specwire.core.law.constraint import MOST_BYTES as MOST_CONSTRAINT_BYTES
from specwire.core.law.constraint import MOST_CHOICES
from specwire.core.law.sampling import MOST_BIASES
from specwire.core.text import MOST_STOP_IDS
from specwire.rpc.channel import MOST_MESSAGE_BYTES
from specwire.text.output import MOST_STOP_CHARACTERS, MOST_STOPS

# How deep lists and objects may be nested. Of how many there are, the longest accepted chat has some ten for each
# message; token ids are numbers.
MOST_DEPTH = 128
MOST_MESSAGES = 4096
# Of a response and those before it: several may be one message.
MOST_ITEMS = 2 * MOST_MESSAGES
MOST_TOOLS = 128
# Bytes of the JSON that describes tools, and of what a template is told besides, over gRPC.
MOST_JSON_BYTES = 1 << 20
MOST_COMPLETIONS = 64
MOST_REQUEST_ID = 128
MOST_NOTE_BYTES = 1 << 22
# Bytes of the references of all sessions that one call begins.
MOST_REFERENCE_BYTES = 1 << 24
# Bytes from which walking, parsing or writing takes long enough for others of the event loop to feel it.
LONG_BYTES = 64 * 1024
# Bytes of a message, a body, or what is read again, for a token that a tenant is charged.
CHARGED_BYTES = 1024

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# `Admission.aside` for one request.
Aside = Callable[..., Awaitable[Any]]


class Limit(NamedTuple):
    """counted: where, and before what. told: what a caller sees beyond it."""

    what: str
    most: int
    counted: str
    told: str


INVALID, LARGE, EXHAUSTED = "`INVALID_ARGUMENT`, 400", "`RESOURCE_EXHAUSTED`, 413", "`RESOURCE_EXHAUSTED`, 429"
MESSAGE, FIELD = "in the message's bytes, before it is decoded", "before the field is walked"
LIMITS = (
    Limit("bytes of a message or a body", MOST_MESSAGE_BYTES, "as they come", LARGE),
    Limit("parts of a message; strings, lists and objects of a body", MOST_PARTS, MESSAGE, INVALID),
    Limit("numbers in lists of a message", MOST_NUMBERS, MESSAGE, INVALID),
    Limit("depth of JSON", MOST_DEPTH, MESSAGE, INVALID),
    Limit("`messages` of a chat", MOST_MESSAGES, FIELD, INVALID),
    Limit("items of a response, with those before it", MOST_ITEMS, FIELD, INVALID),
    Limit("`tools`", MOST_TOOLS, FIELD, INVALID),
    Limit("bytes of JSON in `tools` and `template_values` (gRPC)", MOST_JSON_BYTES, FIELD, INVALID),
    Limit("bytes of a constraint, that of tools among them", MOST_CONSTRAINT_BYTES, "before it is compiled", INVALID),
    Limit("choices of a constraint", MOST_CHOICES, FIELD, INVALID),
    Limit("`stop` strings", MOST_STOPS, FIELD, INVALID),
    Limit("characters of a `stop` string", MOST_STOP_CHARACTERS, FIELD, INVALID),
    Limit("`stop_token_ids`", MOST_STOP_IDS, FIELD, INVALID),
    Limit("entries of `logit_bias`", MOST_BIASES, FIELD, INVALID),
    Limit("`n`", MOST_COMPLETIONS, "before the prompt is copied", INVALID),
    Limit("prompts of a completion", MOST_COMPLETIONS, FIELD, INVALID),
    Limit("`references`", MOST_REFERENCES, FIELD, INVALID),
    Limit("tokens of `references`", MOST_REFERENCE_TOKENS, "while they are encoded", INVALID),
    Limit("bytes of `references`, by `n`", MOST_REFERENCE_BYTES, "before they are copied", INVALID),
    Limit("tokens of references of a tenant's running sessions", MOST_TENANT_REFERENCES, "at admission", EXHAUSTED),
    Limit("continuations to score", MOST_SCORED, FIELD, INVALID),
    Limit("parts of all of these", MOST_SCORED_PARTS, FIELD, INVALID),
    Limit("bytes of a note, or of a stored response", MOST_NOTE_BYTES, "before it is written", INVALID),
    Limit("characters of `request_id`", MOST_REQUEST_ID, FIELD, INVALID),
)


class Admission:
    """What takes long is done by one thread, so that it takes at most half of the process's time; tenants take turns.

    Args:
        charge: takes tokens of a tenant's minute; see `Allowances.charge`.
    """

    def __init__(self, charge: Callable[[str, int], None]) -> None:
        self._charge = charge
        self._thread = ThreadPoolExecutor(1, "aside")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def charge(self, tenant: str, size: int, least: int = 0) -> None:
        """Before so many bytes are gone through for a tenant. StatusError: RESOURCE_EXHAUSTED."""
        tokens = max(least, size // CHARGED_BYTES)
        if tokens:
            self._charge(tenant, tokens)

    def of(self, tenant: str, size: int) -> Aside:
        """Of a tenant's request of so many bytes."""
        return partial(self.aside, tenant, size)

    async def aside(
        self, tenant: str, size: int, work: Callable[Arguments, Result], *args: Arguments.args, **more: Arguments.kwargs
    ) -> Result:
        """What `work` returns, which goes through so many bytes and touches nothing that the event loop does."""
        if size < LONG_BYTES:
            return work(*args, **more)
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **more))

    def stop(self) -> None:
        """Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
