"""Our decoder for the Llama family (Llama, Mistral, Qwen2, Qwen3): its weights, from a Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from specwire.core.model import Feed
from specwire.lm.kv_cache import Runner, unused
from specwire.lm.linear import LinearWeights, side_by_side
from specwire.lm.model_config import CausalModel, window_of
from specwire.lm.runners.decoder import (
    Decoder,
    DecoderShape,
    Layer,
    Layout,
    Model,
    batch_of,
    compiled,
    fed_rows,
    nothing,
    tree_rows,
)

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Positions of a slot of the cache are a multiple of this where rows are computed apart.
ALIGNED = 32
# Rotations whose table does not depend on the length of the text.
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


class Unsuited(Exception):
    """The model is not of the plain shape that this decoder computes. The generic path takes it."""


class LlamaRunner(Runner):
    """`Runner` with weights taken from a Hugging Face model of one of MODEL_TYPES; the model can be freed after."""

    branches = True

    def __init__(
        self,
        model: CausalModel,
        slots: int,
        context: int,
        vocabulary: int,
        apart: bool = False,
        taps: Sequence[int] = (),
    ) -> None:
        """apart, taps: as `Decoder`. Unsuited for what only looks like the family."""
        shape = shape_of(model)
        weights = model_of(model, shape, context, vocabulary)
        # Kernels may go by where their arguments lie: then every slot begins at a cache line.
        room = -(-context // ALIGNED) * ALIGNED if apart else context
        size = (shape.layers, slots, 2 * shape.kv_heads, room, shape.head_dim)
        self._cache = unused(size, weights.embedding.dtype, weights.embedding.device)
        self._layout = Layout(
            2 * shape.kv_heads, room, shape.heads // shape.kv_heads, self._cache.dtype, self._cache.device
        )
        self._apart, self.taps, self.layers = apart, taps, shape.layers
        self.tapped = weights.embedding.new_empty(0)
        self.decoder = Decoder(shape, weights, self._cache, apart)
        self._decode = compiled(self.decoder)

    @property
    def compiled(self) -> bool:
        """Whether a forward is one call that leaves the interpreter alone."""
        return isinstance(self._decode, torch.jit.ScriptModule)

    def zero(self, slot: int, stop: int) -> None:
        self.zero_rows(slot, 0, stop)

    def zero_rows(self, slot: int, start: int, stop: int) -> None:
        self._cache[:, slot, :, start:stop].zero_()

    def copy(self, source: int, target: int, stop: int) -> None:
        self._cache[:, target, :, :stop].copy_(self._cache[:, source, :, :stop])

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        held = self._cache[:, slot]
        kept = held.index_select(2, torch.tensor(rows, device=held.device))
        held.narrow(2, start, len(rows)).copy_(kept)

    @property
    def kv_bytes(self) -> int:
        return self._cache.nbytes

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        rows, self.tapped = self._run(feeds, list(self.taps) if self.tapping else [], [])
        return rows

    def skim(self, feeds: Sequence[Feed], kept: Sequence[int]) -> torch.Tensor:
        rows, _ = self._run(feeds, [], list(kept))
        return rows

    def _run(self, feeds: Sequence[Feed], taps: list[int], kept: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = nothing(self._layout) if self._apart else batch_of(feeds, self._layout)
        tokens = [token for feed in feeds for token in feed.tokens]
        told = tokens, fed_rows(feeds, batch), [max(feed.wanted, 1) for feed in feeds]
        found: tuple[torch.Tensor, torch.Tensor]
        if all(feed.tree is None for feed in feeds):
            found = self._decode(*told, taps, kept)
        else:
            found = self._decode.branched(*told, tree_rows(feeds, batch.feeds, self._layout), taps, kept)
        return found


def shape_of(model: CausalModel) -> DecoderShape:
    """Sizes of a model of MODEL_TYPES; Unsuited if it only looks like the family."""
    config: Any = model.config
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    head_dim = attention.head_dim
    if not isinstance(head_dim, int) or abs(float(attention.scaling) * head_dim**0.5 - 1) > 1e-6:
        raise Unsuited("attention is scaled in its own way")
    if config.hidden_act not in ("silu", "swish"):
        raise Unsuited(f"activation {config.hidden_act}")
    return DecoderShape(
        config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, head_dim, config.rms_norm_eps
    )


def rotations_of(model: CausalModel, context: int, head_dim: int) -> torch.Tensor:
    """Rotation cos + i sin of every position, complex64 (context, head_dim / 2), as the model's own module gives it."""
    rotary: Any = model.get_submodule("model.rotary_emb")
    if rotary.rope_type not in ROPE_TYPES:
        raise Unsuited(f"rotation {rotary.rope_type}")
    device = parameter(model, "model.norm.weight").device
    positions = torch.arange(context, device=device).unsqueeze(0)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=device), positions)
    if cos.shape[-1] != head_dim:
        raise Unsuited(f"rotation of {cos.shape[-1]} of {head_dim} dimensions")
    half = head_dim // 2
    return torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())


