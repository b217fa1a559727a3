"""Streams that come in directly, and through Ray Serve, in turns, on one deployment; forwards are emulated.

Each orchestrator has an HTTP front door of its own. The other way in is the application of `deploy.cluster.serving`,
which stands before the same orchestrator: Serve's proxy, and its replica that hands on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray import serve

from bench.child import cpu_seconds
from bench.cluster.site import Site, command_lines, site
from bench.cluster.streams import HttpRun, streamed
from bench.progress import tracked
from bench.runs import BenchError
from deploy.cluster.serving import NAMESPACE, app

DIRECT, SERVED = "directly", "through Ray Serve"
V_MS = 50.0
STREAMS, TOKENS, WARM_UP = 16, 64, 8
# The kinds of processes, by the beginning or a part of their command lines.
KINDS = {
    "orchestrator": "-m deploy orchestrate ",
    "Serve's proxy": "ray::ProxyActor",
    "Serve's replica": "ray::ServeReplica",
}
FILE = """
redis: redis://{redis}/0
pools:
  target:
    kind: verify
    model: "scripted:7:delay_ms={delay:g}"
    resources: {{verify: 1}}
    num_cpus: 0
    options: {{slots: {slots}, ngram: false, insecure: true}}
orchestrators:
  num_cpus: 0
  http_port: 0
  options: {{insecure: true}}
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one way in. cpu: seconds by kind of process."""

    way: str
    repeat: int
    tokens: int
    firsts_s: Sequence[float]
    gaps_s: Sequence[float]
    cpu: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """mismatches: streams whose text was another one the other way."""

    samples: Sequence[Sample]
    mismatches: int


def measure(repeats: int, tell: Callable[[str], None]) -> Measured:
    """Raises BenchError."""
    tell("bench-ingress: starting a Ray cluster of two nodes, Ray Serve, and the deployment")
    with site({}, {"verify": 1}) as here, _doors(here) as doors:
        prompts = [(2 + turn, 5, 6) for turn in range(STREAMS)]
        pids = _processes()
        texts = {way: [run.tokens for run in streamed(door, prompts, WARM_UP)] for way, door in doors.items()}
        mismatches = sum(direct != other for direct, other in zip(texts[DIRECT], texts[SERVED], strict=True))
        samples = []
        for repeat in tracked(range(repeats), repeats):
            said = {}
            for way, door in doors.items():
                before = _cpu(pids)
                runs = streamed(door, prompts, TOKENS)
                cpu = {kind: seconds - before[kind] for kind, seconds in _cpu(pids).items()}
                samples.append(_sample(way, repeat, runs, cpu))
                said[way] = [run.tokens for run in runs]
            mismatches += sum(direct != other for direct, other in zip(said[DIRECT], said[SERVED], strict=True))
            tell(f"bench-ingress: {repeat + 1} of {repeats}")
    return Measured(samples, mismatches)


@contextmanager
def _doors(here: Site) -> Iterator[dict[str, str]]:
    """HOST:PORT of each way in."""
    port = _free_port()
    config = here.write(FILE.format(redis=here.redis, delay=V_MS, slots=STREAMS))
    ray.init(address=here.cluster.address, namespace=NAMESPACE, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(app({"config": str(config)}), name="specwire")
        [direct] = [row["http"] for row in here.rows() if row["pool"] == "orchestrators"]
        yield {DIRECT: direct.removeprefix("http://"), SERVED: f"127.0.0.1:{port}"}
    finally:
        serve.shutdown()


def _sample(way: str, repeat: int, runs: Sequence[HttpRun], cpu: Mapping[str, float]) -> Sample:
    gaps = [gap for run in runs for gap in run.gaps_s]
    return Sample(way, repeat, sum(len(run.tokens) for run in runs), [run.first_s for run in runs], gaps, cpu)


def _processes() -> dict[str, list[int]]:
    lines = command_lines(os.getpid())
    found = {kind: [pid for pid, line in lines.items() if word in line] for kind, word in KINDS.items()}
    if not all(found.values()):
        raise BenchError(f"processes: some of {list(KINDS)} are not there: {found}")
    return found


def _cpu(pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
    return {kind: sum(map(cpu_seconds, each)) for kind, each in pids.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
