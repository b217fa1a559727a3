"""Starts and stops an orchestrator: log, peers, registration, gRPC and HTTP; and its command line."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Protocol

from orchestrator.api.calls import GenerationApi
from orchestrator.api.status import StatusApi, is_offered
from orchestrator.chat.models import ChatModels
from orchestrator.hub import MOST_SAID_BYTES, DraftHub
from orchestrator.metrics import families
from orchestrator.options import OrchestratorOptions, and_http, chat_template_of, http_access_of, http_of
from orchestrator.peers.models import Target
from orchestrator.sessions import ORCHESTRATOR, Orchestrator
from orchestrator.store import open_store
from orchestrator.tenants import access_of
from specwire.options import add_options
from specwire.registry.directory import Registrar
from specwire.registry.entry import MOST_MODELS, Load, Role, ServedModel, ServiceEntry
from specwire.registry.options import cloud_of, register, registry_of
from specwire.rpc.keys import read_peer_token
from specwire.rpc.link import ALL_ELSEWHERE, LocalPeer
from specwire.rpc.process import run_until_signalled, say
from specwire.rpc.renewal import Renewal
from specwire.rpc.server import RunningServer, Service, check_free, serve
from specwire.rpc.server_options import check_listen, drain_grace, filled
from specwire.rpc.tls import client_tls, server_tls
from specwire.telemetry.metrics import MetricsListener, listen, process_families
from specwire.telemetry.options import telemetry_of
from specwire.v1 import draft_pb2, draft_pb2_grpc, generation_pb2, generation_pb2_grpc, status_pb2, status_pb2_grpc

# ----------------------------------------------------------------------------------------------------------------------
# The orchestrator's own entry in the registry.


def registered(orchestrator: Orchestrator, address: str) -> Registrar:
    """It answers at `address`. The caller closes what this returns."""

    def describe(entry: ServiceEntry) -> ServiceEntry:
        models = tuple(map(_served, orchestrator.pool.targets()[:MOST_MODELS]))
        return replace(entry, models=models, load=_load(orchestrator))

    return register(orchestrator.options.registration, Role.ORCHESTRATOR, address, describe)


def _served(target: Target) -> ServedModel:
    info, digest = target.info, target.identity.digest
    return ServedModel(info.model, info.weights_fingerprint, info.vocabulary_fingerprint, digest)


def _load(orchestrator: Orchestrator) -> Load:
    """Sessions that are driven here; those without a verifier wait."""
    driven = [each for each in orchestrator.sessions.values() if each.view.output.end is None and not each.following]
    waiting = sum(each.verifying.peer is None for each in driven)
    return Load(len(driven) - waiting, waiting, 0)


GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
STATUS = status_pb2.DESCRIPTOR.services_by_name["StatusService"].full_name
HUB = draft_pb2.DESCRIPTOR.services_by_name["DraftHubService"].full_name


# Seconds for streams to end whose sessions have ended.
LAST_WORDS_S = 1.0


class RunningHttp(Protocol):
    """The HTTP server, which needs an extra."""

    @property
    def url(self) -> str: ...
    async def stop(self, grace: float) -> None: ...
    def recheck(self) -> None: ...


class RunningOrchestrator:
    """`address` is where clients call, `http` where they do so by HTTP: a URL, None for nowhere."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        chats: ChatModels,
        hub: DraftHub,
        server: RunningServer,
        http: RunningHttp | None,
        metrics: MetricsListener | None,
        registrar: Registrar,
    ) -> None:
        self.orchestrator = orchestrator
        self.metrics = metrics
        self._registrar = registrar
        self._chats = chats
        self._hub = hub
        self._server = server
        self._http = http
        self._stopped = False
        self._renewal = Renewal(orchestrator.options.origins, self._recheck)
        orchestrator.on_readiness = self.tell_health

    async def tell_health(self) -> None:
        """Tell gRPC's health checks whether sessions are taken: not while the log takes no writes."""
        if not self._stopped:
            await self._server.set_serving(not self.orchestrator.log.trouble)

    def _recheck(self) -> None:
        """End what was let in by a token or a certificate that is no longer valid."""
        self._server.recheck()
        if self._http is not None:
            self._http.recheck()

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def http(self) -> str | None:
        return None if self._http is None else self._http.url

    async def failed(self) -> str:
        """Never returns: lost peers come back, a lost log is waited for."""
        await asyncio.Event().wait()
        return "unreachable"

    async def stop(self, grace: float) -> None:
        """Refuse new sessions, give running ones `grace` seconds, leave the rest to others, end. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        await self._renewal.stop()
        await self._server.set_serving(False)
        await self._registrar.drain()
        await self.orchestrator.drain(grace)
        await self._registrar.close()
        self._hub.leave()
        if self._http is not None:
            await self._http.stop(LAST_WORDS_S)
        await self._server.stop(min(grace, LAST_WORDS_S))
        await self._chats.stop()
        await self.orchestrator.stop()
        if self.metrics is not None:
            await self.metrics.stop()


async def start(options: OrchestratorOptions, local: Mapping[str, LocalPeer] = ALL_ELSEWHERE) -> RunningOrchestrator:
    """Connect to log and peers, then listen.

    Args:
        local: peers in this process, by the addresses that `options` name them with.

    Raises:
        StartError, StoreUnavailable, ListenError: one sentence on what is missing.
    """
    listened = (("listen", options.listen), ("http", options.http), ("metrics", options.metrics))
    check_free((field, address) for field, address in listened if address)
    store = await open_store(options.redis_url, durability=options.durability)
    orchestrator = Orchestrator(options, store, local)
    orchestrator.registry.add(ORCHESTRATOR, lambda: families(orchestrator))
    orchestrator.registry.add(ORCHESTRATOR, process_families)
    async with AsyncExitStack() as started:
        started.push_async_callback(orchestrator.stop)
        metrics = await listen(orchestrator.registry, options.metrics, options.tls) if options.metrics else None
        if metrics is not None:
            started.push_async_callback(metrics.stop)
        await orchestrator.start()
        chats = ChatModels(orchestrator.pool, options.chat_template, options.tool_format)
        started.push_async_callback(chats.stop)
        http = await _serve_http(orchestrator, chats)
        if http is not None:
            started.push_async_callback(http.stop, 0.0)
        hub = DraftHub(orchestrator)
        access, api = options.access, GenerationApi(orchestrator, chats)
        add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
        offered = [Service(GENERATION, partial(add, api), access.keys)]
        if options.accept_drafters:
            add = draft_pb2_grpc.add_DraftHubServiceServicer_to_server
            offered.append(Service(HUB, partial(add, hub), access.drafter_keys, MOST_SAID_BYTES))
        if is_offered(options):
            add = status_pb2_grpc.add_StatusServiceServicer_to_server
            offered.append(Service(STATUS, partial(add, StatusApi(orchestrator)), access.operator_keys))
        server = await serve(offered, options.listen, tls=options.tls, allow_insecure=options.insecure)
        registrar = registered(orchestrator, server.address)
        started.pop_all()
    running = RunningOrchestrator(orchestrator, chats, hub, server, http, metrics, registrar)
    await running.tell_health()
    return running


async def _serve_http(orchestrator: Orchestrator, chats: ChatModels) -> RunningHttp | None:
    options = orchestrator.options
    if not options.http:
        return None
    from orchestrator.http.server import serve as serve_http  # an extra

    return await serve_http(orchestrator, options.http, options.tls, chats)


# ----------------------------------------------------------------------------------------------------------------------
# The command line: `specwire orchestrate` and `python -m orchestrator`.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "orchestrate")


def options_of(args: argparse.Namespace) -> OrchestratorOptions:
    """Raises ValueError that names the option."""
    for field, addresses in (("listen", [args.listen]), ("verifier", args.verifier), ("drafter", args.drafter)):
        for address in addresses:
            check_listen(address, field)
    return serving_options(args, tuple(args.drafter))


def serving_options(args: argparse.Namespace, drafters: tuple[str, ...] = ()) -> OrchestratorOptions:
    """The options of every command that runs an orchestrator. Raises ValueError that names the option."""
    return filled(
        OrchestratorOptions,
        args,
        verifiers=tuple(args.verifier),
        drafters=drafters,
        tls=server_tls(args),
        peer_tls=client_tls(args),
        peer_token=read_peer_token(args),
        access=access_of(args, args.drafter_keys),
        drafter_names=tuple(args.drafter_name),
        http=http_of(args),
        chat_template=chat_template_of(args),
        http_access=http_access_of(args),
        registration=registry_of(args),
        cloud=cloud_of(args),
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    try:
        options, grace, telemetry = options_of(args), drain_grace(args), telemetry_of(args)
    except ValueError as error:
        say(f"specwire orchestrate: error: {error}")
        return 2
    telemetry.start(ORCHESTRATOR)

    def ready(running: RunningOrchestrator) -> str:
        if args.json:
            return json.dumps({"service": "orchestrate", "address": running.address, "http": running.http})
        return f"specwire orchestrate: ready on {running.address}{and_http(running.http)}"

    return asyncio.run(run_until_signalled(lambda: start(options), ready, "orchestrate", grace))
