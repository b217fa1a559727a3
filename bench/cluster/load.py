"""What `make bench-cluster` measures: rows, the deployment on which all of them run, and what the simulator expects.

Forwards are emulated: they sleep V(m) = V (1 + slope (m - 1)), with m sessions in a batch. So the measurement is of
everything around them: registry, placement, links, log, orchestrators. V is long because all of it shares one machine's
cores, which a real target's V would saturate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from specwire import sim
from specwire.client import AsyncClient, Chunk
from specwire.lm.scripted import Script

V_MS = 200.0
SLOPE = 0.005
# Most of each verifier's slots are in use: it could not take over another one's sessions.
SESSIONS_PER_VERIFIER, SLOTS = 16, 24
TOKENS = 24
REPEATS = 7
# Of tokens; each session has one of its own.
PROMPT, VOCABULARY = 3, 64
AGREE = 0.8
DRAFT_MS = 20.0
# A verifier that takes almost no time: what is measured is an orchestrator with as much to do as the machine can.
QUICK_MS = 2.0
FLOOD_SESSIONS, FLOOD_TOKENS = 48, 100
MOST_VERIFIERS = MOST_ORCHESTRATORS = 4


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """One load. verifiers: how many serve its model. orchestrators: among how many its sessions are divided."""

    name: str
    model: str
    verifiers: int
    orchestrators: int = 1
    sessions: int = 0
    tokens: int = TOKENS
    drafting: bool = False

    @property
    def at_once(self) -> int:
        return self.sessions or self.verifiers * SESSIONS_PER_VERIFIER


def pool_model(verifiers: int) -> str:
    """The model of the pool of so many; each pool has one of its own, so a request's model names the pool."""
    return f"scripted:{verifiers}"


FLOOD_MODEL, WIDE_MODEL = "scripted:100", "scripted:50"
ONE = ClusterRow("1 verifier, 1 orchestrator", pool_model(1), 1)
TWO = ClusterRow("2 verifiers, 1 orchestrator", pool_model(2), 2)
FOUR = ClusterRow("4 verifiers, 1 orchestrator", pool_model(4), 4)
FOUR_BY_FOUR = ClusterRow("4 verifiers, 4 orchestrators", pool_model(4), 4, orchestrators=4)
DRAFTED = ClusterRow("4 verifiers, 1 orchestrator, drafting", pool_model(4), 4, tokens=2 * TOKENS, drafting=True)
FLOOD = ClusterRow(
    f"1 verifier of {QUICK_MS:g} ms, 1 orchestrator", FLOOD_MODEL, 1, sessions=FLOOD_SESSIONS, tokens=FLOOD_TOKENS
)
# Each orchestrator has as many sessions, at four verifiers that take any number in the same time.
WIDE = tuple(
    ClusterRow(
        f"4 flat verifiers, {count} orchestrator{'s' if count > 1 else ''}",
        WIDE_MODEL,
        4,
        orchestrators=count,
        sessions=count * 4 * SESSIONS_PER_VERIFIER,
    )
    for count in (1, 2, 4)
)
ROWS = (ONE, TWO, FOUR, FOUR_BY_FOUR, *WIDE, DRAFTED, FLOOD)
# Rows whose N verifiers, or orchestrators, must be as fast as N times one.
OVER_VERIFIERS, OVER_ORCHESTRATORS = (TWO, FOUR, FOUR_BY_FOUR), WIDE[1:]
LEAST_LINEAR = 0.9

_VERIFY = """\
  {name}:
    kind: verify
    model: "{model}"
    resources: {{verify: 1}}
    num_cpus: 0
    min_replicas: {replicas}
    max_replicas: {replicas}
    options: {{slots: {slots}, ngram: false, insecure: true}}
"""
_DRAFT = """\
  draft:
    kind: draft
    model: "{model}:agree={agree}:delay_ms={delay}:device=small"
    resources: {{draft: 1}}
    num_cpus: 0
    options: {{slots: {slots}, insecure: true}}
"""
_REST = """\
orchestrators:
  count: {orchestrators}
  num_cpus: 0
  resources: {{orchestrate: 1}}
  options: {{insecure: true}}
"""
HEAD = {"orchestrate": float(MOST_ORCHESTRATORS)}
NODES = ({"verify": 6.0, "draft": 1.0}, {"verify": 6.0})


