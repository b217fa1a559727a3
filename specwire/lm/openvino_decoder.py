"""The decoder of the Llama family in the form in which OpenVINO reads it: few operations, the cache as arguments.

The weights are those of `specwire.lm.decoder`. Rotations are looked up by position, not computed: traced from the
model's own modules, OpenVINO rounds the angles to bfloat16 before it takes their cosine, and far positions are lost.
Each operation also costs when a step has another number of rows than the one before; here are half as many.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from specwire.lm.decoder import DecoderShape, Layer, Model
from specwire.lm.linear import LinearWeights
from specwire.lm.stateless import Stateless, causal_mask


class OpenvinoDecoder(Stateless):
    """A model of the family, in float32, as a function of tensors."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: DecoderShape, model: Model) -> None:
        super().__init__()
        self.layers, self.queries, self.heads, self.head_size, self.epsilon = shape
        angles = model.rotations
        # Signs of the rotation: (a, b) -> (a cos - b sin, b cos + a sin).
        self.register_buffer("cos", torch.cat((angles.real, angles.real), dim=-1))
        self.register_buffer("sin", torch.cat((-angles.imag, angles.imag), dim=-1))
        self._model = model
        self._qkv = [_in_halves(layer.qkv, shape) for layer in model.layers]
        self._head_norms = [_norms_in_halves(layer, shape) for layer in model.layers]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        beam_idx: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        held = [each.index_select(0, beam_idx) for each in past]
        mask = causal_mask(attention_mask, input_ids.shape[1])
        cos = functional.embedding(position_ids, self.cos).unsqueeze(2)
        sin = functional.embedding(position_ids, self.sin).unsqueeze(2)
        x = functional.embedding(input_ids, self._model.embedding)
        for index, layer in enumerate(self._model.layers):
            query, key, value = self._heads(index, self._normed(x, layer.attention_norm), cos, sin)
            for at, fresh in ((2 * index, key), (2 * index + 1, value)):
                held[at] = torch.cat((held[at], fresh), dim=2)
            seen = self._attended(query, held[2 * index], held[2 * index + 1], mask)
            x = x + functional.linear(seen, *layer.output)
            gate, up = functional.linear(self._normed(x, layer.mlp_norm), *layer.gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, *layer.down)
        return functional.linear(self._normed(x, self._model.norm), *self._model.head), *held

    def _heads(
        self, index: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values (sessions, heads, tokens, head_size); the first two turned by their positions."""
        size, turned = self.head_size, self.queries + self.heads
        both, value = functional.linear(x, *self._qkv[index]).split((turned * size, self.heads * size), dim=-1)
        both = both.view(*x.shape[:2], turned, size)
        norm = self._head_norms[index]
        if norm is not None:
            both = self._normed(both, norm)
        first, second = both.chunk(2, dim=-1)
        both = both * cos + torch.cat((second, first), dim=-1) * sin
        query, key = both.split((self.queries, self.heads), dim=2)
        value = value.view(*x.shape[:2], self.heads, size)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _attended(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """(sessions, tokens, queries x head_size). The paged operation undoes the repetition of keys and values."""
        key, value = (self._repeated(each) for each in (key, value))
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return seen.transpose(1, 2).reshape(query.shape[0], query.shape[2], self.queries * self.head_size)

    def _repeated(self, states: torch.Tensor) -> torch.Tensor:
        sessions, heads, positions, size = states.shape
        shape = (sessions, heads, self.queries // heads, positions, size)
        return states[:, :, None].expand(shape).reshape(sessions, self.queries, positions, size)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Spelt out, as OpenVINO recognises it."""
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


def _in_halves(qkv: LinearWeights, shape: DecoderShape) -> LinearWeights:
    """Rows of q and k reordered: dimensions that are rotated together lie half a head apart, not side by side."""
    order = _order(shape)
    return LinearWeights(qkv.weight[order], None if qkv.bias is None else qkv.bias[order])


def _norms_in_halves(layer: Layer, shape: DecoderShape) -> torch.Tensor | None:
    return None if layer.head_norm is None else layer.head_norm[:, _half_order(shape.head_dim)]


def _order(shape: DecoderShape) -> torch.Tensor:
    turned, values = shape.heads + shape.kv_heads, shape.kv_heads
    starts = torch.arange(turned) * shape.head_dim
    first = (starts[:, None] + _half_order(shape.head_dim)).reshape(-1)
    return torch.cat((first, torch.arange(turned * shape.head_dim, (turned + values) * shape.head_dim)))


def _half_order(head_dim: int) -> torch.Tensor:
    """Undoes the order of pairs."""
    return torch.arange(head_dim).view(-1, 2).t().reshape(-1)
