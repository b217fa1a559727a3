"""A tiny random model of one family over vLLM's worker, held to its own plain forward: ``FAMILY FOLDER``.

From its rows our sampler draws what the numpy reference does, and the process has no socket that others reach.

Run by the environment that `make setup-vllm` makes, in a process for each family: vLLM serves one model in each.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.kv_cache import CachedLM
from specwire.lm.law.sampler import LogitsSampler
from specwire.lm.runners.vllm import VllmRunner
from tests.lm.models import CONTEXT, ROTARY, TOLERANCE, VOCABULARY, build, plain, save
from tests.lm.test_choose import DrawnPart, any_row, by_the_reference
from tests.lm.walk import Texts

LOOPBACK = ("127.", "::1", "::ffff:127.")
SLOTS, DRAWS = 3, 3
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
    """Raises AssertionError where the logits are not the model's own, or a slot keeps what it should not, and so on."""
    model = build(FAMILIES[family]())
    lm = load_model(save(model, folder), slots=SLOTS, engine="vllm", engine_options=OPTIONS)
    texts = Texts(model, lm, seed=len(family))
    for _ in range(60):
        texts.step()
    full = [[(7 * at + slot) % VOCABULARY for at in range(CONTEXT)] for slot in range(SLOTS)]
    rows = lm.forward([Feed(slot, 0, text, CONTEXT) for slot, text in enumerate(full)])
    expected = torch.cat([plain(model, text) for text in full])
    torch.testing.assert_close(rows, expected, atol=TOLERANCE, rtol=TOLERANCE)
    draw(lm, full)
    for slot in range(SLOTS):
        lm.discard(slot)
        texts.held[slot] = []
    assert isinstance(lm, CachedLM)
    assert isinstance(lm.runner, VllmRunner)
    # Block 0 is vLLM's own.
    assert not any(bool(layer[1:].any()) for layer in lm.runner._model.kv_caches), "what was held is gone"
    for _ in range(5):
        texts.step()
    check_silence()


def draw(lm: LanguageModel, texts: list[list[int]]) -> None:
    """Hold the sampler to the reference on every row of these texts: any temperature, filter, penalty and mask."""
    chance, sampler = random.Random(DRAWS), LogitsSampler()
    for _ in range(DRAWS):
        logits = lm.forward([Feed(slot, 0, text, len(text)) for slot, text in enumerate(texts)])
        parts = [DrawnPart([any_row(chance, VOCABULARY) for _ in text]) for text in texts]
        chosen = [token for choice in sampler.choose(logits, parts, lambda _: True) for token in choice.tokens]
        rows = [row for part in parts for row in part.drawn]
        assert any(row.sampling.temperature and row.allowed is not None and row.seen is not None for row in rows)
        assert chosen == [by_the_reference(own, row) for own, row in zip(logits.numpy(), rows, strict=True)]


def reachable(pid: int) -> list[str]:
    """Local and remote addresses that are not this machine's loopback, of its sockets over IP."""
    open_ones = psutil.Process(pid).net_connections("inet")
    ends = [end for each in open_ones for end in (each.laddr, each.raddr) if end]
    return [f"{end.ip}:{end.port}" for end in ends if not end.ip.startswith(LOOPBACK)]


def check_silence() -> None:
    """Nothing is reported to vLLM's makers, and no other machine can reach this process."""
    from vllm.usage.usage_lib import is_usage_stats_enabled

    assert not is_usage_stats_enabled()
    assert reachable(os.getpid()) == []


if __name__ == "__main__":
    walk(sys.argv[1], Path(sys.argv[2]))
