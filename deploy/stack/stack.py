"""The whole stack on one machine: the log, the services in their host, and the orchestrator in this process."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

import orchestrator.server
from deploy.stack.hosts import LocalHost, PlainHost, ServiceHost, first_failure
from deploy.stack.options import DRAFTER, VERIFIER, StackError, StackOptions, kind_of
from deploy.stack.redis_server import RedisServer, check_redis
from orchestrator.options import OrchestratorOptions
from orchestrator.peers.models import Info, vocabulary_mismatch
from orchestrator.sessions import Orchestrator
from orchestrator.store.base import durability_of
from specwire.core.invalid import InvalidParameter
from specwire.redis import without_password
from specwire.rpc.link import ALL_ELSEWHERE
from specwire.rpc.process import one_line, say
from specwire.rpc.server import bound
from specwire.rpc.server_options import filled
from specwire.text.tokenizer import TokenizerError, vocabulary_fingerprint, vocabulary_map
from specwire.text.vocabulary_map import convention_of
from specwire.v1.common_pb2 import TokenText

Report = Callable[[str], None]

# What the URL of a private Redis begins with.
PRIVATE_REDIS = "unix://"
HEALTH_LIMIT = 10.0
MODELS_LOOK_S = 0.02
TOKENIZER = "tokenizer.json"
RELOAD_LIMIT = 180.0  # a verifier that is restarted on this machine must load its model again


class Stack:
    """A running stack.

    Attributes:
        address: HOST:PORT of the orchestrator.
        http: the URL where it is called by HTTP; None where it is not.
        services: the address of each hosted service by its role.
        redis_url: of the session log, without a password.
    """

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.address = ""
        self.http: str | None = None
        self.services: dict[str, str] = {}
        self.redis_url = ""
        self._local: LocalHost | None = None
        self._cleanup = AsyncExitStack()
        self._failures: list[Callable[[], Awaitable[str]]] = []

    async def failed(self) -> str:
        """Return the reason once a part of the stack cannot go on; otherwise never."""
        return await first_failure(self._failures)

    async def stop(self) -> None:
        """End everything, the newest part first. Idempotent; a cancellation waits until it is done."""
        ending = asyncio.ensure_future(self._cleanup.aclose())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _start(self, directory: Path, report: Report) -> None:
        check_all_free(self.options.addresses())
        self._check_durability()
        drafts = [drafter.model for drafter in self.options.drafters().values()]
        await asyncio.to_thread(check_vocabularies, self.options.target, drafts)
        async with asyncio.TaskGroup() as starts:
            redis = starts.create_task(self._start_redis(directory, report))
            services = starts.create_task(self._start_services(report))
        self.services = services.result()
        self.redis_url = without_password(redis.result())
        await self._start_orchestrator(redis.result())
        if self.options.tls is None:  # its certificate need not be for this address
            await _await_healthy(self.address)

    def _check_durability(self) -> None:
        try:
            durability_of(self.options.durability, self.options.log_url or PRIVATE_REDIS)
        except InvalidParameter as error:
            raise StackError(str(error)) from None

    async def _start_redis(self, directory: Path, report: Report) -> str:
        """Return the URL of a log that can be used."""
        if self.options.log_url is not None:
            await check_redis(self.options.log_url, self.options.durability)
            return self.options.log_url
        server = RedisServer(directory, report)
        self._cleanup.push_async_callback(server.stop)
        await server.start()
        self._failures.append(server.failed)
        return server.url

    async def _start_services(self, report: Report) -> dict[str, str]:
        options = self.options
        host: ServiceHost
        if options.one_process:
            host = self._local = LocalHost(options.services(), options.start_timeout, report)
        else:
            host = PlainHost(options.services(), options.start_timeout, report)
        self._cleanup.push_async_callback(host.stop)
        addresses = await host.start()
        self._failures.append(host.failed)
        return addresses

    async def _start_orchestrator(self, redis_url: str) -> None:
        options = filled(
            OrchestratorOptions,
            self.options,
            without=("start_timeout",),  # of the services
            verifiers=self._addresses(VERIFIER),
            drafters=self._addresses(DRAFTER),
            redis_url=redis_url,
            verifier_wait=RELOAD_LIMIT,
        )
        local = self._local
        running = await orchestrator.server.start(options, local.peers if local else ALL_ELSEWHERE)
        self._cleanup.push_async_callback(running.stop, self.options.grace)
        for role, figures in local.figures.items() if local else ():
            running.orchestrator.registry.include(figures, role)
        self._failures.append(running.failed)
        self.address, self.http = running.address, running.http
        await self._await_models(running.orchestrator)

    def _addresses(self, kind: str) -> tuple[str, ...]:
        return tuple(address for role, address in self.services.items() if kind_of(role) == kind)

    async def _await_models(self, running: Orchestrator) -> None:
        """StackError unless all models are served within HEALTH_LIMIT: an orchestrator is ready with its first one."""
        wanted = 1 + len(self.options.also)
        for _ in range(round(HEALTH_LIMIT / MODELS_LOOK_S)):
            if len(running.pool.targets()) >= wanted:
                return
            await asyncio.sleep(MODELS_LOOK_S)
        served = [target.info.model for target in running.pool.targets()]
        raise StackError(f"also: {len(served)} of {wanted} models are served ({', '.join(served)}); names must differ")


def told(line: str) -> None:
    """A `Report` for the user."""
    say(f"specwire: {line}")


async def start(options: StackOptions, directory: Path, report: Report = told) -> Stack:
    """Start everything and return once it is healthy.

    `directory` is private, empty, and has a short path; what runs keeps its files there. `report` gets progress lines.
    StackError says in one sentence what went wrong; then, and when cancelled, nothing is left running.
    """
    stack = Stack(options)
    try:
        await stack._start(directory, report)
    except BaseException as error:
        await stack.stop()
        if isinstance(error, Exception):
            raise StackError(one_line(_first_cause(error))) from error
        raise
    return stack


def check_free(listen: str, field: str = "listen") -> None:
    """StackError of `field` if `listen` cannot be listened on: known before the models load, not after."""
    check_all_free([(field, listen)])


def check_all_free(wanted: Iterable[tuple[str, str]]) -> None:
    """As `check_free`, for several fields at the same time: each must have an address of its own."""
    with ExitStack() as held:
        for field, listen in wanted:
            try:
                held.enter_context(bound(listen))
            except OSError as error:
                raise StackError(f"{field}: {listen} cannot be used: {error.strerror}") from None


def _first_cause(error: Exception) -> BaseException:
    """Return the error that a group of tasks failed with first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def check_vocabularies(target: str, drafts: Iterable[str]) -> None:
    """StackError where a draft model has other tokens than the target, as far as their files here tell.

    It takes no weights to know. Of models that are yet to be fetched the orchestrator learns it from the services.
    """
    known = vocabulary_of(target)
    for draft in drafts:
        drafter = vocabulary_of(draft) if known is not None and draft != target else None
        if known is not None and drafter is not None and (mismatch := vocabulary_mismatch(known, drafter)) is not None:
            raise StackError(mismatch)


