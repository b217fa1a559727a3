"""A drafter that dials in to an orchestrator: the same conversation, over a stream that the drafter opens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio

from draft_service.service import DrafterThread, DraftHandler, OrchestratorLink
from specwire.rpc.channel import Backoff, distrust, open_channel, unreachable
from specwire.rpc.errors import retry_after
from specwire.rpc.keys import Token
from specwire.rpc.outbox import LinkError, Outbox
from specwire.rpc.process import say
from specwire.rpc.renewal import Renewal
from specwire.rpc.tls import ClientTls
from specwire.telemetry.listener import MetricsListener
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc

JOIN_LIMIT = 20.0
FIRST_BACKOFF = 0.1
MOST_BACKOFF = 10.0
# Redialling slows down after links shorter than this: what broke them may still be there.
STABLE = 5.0
# Statuses that do not change by asking again.
FINAL = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}

Call = grpc.aio.StreamStreamCall[draft_pb2.JoinRequest, draft_pb2.JoinResponse]


class JoinRefused(Exception):
    """The orchestrator refuses this drafter, or the two ends do not trust each other; one sentence."""


class Dialler:
    """Keeps a link to the orchestrator at `address`; `joined` is set once it has been up."""

    def __init__(self, address: str, tls: ClientTls | None, handler: DraftHandler, token: Token | str = "") -> None:
        self.address = address
        self.joined = asyncio.Event()
        self._tls = tls
        self._token = token
        self._handler = handler
        self._backoff = Backoff(FIRST_BACKOFF, MOST_BACKOFF)
        self._said = ""
        self._wait = 0.0  # as long as the orchestrator has asked us to

    async def run(self) -> None:
        """Dial, talk, dial again, until cancelled.

        Raises:
            JoinRefused: trying again cannot help.
        """
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            self._wait = 0.0
            reason = await self._talk_once()
            if reason != self._said:
                say(f"specwire draft: {reason}; dialling again")
            self._said = reason
            if loop.time() - began > STABLE:
                self._backoff.reset()
            await asyncio.sleep(max(self._backoff.next(), self._wait))

    async def _talk_once(self) -> str:
        """One connection from start to end; returns why it ended."""
        async with open_channel(self.address, self._tls, self._token) as channel:
            call: Call = draft_pb2_grpc.DraftHubServiceStub(channel).Join()
            try:
                return await self._talk(call)
            except TimeoutError:
                return f"{self.address} did not answer within {JOIN_LIMIT:g} s"
            except grpc.aio.AioRpcError as error:
                self._wait = retry_after(error) or 0.0
                return self._judge(error.code(), error.details() or "")
            finally:
                call.cancel()

    async def _talk(self, call: Call) -> str:
        broken: list[LinkError] = []

        def on_failure(error: LinkError) -> None:
            broken.append(error)
            call.cancel()

        outbox: Outbox[draft_pb2.JoinRequest] = Outbox(call.write, on_failure)
        link = OrchestratorLink(lambda message: outbox.push(draft_pb2.JoinRequest(said=message)))
        outbox.push(draft_pb2.JoinRequest(model=introduction(self._handler.info)))
        try:
            await self._listen(call, link)
            return f"{self.address} closed the stream"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return f"the link to {self.address} broke: {broken[0] if broken else 'the stream was cancelled'}"
        finally:
            self._handler.lose(link)
            await outbox.close(flush_s=0.2)

    async def _listen(self, call: Call, link: OrchestratorLink) -> None:
        """Until the orchestrator closes the stream. Its first message says that we have joined."""
        async with asyncio.timeout(JOIN_LIMIT):
            message = await call.read()
        if isinstance(message, draft_pb2.JoinResponse):
            if self.joined.is_set():
                say(f"specwire draft: joined {self.address} again")
            self._said = ""
            self.joined.set()
        while isinstance(message, draft_pb2.JoinResponse):
            self._handler.take(message.told, link)
            await self._handler.room()
            message = await call.read()

    def _judge(self, code: grpc.StatusCode, details: str) -> str:
        """Why the link is down, in one sentence; JoinRefused if it will stay so."""
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise JoinRefused(f"{self.address} does not let drafters dial in (--accept-drafters)")
        if code is grpc.StatusCode.UNAUTHENTICATED and self.joined.is_set():  # what it shows may be renewed
            return f"{self.address} refused this drafter: {details}"
        if code in FINAL:
            raise JoinRefused(f"{self.address} refused this drafter: {details}")
        if code is grpc.StatusCode.UNAVAILABLE:
            untrusted = distrust(details, self.address)
            if untrusted and not self.joined.is_set():  # it worked before, so it may work again
                raise JoinRefused(untrusted)
            return unreachable(details, self.address, tls=self._tls is not None) or f"{self.address}: {details}"
        return f"{self.address} ended the link: {code.name}: {details}"


class DiallingDrafter:
    """A drafter that serves the orchestrators that it dials; owns the drafter.

    also: orchestrators beside the one at `address`. Each is dialled separately. renewal: of what is shown to them.
    """

    def __init__(
        self,
        drafter: DrafterThread,
        address: str,
        tls: ClientTls | None,
        handler: DraftHandler,
        token: Token | str = "",
        metrics: MetricsListener | None = None,
        also: Sequence[str] = (),
        renewal: Renewal | None = None,
    ) -> None:
        self.address = ", ".join((address, *also))
        self.metrics = metrics
        self._drafter = drafter
        self._renewal = renewal
        self._handler = handler
        self._diallers = [Dialler(each, tls, handler, token) for each in (address, *also)]
        self._dialling = [asyncio.create_task(self._dial(each)) for each in self._diallers]

    async def _dial(self, dialler: Dialler) -> None:
        try:
            await dialler.run()
        except Exception as error:  # the others go on
            if len(self._diallers) > 1:
                say(f"specwire draft: {str(error) or type(error).__name__}")
            raise

    async def join(self) -> None:
        """Return once joined, however long an orchestrator takes to appear; JoinRefused where all refuse it."""
        refused = asyncio.ensure_future(self._refused())
        joined = [asyncio.ensure_future(_until(each.joined)) for each in self._diallers]
        try:
            await asyncio.wait({refused, *joined}, return_when=asyncio.FIRST_COMPLETED)
            if refused.done() and not any(each.joined.is_set() for each in self._diallers):
                self._dialling[0].result()
        finally:
            for each in (refused, *joined):
                each.cancel()

    async def failed(self) -> str:
        """Return, with the reason, once no orchestrator can be served any more."""
        broken = asyncio.ensure_future(self._drafter.failed())
        refused = asyncio.ensure_future(self._refused())
        try:
            await asyncio.wait({broken, refused}, return_when=asyncio.FIRST_COMPLETED)
            return (broken if broken.done() else refused).result()
        finally:
            broken.cancel()
            refused.cancel()

    async def _refused(self) -> str:
        """Why all orchestrators refuse it, once they do."""
        await asyncio.wait(self._dialling)
        error = self._dialling[0].exception()
        return str(error) or type(error).__name__

    async def stop(self, grace: float = 0.0) -> None:
        """Idempotent. The link ends at once: its sessions only get slower."""
        if self._renewal is not None:
            await self._renewal.stop()
        for each in self._dialling:
            each.cancel()
        await asyncio.gather(*self._dialling, return_exceptions=True)
        await self._handler.stop()
        await self._drafter.stop()
        if self.metrics is not None:
            await self.metrics.stop()


async def _until(event: asyncio.Event) -> None:
    await event.wait()


def introduction(info: common_pb2.GetModelInfoResponse) -> common_pb2.GetModelInfoResponse:
    """`info` without what an orchestrator needs from a target only."""
    short = common_pb2.GetModelInfoResponse()
    short.CopyFrom(info)
    short.ClearField("tokenizer_json")
    short.ClearField("chat_template")
    short.ClearField("special_tokens")
    return short
