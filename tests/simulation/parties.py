"""The parties of a simulation: processes that start, crash, pause, drain and come back, each built of the real code."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextvars import Context
from random import Random

from draft_service.dialling import Dialler
from draft_service.reception import Reception as DraftReception
from draft_service.service import DraftServicer
from orchestrator.api import GenerationApi
from orchestrator.hub import DraftHub
from orchestrator.options import OrchestratorOptions
from orchestrator.pool import StartError
from orchestrator.sessions import Orchestrator
from specwire.v1 import draft_pb2_grpc, generation_pb2_grpc, verify_pb2_grpc
from tests.simulation.clock import VirtualTime
from tests.simulation.loop import SimLoop, in_strand
from tests.simulation.network import DETECTION, Network, SimServer
from tests.simulation.services import DrafterStrand, EngineStrand, Model, script
from tests.simulation.store import SimStore
from verify_service.service import VerifyServicer

RESTART = 0.5
FAREWELL = 0.3


class World:
    """What all parties of one simulation share. `leaks`: tasks that outlived their process's orderly end."""

    def __init__(self, loop: SimLoop, network: Network, clock: VirtualTime, seed: int) -> None:
        self.loop = loop
        self.network = network
        self.clock = clock
        self.store = SimStore(loop, network.random)
        self.seed = seed
        self.leaks: list[str] = []


