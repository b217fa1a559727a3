"""A verifier on vLLM's worker beside one of ours: whatever dies, texts are the target's, up to near-ties.

Without the environment that `make setup-vllm` makes nothing of this runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.vllm.server import EAGER, PYTHON, VLLM
from demo_pair import DRAFT, TARGET
from deploy.stack.processes import descendants
from tests.faults.cells import Cell
from tests.faults.matrix import CELLS
from tests.faults.parts import parts
from tests.faults.place import Place, place
from tests.faults.test_demo_pair import WORDS, asked, play, target
from tests.integration.test_tensor_parallel import COUNT, NEAR_TIE, largest_gap, written
from tests.vllm.walk_in_vllm import FAMILIES

pytestmark = pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make setup-vllm")

ENGINE = ("--engine", "vllm", "--engine-options", EAGER)
# vLLM takes longer to start than a restarted verifier is waited for.
PLAYED = {
    ("drafter", "SIGKILL"),
    ("verifier", "SIGKILL"),
    ("verifier", "SIGSTOP"),
    ("verifier", "graceful stop"),
    ("orchestrator-verifier", "cut"),
    ("orchestrator-verifier", "reset"),
}
PARAMETERS = [pytest.param(cell, id=cell.name) for cell in CELLS if (cell.where, cell.fault) in PLAYED]


@pytest.fixture(scope="module")
def running() -> Iterator[Place]:
    """Give the processes: of the two verifiers the first is on vLLM, and `apart` knows only that one."""
    with place(str(TARGET), str(DRAFT), *WORDS, vllm=(PYTHON, *ENGINE)) as present:
        yield present


@pytest.mark.parametrize("cell", PARAMETERS)
def test_a_fault(running: Place, cell: Cell) -> None:
    play(running, cell)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_any_interleaving_gives_the_plain_forward(family: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-m", "tests.vllm.walk_in_vllm", family, str(tmp_path)],
        cwd=VLLM.parents[2],
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


async def test_split_over_two_processes_it_is_the_same_model_and_ends_with_either() -> None:
    one, prompt = target().model, asked()[0].prompt
    with parts() as owned:
        verifier = owned.start("verify", str(TARGET), "--tensor-parallel-size=2", "--slots=2", *ENGINE, python=PYTHON)
        info, tokens = await written(verifier.ready(), prompt)
        assert info.weights_fingerprint == one.info.weights_fingerprint
        assert len(tokens) == COUNT
        assert largest_gap(one, prompt, tokens) <= NEAR_TIE
        (other,) = ranks_of(verifier.process.pid)
        os.kill(other, signal.SIGKILL)
        assert verifier.wait() == 1
        assert "error: rank 1 of 2 ended by SIGKILL" in verifier.said()


def ranks_of(pid: int) -> list[int]:
    """The processes below that one which are ranks, and not vLLM's own helpers."""
    return [each for each in descendants(pid) if b"rank_process" in Path(f"/proc/{each}/cmdline").read_bytes()]
