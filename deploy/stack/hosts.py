"""The hosts of verifiers and drafters: threads of this process, or processes that it starts, watches and restarts."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import fields
from typing import NamedTuple, Protocol

import draft_service.server
import verify_service.server
from deploy.stack.options import DRAFTER, VERIFIER, StackError, kind_of
from deploy.stack.processes import Child, signalled
from draft_service.service import DraftServicer
from specwire.core.model import ModelError
from specwire.options import words_of
from specwire.rpc.link import LocalPeer
from specwire.rpc.local import LocalServer
from specwire.rpc.model_info import core_numbers
from specwire.rpc.process import keep_loaded
from specwire.rpc.server_options import ModelServiceOptions
from specwire.telemetry.logs import message_of
from specwire.telemetry.metrics import Registry
from specwire.telemetry.options import Telemetry, inherited
from specwire.v1 import draft_pb2_grpc, verify_pb2_grpc
from verify_service.service import VerifyServicer


class ServiceHost(Protocol):
    """Starts services, keeps them on the addresses they were first given, restarts those that die."""

    async def start(self) -> dict[str, str]:
        """Return each role's address once its service is healthy; StackError with one sentence if one cannot be."""
        ...

    async def failed(self) -> str:
        """Return the reason once the services cannot be kept up; otherwise never."""
        ...

    async def stop(self) -> None:
        """End every process. Idempotent, and right at any time, also while start() runs or after it failed."""
        ...


async def first_failure(failures: Sequence[Callable[[], Awaitable[str]]]) -> str:
    """The reason of whichever comes first; the others are waited for no more."""
    waits = [asyncio.ensure_future(failure()) for failure in failures]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for wait in waits:
            wait.cancel()


# ----------------------------------------------------------------------------------------------------------------------
# The services in this process: each model in a thread, and no socket between them and the orchestrator.


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


# ----------------------------------------------------------------------------------------------------------------------
# The services as child processes.

COMMANDS = {VERIFIER: "verify", DRAFTER: "draft"}
MODULES = {"verify": "verify_service", "draft": "draft_service"}
STOP_GRACE = 5.0
HEALTHY_AFTER = 30.0
FIRST_PAUSE = 0.2
MOST_FAILURES = 6


class PlainHost:
    """Implements ServiceHost with child processes."""

    def __init__(
        self, services: dict[str, ModelServiceOptions], start_timeout: float, report: Callable[[str], None]
    ) -> None:
        self._services = [PlainService(role, options, start_timeout, report) for role, options in services.items()]

    async def start(self) -> dict[str, str]:
        async with asyncio.TaskGroup() as starts:
            tasks = {service.role: starts.create_task(service.start()) for service in self._services}
        return {role: task.result() for role, task in tasks.items()}

    async def failed(self) -> str:
        return await first_failure([service.failed for service in self._services])

    async def stop(self) -> None:
        await asyncio.gather(*(service.stop() for service in self._services))


class PlainService:
    """One service: a process, and after its death another on the same address."""

    def __init__(
        self, role: str, options: ModelServiceOptions, start_timeout: float, report: Callable[[str], None]
    ) -> None:
        self.role = role
        self._options = options
        self._start_timeout = start_timeout
        self._report = report
        self._child: Child | None = None
        self._keeping: asyncio.Task[str] | None = None

    async def start(self) -> str:
        """Return its address; StackError if it cannot start."""
        self._report(f"{self.role}: loading {self._options.model}")
        address = await self._launch(self._options.listen)
        self._report(f"{self.role}: ready")
        self._keeping = asyncio.create_task(self._keep(address))
        return address

    async def failed(self) -> str:
        if self._keeping is None:
            raise RuntimeError("failed() before start()")
        return await asyncio.shield(self._keeping)

    async def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        if self._child is not None:
            await self._child.stop(STOP_GRACE)

    async def _launch(self, listen: str) -> str:
        """Start a process; return the address in its ready line."""
        self._child = child = await Child.start(self._command(listen), relay if inherited() != Telemetry() else None)
        try:
            async with asyncio.timeout(self._start_timeout):
                line = await child.line()
        except TimeoutError:
            raise StackError(f"{self.role}: not ready within {self._start_timeout:.0f} s") from None
        if line is None:
            raise StackError(f"{self.role}: {await self._end()}")
        return str(json.loads(line)["address"])

    async def _keep(self, address: str) -> str:
        """Replace the process whenever it ends; return the reason once it ended MOST_FAILURES times in a row."""
        failures = 0
        while failures < MOST_FAILURES:
            began = time.monotonic()
            reason = await self._end()
            failures = 1 if time.monotonic() - began > HEALTHY_AFTER else failures + 1
            self._report(f"{self.role}: {reason}; starting it again")
            await asyncio.sleep(FIRST_PAUSE * 2**failures)
            await self._relaunch(address)
        return f"{self.role}: does not stay up: {await self._end()}"

    async def _relaunch(self, address: str) -> None:
        try:
            await self._launch(address)
        except StackError:  # its end is counted like any other
            await self._living().stop(0.0)

    async def _end(self) -> str:
        """Wait until the process ends; return its last words."""
        child = self._living()
        code = await child.wait()
        if code < 0:  # its last line is from before that, and says nothing of it
            return signalled(-code)
        said = child.last_lines[-1] if child.last_lines else f"ended with exit code {code}"
        return message_of(said).rpartition("error: ")[2]

    def _living(self) -> Child:
        if self._child is None:
            raise RuntimeError("there is no process before start()")
        return self._child

    def _command(self, listen: str) -> list[str]:
        """The service's own command, with all that it is not told by default."""
        command, options = COMMANDS[kind_of(self.role)], self._options
        said = {each.name: getattr(options, each.name) for each in fields(options)}
        said |= {"model": None, "listen": listen, "json": True, "reference": options.references}
        return [sys.executable, "-m", MODULES[command], options.model, *words_of(command, said)]


def relay(line: str) -> None:
    """A service's log is its host's."""
    sys.stderr.write(f"{line}\n")
