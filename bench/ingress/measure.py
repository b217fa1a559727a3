"""Streams that come in directly, and through Ray Serve, in turns, on one deployment; forwards are emulated.

Each orchestrator has an HTTP front door of its own. The other way in is the application of `deploy.cluster.serving`,
which stands before the same orchestrator: Serve's proxy, and its replica that hands on.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass

import ray
from ray import serve

from bench.cluster.site import Site, command_lines, site
from bench.harness.child import cpu_seconds
from bench.harness.interleave import tracked
from bench.harness.runs import BenchError
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
# Of a request. Streams are HTTP, all at once, each read by a thread of its own.
LIMIT_S = 60.0
PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class IngressSample:
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

    samples: Sequence[IngressSample]
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


def _sample(way: str, repeat: int, runs: Sequence[HttpRun], cpu: Mapping[str, float]) -> IngressSample:
    gaps = [gap for run in runs for gap in run.gaps_s]
    return IngressSample(way, repeat, sum(len(run.tokens) for run in runs), [run.first_s for run in runs], gaps, cpu)


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


@dataclass(frozen=True, slots=True)
class HttpRun:
    """A stream. Seconds from its request: until its first token, and until each further event of tokens."""

    tokens: tuple[int, ...]
    arrivals: tuple[float, ...]

    @property
    def first_s(self) -> float:
        return self.arrivals[0]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


def streamed(address: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[HttpRun]:
    """One stream for each prompt. address: HOST:PORT. Raises BenchError."""
    together = threading.Barrier(len(prompts))
    with ThreadPoolExecutor(len(prompts)) as readers:
        return list(readers.map(lambda prompt: _stream(address, prompt, tokens, together), prompts))


def _stream(address: str, prompt: Sequence[int], tokens: int, together: threading.Barrier) -> HttpRun:
    wish = {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0.0,
        "drafting": "off",
        "ignore_eos": True,
        "stream": True,
        "details": True,
    }
    together.wait(LIMIT_S)
    try:
        with closing(http.client.HTTPConnection(address, timeout=LIMIT_S)) as connection:
            began = time.perf_counter()
            connection.request("POST", PATH, json.dumps(wish), {"Content-Type": "application/json"})
            return _read(connection.getresponse(), began)
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(f"{address}: {error!r}") from None


def _read(answer: http.client.HTTPResponse, began: float) -> HttpRun:
    if answer.status != 200:
        raise BenchError(f"{answer.status}: {answer.read().decode(errors='replace')}")
    found: list[int] = []
    arrivals: list[float] = []
    while line := answer.readline():
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name != "data":
            continue
        if value == "[DONE]":
            return HttpRun(tuple(found), tuple(arrivals))
        told = json.loads(value)
        if "error" in told:
            raise BenchError(str(told["error"]))
        if new := (told["choices"][0].get("specwire") or {}).get("tokens"):
            found += new
            arrivals.append(time.perf_counter() - began)
    raise BenchError("a stream ended without its end")
