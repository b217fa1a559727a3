"""A layer for multi-token prediction (MTP) in a checkpoint: DeepSeek-V3 (arXiv 2412.19437), section 2.2.

At position t it reads the target's state of t and the embedding of the token at t + 1, both normalised, side by side
and fused. One decoder layer follows, and the target's output layer says what stands at t + 2. Further guesses are its
own as well, from its own output: published files that can be served have one layer.

The report leaves open what exactly a state is. Here it is what transformers' `MtpModel`, vLLM and SGLang agree on:

- the target's state is behind its final norm, but for MiMo, where it is before it (vLLM's `mimo.py`);
- what the next step reads is behind the layer's own last norm (`mtp.norm`, `final_layernorm`), as what the output layer
  reads.

vLLM and SGLang take zeros for the embedding of the row at position 0, transformers and the report do not; nor is it
done here. Rotation is by the row's position t; that differs from transformers' t + 2 by the same for every row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from specwire.lm.heads.files import CONFIG, ConfigKeys, Stored, Tensors, tensor_files
from specwire.lm.heads.layer import (
    DEFAULT_ROPE,
    HEAD_NORMS,
    PARTS,
    HeadLayer,
    HeadLayers,
    LayerConfig,
    LayerRunner,
    layer_sizes,
    model_of,
)
from specwire.lm.linear import LinearWeights, PlainLinear, pack_rounded, weights_of
from specwire.lm.plain_decoder import RmsNorm
from specwire.lm.runners.decoder import FedRows, Model

# Model types whose norms multiply by 1 + weight.
ZERO_CENTRED = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})


class MtpStyle(NamedTuple):
    """A format: where its tensors are.

    own: prefix of everything that is the layer's; layer: of what its decoder layer has.
    state_first: what is fused begins with the state. normed: it reads the target's state behind the final norm.
    """

    own: str
    layer: str
    embedding_norm: str
    state_norm: str
    fuse: str
    norm: str
    state_first: bool = False
    normed: bool = True


# Qwen3-Next and Qwen3.5 (vLLM's qwen3_next_mtp.py); Mellum has the same names.
QWEN3_NEXT = MtpStyle(
    "mtp.", "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
)
# MiMo (vLLM's mimo_mtp.py).
MIMO = MtpStyle(
    "model.mtp_layers.",
    "model.mtp_layers.0.",
    "model.mtp_layers.0.token_layernorm",
    "model.mtp_layers.0.hidden_layernorm",
    "model.mtp_layers.0.input_proj",
    "model.mtp_layers.0.final_layernorm",
    state_first=True,
    normed=False,
)
STYLES = (QWEN3_NEXT, MIMO)
# In place of a gate, where there is none.
NO_GATE = LinearWeights(torch.empty(0), None)
# Parts of names of what is not served, and what they are of.
FOREIGN = (
    ("layers.1.", "a second layer"),
    ("experts", "a mixture of experts"),
    ("mlp.gate.", "a mixture of experts"),
    ("linear_attn", "a recurrent layer"),
    ("_scale", "quantized weights"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(LayerConfig):
    """Shapes of the target whose layer it is. turned: dimensions of a head that are rotated.

    rope: rotation of a kind other than the default one, which must be the target's.
    zero_centred: norms multiply by 1 + weight.
    """

    layers: int
    turned: int
    rope: str
    zero_centred: bool

    @classmethod
    def read(cls, folder: Path, whole: Mapping[str, Any]) -> MtpConfig:
        """whole: its config.json. Raises ModelError that names file and key."""
        keys = ConfigKeys(folder / CONFIG, whole)
        text = keys.object("text_config") if "text_config" in keys else keys
        rope = text.object("rope_parameters" if "rope_parameters" in text else "rope_scaling")
        activation = text.text("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise text.wrong("hidden_act", f"only silu is served in MTP layers, not {activation!r}")
        sizes = layer_sizes(text)
        head_dim = sizes["head_dim"]
        partial = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", 1.0))
        turned = int(head_dim * partial)
        if turned % 2 or not 0 < turned <= head_dim or head_dim % 2:
            raise text.wrong("partial_rotary_factor", f"{turned} of {head_dim} dimensions cannot be rotated")
        return cls(
            **sizes,
            layers=text.whole_number("num_hidden_layers"),
            theta=rope.number("rope_theta", text.number("rope_theta", 10_000.0)),
            turned=turned,
            rope=rope.text("rope_type", rope.text("type", DEFAULT_ROPE)),
            zero_centred=text.any("model_type") in ZERO_CENTRED,
        )


class Mtp(HeadLayer):
    """The layer of a checkpoint. Norms multiply as they are. gate: of attention's result, for Qwen3-Next."""

    def __init__(
        self, config: MtpConfig, style: MtpStyle, gated: bool, head_norms: bool, biased: Collection[str]
    ) -> None:
        super().__init__()
        self.config, self.style = config, style
        self.embedding_norm, self.state_norm = (RmsNorm(config.hidden, config.eps) for _ in range(2))
        self.fuse = nn.Linear(2 * config.hidden, config.hidden, bias="fuse" in biased)
        self.add_layer(config, config.hidden, head_norms, biased)
        queries = config.heads * config.head_dim
        self.gate = nn.Linear(config.hidden, queries, bias="gate" in biased) if gated else None

    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the fused product: those of the state, and those of the embedding."""
        first, second = self.fuse.weight.detach().chunk(2, dim=1)
        return (first, second) if self.style.state_first else (second, first)


def style_of(names: Collection[str]) -> MtpStyle | None:
    """The format of the MTP layer among these tensors; None if there is none."""
    return next((style for style in STYLES if any(name.startswith(style.own) for name in names)), None)


def load(folder: Path, style: MtpStyle, config: MtpConfig) -> Mtp:
    """Read the layer. Raises ModelError, which names file and tensor."""
    files = Tensors(folder, {name: Stored(path, name) for name, path in tensor_files(folder).items()})
    _check_names(style, files)
    names = {own: f"{style.layer}{part}" for own, part in PARTS.items()} | {"fuse": style.fuse, "norm": style.norm}
    names |= {"embedding_norm": style.embedding_norm, "state_norm": style.state_norm}
    head_norms = {own: f"{style.layer}{part}" for own, part in HEAD_NORMS.items()}
    if any(f"{name}.weight" in files for name in head_norms.values()):
        names |= head_norms
    hidden = config.hidden
    needed = config.parts(hidden) | {"fuse.weight": (hidden, 2 * hidden)}
    needed |= dict.fromkeys(("embedding_norm.weight", "state_norm.weight"), (hidden,))
    queries = 2 * config.heads * config.head_dim
    gated = files.shape(f"{names['q_proj']}.weight") == (queries, hidden)
    if gated:
        needed["q_proj.weight"] = queries, hidden
    state: dict[str, torch.Tensor] = {}
    for own, name in names.items():
        shape = needed[f"{own}.weight"]
        weight = files.weights(f"{name}.weight", shape)
        state[f"{own}.weight"] = 1 + weight.float() if config.zero_centred and "norm" in own else weight
        if f"{name}.bias" in files and len(shape) == 2:
            state[f"{own}.bias"] = files.weights(f"{name}.bias", shape[:1])
    for kind in ("weight", "bias") if gated else ():
        if (both := state.get(f"q_proj.{kind}")) is not None:
            # Each head's query and its gate, one behind the other.
            parts = both.unflatten(0, (config.heads, 2, -1))
            state[f"q_proj.{kind}"], state[f"gate.{kind}"] = (parts[:, half].flatten(0, 1) for half in (0, 1))
    with torch.device("meta"):
        biased = {name.removesuffix(".bias") for name in state if name.endswith(".bias")}
        layer = Mtp(config, style, gated, "q_norm" in names, biased)
    layer.load_state_dict(state, assign=True)
    return layer.requires_grad_(False)


def _check_names(style: MtpStyle, files: Tensors) -> None:
    """ModelError for tensors that a layer of the Llama family does not have."""
    known = {f"{style.layer}{part}" for part in (PARTS | HEAD_NORMS).values()}
    known |= {style.embedding_norm, style.state_norm, style.fuse, style.norm}
    names = {f"{name}{end}" for name in known for end in (".weight", ".bias")}
    for name in sorted(files):
        if name.startswith(style.own) and name not in names and not name.endswith("rotary_emb.inv_freq"):
            of = next((what for part, what in FOREIGN if part in name), "something other than a Llama's layer")
            raise files.wrong(name, f"is of {of}, which is not served with MTP")


class StatePart(nn.Module):
    """What the layer fuses of the states (..., hidden) that it reads: normalised, times their columns.

    They are known a step before the embeddings are.
    """

    def __init__(self, mtp: Mtp) -> None:
        super().__init__()
        self._norm, self._weight = mtp.state_norm, nn.Parameter(mtp.columns()[0].contiguous(), requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._norm(states), self._weight)


def told_of(mtp: Mtp, norm: torch.Tensor) -> nn.Module:
    """What a target's graph tells of its last layer's output, for the MTP layer. norm: the target's last one."""
    if not mtp.style.normed:
        return StatePart(mtp)
    last = RmsNorm(len(norm), mtp.config.eps)
    last.weight = nn.Parameter(norm, requires_grad=False)
    return nn.Sequential(last, StatePart(mtp))


