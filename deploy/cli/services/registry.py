"""`specwire registry`: tells edges and drafters elsewhere what is registered, without a way to Redis."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass

from specwire.core.invalid import InvalidParameter
from specwire.options import add_options
from specwire.redis import InvalidUrl
from specwire.registry.directory import Directory
from specwire.registry.service import RegistryServicer
from specwire.rpc.keys import Keys, read_keys
from specwire.rpc.process import run_until_signalled, say
from specwire.rpc.renewal import Renewal
from specwire.rpc.server import RunningServer, Service, check_free, serve
from specwire.rpc.server_options import (
    ANY_PORT,
    check_exposure,
    check_metrics,
    drain_grace,
    filled,
)
from specwire.rpc.tls import ServerTls, server_tls
from specwire.telemetry.metrics import Families, MetricsListener, Registry, gauge, listen, process_families
from specwire.telemetry.options import telemetry_of
from specwire.v1 import registry_pb2, registry_pb2_grpc

SERVICE = registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name
# Whose figures they are.
REGISTRY = "registry"
# Seconds for calls that are no streams of ours.
LAST_CALLS_S = 0.2


@dataclass(frozen=True, slots=True)
class RegistryServiceOptions:
    """url: of the registry in Redis. keys: who may call; None: everybody. The rest: as of any service."""

    url: str
    listen: str = ANY_PORT
    insecure: bool = False
    tls: ServerTls | None = None
    keys: Keys | None = None
    metrics: str = ""

    def __post_init__(self) -> None:
        check_exposure(self.listen, self.tls, self.insecure)
        check_metrics(self.metrics, self.insecure, self.tls)
        try:
            Directory.at(self.url)
        except InvalidUrl as error:
            raise InvalidParameter("registry", str(error).removeprefix("registry: ")) from None


class RunningRegistry:
    """`address` is where edges call."""

    def __init__(
        self, servicer: RegistryServicer, server: RunningServer, metrics: MetricsListener | None, renewal: Renewal
    ) -> None:
        self.metrics = metrics
        self._servicer = servicer
        self._server = server
        self._renewal = renewal

    @property
    def address(self) -> str:
        return self._server.address

    async def failed(self) -> str:
        """Never returns: Redis comes back."""
        await asyncio.Event().wait()
        return "unreachable"

    async def stop(self, grace: float = 0.0) -> None:
        """End all streams: callers keep what they were told, and dial again. Idempotent."""
        await self._renewal.stop()
        await self._servicer.stop()
        await self._server.stop(min(grace, LAST_CALLS_S))
        if self.metrics is not None:
            await self.metrics.stop()


async def start(options: RegistryServiceOptions) -> RunningRegistry:
    """Raises ListenError. Redis need not answer yet."""
    check_free((name, at) for name, at in (("listen", options.listen), ("metrics", options.metrics)) if at)
    figures, servicer = Registry(), RegistryServicer(Directory.at(options.url))
    figures.add(REGISTRY, process_families)
    figures.add(REGISTRY, lambda: _families(servicer))
    service = Service(
        SERVICE,
        lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, server),
        options.keys,
    )
    metrics = await listen(figures, options.metrics, options.tls) if options.metrics else None
    try:
        server = await serve([service], options.listen, tls=options.tls, allow_insecure=options.insecure)
    except BaseException:
        if metrics is not None:
            await metrics.stop()
        raise
    servicer.start()
    origins = [None if each is None else each.origin for each in (options.tls, options.keys)]
    return RunningRegistry(servicer, server, metrics, Renewal(origins, server.recheck))


def _families(servicer: RegistryServicer) -> Families:
    listed = 0 if servicer.listing is None else len(servicer.listing.entries)
    yield gauge("registry_followers", "Calls that follow the registry.", servicer.followers)
    yield gauge("registry_services", "Services that were registered at the last look.", listed)
    yield gauge("registry_up", "1 if the registry answered the last look.", float(not servicer.trouble))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "registry")


def options_of(args: argparse.Namespace) -> RegistryServiceOptions:
    """Raises InvalidParameter."""
    tls, keys = server_tls(args), read_keys("--api-keys", args.api_keys)
    return filled(RegistryServiceOptions, args, url=args.registry, tls=tls, keys=keys)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    try:
        options = options_of(args)
        grace, telemetry = drain_grace(args), telemetry_of(args)
    except InvalidParameter as error:
        say(f"specwire registry: error: {error}")
        return 2
    telemetry.start(REGISTRY)

    def ready(running: RunningRegistry) -> str:
        if args.json:
            return json.dumps({"service": "registry", "address": running.address})
        return f"specwire registry: ready on {running.address}"

    return asyncio.run(run_until_signalled(lambda: start(options), ready, "registry", grace))
