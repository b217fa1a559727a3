"""Tiny randomly initialised models, saved as directories, and the plain forward that everything is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OlmoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from specwire.lm.runners import compiled

VOCABULARY = 50
CONTEXT = 48
EMBEDDING = "model.embed_tokens.weight"
# float32 logits of a few units, summed in another order than the model's own forward sums them.
TOLERANCE = 1e-4

# Weights well above the default deviation, so that attention is far from uniform and a wrong position shows.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 2,
}
ROTARY: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config(kind: str) -> PreTrainedConfig:
    configs: dict[str, PreTrainedConfig] = {
        "llama": LlamaConfig(**ROTARY),
        "llama-biased-tied": LlamaConfig(**ROTARY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        "mistral": MistralConfig(**ROTARY, sliding_window=None, head_dim=16),
        "qwen2": Qwen2Config(**ROTARY),
        "qwen3": Qwen3Config(**ROTARY, head_dim=16),
        "olmo": OlmoConfig(**ROTARY),
        "gpt2": GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4),
    }
    return configs[kind]


def build(made: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with every parameter random, biases and norms included."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(made)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    model.eval()
    return model


def near_ties(vocabulary: int, context: int = CONTEXT, kind: type[PreTrainedConfig] = LlamaConfig) -> PreTrainedModel:
    """Small weights and long sums: near-ties everywhere, so that a changed bit changes texts; they have no end."""
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": context, "intermediate_size": 1408}
    made = kind(**{**ROTARY, **sizes, "initializer_range": 0.02})
    made.eos_token_id = None
    model = build(made)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(1e-4)
    return model


def save(model: PreTrainedModel, folder: Path, words: dict[str, int] | None = None) -> str:
    """Save the model, with a tokenizer of `words` if given; the directory's path."""
    model.save_pretrained(folder)
    if words is not None:
        tokenizer = Tokenizer(WordLevel(words, unk_token=next(iter(words))))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def capture_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile few shapes, and without PyTorch's code generator, which takes minutes."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiled, "COLUMNS", (1, 4))


@torch.inference_mode()
def plain(model: PreTrainedModel, text: Sequence[int]) -> torch.Tensor:
    """Logits of every position by one cache-less forward of the model itself."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0].float()
    return logits


@torch.no_grad()
def poison(model: PreTrainedModel, token: int, value: float) -> None:
    """Make the embedding of one token something that is not finite."""
    model.get_parameter(EMBEDDING)[token] = value
