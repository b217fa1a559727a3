"""A pool of verifiers on vLLM, split over processes, on a Ray cluster of several nodes, all on this machine.

A stub stands for vLLM's Python: it notes how it was started, and serves a scripted model. Ray takes our word for the
devices. What a verifier on vLLM does with such a command line is in `tests/faults/test_vllm_engine.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from bench.cluster.site import Site, command_lines, site
from specwire.client import Client
from tests.faults.streams import PROMPT, plain
from tests.integration.cluster import LIMIT_S, MODEL, MORE
from tests.wait import eventually

RANKS, DEVICES = 4, "0,1,2,3"
STUB = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES $*" >>{noted}
for word in "$@"; do case "$word" in --listen=*) where="$word";; esac; done
exec {python} -m deploy verify {model} --insecure --grace=0.5 "$where" --json
"""
FILE = """
redis: redis://{redis}/0
pools:
  target:
    kind: verify
    model: /models/large
    engine: vllm
    engine_options: {{enforce_eager: true}}
    python: {stub}
    tensor_parallel_size: 2
    pipeline_parallel_size: 2
    num_gpus: 4
    num_cpus: 0.1
    resources: {{big: 1}}
    options: {{insecure: true, grace: 0.5}}
orchestrators:
  num_cpus: 0.1
  resources: {{front: 1}}
  options: {{insecure: true}}
"""


@pytest.fixture(scope="module")
def here() -> Iterator[Site]:
    """Give a cluster with two nodes for the one verifier, each with a device for each of its ranks."""
    with site({"front": 1}, *[{"big": 1, "GPU": RANKS}] * 2) as found:
        yield found


@pytest.mark.cluster
def test_a_split_verifier_keeps_its_devices_while_it_starts_again_and_moves_with_its_node(here: Site) -> None:
    stub, noted = here.folder / "python", here.folder / "noted"
    stub.write_text(STUB.format(noted=noted, python=sys.executable, model=MODEL))
    stub.chmod(0o755)
    here.deploy(FILE.format(redis=here.redis, stub=stub))
    [front] = [row["address"] for row in here.rows() if row["pool"] == "orchestrators"]
    node = where(here)
    assert [(bundle["GPU"], bundle["big"]) for bundle in here.reserved()] == [(RANKS, 1)]
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

    here.lose(node)
    assert eventually(lambda: is_ready(here) and where(here) != node, pause_s=1.0)
    assert len(here.reserved()) == 1
    writes(front)

    assert "target: removed (1 -> 0)" in here.specwire("undeploy")
    assert eventually(lambda: here.reserved() == [], pause_s=1.0)


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
    return [pid for pid, line in command_lines(os.getpid()).items() if f"-m deploy verify {MODEL}" in line]
