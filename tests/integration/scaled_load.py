"""Sessions that come by a plan, at first few, then many, then few again; what came of each; what an autoscaler saw.

    python -m tests.integration.scaled_load FILE

plays them against a deployment of its own on a Ray cluster, and writes what tests/deploy/test_cluster_recorded.py reads
(two minutes; nearly all of it is waiting).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cluster.site import Site, site
from specwire.client import AsyncClient, Chunk
from specwire.rpc.tls import ClientTls

LIMIT_S = 300.0
DELAY_S = 0.05
MODEL = f"scripted:7:vocab=64:delay_ms={DELAY_S * 1000:g}"
SLOTS = 4
TOKENS = 40
PROMPTS = 8
# (seconds, sessions that come in each)
PHASES = ((15.0, 0.4), (40.0, 3.5), (40.0, 0.4))
SEED = 7
FILE = """
redis: redis://{redis}/0
pools:
  target:
    kind: verify
    model: "{model}"
    resources: {{big: 1}}
    num_cpus: 0.1
    max_replicas: 3
    scaling: {{grow_after_s: 2, shrink_after_s: 10, queue_s: 0.5}}
    options: {{slots: {slots}, ngram: false, insecure: true, grace: 60}}
orchestrators:
  num_cpus: 0.1
  resources: {{front: 1}}
  options: {options}
"""


@dataclass(frozen=True, slots=True)
class Planned:
    """A session. at: seconds from the start."""

    at: float
    prompt: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """at: as planned. first_s: from the request to its first token; seconds: from there to its end, and a step."""

    at: float
    first_s: float
    seconds: float
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def planned(seed: int = SEED) -> list[Planned]:
    """Arrivals of a Poisson process for each phase."""
    random_ = random.Random(seed)
    found, began = [], 0.0
    for seconds, rate in PHASES:
        at = began + random_.expovariate(rate)
        while at < began + seconds:
            found.append(Planned(at, (5, 6, 7 + random_.randrange(PROMPTS)), TOKENS))
            at += random_.expovariate(rate)
        began += seconds
    return found


async def drive(address: str, tls: ClientTls | None, sessions: Sequence[Planned]) -> list[Served]:
    """An ExceptionGroup where one failed."""
    async with AsyncClient(address, tls=tls) as client, asyncio.TaskGroup() as tasks:
        began = time.monotonic()
        running = [tasks.create_task(_serve(client, each, began)) for each in sessions]
    return [task.result() for task in running]


async def _serve(client: AsyncClient, session: Planned, began: float) -> Served:
    await asyncio.sleep(max(0.0, began + session.at - time.monotonic()))
    asked, first = time.monotonic(), 0.0
    tokens: list[int] = []
    async for event in client.generate(
        session.prompt, max_tokens=session.tokens, ignore_eos=True, ngram=False, timeout=LIMIT_S
    ):
        if isinstance(event, Chunk):
            first = first or time.monotonic()
            tokens += event.tokens
    seconds = time.monotonic() - first + DELAY_S
    return Served(session.at, first - asked, seconds, session.prompt, tuple(tokens))


@contextmanager
def place(room: int = 4) -> Iterator[Site]:
    """A cluster with room for one orchestrator and so many verifiers."""
    with site({"front": 1}, {"big": room}) as found:
        yield found


def file(here: Site, model: str = MODEL, options: str = "{insecure: true}") -> str:
    return FILE.format(redis=here.redis, model=model, slots=SLOTS, options=options)


def status(here: Site) -> dict[str, Any]:
    """As `specwire status` has it."""
    found: dict[str, Any] = json.loads(here.specwire("status", "--json"))
    return found


def rest(here: Site, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """Wait until the pool is as small as it may be; all that the autoscaler saw until then."""
    deadline = time.monotonic() + limit_s
    while True:
        found = status(here)
        if sum(row["pool"] == "target" for row in found["replicas"]) == 1:
            looks: list[dict[str, Any]] = found["looks"]
            return looks
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {found['replicas']} after {limit_s:g} s")
        time.sleep(1.0)


def recorded(served: Sequence[Served], looks: Sequence[dict[str, Any]], began: float) -> dict[str, Any]:
    """began: Unix time; all that is written counts from there."""
    return {
        "slots": SLOTS,
        "scaling": {"grow_after_s": 2.0, "shrink_after_s": 10.0, "queue_s": 0.5},
        "bounds": [1, 3],
        "sessions": [
            {name: round(value, 3) for name, value in asdict(each).items() if isinstance(value, float)}
            for each in served
        ],
        "looks": [
            {"at": round(look["at"] - began, 3), "wanted": look["wanted"], "reading": look["reading"]} for look in looks
        ],
    }


def text_of(record: dict[str, Any]) -> str:
    """As JSON, an element of a list a line."""
    parts = []
    for name, value in record.items():
        lines = ",\n".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f"{json.dumps(name)}: " + (f"[\n{lines}\n]" if lines else json.dumps(value)))
    return "{" + ",\n".join(parts) + "}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    target: Path = parser.parse_args().file
    with place() as here:
        here.deploy(file(here), "--start-timeout", "90")
        front = next(row["address"] for row in here.rows() if row["pool"] == "orchestrators")
        began = time.time()
        served = asyncio.run(drive(front, None, planned()))
        found = recorded(served, rest(here), began)
        here.specwire("undeploy")
    target.write_text(text_of(found))


if __name__ == "__main__":
    main()
