"""llama.cpp on real files: the trial takes them as they are, and refuses what would be computed otherwise."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from specwire.lm.gguf_file import read_gguf
from specwire.lm.kv_cache import Sizes
from specwire.lm.runners.llamacpp.runner import GgufWeights, LlamaBatch, LlamaCppRunner, LlamaMemory, gguf_trial
from specwire.lm.runners.llamacpp.sequences import SequenceRun
from tests.real_models import GEMMA, NAMES, SMOL, real_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not there: make setup-llamacpp"
)

CONTEXT, KV = 768, "f16"
Change = Callable[[pytest.MonkeyPatch], None]


class RealFile:
    """A real model's weights, and its trial: of one text at once, and a runner in pieces."""

    def __init__(self, name: str) -> None:
        self.file = read_gguf(real_model(name))
        self.weights = GgufWeights(self.file)
        self.sizes = Sizes(2, CONTEXT, self.weights.width)
        self.trial = gguf_trial(self.weights, self.file, self.sizes, KV)

    def deviation(self, weights: GgufWeights | None = None) -> float:
        threads = torch.get_num_threads()
        return self.trial.deviation(self.runner(weights or self.weights, threads), 2)

    def runner(self, weights: GgufWeights, threads: int) -> LlamaCppRunner:
        return LlamaCppRunner(weights, self.file, self.sizes, KV, threads)


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest) -> Iterator[RealFile]:
    """Give each real file, with a trial of one thread: two would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield RealFile(request.param)
    torch.set_num_threads(before)


def test_a_real_file_is_taken_and_takes_trees(real: RealFile) -> None:
    runner = real.runner(real.weights, 1)
    assert 0 <= real.trial.deviation(runner, 2) < 0.8
    assert 0 <= real.trial.tree_deviation(runner, 2) < 0.8


def wrong_base(patch: pytest.MonkeyPatch) -> None:
    """Positions are turned by the usual base, not by the model's."""
    right = LlamaCppRunner._parameters

    def parameters(runner: LlamaCppRunner, *args: Any) -> Any:
        made = right(runner, *args)
        made.rope_freq_base = 10_000.0
        return made

    patch.setattr(LlamaCppRunner, "_parameters", parameters)


def stale_row(patch: pytest.MonkeyPatch) -> None:
    """A rollback leaves one row too many, and what follows stands one position too late."""
    remove, filled = LlamaMemory.remove, LlamaBatch.filled

    def later(batch: LlamaBatch, runs: Sequence[SequenceRun], count: int) -> Any:
        return filled(batch, [run._replace(position=run.position + (run.position > 0)) for run in runs], count)

    patch.setattr(LlamaMemory, "remove", lambda memory, slot, start: remove(memory, slot, start + (start > 0)))
    patch.setattr(LlamaBatch, "filled", later)


@pytest.mark.parametrize("fault", [wrong_base, stale_row])
def test_a_fault_is_beyond_the_tolerance(real: RealFile, fault: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert real.deviation() > 1


def no_rollback(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LlamaMemory, "remove", lambda *_: None)


def one_position_later(patch: pytest.MonkeyPatch) -> None:
    filled = LlamaBatch.filled

    def later(batch: LlamaBatch, runs: Sequence[SequenceRun], count: int) -> Any:
        return filled(batch, [run._replace(position=run.position + (run.position > 0)) for run in runs], count)

    patch.setattr(LlamaBatch, "filled", later)


@pytest.mark.parametrize("fault", [no_rollback, one_position_later])
def test_a_fault_that_llama_cpp_sees_is_told(fault: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text has the positions from 0 on, without gaps: it computes nothing else."""
    small = RealFile(SMOL)
    fault(monkeypatch)
    with pytest.raises(RuntimeError, match="inconsistent sequence positions"):
        small.deviation()


def test_a_window_that_is_ignored_is_beyond_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RealFile(GEMMA)
    assert real.weights.window == 512
    llama = real.weights.library.functions
    changed = (llama.llama_model_kv_override * 2)()
    changed[0].key, changed[0].tag, changed[0].value.val_i64 = b"gemma3.attention.sliding_window", 0, CONTEXT
    default = llama.llama_model_default_params

    def parameters() -> Any:
        made = default()
        made.kv_overrides = ctypes.cast(changed, type(made.kv_overrides))
        return made

    with monkeypatch.context() as patch:
        patch.setattr(llama, "llama_model_default_params", parameters)
        whole = GgufWeights(real.file)
    assert whole.window == CONTEXT
    assert real.deviation(whole) > 1
