"""A decoder layer beside a target, as an EAGLE-3 head and an MTP layer have one: its weights, and torch over slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specwire.core.model import Feed
from specwire.lm.heads.files import ConfigKeys
from specwire.lm.heads.slots import HeadStep, SteppedHead
from specwire.lm.linear import LinearWeights, pack_rounded
from specwire.lm.plain_decoder import RmsNorm
from specwire.lm.runners.decoder import DecoderLayers, DecoderShape, Layout, Model, batch_of, compiled, fed_rows
from specwire.lm.runners.llama import layer_of

DEFAULT_ROPE = "default"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Of a `HeadLayer`'s weights the names in files, within the layer.
PARTS = {name: f"{'self_attn' if name in LINEARS[:4] else 'mlp'}.{name}" for name in LINEARS}
PARTS |= {name: name for name in ("input_layernorm", "post_attention_layernorm")}
HEAD_NORMS = {name: f"self_attn.{name}" for name in ("q_norm", "k_norm")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """Shapes of a layer; theta: of its rotation."""

    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    eps: float = 1e-6
    theta: float = 10_000.0

    @property
    def shape(self) -> DecoderShape:
        return DecoderShape(1, self.heads, self.key_heads, self.head_dim, self.eps)

    @property
    def kept(self) -> int:
        """Numbers that are kept of each position."""
        return 2 * self.key_heads * self.head_dim

    def parts(self, reads: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a `HeadLayer`'s weights, by their names there."""
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.key_heads * self.head_dim
        linears = ((queries, reads), (keys, reads), (keys, reads), (hidden, queries))
        gated = ((self.inner, hidden), (self.inner, hidden), (hidden, self.inner))
        found: dict[str, tuple[int, ...]] = dict(zip(LINEARS, (*linears, *gated), strict=True))
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), (hidden,))
        found |= norms | dict.fromkeys(("q_norm", "k_norm"), (self.head_dim,))
        return {f"{name}.weight": shape for name, shape in found.items()}


def layer_sizes(keys: ConfigKeys) -> dict[str, Any]:
    """What a configuration says of a layer by transformers' names, for a `LayerConfig`. Raises ModelError."""
    hidden, heads = keys.whole_number("hidden_size"), keys.whole_number("num_attention_heads")
    key_heads = keys.whole_number("num_key_value_heads", heads)
    if heads % key_heads:
        raise keys.wrong("num_key_value_heads", f"{heads} heads cannot share {key_heads}")
    return {
        "hidden": hidden,
        "inner": keys.whole_number("intermediate_size"),
        "heads": heads,
        "key_heads": key_heads,
        "head_dim": keys.whole_number("head_dim", hidden // heads),
        "vocabulary": keys.whole_number("vocab_size"),
        "eps": keys.number("rms_norm_eps", 1e-6),
    }


class HeadLayer(nn.Module):
    """A decoder layer under transformers' names, with the norm behind it."""

    q_norm: RmsNorm | None
    k_norm: RmsNorm | None

    def add_layer(self, config: LayerConfig, reads: int, head_norms: bool, biased: Collection[str] = ()) -> None:
        """reads: numbers of a row that attention reads. biased: which linear layers have a bias."""
        self.q_norm, self.k_norm = (RmsNorm(config.head_dim, config.eps) if head_norms else None for _ in range(2))
        self.input_layernorm = RmsNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.eps)
        shapes = config.parts(reads)

        def linear(name: str) -> nn.Linear:
            out, into = shapes[f"{name}.weight"]
            return nn.Linear(into, out, bias=name in biased)

        self.q_proj, self.k_proj, self.v_proj, self.o_proj = map(linear, LINEARS[:4])
        self.gate_proj, self.up_proj, self.down_proj = map(linear, LINEARS[4:])
        self.norm = RmsNorm(config.hidden, config.eps)


