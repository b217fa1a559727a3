"""`specwire deploy` on a Ray cluster of several nodes, all on this machine: placement, scaling, a node that dies.

Texts are those of plain decoding whatever happens to replicas meanwhile. Other faults: test_cluster_faults.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.cluster.site import Site, site
from tests.faults.streams import Stream, plain
from tests.integration.pauses import Pause

LIMIT_S = 120.0
MODEL = "scripted:7:vocab=64"
# More than there is time for: a session that ends by itself would not have been moved.
LENGTH = 4000
MORE = 10
# What was on its way from a node that has gone is there by then.
GONE_S = 3.0
FILE = """
redis: redis://{redis}/0
pools:
  target:
    kind: verify
    model: "scripted:7:vocab=64:delay_ms=250"
    resources: {{big: 1}}
    num_cpus: 0.1
    max_replicas: 3
    options: {{slots: {slots}, insecure: true, grace: 0.5}}
  draft:
    kind: draft
    model: "scripted:7:vocab=64:agree=0.8"
    resources: {{small: 1}}
    num_cpus: 0.1
    options: {{insecure: true}}
orchestrators:
  num_cpus: 0.1
  resources: {{front: 1}}
  options: {{insecure: true}}
"""


@pytest.fixture(scope="module")
def here() -> Iterator[Site]:
    """Give a cluster whose head takes orchestrators, and a node for drafters; nobody takes verifiers yet."""
    with site({"front": 1}, {"small": 2}) as found:
        yield found


def deploy(here: Site, slots: int, *flags: str) -> str:
    return here.deploy(FILE.format(redis=here.redis, slots=slots), "--start-timeout", "60", *flags)


@contextmanager
def running(address: str, pauses: list[Pause], *faults: str) -> Iterator[Stream]:
    """A session under way, to which the faults are to happen now; its text is looked at in the end."""
    with Stream(address, patience=LIMIT_S, max_tokens=LENGTH) as stream:
        stream.until_accepted()
        moment = time.monotonic()
        yield stream
        pauses += [Pause.of(fault, stream, moment) for fault in faults]
    assert stream.tokens == plain(MODEL, len(stream.tokens))


@pytest.mark.cluster
def test_a_deployment_lives_through_changes_and_a_lost_node(here: Site, pauses: list[Pause]) -> None:
    first = here.cluster.add_node(num_cpus=1, resources={"big": 4})
    said = deploy(here, 8, "--dry-run")
    assert said.splitlines()[0] == "target: created (0 -> 1)"
    assert here.rows() == []
    assert "orchestrators: created (0 -> 1)" in deploy(here, 8)
    assert deploy(here, 8).splitlines() == [
        "target: unchanged (1 -> 1)",
        "draft: unchanged (1 -> 1)",
        "orchestrators: unchanged (1 -> 1)",
    ]
    rows = here.rows()
    for pool, resource in (("target", "big"), ("draft", "small"), ("orchestrators", "front")):
        assert {row["node"] for row in rows if row["pool"] == pool} == here.nodes_with(resource)

    [front] = [row["address"] for row in rows if row["pool"] == "orchestrators"]
    with running(front, pauses, "a pool scaled 1 -> 3 -> 1") as stream:
        assert "target: scaled (1 -> 3)" in here.specwire("scale", "target=3")
        stream.until(len(stream.tokens) + MORE)
        assert "target: scaled (3 -> 1)" in here.specwire("scale", "target=1")
        stream.until(len(stream.tokens) + MORE)

    with running(front, pauses, "a rolling update") as stream:
        assert "target: replaced (1 -> 1)" in deploy(here, 4)
        stream.until(len(stream.tokens) + MORE)

    here.cluster.add_node(num_cpus=1, resources={"big": 4})
    with running(front, pauses, "a node lost, its only verifier started again on another") as stream:
        here.cluster.remove_node(first, allow_graceful=False)
        stream.until_arrived(time.monotonic() + GONE_S)
    after = [row for row in here.rows() if row["pool"] == "target"]
    assert [row["state"] for row in after] == ["ready"]
    assert {row["node"] for row in after} == here.nodes_with("big")
    assert not {row["replica"] for row in after} & {row["replica"] for row in rows}

    assert "target: removed (1 -> 0)" in here.specwire("undeploy")
    assert here.specwire("status") == "nothing is deployed\n"
