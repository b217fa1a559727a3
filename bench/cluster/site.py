"""A Ray cluster of several nodes, all on this machine; `specwire`'s commands against it; its processes' time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from bench.harness.child import cpu_seconds, descendants
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


ORCHESTRATORS, VERIFIERS, DRAFTERS, CLIENTS = "orchestrators", "verifiers", "drafters", "clients"
# Ray, Redis, and orchestrators that have nothing to do.
REST = "rest"
_WORDS = {ORCHESTRATORS: "-m deploy orchestrate ", VERIFIERS: "-m deploy verify ", DRAFTERS: "-m deploy draft "}
# In /proc/PID/net/tcp: columns of a socket's own address, its state and its inode; the state of one that listens.
OWN, STATE, INODE, LISTENING = 1, 3, 9, "0A"


class Clocks:
    """The processes below this one as they are now, and this one as the clients'; later ones are not counted.

    fronts: addresses of the orchestrators; of the first of them `read` counts as many as are in use.
    """

    def __init__(self, fronts: Sequence[str]) -> None:
        kinds = {pid: kind_of(line) for pid, line in command_lines(os.getpid()).items()}
        self._pids: Mapping[str, Sequence[int]] = {
            kind: [pid for pid, each in kinds.items() if each == kind] for kind in (*_WORDS, REST)
        }
        by_port = {port: pid for pid in self._pids[ORCHESTRATORS] for port in ports_of(pid)}
        ports = [int(front.rpartition(":")[2]) for front in fronts]
        if missing := [port for port in ports if port not in by_port]:
            raise BenchError(f"orchestrators: no process of ours listens at ports {missing}")
        self._fronts = [by_port[port] for port in ports]

    def read(self, orchestrators: int) -> dict[str, float]:
        """Seconds so far, by kind. orchestrators: how many are in use."""
        seconds = {kind: sum(map(cpu_seconds, pids)) for kind, pids in self._pids.items()}
        used = sum(map(cpu_seconds, self._fronts[:orchestrators]))
        idle = seconds[ORCHESTRATORS] - used
        return {**seconds, ORCHESTRATORS: used, REST: seconds[REST] + idle, CLIENTS: cpu_seconds(os.getpid())}

    def count(self, kind: str) -> int:
        return len(self._pids[kind])


def kind_of(line: str) -> str:
    """What a process is, by its command line."""
    return next((kind for kind, word in _WORDS.items() if word in line), REST)


def ports_of(pid: int) -> set[int]:
    """The TCP ports at which a process listens."""
    process, own = Path(f"/proc/{pid}"), set()
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            own.add(str(descriptor.readlink()))
    lines = [line.split() for table in ("tcp", "tcp6") for line in (process / "net" / table).read_text().splitlines()]
    return {
        int(fields[OWN].rpartition(":")[2], 16)
        for fields in lines
        if fields[STATE] == LISTENING and f"socket:[{fields[INODE]}]" in own
    }
