"""A pool of verifiers on vLLM, split over processes, on a Ray cluster of several nodes, all on this machine.

In the first test a stub stands for vLLM's Python: it notes how it was started, and serves a scripted model. In the
second one it is vLLM's own, where `make setup-vllm` has run. Ray takes our word for the devices.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from bench.cluster.site import Site, command_lines, site
from bench.vllm.server import MISSING, PYTHON, START_S, VLLM
from demo_pair import TARGET
from specwire.client import Client
from tests.faults.streams import PROMPT, plain
from tests.faults.test_demo_pair import asked, check_choices
from tests.integration.cluster import LIMIT_S, MODEL, MORE, file_of
from tests.wait import eventually

RANKS, DEVICES = 4, "0,1,2,3"
STUB = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES $*" >>{noted}
for word in "$@"; do case "$word" in --listen=*) where="$word";; esac; done
exec {python} -m deploy verify {model} --insecure --grace=0.5 "$where" --json
"""


@pytest.fixture
def here() -> Iterator[Site]:
    """Give a cluster with two nodes for the one verifier, each with a device for each of its ranks."""
    with site({"front": 1}, *[{"big": 1, "GPU": RANKS}] * 2) as found:
        yield found


@pytest.mark.cluster
def test_a_split_verifier_keeps_its_devices_while_it_starts_again_and_moves_with_its_node(here: Site) -> None:
    stub, noted = here.folder / "python", here.folder / "noted"
    stub.write_text(STUB.format(noted=noted, python=sys.executable, model=MODEL))
    stub.chmod(0o755)
    front, node = deployed(here, "/models/large", str(stub))
    writes(front)
    devices, *words = noted.read_text().split()
    assert devices == DEVICES
    assert words[:4] == ["-m", "deploy", "verify", "/models/large"]
    assert {"--tensor-parallel-size=2", "--pipeline-parallel-size=2", "--engine=vllm"} <= set(words)

    [verifier] = processes()
    os.kill(verifier, signal.SIGKILL)
    assert eventually(lambda: verifier not in processes() and is_ready(here), pause_s=1.0)
    assert where(here) == node
    assert [line.split()[0] for line in noted.read_text().splitlines()] == [DEVICES] * 2
    writes(front)

    moves(here, node)
    writes(front)
    leaves(here)


@pytest.mark.cluster
@pytest.mark.timeout(1200)  # four processes import vLLM at a time, twice
@pytest.mark.skipif(not VLLM.exists(), reason=MISSING)
def test_vllm_itself_serves_from_four_processes_and_moves_with_its_node(here: Site) -> None:
    front, node = deployed(here, str(TARGET), PYTHON, dtype="float32", threads=1, slots=2, context=512)
    assert len(ranks()) == RANKS
    writes_its_own(front)
    moves(here, node, START_S)
    assert len(ranks()) == RANKS
    writes_its_own(front)
    leaves(here)
    assert eventually(lambda: not ranks(), pause_s=1.0)


def deployed(here: Site, model: str, python: str, **more: object) -> tuple[str, str]:
    """The orchestrator's address, and the node of the verifier, which has all devices of one set aside."""
    target = {
        "kind": "verify",
        "model": model,
        "engine": "vllm",
        "engine_options": {"enforce_eager": True},
        "python": python,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "num_gpus": RANKS,
        "resources": {"big": 1},
        "options": {"insecure": True, "grace": 0.5, **more},
    }
    here.deploy(file_of(here, {"target": target}, {}))
    [front] = [row["address"] for row in here.rows() if row["pool"] == "orchestrators"]
    assert [(bundle["GPU"], bundle["big"]) for bundle in here.reserved()] == [(RANKS, 1)]
    return front, where(here)


def moves(here: Site, node: str, limit_s: float = LIMIT_S) -> None:
    """Lose the verifier's node, and wait until it serves from the other one."""
    here.lose(node)
    assert eventually(lambda: is_ready(here) and where(here) != node, limit_s, pause_s=1.0)
    assert len(here.reserved()) == 1


def leaves(here: Site) -> None:
    assert "target: removed (1 -> 0)" in here.specwire("undeploy")
    assert eventually(lambda: here.reserved() == [], pause_s=1.0)


def writes_its_own(front: str) -> None:
    """A text of the demo pair's target."""
    one, *_ = asked()
    with Client(front, patience=LIMIT_S) as client:
        done = client.complete(one.prompt, max_tokens=MORE, ignore_eos=True)
    assert len(done.tokens) == MORE
    check_choices(one, done.tokens)


def writes(front: str) -> None:
    with Client(front, patience=LIMIT_S) as client:
        done = client.complete(PROMPT, max_tokens=MORE, ignore_eos=True)
    assert list(done.tokens) == plain(MODEL, MORE)


def target(here: Site) -> dict[str, str]:
    [row] = [row for row in here.rows() if row["pool"] == "target"]
    return row


def where(here: Site) -> str:
    return target(here)["node"]


def is_ready(here: Site) -> bool:
    return target(here)["state"] == "ready"


def processes() -> list[int]:
    """The verifier's own."""
    return commanded(f"-m deploy verify {MODEL}")


def ranks() -> list[int]:
    """All of the verifier's that vLLM has split over processes."""
    return [*commanded(f"{PYTHON} -m deploy verify"), *commanded("rank_process")]


def commanded(words: str) -> list[int]:
    """The processes below this one with these words in their command lines."""
    return [pid for pid, line in command_lines(os.getpid()).items() if words in line]
