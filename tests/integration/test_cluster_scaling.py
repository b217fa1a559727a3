"""A deployment that follows its load, is brought new weights under load, and is joined by a drafter from elsewhere.

On a Ray cluster of several nodes, all on this machine. Texts are those of plain decoding, and no request fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import ray

from bench.cluster.site import Site, command_lines, site
from bench.harness.certificates import Authority
from specwire.client import AsyncClient, Chunk, Completion
from specwire.core.messages import Outcome
from specwire.rpc.tls import ClientTls
from tests.faults.parts import Parts
from tests.faults.streams import plain
from tests.integration.cluster import file_of
from tests.options import private
from tests.wait import eventually

LIMIT_S = 300.0
SPEC = "scripted:7:vocab=64"
MODEL = f"{SPEC}:delay_ms=50"
# The same text by other weights, as their fingerprints say.
NEW_MODEL = f"{MODEL}:agree=0.999999"
DRAFT = f"{SPEC}:agree=0.8"
TOKEN = "an-edge-box-of-ours-and-nobody-else"
CLIENTS = 3
# Sessions that keep one replica busy for a minute.
CROWD = 120
# Tokens: a session that goes on while others come and go, and is over before the update's grace is.
LONG, SHORT = 700, 20
SLOTS = 4
TOKENS = 40
PROMPTS = 8
# (seconds, sessions that come in each)
PHASES = ((15.0, 0.4), (40.0, 3.5), (40.0, 0.4))
SEED = 7


@dataclass(frozen=True, slots=True)
class Planned:
    """A session. at: seconds from the start."""

    at: float
    prompt: tuple[int, ...]
    tokens: int


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


async def drive(address: str, tls: ClientTls | None, sessions: Sequence[Planned]) -> list[Completion]:
    """An ExceptionGroup where one failed."""
    async with AsyncClient(address, tls=tls) as client, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(serve(client, each)) for each in sessions]
    return [task.result() for task in running]


async def serve(client: AsyncClient, session: Planned) -> Completion:
    await asyncio.sleep(session.at)
    return await said(client, session.tokens, session.prompt)


@contextmanager
def place(room: int = 4) -> Iterator[Site]:
    """A cluster with room for one orchestrator and so many verifiers."""
    with site({"front": 1}, {"big": room}) as found:
        yield found


def file(here: Site, model: str = MODEL, **orchestrators: object) -> str:
    target = {
        "kind": "verify",
        "model": model,
        "resources": {"big": 1},
        "max_replicas": 3,
        "scaling": {"grow_after_s": 2, "shrink_after_s": 10, "queue_s": 0.5},
        "options": {"slots": SLOTS, "ngram": False, "insecure": True, "grace": 60},
    }
    return file_of(here, {"target": target}, orchestrators)


def status(here: Site) -> dict[str, Any]:
    """As `specwire status` has it."""
    found: dict[str, Any] = json.loads(here.specwire("status", "--json"))
    return found


def rest(here: Site) -> list[dict[str, Any]]:
    """Wait until the pool is as small as it may be; all that the autoscaler saw until then."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = status(here)
        if sum(row["pool"] == "target" for row in found["replicas"]) == 1:
            looks: list[dict[str, Any]] = found["looks"]
            return looks
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {found['replicas']} after {LIMIT_S:g} s")
        time.sleep(1.0)


