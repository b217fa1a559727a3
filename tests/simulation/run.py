"""Runs one scenario from its start to the end of everything, and says what did not hold."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from orchestrator.options import OrchestratorOptions
from specwire.core.limits import FinishReason
from tests.simulation.checks import Checks
from tests.simulation.client import Heard, SimClient
from tests.simulation.clock import simulated
from tests.simulation.ends import judge
from tests.simulation.faults import Faults
from tests.simulation.library import LibraryClient
from tests.simulation.loop import SimLoop, Stuck, in_strand
from tests.simulation.network import Network
from tests.simulation.parties import DrafterParty, OrchestratorParty, Party, VerifierParty, World
from tests.simulation.scenario import Scenario

LIMIT = 400.0
GRACE = 8.0
LOGGERS = ("orchestrator", "draft_service", "verify_service", "specwire")


class Violation(AssertionError):
    """Something did not hold. The message begins with it, and ends with the scenario."""


@dataclass
class Outcome:
    """found: what did not hold. trace: equal for two runs of one scenario.

    claims, restored: of sessions, by orchestrators. resumed: sessions that a verifier had kept for a new connection.
    """

    scenario: Scenario
    found: list[str]
    heard: list[Heard]
    steps: int
    checked: int
    seconds: float
    claims: int
    restored: int
    resumed: int
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def trace(self) -> tuple[object, ...]:
        told = tuple((tuple(h.tokens), h.text, str(h.error), h.attempts, h.session_id) for h in self.heard)
        return self.steps, self.checked, self.seconds, told


class Errors(logging.Handler):
    """What the project's code calls an error is one of its own making."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.said.append(f"{record.name} logged an error: {record.getMessage()}: {error!r}")


@contextmanager
def listening() -> Iterator[Errors]:
    """The loggers' words go to the simulation alone."""
    errors = Errors()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(errors)
        logger.propagate = False
    try:
        yield errors
    finally:
        for logger, propagate in before:
            logger.removeHandler(errors)
            logger.propagate = propagate


def run(scenario: Scenario) -> Outcome:
    """Never raises for what the project's code does."""
    loop = SimLoop(scenario.seed)  # type: ignore[abstract] # what a simulation has no use for
    random = Random(scenario.seed + 1)
    network = Network(loop, random, scenario.delay)
    with listening() as errors, simulated(loop, network, random) as clock:
        simulation = Simulation(scenario, loop, network, World(loop, network, clock, scenario.seed), random)
        found = simulation.run(errors)
    heard = [client.heard for client in simulation.clients]
    books, checks = simulation.store.books, simulation.checks
    reached = books.claims, books.restored, checks.resumed
    outcome = Outcome(scenario, found, heard, loop.steps, checks.checked, loop.time(), *reached)
    for each in heard:
        outcome.ends["left" if each.left else end_of(each)] += 1
    return outcome


def end_of(heard: Heard) -> str:
    if heard.end is not None:
        return FinishReason(heard.end.reason).name
    return "none" if heard.error is None else heard.error.name


def check(scenario: Scenario) -> Outcome:
    """`run`; raises Violation where something did not hold."""
    outcome = run(scenario)
    if outcome.found:
        raise Violation("\n".join([*outcome.found[:5], f"{scenario!r}"]))
    return outcome


class Simulation:
    def __init__(self, scenario: Scenario, loop: SimLoop, network: Network, world: World, random: Random) -> None:
        self.scenario = scenario
        self.loop = loop
        self.world = world
        self.store = world.store
        self.checks = Checks(loop, scenario.seed, self.store.books)
        self.store.report = self.checks.report
        self.store.on_written = self.checks.log_written
        addresses = [name for name in scenario.parties if name.startswith("orchestrator")]
        report = self.checks.report
        self.clients = [
            LibraryClient(addresses, ask, report) if ask.library else SimClient(network, addresses, ask, report)
            for ask in scenario.asks
        ]
        self.parties: dict[str, Party] = {name: self._party(name) for name in scenario.parties}
        self.faults = Faults(loop, network, self.store, self.parties, random)

    def _party(self, name: str) -> Party:
        scenario, world = self.scenario, self.world
        role, _, number = name.partition("-")
        place = "one" if scenario.shared_host else name
        party: VerifierParty | DrafterParty | OrchestratorParty
        if role == "verifier":
            party = VerifierParty(world, name, scenario.slots, scenario.forward, 30.0, place)
        elif role == "drafter":
            dials = self._orchestrators if int(number) >= scenario.drafters else ()
            party = DrafterParty(world, name, scenario.slots, scenario.draft, scenario.agree, place, dials)
        else:
            party = OrchestratorParty(world, name, self._options())
        self.checks.watch(name, party)
        return party

    @property
    def _orchestrators(self) -> tuple[str, ...]:
        return tuple(name for name in self.scenario.parties if name.startswith("orchestrator"))

    def _options(self) -> OrchestratorOptions:
        scenario = self.scenario
        return OrchestratorOptions(
            verifiers=tuple(f"verifier-{number}" for number in range(scenario.verifiers)),
            drafters=tuple(f"drafter-{number}" for number in range(scenario.drafters)),
            insecure=True,
            accept_drafters=True,
            buffer=scenario.buffer,
            plan=scenario.plan,
            drafters_per_session=scenario.drafters_per_session,
        )

    def run(self, errors: Errors) -> list[str]:
        self.loop.after_step = self.checks.after_step
        for party in self.parties.values():
            party.start()
        for number, client in enumerate(self.clients):
            self.checks.watch(f"client-{number}", client)
            in_strand(self.loop, f"client#{number}", client.run())
        for fault in self.scenario.faults:
            self.faults.plan(fault)
        found = self._live()
        return [*self.checks.found, *found, *self.loop.errors, *errors.said]

    def _live(self) -> list[str]:
        """Until every client has its end; then everything is stopped, and nothing may be left."""
        try:
            self.loop.run_until(self._settled, LIMIT)
            found = self.loop.unheard() + self._judged()
            self.loop.after_step = lambda: None
            return found + self._end() + self.loop.unheard()
        except Stuck as error:
            return [str(error)]
        finally:
            self.loop.after_step = lambda: None
            self.loop.bury(LIMIT)

    def _settled(self) -> bool:
        return bool(self.checks.found) or all(client.heard.done for client in self.clients)

    def _judged(self) -> list[str]:
        heard = [client.heard for client in self.clients]
        oracles = self.checks.oracles
        judged = (judge(self.scenario, h, heard, oracles.get(h.session_id), self.checks.decoded) for h in heard)
        return [] if self.checks.found else [each for found in judged for each in found]

    def _end(self) -> list[str]:
        """Stop every party as SIGTERM does, who calls before who is called; what is left of it is a leak."""
        self.faults.end()
        for party in reversed(self.parties.values()):
            party.stop()
            self._pass(GRACE)
        left = [party.name for party in self.parties.values() if party.up]
        return [f"{name} did not stop" for name in left] + [f"left running: {name}" for name in self.world.leaks]

    def _pass(self, seconds: float) -> None:
        until = self.loop.time() + seconds
        self.loop.call_at(until, lambda: None)
        self.loop.run_until(lambda: self.loop.time() >= until, seconds + 1)
