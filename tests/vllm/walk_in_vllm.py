"""A tiny random model of one family over vLLM's worker, held to its own plain forward: ``FAMILY FOLDER``.

Run by the environment that `make setup-vllm` makes, in a process for each family: vLLM serves one model in each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from specwire.lm import Feed, load_model
from specwire.lm.kv_cache import CachedLM
from specwire.lm.runners.vllm import VllmRunner
from tests.lm.models import CONTEXT, ROTARY, TOLERANCE, VOCABULARY, build, plain, save
from tests.lm.walk import Texts

SLOTS = 3
# vLLM's attention on CPUs takes heads of 32 and more.
SIZES: dict[str, Any] = {**ROTARY, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
WINDOW = 16
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS),
}
# So few tokens in a forward that feeds are cut, and several blocks of a slot.
OPTIONS = {"enforce_eager": True, "max_num_batched_tokens": 8, "block_size": 32}


def walk(family: str, folder: Path) -> None:
    """Raises AssertionError where the logits are not the model's own, or a slot keeps what it should not."""
    model = build(FAMILIES[family]())
    lm = load_model(save(model, folder), slots=SLOTS, engine="vllm", engine_options=OPTIONS)
    texts = Texts(model, lm, seed=len(family))
    for _ in range(60):
        texts.step()
    full = [[(7 * at + slot) % VOCABULARY for at in range(CONTEXT)] for slot in range(SLOTS)]
    rows = lm.forward([Feed(slot, 0, text, CONTEXT) for slot, text in enumerate(full)])
    expected = torch.cat([plain(model, text) for text in full])
    torch.testing.assert_close(rows, expected, atol=TOLERANCE, rtol=TOLERANCE)
    for slot in range(SLOTS):
        lm.discard(slot)
        texts.held[slot] = []
    assert isinstance(lm, CachedLM)
    assert isinstance(lm.runner, VllmRunner)
    # Block 0 is vLLM's own.
    assert not any(bool(layer[1:].any()) for layer in lm.runner._model.kv_caches), "what was held is gone"
    for _ in range(5):
        texts.step()


if __name__ == "__main__":
    walk(sys.argv[1], Path(sys.argv[2]))
