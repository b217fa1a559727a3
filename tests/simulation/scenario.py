"""A scenario: a value whose repr is the script that runs it again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from specwire.lm.scripted import SPREAD
from tests.simulation.requests import SimRequest, random_requests
from tests.simulation.services import CONFIGS, HEADS, VOCABULARY

# Of a party or of two parties' line. The log's own: see `LOG_FAULTS`.
PARTY_FAULTS = ("crash", "pause", "slow", "stop")
LINE_FAULTS = ("cut", "break", "stall", "late", "close", "mangle")
LOG_FAULTS = ("log_down", "log_slow", "acks_lost", "effects_lost", "log_restarted", "log_behind", "log_emptied")
# What only hardships have: of a party's host, and of the log.
HOST_FAULTS = ("clock_set", "log_cut", "update", "swap")
HARD_LOG_FAULTS = ("log_clock_set", "log_failover", "log_full", "log_damaged", "effects_late")
# What most faults of a scenario are about; "" leaves it to chance.
FOCUSES = ("", "", "verifier", "drafter", "orchestrator", "orchestrator", "client", "client", "log")
# What all prompts begin with in a third of the scenarios: long enough for verifiers to share it between sessions.
COMMON = 12
# What ends a process.
ENDS = ("crash", "stop")
# Seconds in which a session may go on whose cancellation was lost with the log, and whose owner died.
FORGOTTEN = 1000.0
LOSING = ("log_behind", "log_emptied", "log_failover")


@dataclass(frozen=True, slots=True)
class Fault:
    """`target`: a party, or two with a dash. seconds: until it is over; of a clock, by which it is ahead.

    to: of `update` and `swap` the configuration that the verifier comes back with, of `log_damaged` the key.
    """

    start: float
    kind: str
    target: str = ""
    seconds: float = 1.0
    to: str = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """grace: seconds that running sessions have when their process is told to stop.

    queue: sessions that may wait for a slot, queue_wait: for how many seconds. detach_grace: for readers to come back.
    vocabulary, spread: of the target; a small spread gives every token a chance. configs: of the verifiers, by number,
    as services.CONFIGS has them; all the usual one where there are none. heads: beside their targets, as services.HEADS
    has them, "" for none; none at all where there are none. versions: verifiers that differ are used side
    by side, as registered ones are. session_ttl, retention: seconds that the log keeps a session that runs, and that
    has ended.
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
    configs: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    versions: bool = False
    session_ttl: float = 3600.0
    retention: float = 3600.0
    requests: tuple[SimRequest, ...] = field(default=())
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
        """Seconds by which what goes wrong may hold up an end, outages of the whole log apart."""
        held = ("pause", "slow", "stall", "late", "log_cut", "log_full", "effects_late", *LOG_FAULTS[1:])
        killed = any(each.kind in ENDS and each.target.startswith("orchestrator") for each in self.faults)
        forgotten = killed and any(fault.kind in LOSING for fault in self.faults)
        return forgotten * FORGOTTEN + sum(fault.seconds for fault in self.faults if fault.kind in held)

    @property
    def skew(self) -> float:
        """Seconds by which clocks may be apart."""
        clocks = ("clock_set", "log_clock_set", "log_failover")
        return sum(abs(fault.seconds) for fault in self.faults if fault.kind in clocks)

    @property
    def unequal(self) -> bool:
        """Verifiers have, or come to have, different configurations."""
        return any(self.configs) or any(fault.kind in ("update", "swap") for fault in self.faults)

    @property
    def sessions(self) -> int:
        """How many there may be at once."""
        return sum(request.n for request in self.requests)


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
        plan=random.choice(
            ("auto:4", "stream:2,6", "lockstep:4") if seed % 2 else ("auto", "stream:2,6", "lockstep:4")
        ),
        drafters_per_session=1 + seed % 3,
        tenants=random.choice((1, 1, 2)),
        queue=random.choice((0, 3, 8)),
        queue_wait=random.choice((1.0, 5.0)),
        grace=random.choice((0.0, 0.5, 3.0)),
        detach_grace=random.choice((12.0, 30.0, 30.0)),
        spread=random.choice((SPREAD, SPREAD, 4.0)),
    )
    common = COMMON if bare.drafters_per_session == 1 else 0
    requests = random_requests(random, bare.orchestrators, bare.tenants, bare.vocabulary, common)
    eased = replace(bare, requests=requests, faults=random_faults(random, bare))
    return with_heads(Random(f"heads of {seed}"), with_hardship(Random(f"hardship of {seed}"), eased))


def with_heads(random: Random, scenario: Scenario) -> Scenario:
    """In half of all cases heads beside the targets, or beside some of them."""
    if random.random() < 0.5:
        return scenario
    return replace(scenario, heads=tuple(random.choice(("", *HEADS)) for _ in range(scenario.verifiers)))


# What is unequal, long, partial or hostile


def with_hardship(random: Random, scenario: Scenario) -> Scenario:
    """In half of all cases one of HARDSHIPS, in place of half of the other faults."""
    if random.random() < 0.5:
        return scenario
    kept = tuple(fault for fault in scenario.faults if random.random() < 0.5)
    harder = random.choice(HARDSHIPS)(random, replace(scenario, faults=kept))
    return replace(harder, faults=tuple(sorted(harder.faults, key=_start)))


