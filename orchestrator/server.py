"""Starts and stops an orchestrator: log, peers, and the gRPC server that clients call."""

from __future__ import annotations

import asyncio

from orchestrator.api import GenerationApi
from orchestrator.options import OrchestratorOptions
from orchestrator.sessions import Orchestrator
from orchestrator.store import open_store
from specwire.rpc.server import RunningServer, Service, serve
from specwire.v1 import generation_pb2, generation_pb2_grpc


class RunningOrchestrator:
    """`address` is where clients call."""

    def __init__(self, orchestrator: Orchestrator, server: RunningServer) -> None:
        self.orchestrator = orchestrator
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
        """Refuse new sessions, give running ones `grace` seconds, then end everything. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        await self._server.stop(grace)
        await self.orchestrator.stop()


async def start(options: OrchestratorOptions) -> RunningOrchestrator:
    """Connect to log and peers, then listen.

    Raises:
        StartError, StoreUnavailable, ListenError: one sentence on what is missing.
    """
    store = await open_store(options.redis_url)
    orchestrator = Orchestrator(options, store)
    try:
        await orchestrator.start()
        api = GenerationApi(orchestrator)
        name = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
        service = Service(name, lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(api, server))
        server = await serve([service], options.listen, allow_insecure=options.insecure)
    except BaseException:
        await orchestrator.stop()
        raise
    return RunningOrchestrator(orchestrator, server)
