"""A Ray cluster of several nodes, all on this machine, its Redis, and `specwire`'s commands against them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from bench.harness.child import descendants
from bench.harness.runs import BenchError
from bench.harness.services import RedisLog
from deploy.stack.processes import environment

LIMIT_S = 300.0
LOOK_EVERY_S = 0.1
MOST_SAID = 500


@dataclass(frozen=True, slots=True)
class Site:
    """redis: HOST:PORT. folder: for files; it goes with the cluster."""

    cluster: Cluster
    redis: str
    folder: Path

    def specwire(self, *words: str) -> str:
        """Run a command on the cluster; what it printed. Raises BenchError with what it said instead."""
        done = subprocess.run(
            [sys.executable, "-m", "deploy", *words, "--ray-address", self.cluster.address],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"specwire {' '.join(words)}: {done.stderr.strip()[-MOST_SAID:]}")
        return done.stdout

    def write(self, text: str) -> Path:
        """A file with the text, for `specwire deploy`."""
        file = self.folder / "config.yaml"
        file.write_text(text)
        return file

    def deploy(self, text: str, *flags: str) -> str:
        """Apply a file with this text."""
        return self.specwire("deploy", str(self.write(text)), *flags)

    def rows(self, *flags: str) -> list[dict[str, str]]:
        """Of all replicas, as `specwire status` has them."""
        found: list[dict[str, str]] = json.loads(self.specwire("status", "--json", *flags))["replicas"]
        return found

    def nodes_with(self, resource: str) -> set[str]:
        """The ids of the nodes that live."""
        with self._attached():
            return {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)}

    def reserved(self) -> list[dict[str, float]]:
        """The bundles of all placement groups."""
        with self._attached():
            groups = [each for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
        return [dict(bundle) for each in groups for bundle in each["bundles"].values()]

    def lose(self, node: str) -> float:
        """Kill a node, by its id: its actors' processes end a moment after it. Seconds until Ray knows."""
        [lost] = [each for each in self.cluster.worker_nodes if each.node_id == node]
        with self._attached():
            began = time.monotonic()
            self.cluster.remove_node(lost, allow_graceful=False)
            while any(each["NodeID"] == node and each["Alive"] for each in ray.nodes()):
                if time.monotonic() - began > LIMIT_S:
                    raise BenchError(f"node {node}: Ray has not noticed within {LIMIT_S:g} s that it is gone")
                time.sleep(LOOK_EVERY_S)
            return time.monotonic() - began

    @contextmanager
    def _attached(self) -> Iterator[None]:
        ray.init(address=self.cluster.address, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def site(head: Mapping[str, float], *nodes: Mapping[str, float]) -> Iterator[Site]:
    """A cluster until the block ends: a head with the custom resources `head`, and a node for each of `nodes`.

    GPU, among a node's resources, are devices that Ray takes our word for.
    """
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-cluster-")))
        redis = RedisLog(folder)
        owned.callback(redis.kill)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": dict(head)})
        owned.callback(cluster.shutdown)
        owned.callback(ray.shutdown)
        for resources in nodes:
            own = dict(resources)
            cluster.add_node(num_cpus=1, num_gpus=int(own.pop("GPU", 0)), resources=own)
        yield Site(cluster, redis.ready(), folder)


def command_lines(below: int) -> dict[int, str]:
    """Of all living processes below the one named."""
    return {pid: _command_line(pid) for pid in descendants(below)}


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
