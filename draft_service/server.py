"""A drafter as a service: load, then listen or dial in, stop. Used by the command line and by actors alike."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from draft_service.dialler import DiallingDrafter
from draft_service.service import DraftHandler, DraftServicer, LoadedDrafter
from draft_service.sessions import Command, Replies, Sessions
from specwire.core.invalid import InvalidParameter
from specwire.options import add_options
from specwire.registry.directory import Registrar
from specwire.registry.entry import Role
from specwire.registry.options import (
    NO_CLOUD,
    NOWHERE,
    CloudOptions,
    RegistryOptions,
    cloud_of,
    register_model,
    registry_of,
)
from specwire.registry.service import RemoteDirectory
from specwire.rpc.channel import check_token_is_safe
from specwire.rpc.keys import Token, read_peer_token
from specwire.rpc.model_info import model_info_to_wire
from specwire.rpc.process import run_until_signalled, say, share_machine
from specwire.rpc.renewal import Renewal
from specwire.rpc.server import RunningServer, Service, check_free, serve
from specwire.rpc.server_options import (
    ANY_PORT,
    ModelServiceOptions,
    check_listen,
    drain_grace,
    model_options,
    run_model_service,
)
from specwire.rpc.service_thread import GoOn, Runnable, ServiceThread
from specwire.rpc.tls import ClientTls, client_tls
from specwire.telemetry.metrics import MetricsListener, Registry, listen, process_families
from specwire.telemetry.options import telemetry_of
from specwire.text.vocabulary_map import convention_of
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc

# Seconds for links to end, and be told why. Some calls never do, such as a health watch.
LAST_WORDS_S = 1.0
# Whose figures they are.
DRAFTER = "drafter"
SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


class RunningDrafter:
    """A drafter that answers at `address`."""

    def __init__(
        self,
        drafter: LoadedDrafter,
        servicer: DraftServicer,
        server: RunningServer,
        metrics: MetricsListener | None,
        registrar: Registrar,
        renewal: Renewal,
    ) -> None:
        self.metrics = metrics
        self._drafter = drafter
        self._servicer = servicer
        self._server = server
        self._registrar = registrar
        self._renewal = renewal

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def info(self) -> common_pb2.GetModelInfoResponse:
        """What describes the model."""
        return self._drafter.handler.info

    async def failed(self) -> str:
        return await self._drafter.thread.failed()

    async def stop(self, grace: float = 0.0) -> None:
        """Idempotent. Links end at once, as their sessions only get slower; `grace` is of what serves texts."""
        await self._renewal.stop()
        await self._registrar.close()
        await self._server.set_serving(False)
        self._servicer.leave()
        await self._server.stop(LAST_WORDS_S)
        await self._drafter.stop()
        if self.metrics is not None:
            await self.metrics.stop()


async def start(options: ModelServiceOptions, registration: RegistryOptions = NOWHERE) -> RunningDrafter:
    """Load the model, then listen. registration: where the drafter registers.

    Raises:
        InvalidParameter: nobody could be told where it is.
        ModelError: the model cannot be served.
        ListenError: the address cannot be listened on.
    """
    registration.check_listen(options.listen)
    check_free(options.listened)
    async with AsyncExitStack() as started:
        drafter, metrics = await _begun(options, registration.region, started)
        servicer = DraftServicer(drafter.handler)
        service = Service(
            SERVICE,
            lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server),
            options.keys,
        )
        server = await serve([service], options.listen, tls=options.tls, allow_insecure=options.insecure)
        registrar = register_model(
            registration, Role.DRAFTER, lambda: drafter.handler.info, server.address, drafter.load
        )
        started.pop_all()
    renewal = Renewal(options.origins, server.recheck)
    return RunningDrafter(drafter, servicer, server, metrics, registrar, renewal)


async def dial_in(
    options: ModelServiceOptions,
    address: str,
    tls: ClientTls | None,
    token: Token | str = "",
    region: str = "",
    also: Sequence[str] = (),
    cloud: CloudOptions = NO_CLOUD,
) -> DiallingDrafter:
    """Load the model, then dial the orchestrators at `address` and `also` until it has joined one of them.

    Of the `options` about listening, only those of metrics count.

    Args:
        address: "" where only those of `cloud` are dialled.
        region: where the drafter is.
        cloud: where it asks for further orchestrators, with the same `tls` and `token`.

    Raises:
        ModelError: the model cannot be served.
        ListenError: figures cannot be listened for there.
        JoinRefused: no orchestrator will have this drafter.
    """
    check_free([("metrics", options.metrics)] if options.metrics else [])
    async with AsyncExitStack() as started:
        drafter, metrics = await _begun(options, region, started)
        shown = [None if tls is None else tls.origin, token.origin if isinstance(token, Token) else None]
        renewal = Renewal([*options.origins, *shown])
        told = RemoteDirectory(cloud, Role.ORCHESTRATOR, tls, token, region) if cloud.address else None
        running = DiallingDrafter(drafter, address, tls, token, metrics, also, renewal, told)
        started.push_async_callback(running.stop)
        await running.join()
        started.pop_all()
    return running


async def _begun(
    options: ModelServiceOptions, region: str, started: AsyncExitStack
) -> tuple[LoadedDrafter, MetricsListener | None]:
    """A drafter, and who tells its figures; `started` stops both. Raises ModelError, ListenError."""
    drafter, registry = await load(options), Registry()
    started.push_async_callback(drafter.stop)
    drafter.handler.info.region = region
    registry.add(DRAFTER, drafter.families)
    registry.add(DRAFTER, process_families)
    if not options.metrics:
        return drafter, None
    metrics = await listen(registry, options.metrics, options.tls)
    started.push_async_callback(metrics.stop)
    return drafter, metrics


async def load(options: ModelServiceOptions, cores: frozenset[int] = frozenset()) -> LoadedDrafter:
    """A drafter whose thread runs; the caller stops it. Raises ModelError. cores: see ServiceThread."""
    share_machine()
    loaded: list[Any] = []

    def load_in_thread(
        deliver: Callable[[Replies], None], go_on: GoOn
    ) -> tuple[Runnable[Command], common_pb2.GetModelInfoResponse]:
        # these import torch, which a process that only parses its arguments does not need
        from draft_service.translation import TranslatingModel
        from specwire.lm import load_model
        from specwire.lm.guesses import guesses

        say(f"specwire draft: loading {options.model}")
        model = load_model(options.model, **options.loading())
        go_on()
        sessions = Sessions(model, guesses, deliver, texts=TranslatingModel)
        loaded.extend((sessions, model))
        return sessions, model_info_to_wire(
            model.info, model.slots, model.kv_bytes, convention_of(model.info.tokenizer_json)
        )

    thread = ServiceThread(DRAFTER, load_in_thread, cores=cores)
    handler = DraftHandler(thread, await thread.start())
    return LoadedDrafter(thread, handler, *loaded)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "draft")


def run(args: argparse.Namespace) -> int:
    """Draft until a signal; returns the exit code."""
    try:
        options, tls, token = model_options(args), client_tls(args), read_peer_token(args)
        registration, cloud = registry_of(args), cloud_of(args)
        _check_connect(args, options, tls, token)
        registration.check_listen(args.listen)
        grace, telemetry = drain_grace(args), telemetry_of(args)
    except InvalidParameter as error:
        say(f"specwire draft: error: {error}")
        return 2
    telemetry.start(DRAFTER)
    if not _dials(args):
        return run_model_service(args, "draft", options, grace, lambda: start(options, registration))

    def ready(running: DiallingDrafter) -> str:
        if args.json:
            return json.dumps({"service": "draft", "connected": running.address, "model": options.model})
        return f"specwire draft: {options.model} ready, joined {running.address}"

    def dial() -> Coroutine[None, None, DiallingDrafter]:
        first, *also = args.connect or [""]
        return dial_in(options, first, tls, token, registration.region, also, cloud)

    return asyncio.run(run_until_signalled(dial, ready, "draft", grace))


def _dials(args: argparse.Namespace) -> bool:
    """Whether it dials orchestrators, and does not listen."""
    return args.connect is not None or bool(args.cloud)


def _check_connect(args: argparse.Namespace, options: ModelServiceOptions, tls: ClientTls | None, token: Token) -> None:
    """InvalidParameter where listening and dialling are mixed, or the token would travel unencrypted."""
    if not _dials(args):
        if tls is not None:
            raise InvalidParameter("--tls", "and the other flags of a client need --connect or --cloud")
        if token:
            raise InvalidParameter("--token-file", "is shown to an orchestrator: needs --connect or --cloud")
        return
    for address in args.connect or ():
        check_listen(address, "connect")
    for address in (*(args.connect or ()), *filter(None, [args.cloud])):
        check_token_is_safe(address, tls, token)
    if options.listen != ANY_PORT or options.keys or args.registry:
        message = "a drafter that dials in does not listen: leave out --listen, its flags and --registry"
        raise InvalidParameter("connect", message)
    if (options.tls or options.insecure) and not options.metrics:
        raise InvalidParameter("connect", "a drafter that dials in listens for --metrics only: leave out flags of TLS")