def _when(random: Random) -> float:
    return round(random.uniform(0.5, 2.5), 3)


def unequal_verifiers(random: Random, scenario: Scenario) -> Scenario:
    """Of the same weights. One of them is lost, for its sessions to move."""
    count = random.choice((2, 3))
    configs = tuple(random.choice(tuple(CONFIGS)) for _ in range(count))
    lost = Fault(_when(random), random.choice(("crash", "stop")), f"verifier-{random.randrange(count)}", 5.0)
    versions = random.random() < 0.5
    return replace(scenario, verifiers=count, configs=configs, versions=versions, faults=(*scenario.faults, lost))


def rolling_update(random: Random, scenario: Scenario) -> Scenario:
    """One verifier after the other gets another configuration; then perhaps the orchestrators are started again."""
    start, to, count = _when(random), random.choice(("eos", "context", "tokenizer")), random.choice((2, 3))
    apart, kind = random.uniform(0.3, 6.0), random.choice(("update", "swap"))
    updates = [Fault(round(start + n * apart, 3), kind, f"verifier-{n}", 0.5, to) for n in range(count)]
    if random.random() < 0.5:
        after = round(start + count * apart, 3)
        updates += [Fault(after + 2.0 * n, "stop", f"orchestrator-{n}", 0.5) for n in range(scenario.orchestrators)]
    versions = random.random() < 0.5
    return replace(scenario, verifiers=count, versions=versions, faults=(*scenario.faults, *updates))


def long_outage(random: Random, scenario: Scenario) -> Scenario:
    """The log is down for longer than anybody waits for it. Meanwhile somebody cancels."""
    start, seconds = _when(random), round(random.uniform(25.0, 50.0), 3)
    requests = tuple(
        replace(request, cancel_after=random.randrange(min(request.max_tokens, 8)))
        if random.random() < 0.5
        else request
        for request in scenario.requests
    )
    return replace(scenario, requests=requests, faults=(*scenario.faults, Fault(start, "log_down", "", seconds)))


def cut_off_for_long(random: Random, scenario: Scenario) -> Scenario:
    """One orchestrator does not reach the log for longer than that keeps what has ended elsewhere meanwhile."""
    requests = [request for request in scenario.requests if request.request_id]
    again = [
        replace(request, at=1 - request.at % 2, start=request.start + 0.3)
        for request in requests
        if request.follows is None
    ]
    cut = Fault(_when(random), "log_cut", f"orchestrator-{random.randrange(2)}", round(random.uniform(12.0, 45.0), 3))
    hard = replace(scenario, session_ttl=random.choice((20.0, 60.0)), retention=random.choice((1.0, 5.0)))
    return replace(hard, orchestrators=2, requests=(*scenario.requests, *again[:2]), faults=(*scenario.faults, cut))


def _wrong_by(random: Random) -> float:
    return round(random.choice((-1, 1)) * random.choice((0.5, 5.0, 60.0)) * random.uniform(0.5, 1.5), 3)


def wrong_clocks(random: Random, scenario: Scenario) -> Scenario:
    """Of hosts, and of the log's: they differ, and jump."""
    hosts = [Fault(0.0, "clock_set", party, _wrong_by(random)) for party in scenario.parties if random.random() < 0.5]
    jumps = [Fault(_when(random), "log_clock_set", "", _wrong_by(random)) for _ in range(random.choice((1, 2)))]
    return replace(scenario, faults=(*scenario.faults, *hosts, *jumps))


def failover(random: Random, scenario: Scenario) -> Scenario:
    """Replicas take the log over, once or twice, while sessions change hands."""
    requests = tuple(replace(request, at=0) for request in scenario.requests)
    start = _when(random)
    moved = [Fault(round(start + random.uniform(-0.2, 1.0), 3), "cut", f"orchestrator-{n}-client") for n in (0, 1, 0)]
    overs = [
        Fault(round(start + n * random.uniform(0.5, 2.0), 3), "log_failover", "", -abs(_wrong_by(random)))
        for n in (0, 1)
    ]
    return replace(scenario, orchestrators=2, requests=requests, faults=(*scenario.faults, *moved, *overs))


def late_effects(random: Random, scenario: Scenario) -> Scenario:
    late = Fault(round(random.uniform(0.0, 2.0), 3), "effects_late", "", round(random.uniform(1.0, 8.0), 3))
    return replace(scenario, faults=(*scenario.faults, late))


def damaged_logs(random: Random, scenario: Scenario) -> Scenario:
    keys = ("meta", "tokens", "outcomes", "record")
    damage = [Fault(_when(random), "log_damaged", to=random.choice(keys)) for _ in range(random.choice((1, 2, 4)))]
    cuts = [Fault(round(each.start + 0.01, 3), "cut", "orchestrator-0-client") for each in damage]
    return replace(scenario, orchestrators=2, faults=(*scenario.faults, *damage, *cuts))


def full_log(random: Random, scenario: Scenario) -> Scenario:
    full = Fault(round(random.uniform(0.4, 2.0), 3), "log_full", "", round(random.uniform(0.5, 25.0), 3))
    return replace(scenario, faults=(*scenario.faults, full))


HARDSHIPS = (
    unequal_verifiers, rolling_update, long_outage, cut_off_for_long, wrong_clocks, failover, late_effects,
    damaged_logs, full_log,
)  # fmt: skip


# What everybody suffers


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
