"""Models of the Llama family that GGUF files hold: their weights by name, and a plain forward of a whole text.

Runners take the weights, and are held to the forward at load. transformers has the same classes, under the same names
of modules and weights; to import them takes seconds and over a hundred megabytes, so they are for all other models.
`tests/lm/test_gguf_weights.py` holds these to those.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

# Rotations that are computed here.
DEFAULT, LINEAR = "default", "linear"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What transformers' configurations of the family say, by their names. ValueError for heads that do not fit."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_parameters: dict[str, Any]
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: list[int] | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    hidden_act: str = field(default="silu", init=False)
    is_encoder_decoder: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads % shared:
            raise ValueError(f"num_attention_heads: {heads} are no multiple of {shared} key heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} dimensions cannot be turned in pairs")

    def get_text_config(self) -> DecoderConfig:
        return self


class DecoderOutput(NamedTuple):
    """logits: (texts, tokens, vocabulary)."""

    logits: torch.Tensor


def _linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    """Nothing is drawn for it. (`to_empty` does as much, and imports all that torch compiles by.)"""
    made = nn.Linear(inputs, outputs, bias, device="meta")
    made.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
    if bias:
        made.bias = nn.Parameter(torch.empty(outputs, dtype=dtype))
    return made


class RmsNorm(nn.Module):
    """Root-mean-square normalisation (Zhang, Sennrich 2019), in float32."""

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self._epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled: torch.Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return (self.weight * scaled.to(x.dtype)).to(x.dtype)


class Rotation(nn.Module):
    """Rotary positions (Su et al. 2021). inv_freq: float32 (head_dim / 2,), by how much a position turns each pair."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        said = config.rope_parameters
        self.rope_type: str = said["rope_type"]
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        slower = said["factor"] if self.rope_type == LINEAR else 1.0
        self.inv_freq = 1.0 / said["rope_theta"] ** steps / slower

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (texts, tokens, head_dim) of positions (texts, tokens), in the dtype of x."""
        angles = positions[..., None].float() * self.inv_freq.to(x.device)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig, family: Family, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        hidden = config.hidden_size
        queries, keys = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        inner = family.inner_bias or config.attention_bias
        self.q_proj = _linear(hidden, queries, inner, dtype)
        self.k_proj = _linear(hidden, keys, inner, dtype)
        self.v_proj = _linear(hidden, keys, inner, dtype)
        self.o_proj = _linear(queries, hidden, config.attention_bias, dtype)
        norms = (RmsNorm(self.head_dim, config.rms_norm_eps, dtype) if family.head_norms else None for _ in range(2))
        self.q_norm, self.k_norm = norms

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._in_heads(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (_turned(each, cos[:, None], sin[:, None]) for each in (query, key))
        share = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(share, dim=1) for each in (key, value))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scaling)
        found: torch.Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return found

    def _in_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(texts, heads, tokens, head_dim)."""
        split: torch.Tensor = x.unflatten(-1, (-1, self.head_dim))
        return split.transpose(1, 2)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Mlp(nn.Module):
    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = _linear(hidden, inner, bias, dtype)
        self.up_proj = _linear(hidden, inner, bias, dtype)
        self.down_proj = _linear(inner, hidden, bias, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, family: Family, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, family, dtype)
        self.mlp = Mlp(config, dtype)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    def __init__(self, config: DecoderConfig, family: Family, dtype: torch.dtype) -> None:
        super().__init__()
        unfilled = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self.embed_tokens: nn.Embedding = nn.Embedding.from_pretrained(unfilled)
        self.layers = nn.ModuleList(DecoderLayer(config, family, dtype) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.rotary_emb = Rotation(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed_tokens(tokens)
        turns = self.rotary_emb(x, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
        for layer in self.layers:
            x = layer(x, *turns)
        found: torch.Tensor = self.norm(x)
        return found


class Family(NamedTuple):
    """architecture: transformers' name of the class. inner_bias: queries, keys and values always have one."""

    architecture: str
    inner_bias: bool = False
    head_norms: bool = False


# By model type.
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", inner_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", head_norms=True),
}


class PlainDecoder(nn.Module):
    """A model whose weights hold nothing yet. It is called as transformers' classes are."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, family = config, FAMILIES[config.model_type]
        self.architecture = family.architecture
        self.model = Body(config, family, dtype)
        self.lm_head = _linear(config.hidden_size, config.vocab_size, False, dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> DecoderOutput:
        """input_ids: (texts, tokens), from position 0 on. There is no cache to use."""
        return DecoderOutput(self.lm_head(self.model(input_ids)))

    @property
    def base_model(self) -> Body:
        return self.model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head
