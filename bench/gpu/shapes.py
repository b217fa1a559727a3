"""Models of the shapes of well-known ones. Their weights are random, arranged so that the next token is known.

The embeddings are so large that they outweigh what the layers add, and the output layer has each token's embedding at
its successor's place. So the target's text is a walk, known without a forward and far from any tie. A drafter that
shares only a part of the successors has any acceptance that is wanted. Every weight is read and every product computed
as in a trained model of the shape. For measurements only: such a model says nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

# Above what the layers add, over all of them.
EMBEDDING_SCALE = 30.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int

    def config(self, context: int) -> PreTrainedConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=context,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            tie_word_embeddings=False,
        )

    @property
    def kv_bytes_per_position(self) -> int:
        """In a type of two bytes."""
        return 2 * 2 * self.layers * self.kv_heads * (self.hidden // self.heads)


SHAPES = {
    "llama-8b": ModelShape(32, 4096, 14336, 32, 8, 128_256),
    "llama-3b": ModelShape(28, 3072, 8192, 24, 8, 128_256),
    "llama-1b": ModelShape(16, 2048, 8192, 32, 8, 128_256),
    "tiny": ModelShape(2, 64, 96, 4, 2, 128),
    "tiny-draft": ModelShape(1, 64, 64, 4, 2, 128),
}


def successors(vocabulary: int, seed: int) -> list[int]:
    """A permutation of the ids: what follows each. One cycle, so a walk does not repeat itself soon."""
    order = list(range(vocabulary))
    random.Random(seed).shuffle(order)
    after = [0] * vocabulary
    for index, token in enumerate(order):
        after[token] = order[(index + 1) % vocabulary]
    return after


def agreeing(after: Sequence[int], acceptance: float, seed: int) -> list[int]:
    """A permutation with the same successors for this share of the ids, drawn at random."""
    chance = random.Random(seed)
    others = [token for token in range(len(after)) if chance.random() >= acceptance]
    changed = list(after)
    for index, token in enumerate(others):
        changed[token] = after[others[(index + 1) % len(others)]]
    return changed


def walk(after: Sequence[int], start: int, count: int) -> list[int]:
    """`count` ids, from `start` on."""
    text = [start]
    while len(text) < count:
        text.append(after[text[-1]])
    return text


@torch.no_grad()
def build(
    shape: ModelShape, after: Sequence[int], context: int, dtype: torch.dtype, device: torch.device, seed: int
) -> PreTrainedModel:
    """Random weights, and the arrangement above: after token t comes after[t]."""
    torch.manual_seed(seed)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape.config(context), dtype=dtype)
    model.eval().requires_grad_(False)
    embedding = torch.randn(shape.vocabulary, shape.hidden, dtype=dtype, device=device)
    head = torch.empty_like(embedding)
    head[torch.tensor(list(after), device=device)] = embedding
    for name, weight in (("model.embed_tokens.weight", EMBEDDING_SCALE * embedding), ("lm_head.weight", head)):
        model.get_parameter(name).copy_(weight)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
