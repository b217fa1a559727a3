"""`specwire deploy` on a Ray cluster of several nodes, all on this machine: placement, scaling, nodes that die.

Texts are those of plain decoding whatever happens to replicas meanwhile. Other faults: test_cluster_faults.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from bench.cluster.site import Site, site
from specwire.client import Client
from tests.faults.streams import PROMPT, plain
from tests.integration.cluster import (
    LIMIT_S,
    MODEL,
    MORE,
    NAME,
    OTHER,
    OTHER_MODEL,
    OTHER_NAME,
    deploy,
    running,
)
from tests.integration.pauses import Pause
from tests.wait import eventually

VERIFIERS = 3
PROMPTS = ((5, 6, 7), (5, 6, 8), (5, 6, 9))


@pytest.fixture(scope="module")
def here() -> Iterator[Site]:
    """Give a cluster whose head takes orchestrators, a node for drafters, and one for each of three verifiers."""
    with site({"front": 1}, {"small": 2}, *[{"big": 1}] * VERIFIERS) as found:
        yield found


def targets(here: Site) -> list[dict[str, str]]:
    return [row for row in here.rows() if row["pool"] == "target"]


def are_ready(here: Site, count: int) -> bool:
    return [row["state"] for row in targets(here)] == ["ready"] * count


@pytest.mark.cluster
def test_a_deployment_lives_through_changes_and_lost_nodes(here: Site, pauses: list[Pause]) -> None:
    assert deploy(here, 1, VERIFIERS, flags=["--dry-run"]).splitlines()[0] == "target: created (0 -> 1)"
    assert here.rows() == []
    assert "orchestrators: created (0 -> 1)" in deploy(here, 1, VERIFIERS)
    assert deploy(here, 1, VERIFIERS).splitlines() == [
        "target: unchanged (1 -> 1)",
        "draft: unchanged (1 -> 1)",
        "orchestrators: unchanged (1 -> 1)",
    ]
    rows = here.rows()
    for pool, resource in (("target", "big"), ("draft", "small"), ("orchestrators", "front")):
        assert {row["node"] for row in rows if row["pool"] == pool} <= here.nodes_with(resource)
    [front] = [row["address"] for row in rows if row["pool"] == "orchestrators"]

    with running(front) as stream:
        moment = time.monotonic()
        assert "target: scaled (1 -> 3)" in here.specwire("scale", "target=3")
        assert {row["node"] for row in targets(here)} == here.nodes_with("big")
        stream.until(len(stream.tokens) + MORE)
        assert "target: scaled (3 -> 1)" in here.specwire("scale", "target=1")
        stream.until(len(stream.tokens) + MORE)
        pauses.append(Pause.of("a pool scaled 1 -> 3 -> 1", moment, stream))

    with running(front) as stream:
        moment = time.monotonic()
        assert "target: replaced (1 -> 1)" in deploy(here, 1, VERIFIERS, slots=6)
        stream.until(len(stream.tokens) + MORE)
        pauses.append(Pause.of("a rolling update", moment, stream))
    assert not {row["replica"] for row in targets(here)} & {row["replica"] for row in rows}

    printed = deploy(here, 1, VERIFIERS, slots=6, more=OTHER).splitlines()
    assert {"target: unchanged (1 -> 1)", "other: created (0 -> 1)"} <= set(printed)
    each_model_has_its_text(front)
    assert "other: removed (1 -> 0)" in deploy(here, 1, VERIFIERS, slots=6)

    assert "target: scaled (1 -> 2)" in here.specwire("scale", "target=2")
    lose_a_node(here, front, pauses, 2, "a node lost, another verifier elsewhere")
    assert "target: scaled (2 -> 1)" in here.specwire("scale", "target=1")
    lose_a_node(here, front, pauses, 1, "a node lost, its only verifier started again on another")

    assert "target: removed (1 -> 0)" in here.specwire("undeploy")
    assert here.specwire("status") == "nothing is deployed\n"


def each_model_has_its_text(front: str) -> None:
    """Whichever a request names."""
    with Client(front, patience=LIMIT_S) as client:
        assert eventually(lambda: {each.model for each in client.server_info().targets} == {NAME, OTHER_NAME})
        for name, model in ((NAME, MODEL), (OTHER_NAME, OTHER_MODEL)):
            found = client.complete(PROMPT, max_tokens=MORE, model=name, ignore_eos=True)
            assert list(found.tokens) == plain(model, MORE)


def lose_a_node(here: Site, front: str, pauses: list[Pause], verifiers: int, fault: str) -> None:
    """Under load, with one of so many verifiers; in the end there are as many, on nodes that live."""
    with ExitStack() as owned:
        streams = [owned.enter_context(running(front, prompt)) for prompt in PROMPTS]
        lost, moment = targets(here)[0]["node"], time.monotonic()
        ray_s = here.lose(lost)
        for stream in streams:
            stream.until_arrived(time.monotonic())
        pauses.append(Pause.of(fault, moment, *streams, ray_s=ray_s))
    assert eventually(lambda: are_ready(here, verifiers), pause_s=1.0)
    assert {row["node"] for row in targets(here)} == here.nodes_with("big")
