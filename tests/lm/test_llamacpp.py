"""llama.cpp behind the same interface: the same logits, the same refusals of what it cannot serve."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from specwire.lm import load_model
from specwire.lm.kv_cache import CachedLM
from specwire.lm.runners.llamacpp import LlamaCppRunner
from tests.lm.gguf_files import rounded, write
from tests.lm.models import build, config, plain
from tests.lm.walk import Texts

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not there: make setup-llamacpp"
)

KINDS = ["llama", "llama-biased-tied", "mistral", "qwen2", "qwen3"]
SLOTS = 3
# Of logits of a few units: activations are rounded to 8 bits, too, before they are multiplied with such weights.
QUANTISED_TOLERANCE = 0.25


def load(model: PreTrainedModel, folder: Path, kind: Type = Type.F32, slots: int = SLOTS, **options: Any) -> CachedLM:
    lm = load_model(write(model, folder / "model.gguf", kind), slots=slots, **options)
    assert isinstance(lm, CachedLM)
    assert isinstance(lm.runner, LlamaCppRunner)
    return lm


@pytest.mark.parametrize("kind", KINDS)
def test_any_interleaving_of_extend_and_rollback_gives_the_plain_forward(kind: str, tmp_path: Path) -> None:
    model = build(config(kind))
    texts = Texts(model, load(model, tmp_path), seed=len(kind))
    for _ in range(60):
        texts.step()


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.F16])
def test_rounded_weights_give_what_they_stand_for(kind: Type, tmp_path: Path) -> None:
    model = build(config("llama"))
    lm = load(model, tmp_path, kind)
    whole = plain(model, range(1, 30))
    rounded(model, kind)
    texts = Texts(model, lm, seed=4, tolerance=QUANTISED_TOLERANCE)
    for _ in range(40):
        texts.step()
    assert lm.info.dtype == kind.name.lower()
    assert float((whole - plain(model, range(1, 30))).abs().max()) > 1e-3  # it was rounded
