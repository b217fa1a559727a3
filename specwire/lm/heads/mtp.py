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

from specwire.lm.heads.eagle3 import RmsNorm
from specwire.lm.heads.files import CONFIG, ConfigKeys, Stored, Tensors, tensor_files
from specwire.lm.runners.linear import LinearWeights

DEFAULT_ROPE = "default"
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
LINEARS = tuple(f"self_attn.{part}_proj" for part in "qkvo") + tuple(
    f"mlp.{part}_proj" for part in ("gate", "up", "down")
)
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
# Parts of names of what is not served, and what they are of.
FOREIGN = (
    ("layers.1.", "a second layer"),
    ("experts", "a mixture of experts"),
    ("mlp.gate.", "a mixture of experts"),
    ("linear_attn", "a recurrent layer"),
    ("_scale", "quantized weights"),
)


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Shapes of the target whose layer it is. turned: dimensions of a head that are rotated.

    rope: rotation of a kind other than the default one, which must be the target's.
    zero_centred: norms multiply by 1 + weight.
    """

    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    layers: int
    eps: float
    theta: float
    turned: int
    rope: str
    zero_centred: bool

    @property
    def taps(self) -> tuple[int, ...]:
        """Of the target: what leaves its last layer."""
        return (self.layers,)

    @property
    def draft_vocabulary(self) -> int:
        return self.vocabulary

    @classmethod
    def read(cls, folder: Path, whole: Mapping[str, Any]) -> MtpConfig:
        """whole: its config.json. Raises ModelError that names file and key."""
        keys = ConfigKeys(folder / CONFIG, whole)
        text = keys.object("text_config") if "text_config" in keys else keys
        rope = text.object("rope_parameters" if "rope_parameters" in text else "rope_scaling")
        activation = text.text("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise text.wrong("hidden_act", f"only silu is served in MTP layers, not {activation!r}")
        hidden, heads = text.whole_number("hidden_size"), text.whole_number("num_attention_heads")
        head_dim = text.whole_number("head_dim", hidden // heads)
        key_heads = text.whole_number("num_key_value_heads", heads)
        if heads % key_heads:
            raise text.wrong("num_key_value_heads", f"{heads} heads cannot share {key_heads}")
        partial = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", 1.0))
        turned = int(head_dim * partial)
        if turned % 2 or not 0 < turned <= head_dim or head_dim % 2:
            raise text.wrong("partial_rotary_factor", f"{turned} of {head_dim} dimensions cannot be rotated")
        return cls(
            hidden=hidden,
            inner=text.whole_number("intermediate_size"),
            heads=heads,
            key_heads=key_heads,
            head_dim=head_dim,
            vocabulary=text.whole_number("vocab_size"),
            layers=text.whole_number("num_hidden_layers"),
            eps=text.number("rms_norm_eps", 1e-6),
            theta=rope.number("rope_theta", text.number("rope_theta", 10_000.0)),
            turned=turned,
            rope=rope.text("rope_type", rope.text("type", DEFAULT_ROPE)),
            zero_centred=text.any("model_type") in ZERO_CENTRED,
        )


class MtpLayer(NamedTuple):
    """Weights as they are stored, but for norms, which multiply as they are.

    gate: of attention's result, for Qwen3-Next. head_norms: of queries and of keys.
    """

    embedding_norm: torch.Tensor
    state_norm: torch.Tensor
    fuse: LinearWeights
    attention_norm: torch.Tensor
    q: LinearWeights
    k: LinearWeights
    v: LinearWeights
    gate: LinearWeights | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: LinearWeights
    mlp_norm: torch.Tensor
    mlp_gate: LinearWeights
    up: LinearWeights
    down: LinearWeights
    norm: torch.Tensor


class Mtp(NamedTuple):
    """The layer of a checkpoint."""

    config: MtpConfig
    style: MtpStyle
    layer: MtpLayer


def style_of(names: Collection[str]) -> MtpStyle | None:
    """The format of the MTP layer among these tensors; None if there is none."""
    return next((style for style in STYLES if any(name.startswith(style.own) for name in names)), None)


def load(folder: Path, style: MtpStyle, config: MtpConfig) -> Mtp:
    """Read the layer. Raises ModelError, which names file and tensor."""
    files = Tensors(folder, {name: Stored(path, name) for name, path in tensor_files(folder).items()})
    _check_names(style, files)
    return Mtp(config, style, _layer(style, config, files))


def _linear(files: Tensors, name: str, out: int, into: int) -> LinearWeights:
    bias = f"{name}.bias"
    weight = files.weights(f"{name}.weight", (out, into))
    return LinearWeights(weight, files.weights(bias, (out,)) if bias in files else None)


def _check_names(style: MtpStyle, files: Tensors) -> None:
    """ModelError for tensors that a layer of the Llama family does not have."""
    known = {f"{style.layer}{part}" for part in (*LINEARS, *NORMS, *HEAD_NORMS)}
    known |= {style.embedding_norm, style.state_norm, style.fuse, style.norm}
    names = {f"{name}{end}" for name in known for end in (".weight", ".bias")}
    for name in sorted(files):
        if name.startswith(style.own) and name not in names and not name.endswith("rotary_emb.inv_freq"):
            of = next((what for part, what in FOREIGN if part in name), "something other than a Llama's layer")
            raise files.wrong(name, f"is of {of}, which is not served with MTP")


def _layer(style: MtpStyle, config: MtpConfig, files: Tensors) -> MtpLayer:
    layer = style.layer
    hidden, size = config.hidden, config.head_dim
    queries, keys = config.heads * size, config.key_heads * size

    def norm(name: str, width: int = hidden) -> torch.Tensor:
        weight = files.weights(f"{name}.weight", (width,))
        return 1 + weight.float() if config.zero_centred else weight

    gate = None
    name = f"{layer}self_attn.q_proj"
    if files.shape(f"{name}.weight") == (2 * queries, hidden):
        # Each head's query and its gate, one behind the other.
        both = _linear(files, name, 2 * queries, hidden)
        q, gate = (_half(both, config.heads, half) for half in (0, 1))
    else:
        q = _linear(files, name, queries, hidden)
    names = [f"{layer}{part}" for part in HEAD_NORMS]
    head_norms = None
    if any(f"{part}.weight" in files for part in names):
        head_norms = norm(names[0], size), norm(names[1], size)
    return MtpLayer(
        embedding_norm=norm(style.embedding_norm),
        state_norm=norm(style.state_norm),
        fuse=_linear(files, style.fuse, hidden, 2 * hidden),
        attention_norm=norm(f"{layer}input_layernorm"),
        q=q,
        k=_linear(files, f"{layer}self_attn.k_proj", keys, hidden),
        v=_linear(files, f"{layer}self_attn.v_proj", keys, hidden),
        gate=gate,
        head_norms=head_norms,
        output=_linear(files, f"{layer}self_attn.o_proj", hidden, queries),
        mlp_norm=norm(f"{layer}post_attention_layernorm"),
        mlp_gate=_linear(files, f"{layer}mlp.gate_proj", config.inner, hidden),
        up=_linear(files, f"{layer}mlp.up_proj", config.inner, hidden),
        down=_linear(files, f"{layer}mlp.down_proj", hidden, config.inner),
        norm=norm(style.norm),
    )


def _half(both: LinearWeights, heads: int, half: int) -> LinearWeights:
    weight = both.weight.unflatten(0, (heads, 2, -1))[:, half].flatten(0, 1)
    bias = None if both.bias is None else both.bias.unflatten(0, (heads, 2, -1))[:, half].flatten()
    return LinearWeights(weight, bias)


# The fused product in two: of the states, which are known a step earlier, and of the embeddings.


class StatePart(nn.Module):
    """What the layer fuses of the states (..., hidden) that it reads: normalised, times their columns."""

    def __init__(self, mtp: Mtp) -> None:
        super().__init__()
        self._norm = _norm_of(mtp.layer.state_norm, mtp.config.eps)
        self._weight = nn.Parameter(_columns(mtp)[0].contiguous(), requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._norm(states), self._weight)


class EmbeddingPart(nn.Module):
    """Likewise of the embeddings, and what is added to both."""

    def __init__(self, mtp: Mtp) -> None:
        super().__init__()
        self._norm = _norm_of(mtp.layer.embedding_norm, mtp.config.eps)
        self._layer = LinearWeights(_columns(mtp)[1].contiguous(), mtp.layer.fuse.bias)

    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._norm(embedded), *self._layer)


def told_of(mtp: Mtp, norm: torch.Tensor) -> nn.Module:
    """What a target's graph tells of its last layer's output, for the MTP layer. norm: the target's last one."""
    part = StatePart(mtp)
    return nn.Sequential(_norm_of(norm, mtp.config.eps), part) if mtp.style.normed else part


def _norm_of(weight: torch.Tensor, eps: float) -> RmsNorm:
    norm = RmsNorm(len(weight), eps)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def _columns(mtp: Mtp) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the fused product: those of the state, and those of the embedding."""
    first, second = mtp.layer.fuse.weight.chunk(2, dim=1)
    return (first, second) if mtp.style.state_first else (second, first)