def vocabulary_of(model: str) -> Info | None:
    """The model's vocabulary as a service would describe it; None where its tokenizer is missing here, or broken."""
    file = file_here(model, TOKENIZER)
    if file is None:
        return None
    try:
        text = file.read_bytes()
        tokens = vocabulary_map(text, 0)
    except (OSError, TokenizerError):
        return None  # the service will report it
    return Info(
        model=model,
        vocabulary=max(tokens) + 1,
        vocabulary_fingerprint=vocabulary_fingerprint(tokens),
        tokenizer_hash=hashlib.sha256(text).hexdigest(),
        token_text=cast("TokenText", int(convention_of(text))),
    )


async def _await_healthy(address: str) -> None:
    """StackError unless the orchestrator says within HEALTH_LIMIT that it serves."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_LIMIT, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise StackError(f"the orchestrator on {address} does not answer: {error.details()}") from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise StackError(f"the orchestrator on {address} is not serving")


# ----------------------------------------------------------------------------------------------------------------------
# What is here of a model: its directory, or its folder in the Hugging Face hub's cache, whose layout is public.


def hub_cache() -> Path:
    """Where models are kept that were fetched: huggingface_hub's own variables, in its order."""
    kept = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    home = Path(os.environ.get("HF_HOME", kept), "hub")
    named = os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE", home))
    return Path(os.path.expandvars(Path(named).expanduser()))


def file_here(model: str, name: str) -> Path | None:
    """One of the files of a directory, or of a model that was fetched before; None where it is not on this machine."""
    folder, kept = Path(model).expanduser(), hub_cache() / f"models--{model.replace('/', '--')}"
    with suppress(OSError):
        if not folder.is_dir():
            folder = kept / "snapshots" / (kept / "refs" / "main").read_text().strip()
        return folder / name if (folder / name).is_file() else None
    return None
