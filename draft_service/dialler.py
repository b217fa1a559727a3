"""A drafter that dials in to an orchestrator: the same conversation, over a stream that the drafter opens."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio

from draft_service.service import DraftHandler, LoadedDrafter, OrchestratorLink
from specwire.core.invalid import InvalidParameter
from specwire.registry.directory import Listing, RegistryUnavailable
from specwire.registry.entry import ServiceState
from specwire.registry.service import RemoteDirectory
from specwire.rpc.channel import Backoff, distrust, open_peer_channel, unreachable
from specwire.rpc.errors import readable, retry_after
from specwire.rpc.keys import Token
from specwire.rpc.link import LinkError, Outbox
from specwire.rpc.process import say
from specwire.rpc.renewal import Renewal
from specwire.rpc.tls import ClientTls
from specwire.telemetry.metrics import MetricsListener
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc

JOIN_LIMIT = 20.0
FIRST_BACKOFF = 0.1
MOST_BACKOFF = 10.0
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
    """Keeps a link to the orchestrator at `address`; `joined` once it has been up, and then `any_joined` is set.

    `up`: the link is. `task`: runs it. `missing_since`: when the cloud stopped telling of it; None where it tells.
    """

    task: asyncio.Task[None]

    def __init__(
        self,
        address: str,
        tls: ClientTls | None,
        handler: DraftHandler,
        token: Token | str,
        any_joined: asyncio.Event,
    ) -> None:
        self.address = address
        self.joined = self.up = False
        self.missing_since: float | None = None
        self._any_joined = any_joined
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
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        while True:
            began = loop.time()
            self._wait = 0.0
            reason = await self._talk_once()
            if task is not None and task.cancelling():  # gRPC keeps one that comes while a call begins to itself
                raise asyncio.CancelledError
            if reason != self._said:
                say(f"specwire draft: {reason}; dialling again")
            self._said = reason
            await asyncio.sleep(max(self._backoff.next(loop.time() - began), self._wait))

    async def _talk_once(self) -> str:
        """One connection from start to end; returns why it ended."""
        async with open_peer_channel(self.address, self._tls, self._token) as channel:
            call: Call = draft_pb2_grpc.DraftHubServiceStub(channel).Join()
            try:
                return await self._talk(call)
            except TimeoutError:
                return f"{self.address} did not answer within {JOIN_LIMIT:g} s"
            except InvalidParameter as error:
                return f"what {self.address} sent cannot be taken: {error}"
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
        except asyncio.CancelledError:  # of the call, or of this task: see `run`
            return f"the link to {self.address} broke: {broken[0] if broken else 'the stream was cancelled'}"
        finally:
            self.up = False
            self._handler.lose(link)
            await outbox.close(flush_s=0.2)

    async def _listen(self, call: Call, link: OrchestratorLink) -> None:
        """Until the orchestrator closes the stream. Its first message says that we have joined."""
        async with asyncio.timeout(JOIN_LIMIT):
            message = await readable(await call.read())
        if isinstance(message, draft_pb2.JoinResponse):
            if self.joined:
                say(f"specwire draft: joined {self.address} again")
            self._said, self.up, self.joined = "", True, True
            self._any_joined.set()
        while isinstance(message, draft_pb2.JoinResponse):
            await self._handler.take(message.told, link)
            await self._handler.room()
            message = await readable(await call.read())

    def _judge(self, code: grpc.StatusCode, details: str) -> str:
        """Why the link is down, in one sentence; JoinRefused if it will stay so."""
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise JoinRefused(f"{self.address} does not let drafters dial in (--accept-drafters)")
        if code is grpc.StatusCode.UNAUTHENTICATED and self.joined:  # what it shows may be renewed
            return f"{self.address} refused this drafter: {details}"
        if code in FINAL:
            raise JoinRefused(f"{self.address} refused this drafter: {details}")
        if code is grpc.StatusCode.UNAVAILABLE:
            untrusted = distrust(details, self.address)
            if untrusted and not self.joined:  # it worked before, so it may work again
                raise JoinRefused(untrusted)
            return unreachable(details, self.address, tls=self._tls is not None) or f"{self.address}: {details}"
        return f"{self.address} ended the link: {code.name}: {details}"


# Seconds between two looks at who is there, and for which an orchestrator that is not told any more is still dialled.
LOOK_S = 1.0
GIVEN_UP_S = 10.0


class DiallingDrafter:
    """A drafter that serves the orchestrators that it dials; owns the drafter, and `directory`.

    address: "" where only those of `directory` are dialled. also: orchestrators beside the one at `address`. Each is
    dialled separately. renewal: of what is shown to them. directory: tells of further ones while they are there.

    Invariant: `_dialled` holds the named ones, and those that `directory` told of and that did not go since.
    """

    def __init__(
        self,
        drafter: LoadedDrafter,
        address: str,
        tls: ClientTls | None,
        token: Token | str = "",
        metrics: MetricsListener | None = None,
        also: Sequence[str] = (),
        renewal: Renewal | None = None,
        directory: RemoteDirectory | None = None,
    ) -> None:
        self.metrics = metrics
        self._drafter = drafter
        self._renewal = renewal
        self._tls = tls
        self._token = token
        self._directory = directory
        self._joined = asyncio.Event()
        self._named = tuple(filter(None, (address, *also)))
        self._dialled: dict[str, Dialler] = {}
        for each in self._named:
            self._start(each)
        self._looking = None if directory is None else asyncio.create_task(self._look(directory), name="orchestrators")

    @property
    def address(self) -> str:
        """Names of whom it dials, for people."""
        joined = [address for address, each in self._dialled.items() if each.joined]
        return ", ".join(self._named if self._directory is None else joined)

    def _start(self, address: str) -> None:
        self._dialled[address] = each = Dialler(address, self._tls, self._drafter.handler, self._token, self._joined)
        each.task = asyncio.create_task(self._dial(each))

    async def _dial(self, dialler: Dialler) -> None:
        try:
            await dialler.run()
        except Exception as error:  # the others go on
            if len(self._dialled) > 1 or self._directory is not None:
                say(f"specwire draft: {str(error) or type(error).__name__}")
            raise

    async def _look(self, directory: RemoteDirectory) -> None:
        """Dial those that are told, and leave those that are gone."""
        loop, trouble = asyncio.get_running_loop(), ""
        while True:
            try:
                self._follow(await directory.listing(), loop.time())
                trouble = ""
            except RegistryUnavailable as error:  # those that are known stay
                if str(error) != trouble:
                    say(f"specwire draft: {error}")
                trouble = str(error)
            await asyncio.sleep(LOOK_S)

    def _follow(self, listing: Listing, now: float) -> None:
        there = {each.address for each in listing.entries if each.state is ServiceState.SERVING}
        for address in sorted(there - self._dialled.keys()):
            self._start(address)
        for address, each in list(self._dialled.items()):
            if address in self._named or address in there:
                each.missing_since = None
                continue
            each.missing_since = now if each.missing_since is None else each.missing_since
            if not each.up and (each.task.done() or now - each.missing_since > GIVEN_UP_S):
                each.task.cancel()
                del self._dialled[address]

    async def join(self) -> None:
        """Return once joined, however long an orchestrator takes to appear; JoinRefused where all refuse it.

        One that is told later may want it, so where a cloud is asked nobody's refusal is the end.
        """
        await _first(self._refused(), self._joined.wait())
        if not self._joined.is_set():
            self._dialled[self._named[0]].task.result()

    async def failed(self) -> str:
        """Return, with the reason, once no orchestrator can be served any more."""
        return str(await _first(self._drafter.thread.failed(), self._refused()))

    async def _refused(self) -> str:
        """Why all orchestrators refuse it, once they do; never returns where a cloud may tell of others."""
        if self._looking is not None:
            await asyncio.wait({self._looking})
        tasks = [self._dialled[each].task for each in self._named]
        await asyncio.wait(tasks)
        error = tasks[0].exception()
        return str(error) or type(error).__name__

    async def stop(self, grace: float = 0.0) -> None:
        """Idempotent. The link ends at once: its sessions only get slower."""
        if self._renewal is not None:
            await self._renewal.stop()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self._directory is not None:
            await self._directory.close()
        dialling = [each.task for each in self._dialled.values()]
        for task in dialling:
            task.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)
        await self._drafter.stop()
        if self.metrics is not None:
            await self.metrics.stop()


async def _first(*waits: Coroutine[Any, Any, object]) -> object:
    """What the first of them returns that ends; the others are waited for no more."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()


def introduction(info: common_pb2.GetModelInfoResponse) -> common_pb2.GetModelInfoResponse:
    """`info` without what an orchestrator needs from a target only."""
    short = common_pb2.GetModelInfoResponse()
    short.CopyFrom(info)
    short.ClearField("tokenizer_json")
    short.ClearField("chat_template")
    short.ClearField("special_tokens")
    return short
