"""`specwire edge`: drafter, orchestrator and session log in one process near the client."""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc

import draft_service.server
import orchestrator.server
from deploy.stack.options import StackError
from deploy.stack.stack import check_all_free, vocabulary_of
from draft_service.service import DrafterThread, DraftHandler, OrchestratorLink
from orchestrator.options import OrchestratorOptions, and_http
from orchestrator.peers.models import Info, vocabulary_mismatch
from orchestrator.peers.peer import DrafterPeer
from orchestrator.pool import StartError
from orchestrator.server import serving_options
from orchestrator.sessions import Orchestrator
from specwire.core.invalid import InvalidParameter
from specwire.options import add_options
from specwire.progress import LAST_LINE
from specwire.redis import MEMORY, without_password
from specwire.rpc.channel import open_peer_channel
from specwire.rpc.errors import readable
from specwire.rpc.process import Footprint, run_until_signalled, say, share_machine
from specwire.rpc.server_options import (
    ModelServiceOptions,
    check_listen,
    drain_grace,
    filled,
    size_of,
)
from specwire.telemetry.metrics import Registry
from specwire.telemetry.options import telemetry_of
from specwire.v1 import draft_pb2
from specwire.v1.common_pb2 import GetModelInfoRequest
from specwire.v1.verify_pb2_grpc import VerifyServiceStub

# ----------------------------------------------------------------------------------------------------------------------
# A drafter in the orchestrator's process: messages are handed over without gRPC.


class LocalDrafter:
    """Owns a drafter; implements specwire.rpc.link.Line.

    Invariant: `_peer` is the orchestrator's from `join` until the drafter fails, is cut, or is stopped.
    """

    address = "the drafter in this process"

    def __init__(self, drafter: DrafterThread, handler: DraftHandler) -> None:
        self._drafter = drafter
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        # Later, not at once: a refusal would reach the session in the middle of the event that it answers.
        self._link = OrchestratorLink(lambda message: self._loop.call_soon(self._hear, message))
        self._orchestrator: Orchestrator | None = None
        self._peer: DrafterPeer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._up = True

    @property
    def up(self) -> bool:
        return self._up

    def join(self, orchestrator: Orchestrator) -> None:
        """Draft for the orchestrator's sessions; StartError if its target has another vocabulary."""
        self._orchestrator = orchestrator
        self._peer = orchestrator.pool.admit(self, self._handler.info)
        if self._peer.refusal is not None:
            raise StartError(self._peer.refusal)
        self._watching = asyncio.create_task(self._watch())

    def send(self, part: draft_pb2.ConnectDraftRequest) -> None:
        if self._up:
            self._handler.take_at_once(part, self._link)

    def cut(self, reason: str) -> None:
        """Cut the drafter off after a fault of our own: sessions go on without one."""
        if self._up:
            say(f"specwire edge: drafting has ended: {reason}")
            self._loop.call_soon(self._leave)

    def _hear(self, message: draft_pb2.ConnectDraftResponse) -> None:
        if self._peer is not None:
            self._peer.on_message(message)

    async def _watch(self) -> None:
        self.cut(await self._drafter.failed())

    def _leave(self) -> None:
        self._up = False
        peer, self._peer = self._peer, None
        if self._orchestrator is not None and peer is not None:
            self._handler.lose(self._link)
            self._orchestrator.pool.dismiss(peer)

    async def stop(self) -> None:
        """Idempotent; sessions that run go on without a drafter."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._leave()
        await self._handler.stop()
        await self._drafter.stop()


# Seconds for a verifier to describe itself before the draft model is loaded.
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class EdgeOptions:
    """`serving` is the orchestrator's part."""

    drafting: ModelServiceOptions
    serving: OrchestratorOptions


class RunningEdge:
    """`address` is where clients call."""

    def __init__(self, serving: orchestrator.server.RunningOrchestrator, cleanup: AsyncExitStack) -> None:
        self._serving = serving
        self._cleanup = cleanup

    @property
    def address(self) -> str:
        return self._serving.address

    @property
    def http(self) -> str | None:
        """The URL where it is called by HTTP; None where it is not."""
        return self._serving.http

    async def failed(self) -> str:
        """Never returns: a lost verifier comes back, and a drafter is not needed."""
        return await self._serving.failed()

    async def stop(self, grace: float) -> None:
        """Refuse new sessions, give running ones `grace` seconds, then end everything. Idempotent."""
        await self._serving.stop(grace)
        await self._cleanup.aclose()