def model_of(model: CausalModel, shape: DecoderShape, context: int, vocabulary: int | None) -> Model:
    """Weights of such a model, and its rotations for `context` positions; Unsuited as above.

    vocabulary: rows of the output layer to keep; None keeps all that are there.
    """
    if window_of(model.config, context) is not None:
        raise Unsuited("attention slides")
    body = model.get_submodule("model")
    bias = optional(model, "lm_head.bias")
    head = LinearWeights(parameter(model, "lm_head.weight")[:vocabulary], None if bias is None else bias[:vocabulary])
    return Model(
        parameter(body, "embed_tokens.weight"),
        [
            layer_of(layer, layer.get_submodule("self_attn"), layer.get_submodule("mlp"), shape)
            for layer in body.get_submodule("layers").children()
        ],
        parameter(body, "norm.weight"),
        head,
        rotations_of(model, context, shape.head_dim),
    )


def layer_of(
    layer: nn.Module, attention: nn.Module, mlp: nn.Module, shape: DecoderShape, turned: int | None = None
) -> Layer:
    """layer: has the norms. turned: dimensions of a head that are rotated; None for all."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    q, k, v, o = (_weights(attention, name) for name in names)
    gate, up, down = (_weights(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
    pairs = [pairwise(part, shape.head_dim, turned) for part in (q, k)]
    return Layer(
        parameter(layer, "input_layernorm.weight"),
        fused(*pairs, v),
        _head_norm(attention, shape, turned),
        o,
        parameter(layer, "post_attention_layernorm.weight"),
        fused(gate, up),
        down,
    )


def _weights(module: nn.Module, name: str) -> LinearWeights:
    layer = module.get_submodule(name)
    if type(layer) is not nn.Linear:
        raise Unsuited(f"{name} is a {type(layer).__name__}")
    return LinearWeights(parameter(layer, "weight"), optional(layer, "bias"))


def pairwise(part: LinearWeights, head_dim: int, turned: int | None = None) -> LinearWeights:
    """Reorder each head's rows so that the two dimensions that are rotated together lie side by side.

    Hugging Face rotates dimension i with i + turned / 2; turned: how many are, None for all. Scores do not depend on
    the order, as long as queries and keys share it.
    """
    order = pair_order(head_dim, turned).to(part.weight.device)
    heads = part.weight.view(-1, head_dim, part.weight.shape[1])
    weight = heads[:, order].reshape(part.weight.shape)
    return LinearWeights(weight, None if part.bias is None else part.bias.view(-1, head_dim)[:, order].reshape(-1))


def pair_order(head_dim: int, turned: int | None = None) -> torch.Tensor:
    """Of the dimensions of a head, for `pairwise`."""
    first = head_dim if turned is None else turned
    return torch.cat((torch.arange(first).view(2, -1).t().reshape(-1), torch.arange(first, head_dim)))


def fused(*parts: LinearWeights) -> LinearWeights:
    """One layer whose output is the parts' outputs side by side."""
    weight = side_by_side([part.weight for part in parts])
    if all(part.bias is None for part in parts):
        return LinearWeights(weight, None)
    zeros = [part.weight.new_zeros(len(part.weight)) for part in parts]
    biases = [zero if part.bias is None else part.bias for part, zero in zip(parts, zeros, strict=True)]
    return LinearWeights(weight, torch.cat(biases))


def _head_norm(attention: nn.Module, shape: DecoderShape, turned: int | None) -> torch.Tensor | None:
    """Per-head scale of normalised queries and keys (Qwen3), in the order of `pairwise`."""
    names = ("q_norm.weight", "k_norm.weight")
    q, k = (optional(attention, name) for name in names)
    if q is None or k is None:
        return None
    order = pair_order(shape.head_dim, turned).to(q.device)
    return torch.cat((q[order].expand(shape.heads, -1), k[order].expand(shape.kv_heads, -1)))


def optional(module: nn.Module, name: str) -> torch.Tensor | None:
    try:
        return module.get_parameter(name).detach()
    except AttributeError:
        return None


def parameter(module: nn.Module, name: str) -> torch.Tensor:
    parameter = optional(module, name)
    if parameter is None:
        raise Unsuited(f"no {name}")
    return parameter
