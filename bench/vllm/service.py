"""Our service on vLLM's worker: a verifier, an orchestrator for each distance of the drafter, their log in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from bench.harness.services import ANY_PORT, RedisLog, ServiceProcess
from bench.relay.link import RelayLink
from bench.vllm.server import CONTEXT, EAGER, PYTHON, Front
from demo_pair import DRAFT, TARGET
from deploy.stack.processes import environment

# What may propose.
ENGINE_OFF, ENGINE_BOTH = "engine vllm, off", "engine vllm, drafter and n-grams"
ENGINE = {0: "engine vllm, drafter at 0 ms", 20: "engine vllm, drafter at 20 ms"}
ENGINES = (ENGINE_OFF, *ENGINE.values(), ENGINE_BOTH)
# As vLLM's own rows are.
COMPUTED = ("--dtype", "float32", "--threads", "1")


def drafter_of(owned: ExitStack, folder: Path) -> ServiceProcess:
    """Start the demo pair's drafter. Raises BenchError."""
    words = ("draft", str(DRAFT), *COMPUTED, "--slots", "64")
    drafter = ServiceProcess(words, environment(), folder / "draft.stderr", ANY_PORT)
    owned.callback(drafter.kill)
    drafter.ready()
    return drafter


def engine_service(owned: ExitStack, folder: Path, links: Mapping[int, RelayLink], sessions: int) -> dict[str, Front]:
    """Start it; where its rows are asked for. links: to the drafter, by their delay in ms. Raises BenchError."""
    log = RedisLog(folder)
    owned.callback(log.kill)
    told = {**environment(), "OMP_NUM_THREADS": "1"}
    engine = ("--engine", "vllm", "--engine-options", EAGER)
    words = ("verify", str(TARGET), *COMPUTED, "--slots", str(sessions), "--context", str(CONTEXT), *engine)
    verifier = ServiceProcess(words, told, folder / "verify.stderr", ANY_PORT, python=PYTHON)
    owned.callback(verifier.kill)
    logged = ("--redis-url", f"redis://{log.ready()}", "--http", ANY_PORT)
    verifier.ready()
    orchestrators = {}
    for rtt in ENGINE:
        line = ("orchestrate", "--verifier", verifier.address, "--drafter", links[rtt].address, *logged)
        orchestrators[rtt] = one = ServiceProcess(line, environment(), folder / f"orchestrate-{rtt}.stderr", ANY_PORT)
        owned.callback(one.kill)
        one.ready()
    nearest = orchestrators[min(orchestrators)]
    return {
        ENGINE_OFF: Front(nearest.http, "off"),
        **{row: Front(orchestrators[rtt].http, "drafters") for rtt, row in ENGINE.items()},
        ENGINE_BOTH: Front(nearest.http, "auto"),
    }
