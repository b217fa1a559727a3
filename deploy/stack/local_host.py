"""The services in this process: each model in a thread, and no socket between them and the orchestrator."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

import draft_service.server
import verify_service.server
from deploy.stack.options import VERIFIER, StackError, kind_of
from draft_service.service import DraftServicer
from specwire.core.model import ModelError
from specwire.rpc.link import LocalPeer
from specwire.rpc.local import LocalServer
from specwire.rpc.model_info import core_numbers
from specwire.rpc.process import keep_loaded
from specwire.rpc.server_options import ModelServiceOptions
from specwire.telemetry.metrics import Registry
from specwire.v1 import draft_pb2_grpc, verify_pb2_grpc
from verify_service.service import VerifyServicer


class CorePlan(NamedTuple):
    """Cores in one process: of the verifier's forwards, and of all else. Both empty: all share all."""

    verifier: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()

    @classmethod
    def of(cls, available: Sequence[int], services: Mapping[str, ModelServiceOptions]) -> CorePlan:
        """The verifier has as many cores as threads, if one is left for the event loop and whoever drafts.

        Several verifiers share all, and so does one that computes elsewhere than on the cores.
        """
        verifiers = [each for role, each in services.items() if kind_of(role) == VERIFIER]
        threads = verifiers[0].threads
        if len(verifiers) > 1 or verifiers[0].device != "cpu" or threads >= len(available):
            return cls()
        return cls(frozenset(available[-threads:]), frozenset(available[:-threads]))

    def cores_of(self, role: str) -> frozenset[int]:
        return self.verifier if kind_of(role) == VERIFIER else self.others

    def __str__(self) -> str:
        if not self.verifier:
            return "all threads share all cores"
        return f"the verifier computes on {_cores(self.verifier)}, all else runs on {_cores(self.others)}"


def threads_told(services: Mapping[str, ModelServiceOptions], placement: CorePlan) -> str:
    """Such as "verifier, 1 thread; drafter, 1 thread: all threads share all cores"."""

    def told(options: ModelServiceOptions) -> str:
        return f"{options.threads} thread{'s' if options.threads > 1 else ''}"

    return f"{'; '.join(f'{role}, {told(each)}' for role, each in services.items())}: {placement}"


def _cores(numbers: frozenset[int]) -> str:
    return f"core{'s' if len(numbers) > 1 else ''} {', '.join(map(str, sorted(numbers)))}"


class LocalHost:
    """Implements ServiceHost. A service that fails is not started again: the process cannot go on.

    `peers`: how each is called, by its address, which only this process knows. `figures`: of each, by its role.
    """

    def __init__(
        self, services: dict[str, ModelServiceOptions], start_timeout: float, report: Callable[[str], None]
    ) -> None:
        self.peers: dict[str, LocalPeer] = {}
        self.figures = {role: Registry() for role in services}
        self._services = services
        self._start_timeout = start_timeout
        self._report = report
        self._placement = CorePlan.of(core_numbers(), services)
        self._failures: list[Callable[[], Awaitable[str]]] = []
        self._cleanup = AsyncExitStack()

    async def start(self) -> dict[str, str]:
        """One after the other, verifiers last: who measures its forwards then has the interpreter to itself."""
        self._report(threads_told(self._services, self._placement))
        addresses: dict[str, str] = {}
        try:
            async with asyncio.timeout(self._start_timeout):
                for role in reversed(self._services):
                    addresses[role] = await self._start(role)
        except TimeoutError:
            raise StackError(f"not ready within {self._start_timeout:.0f} s") from None
        keep_loaded()
        self._place(self._placement.others)  # runtimes count the cores that they may use when they load
        return {role: addresses[role] for role in self._services}

    def _place(self, cores: frozenset[int]) -> None:
        """Keep the event loop's thread, and those that it starts, off the verifier's cores until the end."""
        if cores:
            self._cleanup.callback(os.sched_setaffinity, 0, core_numbers())
            os.sched_setaffinity(0, cores)

    async def _start(self, role: str) -> str:
        """Load the role's model; the address of its service."""
        options, server = self._services[role], LocalServer()
        self._report(f"{role}: loading {options.model}")
        try:
            await (self._verify if kind_of(role) == VERIFIER else self._draft)(role, options, server)
        except ModelError as error:
            raise StackError(f"{role}: {error}") from error
        self._report(f"{role}: ready")
        address = f"{role} in this process"
        self.peers[address] = server.channel
        return address

    async def _verify(self, role: str, options: ModelServiceOptions, server: LocalServer) -> None:
        cores = self._placement.cores_of(role)
        registry = self.figures[role]
        thread, info = await verify_service.server.load(options, registry, cores=cores)
        servicer = VerifyServicer(thread, info)
        self._cleanup.push_async_callback(thread.stop)
        self._cleanup.push_async_callback(server.stop)
        self._cleanup.push_async_callback(servicer.drain, 0.0)
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
        self._failures.append(thread.failed)

    async def _draft(self, role: str, options: ModelServiceOptions, server: LocalServer) -> None:
        drafter = await draft_service.server.load(options, cores=self._placement.cores_of(role))
        self.figures[role].add(draft_service.server.DRAFTER, drafter.families)
        self._cleanup.push_async_callback(drafter.stop)
        self._cleanup.push_async_callback(server.stop)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(drafter.handler), server)
        self._failures.append(drafter.thread.failed)

    async def failed(self) -> str:
        return await first_failure(self._failures)

    async def stop(self) -> None:
        await self._cleanup.aclose()


async def first_failure(failures: Sequence[Callable[[], Awaitable[str]]]) -> str:
    """The reason of whichever comes first; the others are waited for no more."""
    waits = [asyncio.ensure_future(failure()) for failure in failures]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for wait in waits:
            wait.cancel()
