"""What a load is put on: one verifier, one orchestrator and one Redis, each a process."""

from __future__ import annotations

import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness.runs import BenchError
from bench.harness.services import ANY_PORT, RedisLog, ServiceProcess, free_port
from bench.soak.pairs import SoakPair
from bench.soak_load import weighing
from bench.soak_load.memory import Memory
from deploy.stack.processes import environment

LIMIT_S = 60.0
RUNNING = "specwire:num_sessions_running"
# Ended sessions are remembered for as long, a minute by itself: at some thousand a minute their number, and with it
# memory, would follow every change of the machine's speed.
FORGETTING = ("--retention", "5")
# With sessions that wait for a slot: on a slow machine it takes long until one is free.
PATIENT = ("--queue-wait", "300")
DEPLOY = "deploy"


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """address: where clients call. figures: where the orchestrator tells its own. memory: of all processes."""

    address: str
    figures: str
    memory: Memory

    def running(self) -> int:
        """Sessions that have begun and not ended, as the orchestrator counts them. BenchError if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self.figures}/metrics", timeout=LIMIT_S) as page:
                lines = page.read().decode().splitlines()
        except OSError as error:
            raise BenchError(f"metrics: {error}") from error
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(RUNNING))


@contextmanager
def served(pair: SoakPair, verifier: str) -> Iterator[ServedLoad]:
    """Start everything. Whatever becomes of it, no process is left.

    verifier: a module in place of deploy's for the verifier's process.
    """
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-load-")))
        surroundings = {**environment(), **weighing.ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        redis = RedisLog(folder)
        owned.callback(redis.kill)

        def start(module: str, *words: str) -> ServiceProcess:
            through = weighing.words(folder / words[0], module)
            service = ServiceProcess(words, surroundings, folder / f"{words[0]}.stderr", ANY_PORT, through)
            owned.callback(service.kill)
            return service

        verify = start(verifier, "verify", pair.target, *pair.words, *PATIENT)
        figures = f"127.0.0.1:{free_port()}"
        words = ("--redis-url", f"redis://{redis.ready()}/0", *FORGETTING, "--metrics", figures)
        orchestrate = start(DEPLOY, "orchestrate", "--verifier", verify.ready(), *words)
        parts = {"orchestrator": orchestrate, "verifier": verify, "redis": redis}
        sockets = {"orchestrator": folder / "orchestrate", "verifier": folder / "verify"}
        yield ServedLoad(orchestrate.ready(), figures, Memory(parts, sockets, redis))