class Party(ABC):
    """A process by name; every start is a new incarnation, NAME#1, NAME#2, ..."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.incarnation = 0
        self.up = False
        self.paused = False
        self._stopping = ""

    @property
    def process(self) -> str:
        return f"{self.name}#{self.incarnation}"

    def context(self, thread: str = "") -> Context:
        return self.world.loop.context_of(self.process + thread)

    def start(self) -> None:
        if not self.up:
            self.incarnation += 1
            self.up = True
            self._running = in_strand(self.world.loop, self.process, self._run())

    @abstractmethod
    async def _run(self) -> None: ...

    @abstractmethod
    async def _drain(self) -> None:
        """What the process does on SIGTERM, before it exits."""

    def slow(self, factor: float) -> None:
        """1 is its normal speed; callbacks take (factor - 1) milliseconds."""
        for strand in self.world.loop.strands_of(self.process):
            strand.cost = (factor - 1) / 1000

    def crash(self) -> None:
        """SIGKILL."""
        if self.up:
            self.up = self.paused = False
            self.world.loop.kill(self.process)
            self.world.network.crash(self.process)

    def pause(self) -> None:
        """SIGSTOP; who waits for its pings gives up in time."""
        if self.up and not self.paused:
            self.paused = True
            for strand in self.world.loop.strands_of(self.process):
                strand.paused = True
            self.world.loop.call_later(DETECTION, self._miss, self.process)

    def _miss(self, process: str) -> None:
        if self.paused and process == self.process:
            for line in self.world.network.lines_of(self.name):
                self.world.network.reset(line, slow=False)

    def resume(self) -> None:
        """SIGCONT; nothing to one that has been killed meanwhile."""
        if self.paused:
            self.paused = False
            for strand in self.world.loop.strands_of(self.process):
                strand.paused = False

    def stop(self) -> None:
        """SIGTERM."""
        if self.up and not self.paused and self._stopping != self.process:
            self._stopping = self.process
            in_strand(self.world.loop, self.process, self._end())

    async def _end(self) -> None:
        process = self.process
        self._running.cancel()  # it may not be ready yet
        await asyncio.gather(self._running, return_exceptions=True)
        await self._drain()
        await asyncio.sleep(FAREWELL)
        if self.up and process == self.process:
            self.world.loop.call_soon(self._exited, process, context=self.world.loop.context_of("world"))

    async def _end_calls(self) -> None:
        """As a gRPC server that stops: after a moment what still runs is cancelled."""
        self.world.network.close(self.name)
        await asyncio.sleep(FAREWELL)
        self.world.network.end_calls(self.process)

    def _exited(self, process: str) -> None:
        if self.up and process == self.process:
            self.world.leaks += self.world.loop.left_of(process)
            self.crash()


class VerifierParty(Party):
    def __init__(self, world: World, name: str, slots: int, seconds: float, grace: float, place: str) -> None:
        super().__init__(world, name)
        self.slots, self.seconds, self.grace, self.place = slots, seconds, grace, place
        self.strand: EngineStrand | None = None

    async def _run(self) -> None:
        lm = Model(script(self.world.seed), self.slots, self.seconds)
        worker = EngineStrand(self.world.loop, lm, self.context("/engine"), self.context(), self.grace)
        self.strand = worker
        self._servicer = VerifyServicer(worker, lm.described(self.place))  # type: ignore[arg-type]  # stands in for the real one
        server = SimServer()
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self._servicer, server)
        await self.world.network.listen(self.name, self.context(), server)

    def slow(self, factor: float) -> None:
        super().slow(factor)
        if self.strand is not None:
            self.strand.engine.lm.slowness = factor

    def crash(self) -> None:
        super().crash()
        self.strand = None

    async def _drain(self) -> None:
        await self._servicer.drain(0.5)
        await self._end_calls()
        if self.strand is not None:
            await self.strand.stop()


class DrafterParty(Party):
    """It listens, or dials in to the orchestrators named."""

    def __init__(
        self, world: World, name: str, slots: int, seconds: float, agree: float, place: str, dials: tuple[str, ...]
    ) -> None:
        super().__init__(world, name)
        self.slots, self.seconds, self.agree, self.place, self.dials = slots, seconds, agree, place, dials
        self.strand: DrafterStrand | None = None

    async def _run(self) -> None:
        lm = Model(script(self.world.seed, self.agree), self.slots, self.seconds)
        lm.elapse = self.world.clock.elapse
        random = Random(self.world.loop.random.getrandbits(32))
        self.strand = DrafterStrand(self.world.loop, lm, self.context("/model"), random)
        reception = DraftReception(self.strand, lm.described(self.place))  # type: ignore[arg-type]  # stands in for the real one
        self._servicer = DraftServicer(reception)
        server = SimServer()
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, server)
        if not self.dials:
            await self.world.network.listen(self.name, self.context(), server)
        self._dialling = [asyncio.create_task(Dialler(each, None, reception).run()) for each in self.dials]

    def slow(self, factor: float) -> None:
        super().slow(factor)
        if self.strand is not None:
            self.strand.book._model.slowness = factor  # type: ignore[attr-defined]  # of the scripted model

    def crash(self) -> None:
        super().crash()
        self.strand = None

    async def _drain(self) -> None:
        self._servicer.leave()
        for dialling in self._dialling:
            dialling.cancel()
        await self._end_calls()


class OrchestratorParty(Party):
    def __init__(self, world: World, name: str, options: OrchestratorOptions) -> None:
        super().__init__(world, name)
        self.options = options
        self.orchestrator: Orchestrator | None = None

    async def _run(self) -> None:
        """As orchestrator.server.start; where a supervisor would start it again, it does so itself."""
        while True:
            orchestrator = Orchestrator(self.options, self.world.store.view())
            try:
                await orchestrator.start()
                break
            except BaseException as error:
                await orchestrator.stop()
                if not isinstance(error, StartError):
                    raise
                await asyncio.sleep(RESTART)
        self.orchestrator = orchestrator
        self._hub = DraftHub(orchestrator)
        server = SimServer()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationApi(orchestrator), server)
        draft_pb2_grpc.add_DraftHubServiceServicer_to_server(self._hub, server)
        await self.world.network.listen(self.name, self.context(), server)

    def crash(self) -> None:
        super().crash()
        self.orchestrator = None

    async def _drain(self) -> None:
        orchestrator = self.orchestrator
        if orchestrator is not None:
            self._hub.leave()
            await self._end_calls()
            await orchestrator.stop()
