"""What a simulation is of: a value whose repr is the script that runs it again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from specwire.lm.scripted import SPREAD
from tests.simulation.asks import Ask, random_asks
from tests.simulation.services import VOCABULARY

# Of a party or of two parties' line. The log's own: see `LOG_FAULTS`.
PARTY_FAULTS = ("crash", "pause", "slow", "stop")
LINE_FAULTS = ("cut", "break", "stall", "late", "close", "mangle")
LOG_FAULTS = ("log_down", "log_slow", "acks_lost", "effects_lost", "log_restarted", "log_behind", "log_emptied")
# What most faults of a scenario are about; "" leaves it to chance.
FOCUSES = ("", "", "verifier", "drafter", "orchestrator", "orchestrator", "client", "client", "log")
# What all prompts begin with in a third of the scenarios: long enough for verifiers to share it between sessions.
COMMON = 12
# What ends a process.
ENDS = ("crash", "stop")
# Seconds in which a session may go on that was cancelled at an owner that died: for this long, nobody says anything.
KILLED = 1000.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`target`: a party, or two with a dash. seconds: until it is over."""

    start: float
    kind: str
    target: str = ""
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """grace: seconds that running sessions have when their process is told to stop.

    queue: sessions that may wait for a slot, queue_wait: for how many seconds. detach_grace: for readers to come back.
    vocabulary, spread: of the target; a small spread gives every token a chance.
    """

    seed: int
    verifiers: int = 1
    drafters: int = 1
    dialling: int = 0
    orchestrators: int = 1
    slots: int = 8
    forward: float = 0.02
    draft: float = 0.004
    agree: float = 0.8
    delay: tuple[float, float] = (0.0002, 0.002)
    buffer: int = 16
    shared_host: bool = False
    plan: str = "auto"
    drafters_per_session: int = 1
    tenants: int = 1
    queue: int = 3
    queue_wait: float = 5.0
    grace: float = 0.5
    detach_grace: float = 30.0
    vocabulary: int = VOCABULARY
    spread: float = SPREAD
    asks: tuple[Ask, ...] = field(default=())
    faults: tuple[Fault, ...] = field(default=())

    @property
    def parties(self) -> list[str]:
        counts = {"verifier": self.verifiers, "drafter": self.drafters + self.dialling}
        counts["orchestrator"] = self.orchestrators
        return [f"{role}-{number}" for role, count in counts.items() for number in range(count)]

    @property
    def lines(self) -> list[str]:
        ends = [party for party in self.parties if not party.startswith("orchestrator")]
        return [f"orchestrator-{n}-{end}" for n in range(self.orchestrators) for end in (*ends, "client")]

    @property
    def delays(self) -> float:
        """Seconds by which what goes wrong may hold up an end; a killed owner's until somebody else has the session."""
        held = ("pause", "slow", "stall", "late", *LOG_FAULTS)
        killed = sum(KILLED for fault in self.faults if fault.kind in ENDS and fault.target.startswith("orchestrator"))
        return killed + sum(fault.seconds for fault in self.faults if fault.kind in held)

    @property
    def sessions(self) -> int:
        """How many there may be at once."""
        return sum(ask.n for ask in self.asks)


def random_scenario(seed: int) -> Scenario:
    random = Random(seed)
    bare = Scenario(
        seed,
        verifiers=random.choice((1, 1, 2)),
        drafters=random.choice((0, 1, 1, 2, 3)),
        dialling=random.choice((0, 0, 0, 1)),
        orchestrators=random.choice((1, 2, 2)),
        slots=random.choice((2, 8, 8)),
        forward=random.choice((0.01, 0.05, 0.2)),
        draft=random.choice((0.002, 0.01)),
        agree=random.choice((0.0, 0.6, 0.9, 1.0)),
        delay=random.choice(((0.0001, 0.0005), (0.0002, 0.02), (0.02, 0.04))),
        buffer=random.choice((2, 8, 64)),
        shared_host=random.random() < 0.3,
        plan=random.choice(("auto", "stream:2,6", "lockstep:4")),
        drafters_per_session=1 + seed % 3,
        tenants=random.choice((1, 1, 2)),
        queue=random.choice((0, 3, 8)),
        queue_wait=random.choice((1.0, 5.0)),
        grace=random.choice((0.0, 0.5, 3.0)),
        detach_grace=random.choice((12.0, 30.0, 30.0)),
        spread=random.choice((SPREAD, SPREAD, 4.0)),
    )
    common = COMMON if bare.drafters_per_session == 1 else 0
    asks = random_asks(random, bare.orchestrators, bare.tenants, bare.vocabulary, common)
    return replace(bare, asks=asks, faults=random_faults(random, bare))


def random_faults(random: Random, scenario: Scenario) -> tuple[Fault, ...]:
    focus = random.choice(FOCUSES)
    faults = (random_fault(random, scenario, focus) for _ in range(random.choice((0, 2, 4, 6, 8))))
    return tuple(sorted(faults, key=_start))


def _start(fault: Fault) -> float:
    return fault.start


def role_of(target: str) -> str:
    """Of a party, or of the one to which an orchestrator's line goes."""
    parts = target.split("-")
    return parts[2] if len(parts) > 2 else parts[0]


def random_fault(random: Random, scenario: Scenario, focus: str) -> Fault:
    """Everything is up after half a second. Sessions take a second or a few, and longer if something is wrong."""
    kinds = LOG_FAULTS if focus == "log" else random.choices((PARTY_FAULTS, LINE_FAULTS, LOG_FAULTS), (5, 5, 1))[0]
    targets = {PARTY_FAULTS: scenario.parties, LINE_FAULTS: scenario.lines}.get(kinds, [""])
    meant = [target for target in targets if focus in ("", role_of(target))] or targets
    start = random.uniform(0.5, 2.0) if random.random() < 0.8 else random.uniform(2.0, 8.0)
    seconds = random.choice((0.02, 0.3, 1.0, 3.0, 12.0)) * random.uniform(0.5, 1.5)
    return Fault(round(start, 3), random.choice(kinds), random.choice(meant), round(seconds, 3))
