"""The services as child processes: started, watched and restarted by this process."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields

from deploy.stack.local_host import first_failure
from deploy.stack.options import DRAFTER, VERIFIER, StackError, kind_of
from deploy.stack.processes import Child, signalled
from specwire.options import words_of
from specwire.rpc.server_options import ModelServiceOptions
from specwire.telemetry.logs import message_of
from specwire.telemetry.options import Telemetry, inherited

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
