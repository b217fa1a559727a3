"""DraftHubService: drafters that cannot be dialled dial in, and are used like any other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from orchestrator.peers.models import Info
from orchestrator.peers.peer import DrafterPeer
from orchestrator.sessions import Orchestrator
from specwire.core.invalid import InvalidParameter
from specwire.rpc.decoding import portions
from specwire.rpc.errors import StatusError
from specwire.rpc.link import QUARANTINE, LinkError, Outbox
from specwire.rpc.server import MessageTooLong, certified_names
from specwire.v1 import draft_pb2, draft_pb2_grpc

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[draft_pb2.JoinRequest, draft_pb2.JoinResponse]
Requests = AsyncIterator[draft_pb2.JoinRequest]

HELLO_LIMIT = 10.0
MOST_JOINED = 64
# Most bytes of one message: far more than an honest drafter sends in a tick for a thousand sessions.
MOST_SAID_BYTES = 1 << 20
# Fields of a drafter's description that are kept and shown to clients; a drafter may write anything there. The host is
# not kept: a drafter that claimed the verifier's would change how every session is paced.
STRINGS = (
    "model",
    "architecture",
    "dtype",
    "quantization",
    "device",
    "runtime",
    "weights_fingerprint",
    "vocabulary_fingerprint",
    "region",
)
NUMBERS = ("vocabulary", "context", "slots", "token_text")
MOST_CHARACTERS = 1024
SHOWN = 64


class JoinedLine:
    """A drafter's connection that it dialled; implements link.Line. Once `ended`, `reason` is its stream's status."""

    def __init__(self, address: str, context: Context) -> None:
        self.address = address
        self.flooded = False
        self.reason = StatusError(grpc.StatusCode.UNAVAILABLE, "the stream has ended")
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox: Outbox[draft_pb2.JoinResponse] = Outbox(context.write, self._on_failure)

    @property
    def up(self) -> bool:
        return not self.ended.done()

    def greet(self) -> None:
        """Say that the drafter has joined."""
        self._outbox.push(draft_pb2.JoinResponse())

    def send(self, part: draft_pb2.ConnectDraftRequest) -> None:
        if self.up:
            self._outbox.push(draft_pb2.JoinResponse(told=part))

    def cut(self, reason: str) -> None:
        """End its stream because of what it sent, and keep it out for a while."""
        if not self.up:
            return
        logger.warning("%s is cut off: %s", self.address, reason)
        self.flooded = True
        message = f"{reason}; it is let in again after {QUARANTINE:g} s"
        self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, message, QUARANTINE)

    def end(self, code: grpc.StatusCode, message: str, retry_after: float | None = None) -> None:
        """The first reason counts."""
        if self.up:
            self.reason = StatusError(code, message, retry_after)
            self.ended.set_result(None)

    def _on_failure(self, error: LinkError) -> None:
        self.end(grpc.StatusCode.UNAVAILABLE, str(error))

    async def close(self) -> None:
        await self._outbox.close(flush_s=0.2)


class DraftHub(draft_pb2_grpc.DraftHubServiceServicer):
    """`_lines`: each with the caller to bar for it.

    Invariants: every line in `_lines` belongs to a drafter of the orchestrator, until its stream ends; lines and
    awaited hellos are together at most MOST_JOINED.
    """

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._lines: dict[JoinedLine, str] = {}
        self._awaited: set[asyncio.Task[Info]] = set()
        self._barred: dict[str, float] = {}
        self._leaving = False

    def leave(self) -> None:
        """End every line: their sessions only get slower, and the drafters dial again."""
        self._leaving = True
        for line in self._lines:
            line.end(grpc.StatusCode.UNAVAILABLE, "the orchestrator is stopping")
        for hello in self._awaited:
            hello.cancel()

    async def Join(self, requests: Requests, context: Context) -> None:
        who = self._identity(context)
        self._check_name(context)
        self._check_welcome(who)
        info = await self._introduced(requests, who)
        line = JoinedLine(f"drafter {info.model!r} at {context.peer()}", context)
        drafter = self._orchestrator.pool.admit(line, info)
        self._lines[line] = who
        try:
            await self._converse(requests, line, drafter)
        except MessageTooLong:
            line.flooded = True
            raise
        finally:
            if line.flooded:
                self._bar(who)
            del self._lines[line]
            line.end(line.reason.code, line.reason.message)
            logger.info("%s has left: %s", line.address, line.reason.message)
            self._orchestrator.pool.dismiss(drafter)
            await line.close()

    def _identity(self, context: Context) -> str:
        """The caller to bar: the holder of its token, else its `identity`."""
        keys = self._orchestrator.options.access.drafter_keys
        return identity(context) if keys is None else keys.holder(context.invocation_metadata() or ())

    def _check_name(self, context: Context) -> None:
        accepted, names = self._orchestrator.options.drafter_names, certified_names(context)
        if accepted and names.isdisjoint(accepted):
            shown = ", ".join(sorted(names)) or "nothing"
            message = f"the certificate names {shown}, and drafters of other names are let in only"
            raise StatusError(grpc.StatusCode.PERMISSION_DENIED, message)

    async def _introduced(self, requests: Requests, who: str) -> Info:
        """The hello; raises if the caller is no longer welcome when it comes."""
        hello = asyncio.ensure_future(_hello(requests))
        self._awaited.add(hello)
        try:
            (told,) = await asyncio.gather(hello, return_exceptions=True)
        finally:
            self._awaited.discard(hello)
        self._check_welcome(who)
        if isinstance(told, BaseException):
            raise told
        return told

    def _bar(self, who: str) -> None:
        """Let it in no more for a while, and end what has joined already."""
        self._barred[who] = asyncio.get_running_loop().time() + QUARANTINE
        message = f"{who} flooded; it is let in again after {QUARANTINE:g} s"
        for line, whose in self._lines.items():
            if whose == who:
                line.end(grpc.StatusCode.RESOURCE_EXHAUSTED, message, QUARANTINE)

    def _check_welcome(self, who: str) -> None:
        now = asyncio.get_running_loop().time()
        self._barred = {each: until for each, until in self._barred.items() if until > now}
        if self._leaving:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "the orchestrator is stopping")
        if who in self._barred:
            left = self._barred[who] - now
            message = f"{who} flooded; it is let in again in {left:.0f} s"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, left)
        if len(self._lines) + len(self._awaited) >= MOST_JOINED:
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_JOINED} drafters have joined already")

    async def _converse(self, requests: Requests, line: JoinedLine, drafter: DrafterPeer) -> None:
        """Relay messages until the drafter leaves. Raises the status that the line is ended with."""
        if drafter.refusal is not None:
            raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, drafter.refusal)
        line.greet()
        reading = asyncio.ensure_future(_read(requests, drafter))
        try:
            await asyncio.wait({reading, line.ended}, return_when=asyncio.FIRST_COMPLETED)
            if line.ended.done():
                raise line.reason
            reading.result()
        finally:
            reading.cancel()


async def _hello(requests: Requests) -> Info:
    """The first message's description of the drafter's model."""
    try:
        async with asyncio.timeout(HELLO_LIMIT):
            first = await anext(requests)
    except TimeoutError:
        raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, f"model: not told within {HELLO_LIMIT:g} s") from None
    except StopAsyncIteration:
        raise InvalidParameter("model", "the stream ended before the drafter's model was told") from None
    if not first.HasField("model"):
        raise InvalidParameter("model", "must be in the first message")
    return _kept(first.model)


def _kept(described: Info) -> Info:
    """What is kept of a description; InvalidParameter if a part is too long, or could not be shown as it is."""
    for field in STRINGS:
        text: str = getattr(described, field)
        if len(text) > MOST_CHARACTERS:
            raise InvalidParameter(f"model.{field}", f"has {len(text)} characters, at most {MOST_CHARACTERS} are taken")
        if not text.isprintable():
            raise InvalidParameter(f"model.{field}", f"must be printable, not {text[:SHOWN]!r}")
    return Info(**{field: getattr(described, field) for field in (*STRINGS, *NUMBERS)})


async def _read(requests: Requests, drafter: DrafterPeer) -> None:
    async for message in requests:
        if message.HasField("model"):
            raise InvalidParameter("model", "must be in the first message only")
        for portion in portions(message.said):
            drafter.on_message(portion)
            await asyncio.sleep(0)


def identity(context: Context) -> str:
    """The caller to bar: by its certificate, else by the host that it calls from (a NAT's hosts count as one)."""
    certified = context.peer_identities()
    if certified:
        return " ".join(sorted(name.decode(errors="replace") for name in certified))
    kind, _, place = context.peer().partition(":")
    return place.rpartition(":")[0] if kind in ("ipv4", "ipv6") else place
