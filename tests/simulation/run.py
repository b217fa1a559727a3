"""Runs one scenario from its start to the end of everything, and says what did not hold."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from orchestrator.options import OrchestratorOptions
from orchestrator.store import SessionRecord
from orchestrator.tenants import Access
from specwire.core.law.sampling import Rule
from specwire.rpc.errors import StatusError
from specwire.rpc.keys import Keys
from tests.simulation.checks import Checks, overheard
from tests.simulation.clients import LibraryClient, SimAnswer, SimClient, SimTurn, tenant_name, token_of
from tests.simulation.clock import simulated
from tests.simulation.ends import Judge
from tests.simulation.facts import Facts
from tests.simulation.faults import Faults
from tests.simulation.loop import AllOf, SimLoop, Stuck, in_strand
from tests.simulation.network import Network
from tests.simulation.parties import EXIT, DrafterParty, Hardware, OrchestratorParty, Party, VerifierParty, World
from tests.simulation.scenario import Scenario, random_scenario
from tests.simulation.services import Play
from tests.simulation.store import SimStore
from verify_service.engine.messages import QueuePatience

LIMIT = 400.0
# Seconds within which a session ends in the log whose owner and readers are gone.
ORPHANED = 120.0
# Seconds for which a verifier keeps what lost its link.
KEPT = 30.0
DRAFTERS_TOKEN = "token-of-all-drafters"
SALT = b"the same at every orchestrator"
LOGGERS = ("orchestrator", "draft_service", "verify_service", "specwire")


class Violation(AssertionError):
    """Something did not hold. The message begins with it, and ends with the scenario."""


@dataclass
class Outcome:
    """found: what did not hold. trace: equal for two runs of one scenario.

    reached: how often what is rare was met: sessions that orchestrators have claimed or written again, that a verifier
    had kept for a new connection, whose prompt was in a cache, that waited for a slot; pieces of trees that branch;
    sessions that a head drafted for, and of these such as went on where there is none; heads that were switched off.
    """

    scenario: Scenario
    found: list[str]
    answers: list[SimAnswer]
    steps: int
    checked: int
    seconds: float
    reached: Counter[str]
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def trace(self) -> tuple[object, ...]:
        told = tuple((tuple(h.tokens), h.text, str(h.error), h.attempts, h.session_id) for h in self.answers)
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
    network, store = Network(loop, random, scenario.delay), SimStore(loop, random)
    play = Play(scenario.seed, scenario.agree, scenario.vocabulary, scenario.spread)
    with listening() as errors, simulated(loop, network, store, random, scenario.versions) as clock:
        simulation = Simulation(scenario, World(loop, network, clock, store, play), random)
        with overheard(simulation.facts):
            found = simulation.run(errors)
    facts, answers = simulation.facts, simulation.answers
    outcome = Outcome(scenario, found, answers, loop.steps, facts.checked, loop.time(), facts.reached)
    for each in answers:
        outcome.ends["left" if each.left else end_of(each)] += 1
    return outcome


def run_seed(seed: int) -> Outcome:
    """Run what the seed makes up: of many, in processes of their own, too."""
    return run(random_scenario(seed))


def end_of(answer: SimAnswer) -> str:
    if answer.end is not None:
        return answer.end.reason.name
    if answer.unasked:
        return "unasked"
    return "none" if answer.error is None else answer.error.name


def check(scenario: Scenario) -> Outcome:
    """`run`; raises Violation where something did not hold."""
    outcome = run(scenario)
    if outcome.found:
        raise Violation("\n".join([*outcome.found[:5], f"{scenario!r}"]))
    return outcome


def _has_tokenizer(party: OrchestratorParty, record: SessionRecord) -> bool:
    if party.running is None:
        return False
    try:
        return party.running.orchestrator.pool.models.tokenizer_of(record) is not None
    except StatusError:
        return False


class Simulation:
    def __init__(self, scenario: Scenario, world: World, random: Random) -> None:
        self.scenario = scenario
        self.loop = world.loop
        self.world = world
        self.facts = Facts(world.loop, world.play, world.store, scenario.delays, scenario.skew)
        self.checks = Checks(self.facts, scenario.detach_grace)
        world.store.report = self.facts.report
        world.store.on_written = self.checks.readers.log_written
        self.clients = self._clients()
        self.answers: list[SimAnswer] = [answer for client in self.clients for answer in client.answers]
        self._answered = AllOf(self.answers, lambda answer: answer.done)
        self.parties: dict[str, Party] = {name: self._party(name) for name in scenario.parties}
        hosts = world.network, world.store, world.clock, self.parties
        self.faults = Faults(world.loop, *hosts, random, scenario.vocabulary)

    def _clients(self) -> list[SimClient | LibraryClient]:
        """One for each request, in their order."""
        clients: list[SimClient | LibraryClient] = []
        for request in self.scenario.requests:
            before = None if request.follows is None else clients[request.follows].answers[0]
            turn = SimTurn(request, self.facts, self.scenario.tenants, before)
            raw = self.world.network, self._orchestrators, turn
            clients.append(LibraryClient(self._orchestrators, turn) if request.library else SimClient(*raw))
        return clients

    def _party(self, name: str) -> Party:
        scenario, common = self.scenario, (self.world, name, self.scenario.grace)
        role, _, number = name.partition("-")
        place = "one" if scenario.shared_host else name
        party: VerifierParty | DrafterParty | OrchestratorParty
        if role == "verifier":
            patience = QueuePatience(scenario.queue, scenario.queue_wait * 1e6)
            hardware = Hardware(scenario.slots, scenario.forward, place)
            config = scenario.configs[int(number)] if scenario.configs else ""
            head = scenario.heads[int(number)] if scenario.heads else ""
            party = VerifierParty(*common, hardware, KEPT, patience, config, head)
        elif role == "drafter":
            dials = self._orchestrators if int(number) >= scenario.drafters else ()
            token = DRAFTERS_TOKEN if scenario.tenants > 1 else ""
            party = DrafterParty(*common, Hardware(scenario.slots, scenario.draft, place), dials, token)
        else:
            party = OrchestratorParty(*common, self._options())
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
            access=self._access(),
            buffer=scenario.buffer,
            detach_grace=scenario.detach_grace,
            session_ttl=scenario.session_ttl,
            retention=scenario.retention,
            plan=scenario.plan,
            drafters_per_session=scenario.drafters_per_session,
        )

    def _access(self) -> Access:
        """A single tenant shows no token."""
        if self.scenario.tenants == 1:
            return Access(rules=frozenset(Rule), cache_salt=SALT)
        tenants = {token_of(number): tenant_name(number) for number in range(self.scenario.tenants)}
        return Access(Keys(tenants), Keys({DRAFTERS_TOKEN: "drafters"}), rules=frozenset(Rule), cache_salt=SALT)

    def run(self, errors: Errors) -> list[str]:
        self.loop.after_step = self.checks.after_step
        for party in self.parties.values():
            party.start()
        for number, client in enumerate(self.clients):
            self.checks.watch(f"client#{number}", client)
            in_strand(self.loop, f"client#{number}", client.run())
        for fault in self.scenario.faults:
            self.faults.plan(fault)
        found = self._live()
        return [*self.facts.found, *found, *self.loop.errors, *errors.said]

    def _live(self) -> list[str]:
        """Until every client has its end; then everything is stopped, and nothing may be left."""
        try:
            self.loop.run_until(self._settled, LIMIT)
            found = self.loop.unheard() + self._judged() + self._orphans()
            self.loop.after_step = lambda: None
            return found + self._end() + self.loop.unheard()
        except Stuck as error:
            return [str(error)]
        finally:
            self.loop.after_step = lambda: None
            self.loop.bury(LIMIT)

    def _settled(self) -> bool:
        return bool(self.facts.found) or self._answered()

    def _judged(self) -> list[str]:
        return [] if self.facts.found else list(Judge(self.scenario, self.facts, self.answers).all())

    def _orphans(self) -> list[str]:
        """Nobody reads any more, and nothing goes wrong: whatever runs in the log comes to an end there.

        In one that has lost an end it may run until it expires: its owner knows it to have ended. So may one whose
        tokenizer nobody has any more: its end needs the text's length.
        """
        self.faults.end()
        kept = [party for party in self.parties.values() if isinstance(party, OrchestratorParty) and party.stays]
        if self.facts.found or not kept or not self.world.store.running:
            return []
        self.facts.orphans += len(self.world.store.running)
        seconds = ORPHANED + self.scenario.skew
        until = self.loop.time() + seconds
        self.loop.call_at(until, lambda: None)
        self.loop.run_until(lambda: not self.world.store.running or self.loop.time() >= until, seconds + 1)
        left = [] if self.world.store.books.losses else self.world.store.running
        records = {each: self.world.store.record_of(each) for each in left}
        ends = [each for each in left if any(_has_tokenizer(party, records[each]) for party in kept)]
        return [f"session {session_id} runs for ever" for session_id in ends]

    def _end(self) -> list[str]:
        """Stop every party as SIGTERM does, who calls before who is called; what is left of it is a leak."""
        for party in reversed(self.parties.values()):
            self._stop(party)
        self._pass(EXIT)
        left = [party.name for party in self.parties.values() if party.up]
        return [f"{name} did not stop" for name in left] + [f"left running: {name}" for name in self.world.leaks]

    def _stop(self, party: Party) -> None:
        party.stop()
        self._pass(party.exits_within, lambda: not party.up)

    def _pass(self, seconds: float, done: Callable[[], bool] = lambda: False) -> None:
        """At most so long."""
        until = self.loop.time() + seconds
        self.loop.call_at(until, lambda: None)
        self.loop.run_until(lambda: done() or self.loop.time() >= until, seconds + 1)
