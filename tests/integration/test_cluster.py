"""`specwire deploy` on a Ray cluster of several nodes, all on this machine: placement, scaling, a node that dies.

Texts are those of plain decoding whatever happens to replicas meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.faults.streams import Stream, plain
from tests.orchestrator.redis_for_tests import RedisServer, free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
MODEL = "scripted:7:vocab=64"
# More than there is time for: a session that ends by itself would not have been moved.
LENGTH = 4000
MORE = 10
# What was on its way from a node that has gone is there by then.
GONE_S = 3.0
FILE = """
redis: redis://127.0.0.1:{port}/0
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


class Site:
    """The cluster, its Redis, and the commands against them."""

    def __init__(self, cluster: Cluster, port: str, folder: Path) -> None:
        self.cluster = cluster
        self.port = port
        self._file = folder / "config.yaml"

    def specwire(self, *words: str) -> str:
        """Run a command on the cluster; what it printed."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "deploy", *words, "--ray-address", self.cluster.address],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def deploy(self, slots: int, *flags: str) -> str:
        self._file.write_text(FILE.format(port=self.port, slots=slots))
        return self.specwire("deploy", str(self._file), "--start-timeout", "60", *flags)

    def rows(self) -> list[dict[str, str]]:
        """Of all replicas."""
        found: list[dict[str, str]] = json.loads(self.specwire("status", "--json"))["replicas"]
        return found

    def nodes_with(self, resource: str) -> set[str]:
        ray.init(address=self.cluster.address, ignore_reinit_error=True, log_to_driver=False)
        return {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    port = free_port()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"front": 1}})
    try:
        with RedisServer(port=port, bind="127.0.0.1"):
            cluster.add_node(num_cpus=1, resources={"small": 2})
            yield Site(cluster, port, tmp_path_factory.mktemp("site"))
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def running(address: str) -> Iterator[Stream]:
    """A session under way; its text is looked at in the end."""
    with Stream(address, patience=LIMIT_S, max_tokens=LENGTH) as stream:
        stream.until(1)
        yield stream
    assert stream.tokens == plain(MODEL, len(stream.tokens))


@pytest.mark.cluster
def test_a_deployment_lives_through_changes_and_a_lost_node(site: Site) -> None:
    first = site.cluster.add_node(num_cpus=1, resources={"big": 4})
    said = site.deploy(8, "--dry-run")
    assert said.splitlines()[0] == "target: created (0 -> 1)"
    assert site.rows() == []
    assert "orchestrators: created (0 -> 1)" in site.deploy(8)
    assert site.deploy(8).splitlines() == [
        "target: unchanged (1 -> 1)",
        "draft: unchanged (1 -> 1)",
        "orchestrators: unchanged (1 -> 1)",
    ]
    rows = site.rows()
    for pool, resource in (("target", "big"), ("draft", "small"), ("orchestrators", "front")):
        assert {row["node"] for row in rows if row["pool"] == pool} == site.nodes_with(resource)

    [front] = [row for row in rows if row["pool"] == "orchestrators"]
    with running(front["address"]) as stream:
        stream.until_accepted()
        assert "target: scaled (1 -> 3)" in site.specwire("scale", "target=3")
        stream.until(len(stream.tokens) + MORE)
        assert "target: scaled (3 -> 1)" in site.specwire("scale", "target=1")
        stream.until(len(stream.tokens) + MORE)

    with running(front["address"]) as stream:
        assert "target: replaced (1 -> 1)" in site.deploy(4)
        stream.until(len(stream.tokens) + MORE)

    site.cluster.add_node(num_cpus=1, resources={"big": 4})
    with running(front["address"]) as stream:
        site.cluster.remove_node(first, allow_graceful=False)
        stream.until_arrived(time.monotonic() + GONE_S)
    after = [row for row in site.rows() if row["pool"] == "target"]
    assert [row["state"] for row in after] == ["ready"]
    assert {row["node"] for row in after} == site.nodes_with("big")
    assert not {row["replica"] for row in after} & {row["replica"] for row in rows}

    assert "target: removed (1 -> 0)" in site.specwire("undeploy")
    assert site.specwire("status") == "nothing is deployed\n"
