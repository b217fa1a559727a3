"""A lean decoder for the Llama family (Llama, Mistral, Qwen2, Qwen3): the same arithmetic in few dispatches.

At batch 1 on a CPU most of an eager forward is dispatch and a BLAS that is slow at a few rows. Here each layer is four
matrix products, one attention per session over its valid positions only, and a dozen small operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from specwire.lm.interface import Feed
from specwire.lm.linear import Linear, linear

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Rotations whose table does not depend on the length of the text.
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


class Unsuited(Exception):
    """The model is not of the plain shape that this decoder computes. The generic path takes it."""


class Shape(NamedTuple):
    """Sizes shared by all layers."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads


class Span(NamedTuple):
    """One feed's share of a forward: rows [begin, end) of the flat batch, and its view of the cache, by layer."""

    begin: int
    end: int
    fresh: tuple[torch.Tensor, ...]  # (2 kv_heads, end - begin, head_dim): where this feed's keys and values go
    keys: tuple[torch.Tensor, ...]  # (1, kv_heads, stop, head_dim)
    values: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None  # (rows x group, stop), additive; None for a single row, which sees everything


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer, fused and packed."""

    index: int
    shape: Shape
    attention_norm: torch.Tensor
    qkv: Linear
    head_norm: torch.Tensor | None  # (heads + kv_heads, head_dim) for Qwen3
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor, rotation: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Map x (rows, hidden) to (rows, hidden); writes the rows' keys and values."""
        shape = self.shape
        normed = functional.rms_norm(x, x.shape[-1:], self.attention_norm, shape.epsilon)
        heads = self.qkv(normed).view(len(x), -1, shape.head_dim)
        heads = self._rotate(heads, rotation)
        x = x + self.output(self._attend(heads, spans, x.dtype))
        normed = functional.rms_norm(x, x.shape[-1:], self.mlp_norm, shape.epsilon)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate).mul_(up))

    def _rotate(self, heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Turn queries and keys by their positions; values pass. Pairs lie side by side (see `_pairwise`)."""
        turned = self.shape.heads + self.shape.kv_heads
        if self.head_norm is not None:
            normed = functional.rms_norm(heads[:, :turned], heads.shape[-1:], None, self.shape.epsilon)
            heads = torch.cat((normed.mul_(self.head_norm), heads[:, turned:]), dim=1)
        heads = heads.float()
        torch.view_as_complex(heads[:, :turned].view(len(heads), turned, -1, 2)).mul_(rotation)
        return heads

    def _attend(self, heads: torch.Tensor, spans: Sequence[Span], dtype: torch.dtype) -> torch.Tensor:
        """Map turned heads (rows, heads + 2 kv_heads, head_dim) to attention's result (rows, heads x head_dim)."""
        queries = heads[:, : self.shape.heads].to(dtype)
        fresh = heads[:, self.shape.heads :].transpose(0, 1)
        parts = [self._attend_span(queries, fresh, span) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_span(self, queries: torch.Tensor, fresh: torch.Tensor, span: Span) -> torch.Tensor:
        heads, kv_heads, head_dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        rows = span.end - span.begin
        span.fresh[self.index].copy_(fresh[:, span.begin : span.end])
        # Queries that share a key head are rows of one attention: keys are neither repeated nor copied.
        query = queries[span.begin : span.end].view(rows, kv_heads, -1, head_dim)
        query = query.transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
        result = functional.scaled_dot_product_attention(
            query, span.keys[self.index], span.values[self.index], span.mask
        )
        result = result.view(kv_heads, rows, -1, head_dim).transpose(0, 1)
        return result.reshape(rows, heads * head_dim)


class LlamaRunner:
    """`Runner` with weights taken from a Hugging Face model of one of MODEL_TYPES; the model can be freed after."""

    def __init__(self, model: PreTrainedModel, slots: int, context: int, vocabulary: int) -> None:
        """Raises Unsuited for a model that only looks like the family."""
        body = model.get_submodule("model")
        self._shape = _shape(model)
        self._embedding = _parameter(body, "embed_tokens.weight")
        self._norm = _parameter(body, "norm.weight")
        self._head = linear(_parameter(model, "lm_head.weight")[:vocabulary], _optional(model, "lm_head.bias"))
        self._rotations = _rotations(model, context, self._shape.head_dim)
        layers = body.get_submodule("layers").children()
        self._layers = [_layer(index, layer, self._shape) for index, layer in enumerate(layers)]
        size = (self._shape.layers, slots, 2 * self._shape.kv_heads, context, self._shape.head_dim)
        self._cache = torch.zeros(size, dtype=self._embedding.dtype, device=self._embedding.device)

    def zero(self, slot: int, stop: int) -> None:
        self._cache[:, slot, :, :stop].zero_()

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        device = self._embedding.device
        tokens = torch.tensor([token for feed in feeds for token in feed.tokens], device=device)
        positions = torch.tensor([p for feed in feeds for p in range(feed.start, feed.stop)], device=device)
        spans = self._spans(feeds)
        x = functional.embedding(tokens, self._embedding)
        rotation = self._rotations[positions].unsqueeze(1)
        for layer in self._layers:
            x = layer(x, rotation, spans)
        x = _last_rows(x, feeds, spans)
        return self._head(functional.rms_norm(x, x.shape[-1:], self._norm, self._shape.epsilon))

    def _spans(self, feeds: Sequence[Feed]) -> list[Span]:
        spans: list[Span] = []
        kv_heads = self._shape.kv_heads
        for feed in feeds:
            begin = spans[-1].end if spans else 0
            window = self._cache[:, feed.slot, :, : feed.stop]
            keys = window[:, :kv_heads].unsqueeze(1).unbind()
            values = window[:, kv_heads:].unsqueeze(1).unbind()
            fresh = window[:, :, feed.start :].unbind()
            spans.append(Span(begin, begin + len(feed.tokens), fresh, keys, values, self._mask(feed)))
        return spans

    def _mask(self, feed: Feed) -> torch.Tensor | None:
        """Row i of the feed sees positions [0, start + i]; each of its `group` queries alike."""
        rows = len(feed.tokens)
        if rows == 1:
            return None
        mask = torch.zeros(rows, feed.stop, dtype=self._cache.dtype, device=self._cache.device)
        future = torch.full((rows, rows), -torch.inf, dtype=mask.dtype, device=mask.device).triu_(1)
        mask[:, feed.start :] = future
        return mask.repeat_interleave(self._shape.group, dim=0)


def _last_rows(x: torch.Tensor, feeds: Sequence[Feed], spans: Sequence[Span]) -> torch.Tensor:
    """The rows of the last max(wanted, 1) tokens of each feed."""
    parts = [x[span.end - max(feed.wanted, 1) : span.end] for feed, span in zip(feeds, spans, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _shape(model: PreTrainedModel) -> Shape:
    config: Any = model.config
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    head_dim = attention.head_dim
    if not isinstance(head_dim, int) or abs(float(attention.scaling) * head_dim**0.5 - 1) > 1e-6:
        raise Unsuited("attention is scaled in its own way")
    if config.hidden_act not in ("silu", "swish"):
        raise Unsuited(f"activation {config.hidden_act}")
    return Shape(
        config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, head_dim, config.rms_norm_eps
    )


def _rotations(model: PreTrainedModel, context: int, head_dim: int) -> torch.Tensor:
    """Rotation cos + i sin of every position, complex64 (context, head_dim / 2), as the model's own module gives it."""
    rotary: Any = model.get_submodule("model.rotary_emb")
    if rotary.rope_type not in ROPE_TYPES:
        raise Unsuited(f"rotation {rotary.rope_type}")
    device = _parameter(model, "model.norm.weight").device
    positions = torch.arange(context, device=device).unsqueeze(0)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=device), positions)
    if cos.shape[-1] != head_dim:
        raise Unsuited(f"rotation of {cos.shape[-1]} of {head_dim} dimensions")
    half = head_dim // 2
    return torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())


def _layer(index: int, layer: nn.Module, shape: Shape) -> Layer:
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    q, k, v, o = (_weights(attention, name) for name in names)
    gate, up, down = (_weights(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
    turned = [_pairwise(part, shape.head_dim) for part in (q, k)]
    return Layer(
        index,
        shape,
        _parameter(layer, "input_layernorm.weight"),
        _fused(*turned, v),
        _head_norm(attention, shape),
        _fused(o),
        _parameter(layer, "post_attention_layernorm.weight"),
        _fused(gate, up),
        _fused(down),
    )


class Weights(NamedTuple):
    """Weight (out, in) and bias (out,) of one linear layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def _weights(module: nn.Module, name: str) -> Weights:
    layer = module.get_submodule(name)
    if type(layer) is not nn.Linear:
        raise Unsuited(f"{name} is a {type(layer).__name__}")
    return Weights(_parameter(layer, "weight"), _optional(layer, "bias"))


def _pairwise(part: Weights, head_dim: int) -> Weights:
    """Reorder each head's rows so that the two dimensions that are rotated together lie side by side.

    Hugging Face rotates dimension i with i + head_dim / 2. Scores do not depend on the order, as long as queries and
    keys share it.
    """
    order = _pair_order(head_dim).to(part.weight.device)
    heads = part.weight.view(-1, head_dim, part.weight.shape[1])
    weight = heads[:, order].reshape(part.weight.shape)
    return Weights(weight, None if part.bias is None else part.bias.view(-1, head_dim)[:, order].reshape(-1))


def _pair_order(head_dim: int) -> torch.Tensor:
    return torch.arange(head_dim).view(2, -1).t().reshape(-1)


def _fused(*parts: Weights) -> Linear:
    """One layer whose output is the parts' outputs side by side."""
    weight = torch.cat([part.weight for part in parts])
    if all(part.bias is None for part in parts):
        return linear(weight, None)
    zeros = [part.weight.new_zeros(len(part.weight)) for part in parts]
    biases = [zero if part.bias is None else part.bias for part, zero in zip(parts, zeros, strict=True)]
    return linear(weight, torch.cat(biases))


def _head_norm(attention: nn.Module, shape: Shape) -> torch.Tensor | None:
    """Per-head scale of normalised queries and keys (Qwen3), in the order of `_pairwise`."""
    names = ("q_norm.weight", "k_norm.weight")
    q, k = (_optional(attention, name) for name in names)
    if q is None or k is None:
        return None
    order = _pair_order(shape.head_dim).to(q.device)
    return torch.cat((q[order].expand(shape.heads, -1), k[order].expand(shape.kv_heads, -1)))


def _optional(module: nn.Module, name: str) -> torch.Tensor | None:
    try:
        return module.get_parameter(name).detach()
    except AttributeError:
        return None


def _parameter(module: nn.Module, name: str) -> torch.Tensor:
    parameter = _optional(module, name)
    if parameter is None:
        raise Unsuited(f"no {name}")
    return parameter