def config(redis: str) -> str:
    """The file that is deployed. redis: HOST:PORT."""
    pools = [
        _VERIFY.format(
            name=f"pool-{count}",
            model=f"{pool_model(count)}:delay_ms={V_MS:g}:row_cost={SLOPE:g}:device=large",
            replicas=count,
            slots=SLOTS,
        )
        for count in (1, 2, 4)
    ]
    pools += [
        _VERIFY.format(name="flood", model=f"{FLOOD_MODEL}:delay_ms={QUICK_MS:g}", replicas=1, slots=FLOOD_SESSIONS),
        _VERIFY.format(name="wide", model=f"{WIDE_MODEL}:delay_ms={V_MS:g}", replicas=4, slots=WIDE[-1].at_once),
    ]
    pools.append(_DRAFT.format(model=DRAFTED.model, agree=AGREE, delay=f"{DRAFT_MS:g}", slots=DRAFTED.at_once))
    rest = _REST.format(orchestrators=MOST_ORCHESTRATORS)
    return f"redis: redis://{redis}/0\npools:\n{''.join(pools)}{rest}"


LIMIT_S = 180.0

Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CrowdSession:
    """A text, and when so many tokens of it came, in seconds of the monotonic clock."""

    text: Text
    arrivals: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class ServedCrowd:
    """seconds: from the first request to the last answer."""

    sessions: tuple[CrowdSession, ...]
    seconds: float

    @property
    def texts(self) -> tuple[Text, ...]:
        return tuple(session.text for session in self.sessions)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def steady(self) -> float:
        """Tokens per second while all sessions run: from when the last one has begun until the first one ends."""
        begin = max(session.arrivals[0][0] for session in self.sessions)
        end = min(session.arrivals[-1][0] for session in self.sessions)
        counted = sum(count for each in self.sessions for at, count in each.arrivals if begin < at <= end)
        return counted / (end - begin) if end > begin else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


async def served(row: ClusterRow, addresses: Sequence[str]) -> ServedCrowd:
    """addresses: of orchestrators. An ExceptionGroup where a session failed."""
    clients = [AsyncClient(address) for address in addresses[: row.orchestrators]]
    try:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_run(row, turn, clients[turn % len(clients)])) for turn in range(row.at_once)]
        return ServedCrowd(tuple(task.result() for task in running), time.monotonic() - began)
    finally:
        for client in clients:
            await client.close()


def prompt(turn: int) -> Text:
    """Of a row's session of this number."""
    return tuple(2 + (turn // (VOCABULARY - 2) ** place) % (VOCABULARY - 2) for place in range(PROMPT))


async def _run(row: ClusterRow, turn: int, client: AsyncClient) -> CrowdSession:
    text: list[int] = []
    arrivals: list[tuple[float, int]] = []
    events = client.generate(
        prompt(turn),
        max_tokens=row.tokens,
        ignore_eos=True,
        drafting=row.drafting,
        ngram=False,
        model=row.model,
        timeout=LIMIT_S,
    )
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Chunk):
                text += event.tokens
                arrivals.append((event.received_ns / 1e9, len(event.tokens)))
    return CrowdSession(tuple(text), tuple(arrivals))


# All at once, nearly: the simulator's sessions arrive by chance.
ARRIVALS_PER_SECOND = 10_000.0


def simulated(row: ClusterRow) -> float | None:
    """Tokens per second; None where the devices are not what limits it."""
    if row == FLOOD:
        return None
    slope = 0.0 if row in WIDE else SLOPE
    fleet = sim.SimFleet(
        sessions=row.at_once,
        verifiers=row.verifiers,
        drafters=1,
        V_us=1000 * V_MS,
        slope=slope,
        draft_us=1000 * DRAFT_MS,
        arrivals_per_second=ARRIVALS_PER_SECOND,
        rtts_us=(0.0,),
        acceptance=AGREE,
        traces=[trace(row, turn) for turn in range(row.at_once)] if row.drafting else (),
        prompt=PROMPT,
        prefill_us=1000 * V_MS * slope,
        tokens=row.tokens,
        slots=row.at_once if row in WIDE else SLOTS,
    )
    return sim.simulate_fleet(fleet, sim.AUTO if row.drafting else sim.PLAIN).tokens_per_second


def trace(row: ClusterRow, turn: int) -> tuple[bool, ...]:
    """Of a row's session: whether the drafter's guess is the target's token, all along the text.

    A row ends with its slowest session, so the simulation must have the same right guesses.
    """
    target, drafter = Script.parse(row.model), Script.parse(f"{row.model}:agree={AGREE}")
    state, right = 0, []
    for token in prompt(turn):
        state = target.extend(state, token)
    for _ in range(row.tokens):
        token = int(np.argmax(target.logits(state)))
        right.append(int(np.argmax(drafter.logits(state))) == token)
        state = target.extend(state, token)
    return tuple(right)