@dataclass(frozen=True, slots=True)
class Deployed:
    site: Site
    options: dict[str, object]
    front: str
    tls: ClientTls
    ca: str
    token: str


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Give a deployment whose orchestrator is encrypted, and lets drafters with a token dial in."""
    folder = tmp_path_factory.mktemp("edge")
    authority = Authority()
    certificate, key = authority.sign(ray.util.get_node_ip_address()).save(folder, "front")
    keys, token = private(folder / "keys", f"box {TOKEN}\n"), private(folder / "token", TOKEN)
    options = {"tls-cert": certificate, "tls-key": key, "accept-drafters": True, "drafter-keys": keys}
    with place() as site:
        site.deploy(file(site, options=options), "--start-timeout", "90")
        front = next(row["address"] for row in site.rows() if row["pool"] == "orchestrators")
        ca = authority.save(folder, "ca")
        yield Deployed(site, options, front, authority.client(), ca, token)
        assert "target: removed" in site.specwire("undeploy")
        assert status(site) == {"replicas": [], "looks": []}


def assert_plain(sessions: Sequence[Planned], served: Sequence[Completion]) -> None:
    assert [len(each.tokens) for each in served] == [each.tokens for each in sessions]
    longest = max(each.tokens for each in sessions)
    texts = {prompt: plain(SPEC, longest, prompt) for prompt in {each.prompt for each in sessions}}
    for asked, found in zip(sessions, served, strict=True):
        assert list(found.tokens) == texts[asked.prompt][: asked.tokens]


@pytest.mark.cluster
async def test_a_pool_follows_its_load(deployed: Deployed) -> None:
    """It grows when sessions wait, and shrinks when they are few: one that runs all the time is not disturbed."""
    sessions = [Planned(0.0, (5, 6, 7), 3 * LONG), *planned()]
    served = await drive(deployed.front, deployed.tls, sessions)
    assert_plain(sessions, served)
    looks = await asyncio.to_thread(rest, deployed.site)
    replicas = [look["reading"]["replicas"] for look in looks]
    assert {1, 3} <= set(replicas)
    assert replicas[-1] == 1
    assert turns(replicas) == 1
    assert max(look["reading"]["queue_s"] for look in looks) > 0.0


def turns(counts: Sequence[int]) -> int:
    """How often growing became shrinking, or the other way round."""
    moves = [after > before for before, after in pairwise(counts) if after != before]
    return sum(before != after for before, after in pairwise(moves))


@pytest.mark.cluster
def test_the_autoscaler_is_started_again(deployed: Deployed) -> None:
    nodes = deployed.site.cluster.list_all_nodes()
    below = [node.all_processes["raylet"][0].process.pid for node in nodes]
    [autoscaler] = [
        pid for each in below for pid, line in command_lines(each).items() if line.startswith("ray::Autoscaler")
    ]
    os.kill(autoscaler, signal.SIGKILL)
    began = time.time()
    assert eventually(lambda: any(look["at"] > began for look in status(deployed.site)["looks"]), pause_s=1.0)


@pytest.mark.cluster
async def test_a_full_cluster_queues_until_there_is_a_node() -> None:
    """Who waits has a slot in turn; the replica that finds no node starts as soon as one comes."""
    with place(1) as site:
        await asyncio.to_thread(site.deploy, file(site), "--start-timeout", "90")
        front = next(row["address"] for row in status(site)["replicas"] if row["pool"] == "orchestrators")
        sessions = [Planned(0.3 * turn, (5, 6, 7), TOKENS) for turn in range(CROWD)]
        crowd = asyncio.create_task(drive(front, None, sessions))
        await asyncio.to_thread(wait_for, site, {"ready": 1, "away": 1})
        site.cluster.add_node(num_cpus=1, resources={"big": 1})
        await asyncio.to_thread(wait_for, site, {"ready": 2})
        assert_plain(sessions, await crowd)
        assert "target: removed" in await asyncio.to_thread(site.specwire, "undeploy")


def wait_for(site: Site, wanted: dict[str, int]) -> None:
    """Until at least as many verifiers are in these states."""

    def are_there() -> bool:
        states = Counter(row["state"] for row in status(site)["replicas"] if row["pool"] == "target")
        return all(states[state] >= count for state, count in wanted.items())

    assert eventually(are_there, pause_s=1.0)


@pytest.mark.cluster
async def test_new_weights_come_under_load_and_no_request_fails(deployed: Deployed) -> None:
    over = asyncio.Event()
    async with AsyncClient(deployed.front, tls=deployed.tls) as client:
        before = await weights(client)
        long = [asyncio.create_task(said(client, LONG)) for _ in range(2)]
        steady = [asyncio.create_task(keep_asking(client, over)) for _ in range(CLIENTS)]
        text = file(deployed.site, model=NEW_MODEL, options=deployed.options)
        printed = await asyncio.to_thread(deployed.site.deploy, text, "--start-timeout", "90")
        assert "target: replaced (1 -> 1)" in printed
        # What was begun on the old weights can be decided by nothing else, and was waited for.
        assert all(task.done() for task in long)
        over.set()
        done = [each for task in steady for each in await task]
        done += [await task for task in long]
        assert {len(each.tokens) for each in done} == {SHORT, LONG}
        assert all(list(each.tokens) == plain(SPEC, len(each.tokens)) for each in done)
        assert await weights(client) != before
        assert list((await said(client, SHORT)).tokens) == plain(SPEC, SHORT)
    rows = [row for row in status(deployed.site)["replicas"] if row["pool"] == "target"]
    assert [row["state"] for row in rows] == ["ready"]


async def weights(client: AsyncClient) -> str:
    [target] = (await client.server_info()).targets
    return target.weights_fingerprint


async def said(client: AsyncClient, length: int, prompt: Sequence[int] = (5, 6, 7)) -> Completion:
    return await client.complete(prompt, max_tokens=length, ignore_eos=True, ngram=False, timeout=LIMIT_S)


async def keep_asking(client: AsyncClient, over: asyncio.Event) -> list[Completion]:
    done = []
    while not over.is_set():
        done.append(await said(client, SHORT))
    return done


@pytest.mark.cluster
async def test_an_edge_box_joins_with_one_command_and_vanishes(deployed: Deployed, owned: Parts) -> None:
    dial = ("--connect", deployed.front, "--tls-ca", deployed.ca, "--token-file", deployed.token, "--region", "home")
    box = owned.start("draft", DRAFT, *dial)
    await asyncio.to_thread(box.ready)
    async with AsyncClient(deployed.front, tls=deployed.tls) as client:
        tokens: list[int] = []
        accepted = after = 0
        events = client.generate((5, 6, 7), max_tokens=4000, ignore_eos=True, ngram=False, timeout=LIMIT_S)
        async with aclosing(events):
            async for event in events:
                if not isinstance(event, Chunk):
                    continue
                tokens += event.tokens
                accepted += sum(outcome is Outcome.ACCEPTED for outcome in event.outcomes)
                if accepted > 20 and box.lives:
                    box.kill()
                after += not box.lives
                if after > 40:
                    break
    assert tokens == plain(SPEC, len(tokens))
