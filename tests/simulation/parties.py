"""The parties of a simulation: processes that start, crash, pause, drain and come back, each built of the real code."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from draft_service.dialler import DiallingDrafter
from draft_service.server import RunningDrafter
from draft_service.service import DraftHandler as DraftHandler
from draft_service.service import DraftServicer, LoadedDrafter
from orchestrator import server as orchestrating
from orchestrator.options import OrchestratorOptions
from orchestrator.pool import StartError
from specwire.registry.entry import Load, Role
from specwire.registry.options import NOWHERE, register_model
from specwire.rpc.renewal import Renewal
from specwire.v1 import draft_pb2_grpc, verify_pb2_grpc
from tests.simulation.clock import VirtualTime
from tests.simulation.loop import SimLoop, in_strand
from tests.simulation.network import DETECTION, Network, SimServer
from tests.simulation.services import CONFIGS, HEADS, DrafterStrand, EngineStrand, HeadedModel, Model, Play
from tests.simulation.store import SimStore
from verify_service.engine.messages import QueuePatience
from verify_service.server import RunningVerifier
from verify_service.service import VerifyServicer

RESTART = 0.5
FAREWELL = 0.3
# Seconds within which a process has exited, beside the grace that it gives.
EXIT = 4.0


class Running(Protocol):
    """A service that answers: what the commands get from `start`."""

    async def stop(self, grace: float) -> None: ...


@dataclass
class World:
    """What all parties of one simulation share. `leaks`: tasks that outlived their process's orderly end."""

    loop: SimLoop
    network: Network
    clock: VirtualTime
    store: SimStore
    play: Play

    def __post_init__(self) -> None:
        self.leaks: list[str] = []


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a model runs on. seconds: of one forward. place: the host."""

    slots: int
    seconds: float
    place: str


class Party(ABC):
    """A process by name; every start is a new incarnation, NAME#1, NAME#2, ...

    grace: seconds that it gives to what runs when it is told to stop; `stopping` from then on.
    """

    def __init__(self, world: World, name: str, grace: float) -> None:
        self.world = world
        self.name = name
        self.grace = grace
        self.incarnation = 0
        self.up = False
        self.paused = False
        self.stopping = False
        self._told_to_stop = ""
        self._services: list[Running] = []

    @property
    def process(self) -> str:
        return f"{self.name}#{self.incarnation}"

    @property
    def stays(self) -> bool:
        """It is up, and nobody has told it to stop."""
        return self.up and self._told_to_stop != self.process

    @property
    def exits_within(self) -> float:
        """Seconds from SIGTERM on."""
        return self.grace + EXIT

    def context(self, thread: str = "") -> Context:
        return self.world.loop.context_of(self.process + thread)

    def start(self) -> None:
        if not self.up:
            self.incarnation += 1
            self.up, self.stopping = True, False
            self._services = []
            self._starting = in_strand(self.world.loop, self.process, self._run())

    @abstractmethod
    async def _run(self) -> None:
        """Start its services."""

    def slow(self, factor: float) -> None:
        """1 is its normal speed; callbacks take (factor - 1) milliseconds."""
        for strand in self.world.loop.strands_of(self.process):
            strand.cost = (factor - 1) / 1000

    def crash(self) -> None:
        """SIGKILL."""
        if self.up:
            self.up = self.paused = False
            self._services = []
            self.world.loop.hold(self.process)
            self.world.network.crash(self.process)

    def pause(self) -> None:
        """SIGSTOP; who waits for its pings gives up in time."""
        if self.up and not self.paused:
            self.paused = True
            self.world.loop.hold(self.process)
            self.world.loop.call_later(DETECTION, self._miss, self.process)

    def _miss(self, process: str) -> None:
        if self.paused and process == self.process:
            for line in self.world.network.connection_of(self.name):
                self.world.network.reset(line, slow=False)

    def resume(self) -> None:
        """SIGCONT; nothing to one that has been killed meanwhile."""
        if self.paused:
            self.paused = False
            self.world.loop.let_go(self.process)

    def stop(self) -> None:
        """SIGTERM."""
        if self.up and not self.paused and self._told_to_stop != self.process:
            self._told_to_stop = self.process
            in_strand(self.world.loop, self.process, self._end())

    async def _end(self) -> None:
        """As specwire.rpc.process.run_until_signalled: a start is given up, what runs is stopped."""
        process = self.process
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        self.stopping = True
        for service in self._services:
            await service.stop(self.grace)
        await asyncio.sleep(FAREWELL)
        if self.up and process == self.process:
            self.world.loop.call_soon(self._exited, process, context=self.world.loop.context_of("world"))

    def _exited(self, process: str) -> None:
        if self.up and process == self.process:
            self.world.leaks += self.world.loop.left_of(process)
            self.crash()


class ModelParty(Party):
    """One that runs a model, in a strand of its own."""

    strand: Any = None

    def slow(self, factor: float) -> None:
        super().slow(factor)
        if self.strand is not None:
            self.strand.lm.slowness = factor

    def crash(self) -> None:
        super().crash()
        self.strand = None


class VerifierParty(ModelParty):
    """kept: seconds for which it keeps what lost its link. config: of CONFIGS, at its next start. head: of HEADS."""

    def __init__(
        self,
        world: World,
        name: str,
        grace: float,
        hardware: Hardware,
        kept: float,
        patience: QueuePatience,
        config: str,
        head: str = "",
    ) -> None:
        super().__init__(world, name, grace)
        self.config, self.head = config, head
        self._hardware, self._kept, self._patience = hardware, kept, patience
        self._servicer: VerifyServicer | None = None

    @property
    def opened(self) -> Iterable[tuple[int, int]]:
        """What its links have open there, by link and handle."""
        return [] if self._servicer is None else self._servicer._presence._open

    async def _run(self) -> None:
        """As verify_service.server.start."""
        hardware = self._hardware
        target = self.world.play.target, hardware.slots, hardware.seconds, CONFIGS[self.config]
        lm = Model(*target)
        if self.head:
            lm = HeadedModel(*target, HEADS[self.head], Random(self.world.loop.random.getrandbits(32)))
        contexts = self.context("/engine"), self.context()
        worker: Any = EngineStrand(self.world.loop, lm, *contexts, self._kept, self._patience)
        self.strand = worker
        info = lm.described(hardware.place)
        servicer = self._servicer = VerifyServicer(worker, info)
        server = SimServer()
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
        listening: Any = await self.world.network.listen(self.name, server)
        registrar = register_model(NOWHERE, Role.VERIFIER, lambda: info, listening.address, lambda: Load(0, 0, 0))
        self._services = [RunningVerifier(worker, servicer, listening, info, None, registrar, Renewal(()))]


class DrafterParty(ModelParty):
    """It listens, or dials in to the orchestrators named, showing `token`."""

    def __init__(
        self, world: World, name: str, grace: float, hardware: Hardware, dials: tuple[str, ...], token: str
    ) -> None:
        super().__init__(world, name, grace)
        self._hardware, self._dials, self._token = hardware, dials, token

    async def _run(self) -> None:
        """As draft_service.server.start, or dial_in."""
        hardware = self._hardware
        lm = Model(self.world.play.drafter, hardware.slots, hardware.seconds)
        lm.elapse = self.world.clock.elapse
        random = Random(self.world.loop.random.getrandbits(32))
        self.strand = DrafterStrand(self.world.loop, lm, self.context("/model"), self.context(), random)
        drafter: Any = self.strand
        info = lm.described(hardware.place)
        handler = DraftHandler(drafter, info)
        loaded = LoadedDrafter(drafter, handler, self.strand.book, lm)
        if self._dials:
            self._services = [DiallingDrafter(loaded, each, None, self._token) for each in self._dials]
            return
        servicer = DraftServicer(handler)
        server = SimServer()
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
        listening: Any = await self.world.network.listen(self.name, server)
        registrar = register_model(NOWHERE, Role.DRAFTER, lambda: info, listening.address, lambda: Load(0, 0, 0))
        self._services = [RunningDrafter(loaded, servicer, listening, None, registrar, Renewal(()))]


class OrchestratorParty(Party):
    def __init__(self, world: World, name: str, grace: float, options: OrchestratorOptions) -> None:
        super().__init__(world, name, grace)
        self.options = options
        self.running: orchestrating.RunningOrchestrator | None = None

    @property
    def serving(self) -> bool:
        """What health checks are told."""
        server: Any = None if self.running is None else self.running._server
        return server is not None and bool(server.serving)

    async def _run(self) -> None:
        """Where a supervisor would start it again, it does so itself."""
        while True:
            try:
                self.running = await orchestrating.start(self.options)
                break
            except StartError:
                await asyncio.sleep(RESTART)
        self._services = [self.running]

    def crash(self) -> None:
        super().crash()
        self.running = None