async def start(options: EdgeOptions) -> RunningEdge:
    """Load the drafter, connect to a verifier, listen.

    Raises:
        StackError, ModelError, StartError, StoreUnavailable, ListenError: one sentence on what is missing.
    """
    serving = options.serving
    wanted = [("listen", serving.listen), ("http", serving.http), ("metrics", serving.metrics)]
    check_all_free((name, address) for name, address in wanted if address)
    await _check_vocabulary(options)
    share_machine()
    async with AsyncExitStack() as parts:
        figures = Registry()
        drafter = await draft_service.server.load(options.drafting)
        drafter.handler.info.region = serving.registration.region
        figures.add(draft_service.server.DRAFTER, drafter.families)
        local = LocalDrafter(drafter.thread, drafter.handler)
        parts.push_async_callback(local.stop)
        running = await orchestrator.server.start(serving)
        parts.push_async_callback(running.stop, 0.0)
        running.orchestrator.registry.include(figures)
        local.join(running.orchestrator)
        return RunningEdge(running, parts.pop_all())


async def _check_vocabulary(options: EdgeOptions) -> None:
    """StackError where every named verifier has other tokens than the draft model, which then need not be loaded.

    Verifiers that do not answer at once are waited for later.
    """
    serving, drafter = options.serving, await asyncio.to_thread(vocabulary_of, options.drafting.model)
    if drafter is None or not serving.verifiers:
        return
    asked = [_described(address, serving, drafter.tokenizer_hash) for address in serving.verifiers]
    mismatches = [target and vocabulary_mismatch(target, drafter) for target in await asyncio.gather(*asked)]
    if all(mismatches):
        raise StackError(str(mismatches[0]))


async def _described(address: str, serving: OrchestratorOptions, known: str) -> Info | None:
    try:
        async with open_peer_channel(address, serving.peer_tls, serving.peer_token) as channel:
            asked = GetModelInfoRequest(known_tokenizer_hash=known)
            info: Info = await readable(await VerifyServiceStub(channel).GetModelInfo(asked, timeout=ANSWER_S))
            return info
    except (grpc.RpcError, InvalidParameter):
        return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "edge")


def options_of(args: argparse.Namespace) -> EdgeOptions:
    """Raises ValueError that names the option."""
    for field, addresses in (("listen", [args.listen]), ("verifier", args.verifier)):
        for address in addresses:
            check_listen(address, field)
    if not args.draft:
        raise InvalidParameter("draft", "must not be empty")
    drafting = filled(
        ModelServiceOptions,
        args,
        without=("listen", "insecure", "metrics"),  # of the orchestrator
        model=args.draft,
        threads=args.draft_threads,
        kv_memory=size_of("kv-memory", args.kv_memory),
    )
    return EdgeOptions(drafting, serving_options(args))


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    LAST_LINE.quiet = args.json
    try:
        options, grace, telemetry = options_of(args), drain_grace(args), telemetry_of(args)
    except ValueError as error:
        say(f"specwire edge: error: {error}")
        return 2
    telemetry.start("edge")

    def ready(running: RunningEdge) -> str:
        say(f"specwire edge: {Footprint.now()}")
        return _ready_object(running, options) if args.json else _ready_line(running, options)

    return asyncio.run(run_until_signalled(lambda: start(options), ready, "edge", grace))


def _ready_line(running: RunningEdge, options: EdgeOptions) -> str:
    url = options.serving.redis_url
    log = "log in memory: lost in a crash" if url == MEMORY else f"log {without_password(url)}"
    return (
        f"specwire edge: ready on {running.address}{and_http(running.http)} "
        f"(draft {options.drafting.model}, {_verifiers(options.serving)}, {log})"
    )


def _verifiers(serving: OrchestratorOptions) -> str:
    """Where they are, for people."""
    named = [f"verifier {', '.join(serving.verifiers)}"] if serving.verifiers else []
    url, cloud = serving.registration.url, serving.cloud.address
    looked = [f"registry {without_password(url)}"] if url else [f"cloud {cloud}"] if cloud else []
    return ", ".join([*named, *looked])


def _ready_object(running: RunningEdge, options: EdgeOptions) -> str:
    url = options.serving.redis_url
    ready = {
        "service": "edge",
        "address": running.address,
        "http": running.http,
        "draft": options.drafting.model,
        "verifiers": options.serving.verifiers,
        "registry": without_password(options.serving.registration.url),
        "cloud": options.serving.cloud.address,
        "redis": without_password(url),
        "durable": url != MEMORY,
        **Footprint.now()._asdict(),
    }
    return json.dumps(ready)