def model_of(
    layer: HeadLayer,
    config: LayerConfig,
    embedding: torch.Tensor,
    norm: torch.Tensor,
    output: LinearWeights,
    turns: torch.Tensor,
    turned: int | None = None,
) -> Model:
    """As `HeadLayers` computes it. turned: dimensions of a head that are rotated; None for all."""
    parts = [layer_of(layer, layer, layer, config.shape, turned)]
    return Model(embedding, parts, norm, output, turns.to(embedding.device))


class HeadLayers(DecoderLayers):
    """Layers that read a state beside each token's embedding. Large ones are in 8 bits: guesses need not be exact."""

    def __init__(self, shape: DecoderShape, model: Model, cache: torch.Tensor) -> None:
        super().__init__(shape, model, cache, packing=pack_rounded)

    def _last(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Of x (rows, hidden) the last row of each feed."""
        rows: list[torch.Tensor] = []
        end = 0
        for count in counts:
            end += count
            rows.append(x.narrow(0, end - 1, 1))
        return torch.cat(rows)


class LayerRunner(SteppedHead):
    """A `Head` of one layer over `slots` texts, with keys and values of its own, as one TorchScript call.

    Its row t is of the token at t + 1.
    """

    most_depth: int | None = None

    def __init__(
        self,
        layers: Callable[[torch.Tensor], HeadLayers],
        config: LayerConfig,
        width: int,
        ids: torch.Tensor,
        cache: tuple[int, int, torch.dtype, torch.device | None],
    ) -> None:
        """layers: over (1, slots, 2 key heads, context, head_dim). width, ids: see `Head`, `SteppedHead`.

        cache: its slots and context, dtype and device.
        """
        slots, context, dtype, device = cache
        kv = 2 * config.key_heads
        self.cache = torch.zeros((1, slots, kv, context, config.head_dim), dtype=dtype, device=device)
        self._layout = Layout(kv, context, config.heads // config.key_heads, dtype, self.cache.device)
        self._decode: Any = compiled(layers(self.cache))
        self.width, self.target_ids = width, ids

    def read(self, feeds: Sequence[Feed], features: torch.Tensor) -> HeadStep:
        return self._run(feeds, features, first=True)

    def follow(self, feeds: Sequence[Feed], states: torch.Tensor, depth: int) -> HeadStep:
        return self._run(feeds, states, first=False)

    def _run(self, feeds: Sequence[Feed], states: torch.Tensor, first: bool) -> HeadStep:
        """first: states are the target's."""
        tokens = [token for feed in feeds for token in feed.tokens]
        fed = fed_rows(feeds, batch_of(feeds, self._layout))
        return HeadStep(*self._decode(states.to(self.cache.device, self.cache.dtype), tokens, fed, first))

    def zero(self, slot: int, stop: int) -> None:
        self.cache[:, slot, :, :stop].zero_()

    def copy(self, source: int, target: int, stop: int) -> None:
        self.cache[:, target, :, :stop].copy_(self.cache[:, source, :, :stop])

    @property
    def kv_bytes(self) -> int:
        return self.cache.nbytes


class Apart(nn.Module):
    """Each tap times the identity. What a product makes is rounded as the runtime computes; what leaves the graph as it
    is would be computed in float32, with all that leads to it (see `DecoderGraph`).
    """

    def __init__(self, taps: int, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(taps))
        for part in self.parts:
            nn.init.eye_(part.get_parameter("weight"))
        self.requires_grad_(False)

    def forward(self, taps: torch.Tensor) -> torch.Tensor:
        chunks = taps.chunk(len(self.parts), dim=-1)
        return torch.cat([part(chunk) for part, chunk in zip(self.parts, chunks, strict=True)], dim=-1)


def rotations(context: int, head_dim: int, turned: int, theta: float) -> torch.Tensor:
    """Rotation cos + i sin of every position, complex64 (context, head_dim / 2), of which `turned` / 2 are not 1."""
    half = turned // 2
    angles = torch.arange(context)[:, None] * theta ** (-torch.arange(half, dtype=torch.float32) / half)
    still = torch.zeros(context, head_dim // 2 - half)
    angles = torch.cat((angles, still), -1)
    return torch.complex(angles.cos(), angles.sin())
