"""A pool of verifiers on vLLM, split over processes, on a Ray cluster of several nodes, all on this machine.

Ray takes our word for the devices: vLLM's CPU build uses none.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.cluster.site import Site, command_lines, site
from bench.vllm.server import PYTHON, START_S, VLLM
from demo_pair import DRAFT, TARGET
from specwire.client import Client
from tests.faults.test_demo_pair import asked, check_choices
from tests.integration.cluster import LIMIT_S
from tests.wait import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make setup-vllm"),
]
TENSOR, STAGES, LENGTH = 2, 1, 48
RANKS = TENSOR * STAGES
FILE = """
redis: redis://{redis}/0
pools:
  target:
    kind: verify
    model: "{target}"
    engine: vllm
    engine_options: {{enforce_eager: true}}
    python: {python}
    tensor_parallel_size: {tensor}
    pipeline_parallel_size: {stages}
    num_gpus: {ranks}
    num_cpus: 0.1
    resources: {{big: 1}}
    options: {{dtype: float32, slots: 2, context: 512, insecure: true, grace: 0.5}}
  draft:
    kind: draft
    model: "{draft}"
    num_cpus: 0.1
    resources: {{small: 1}}
    options: {{dtype: float32, insecure: true}}
orchestrators:
  num_cpus: 0.1
  resources: {{front: 1}}
  options: {{insecure: true}}
"""


@pytest.fixture(scope="module")
def here() -> Iterator[Site]:
    """Give a cluster with two nodes for the one verifier, each with a device for each of its ranks."""
    with site({"front": 1}, {"small": 1}, *[{"big": 1, "GPU": RANKS}] * 2) as found:
        yield found


def test_a_split_verifier_keeps_its_devices_while_it_starts_again_and_moves_with_its_node(here: Site) -> None:
    sizes = {"tensor": TENSOR, "stages": STAGES, "ranks": RANKS}
    text = FILE.format(redis=here.redis, target=TARGET, draft=DRAFT, python=PYTHON, **sizes)
    here.deploy(text, "--start-timeout", f"{START_S:g}")
    [front] = [row["address"] for row in here.rows() if row["pool"] == "orchestrators"]
    node = where(here)
    assert [(bundle["GPU"], bundle["big"]) for bundle in here.reserved()] == [(RANKS, 1)]
    writes(front)
    verifier, *others = sorted(processes())
    assert len(others) == RANKS - 1
    assert f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(RANKS)))}" in Path(f"/proc/{verifier}/environ").read_text()

    os.kill(verifier, signal.SIGKILL)
    assert eventually(lambda: verifier not in processes() and is_ready(here), START_S, 1.0)
    assert where(here) == node
    writes(front)

    here.lose(node)
    assert eventually(lambda: is_ready(here) and where(here) != node, START_S, 1.0)
    assert len(here.reserved()) == 1
    writes(front)

    assert "target: removed (1 -> 0)" in here.specwire("undeploy")
    assert eventually(lambda: here.reserved() == [])


def writes(front: str) -> None:
    """A text is the target's own."""
    one = asked()[0]
    with Client(front, patience=LIMIT_S) as client:
        done = client.complete(one.prompt, max_tokens=LENGTH, ignore_eos=True, temperature=0.0)
    assert len(done.tokens) == LENGTH
    check_choices(one, done.tokens)


def target(here: Site) -> dict[str, str]:
    [row] = [row for row in here.rows() if row["pool"] == "target"]
    return row


def where(here: Site) -> str:
    return target(here)["node"]


def is_ready(here: Site) -> bool:
    return target(here)["state"] == "ready"


def processes() -> list[int]:
    """The verifier's, its ranks among them."""
    running = command_lines(os.getpid()).items()
    return [pid for pid, line in running if line.startswith(PYTHON) and (" verify " in line or "rank_process" in line)]