# Over the slots of a target


class MtpDecoder(HeadLayers):
    """norms: of a decoder layer, the target's, the embedding's, the state's, and the last one."""

    def __init__(self, mtp: Mtp, model: Model, cache: torch.Tensor) -> None:
        super().__init__(mtp.config.shape, model, cache)
        self.state_first, self.normed_states = mtp.style.state_first, mtp.style.normed
        self.norms += [norm.weight.detach() for norm in (mtp.embedding_norm, mtp.state_norm, mtp.norm)]
        self.fusing, (packed,) = pack_rounded([weights_of(mtp.fuse)])
        self.fuse_weight, self.fuse_bias = packed
        self.gated = mtp.gate is not None
        self.gating, (gate,) = (PlainLinear(), [NO_GATE]) if mtp.gate is None else pack_rounded([weights_of(mtp.gate)])
        self.gate_weight, self.gate_bias = gate

    def forward(
        self, states: torch.Tensor, tokens: list[int], fed: FedRows, first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last token of each feed leads to: states (feeds, hidden), and logits (feeds, vocabulary).

        states: (tokens, hidden), of the target before its final norm where `first`, else of the step before.
        """
        if first and self.normed_states:
            states = self._normed(2, states)
        ids = torch.tensor(tokens, dtype=torch.long, device=states.device)
        embedded = self._normed(3, functional.embedding(ids, self.embedding))
        states = self._normed(4, states)
        parts = [states, embedded] if self.state_first else [embedded, states]
        x = self.fusing(torch.cat(parts, dim=-1), self.fuse_weight, self.fuse_bias)
        normed = self._normed(0, x)
        found = self._gathered(0, normed, fed, self._lines(fed))
        if self.gated:
            found = found * torch.sigmoid(self.gating(normed, self.gate_weight, self.gate_bias))
        x = x + self._multiply(1, found)
        last = self._normed(5, self._last(x + self._fed_forward(0, x), fed.counts))
        return last, self._multiply(4, last)


class MtpRunner(LayerRunner):
    """A `Head`."""

    def __init__(self, mtp: Mtp, target: Model, slots: int, context: int, dtype: torch.dtype) -> None:
        """target: without its layers; its rotations are the layer's."""
        config, device = mtp.config, target.embedding.device
        mtp = mtp.to(device, dtype)
        weight, bias = target.head
        output = LinearWeights(weight.to(dtype), None if bias is None else bias.to(dtype))
        embedding, norm = target.embedding.to(dtype), target.norm.to(dtype)
        model = model_of(mtp, config, embedding, norm, output, target.rotations, config.turned)
        ids, room = torch.arange(len(weight), device=device), (slots, context, dtype, device)
        super().__init__(lambda cache: MtpDecoder(mtp, model, cache), config, config.hidden, ids, room)
