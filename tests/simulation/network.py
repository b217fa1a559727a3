"""A network of simulated processes: which address is whose, how long messages take, and what breaks.

A message takes its line's delay, in order within a call's direction. A line may stall (nothing arrives for a while), be
closed (nobody gets through) or be reset (every call on it is lost, and the two ends learn it at different times).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextvars import Context
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import grpc.aio

from specwire.rpc.errors import ErrorPolicy
from tests.simulation.loop import SimLoop, current_process

# Both ends ping every 5 s and give up 5 s later (PROTOCOL.md section 3).
DETECTION = 10.0
UNREACHABLE_AFTER = 1.0
# Seconds between two looks of a server that stops, whether its calls have ended.
LOOK = 0.05


def failure(code: grpc.StatusCode, details: str, trailers: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details, None)


def broken() -> grpc.aio.AioRpcError:
    return failure(grpc.StatusCode.UNAVAILABLE, "the connection was lost")


@dataclass(eq=False)
class Line:
    """Between two processes. delay: seconds, least and most. mangle: what becomes of a message on arrival."""

    delay: tuple[float, float]
    random: Random
    stalled_until: float = 0.0
    closed_until: float = 0.0
    mangle: Callable[[Any], Any] = lambda message: message
    calls: dict[Breakable, None] = field(default_factory=dict)

    def arrival(self, now: float) -> float:
        return max(now + self.random.uniform(*self.delay), self.stalled_until)


class Breakable:
    """A call, as its line sees it."""

    def lose(self, client_in: float, server_in: float) -> None:
        raise NotImplementedError

    def hold(self, until: float) -> None:
        raise NotImplementedError

    def served_by(self, process: str) -> bool:
        raise NotImplementedError


@dataclass
class Listening:
    """context: of the server's strand, in which handlers run."""

    process: str
    context: Context
    handlers: dict[str, Any]


class SimServer:
    """What the generated add_..._to_server functions register a service with."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The registered ones are all that is asked for."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


class SimRunningServer:
    """In place of specwire.rpc.server.RunningServer: stops as that does. serving: what health checks are told."""

    def __init__(self, network: Network, name: str) -> None:
        self.address = f"{name}:1"
        self.serving = True
        self._network = network
        self._name = name
        self._process = current_process()

    async def set_serving(self, serving: bool) -> None:
        self.serving = serving

    async def stop(self, grace: float = 5.0) -> None:
        """New calls are refused, running ones get `grace` seconds, then are cancelled."""
        self.serving = False
        listening = self._network.listening.get(self._name)
        if listening is not None and listening.process == self._process:
            self._network.close(self._name)
        until = self._network.loop.time() + grace
        while self._network.serves(self._process) and self._network.loop.time() < until:  # noqa: ASYNC110 # virtual
            await asyncio.sleep(LOOK)
        self._network.end_calls(self._process)


@dataclass
class Method:
    method: str


class Network:
    """`served`: calls whose handlers run."""

    def __init__(self, loop: SimLoop, random: Random, delay: tuple[float, float]) -> None:
        self.loop = loop
        self.random = random
        self.delay = delay
        self.listening: dict[str, Listening] = {}
        self.lines: dict[frozenset[str], Line] = {}
        self.served: dict[Breakable, None] = {}

    def line(self, one: str, other: str) -> Line:
        """Between two parties, whatever incarnation they are in."""
        ends = frozenset((party_of(one), party_of(other)))
        if ends not in self.lines:
            self.lines[ends] = Line(self.delay, self.random)
        return self.lines[ends]

    def connection_of(self, party: str) -> Iterable[Line]:
        return [line for ends, line in self.lines.items() if party in ends]

    async def listen(self, address: str, server: SimServer) -> SimRunningServer:
        """From now on calls to `address` are served by this process, under the services' own error policy."""
        policy = ErrorPolicy()
        handlers = {}
        for path, handler in server.handlers.items():

            async def found(_: Any, handler: Any = handler) -> Any:
                return handler

            handlers[path] = await policy.intercept_service(found, Method(path))  # type: ignore[arg-type]  # no real call details
        process = current_process()
        self.listening[address] = Listening(process, self.loop.context_of(process), handlers)
        return SimRunningServer(self, address)

    def close(self, address: str) -> None:
        self.listening.pop(address, None)

    def crash(self, process: str) -> None:
        """The process is gone: its kernel resets what it was connected to."""
        for address in [a for a, listening in self.listening.items() if listening.process == process]:
            self.close(address)
        for line in self.connection_of(party_of(process)):
            self.reset(line, slow=False)

    def serves(self, process: str) -> bool:
        """Whether calls to the process are under way."""
        return any(call.served_by(process) for call in self.served)

    def end_calls(self, process: str) -> None:
        """Those that the process serves, as a server does that stops."""
        for call in list(self.served):
            if call.served_by(process):
                call.lose(self.random.uniform(0.0, 0.05), 0.0)

    def reset(self, line: Line, slow: bool) -> None:
        """Both ends learn it: soon, or (slow) when a ping is not answered."""
        for call in list(line.calls):
            most = DETECTION if slow else 0.05
            call.lose(self.random.uniform(0.0, most), self.random.uniform(0.0, most))


def party_of(process: str) -> str:
    """Processes are incarnations of a party: PARTY#NUMBER."""
    return process.partition("#")[0]
