"""Starts and stops an orchestrator: log, peers, and the gRPC server that clients call."""

from __future__ import annotations

import asyncio

from orchestrator.api import GenerationApi
from orchestrator.hub import MOST_SAID_BYTES, DraftHub
from orchestrator.options import OrchestratorOptions
from orchestrator.sessions import Orchestrator
from orchestrator.store import open_store
from specwire.rpc.guard import Admission
from specwire.rpc.keys import Keys
from specwire.rpc.server import RunningServer, Service, serve
from specwire.v1 import draft_pb2, draft_pb2_grpc, generation_pb2, generation_pb2_grpc

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
HUB = draft_pb2.DESCRIPTOR.services_by_name["DraftHubService"].full_name


# For streams whose sessions have ended to say so.
LAST_WORDS_S = 1.0


class RunningOrchestrator:
    """`address` is where clients call."""

    def __init__(self, orchestrator: Orchestrator, hub: DraftHub, server: RunningServer) -> None:
        self.orchestrator = orchestrator
        self._hub = hub
        self._server = server
        self._stopped = False

    @property
    def address(self) -> str:
        return self._server.address

    async def failed(self) -> str:
        """Never returns: lost peers come back, a lost log is waited for."""
        await asyncio.Event().wait()
        return "unreachable"

    async def stop(self, grace: float) -> None:
        """Refuse new sessions, give running ones `grace` seconds, leave the rest to others, end. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        await self._server.set_serving(False)
        await self.orchestrator.drain(grace)
        self._hub.leave()
        await self._server.stop(min(grace, LAST_WORDS_S))
        await self.orchestrator.stop()


async def start(options: OrchestratorOptions) -> RunningOrchestrator:
    """Connect to log and peers, then listen.

    Raises:
        StartError, StoreUnavailable, ListenError: one sentence on what is missing.
    """
    store = await open_store(options.redis_url, durability=options.durability)
    orchestrator = Orchestrator(options, store)
    try:
        await orchestrator.start()
        hub = DraftHub(orchestrator)
        access = options.access
        services = [_generation(GenerationApi(orchestrator), access.keys), _drafters(hub, access.drafter_keys)]
        offered = services if options.accept_drafters else services[:1]
        server = await serve(offered, options.listen, tls=options.tls, allow_insecure=options.insecure)
    except BaseException:
        await orchestrator.stop()
        raise
    return RunningOrchestrator(orchestrator, hub, server)


def _generation(api: GenerationApi, keys: Keys | None) -> Service:
    return Service(
        GENERATION,
        lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(api, server),
        Admission(keys),
    )


def _drafters(hub: DraftHub, keys: Keys | None) -> Service:
    return Service(
        HUB,
        lambda server: draft_pb2_grpc.add_DraftHubServiceServicer_to_server(hub, server),
        Admission(keys, MOST_SAID_BYTES),
    )
