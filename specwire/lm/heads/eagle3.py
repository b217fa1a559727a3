"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer over the target's features and the newest token.

At text position t the head reads what the target's taps said there (fused by `fc`) and the embedding of the token at
t + 1, and says what stands at t + 2. Behind its own guess it reads, in place of features, its own output before.

Two formats are read: speculators' (`speculators_model_type: eagle3`; the layer a Llama's or a Qwen3's) and the original
one (a flat Llama configuration, the layer under `midlayer.`, `eagle_config` as NVIDIA and SpecForge write it). Readers
count taps differently: `eagle_aux_hidden_state_layer_ids` are layers that a state enters at a file's top level (vLLM,
speculators), and layers that it leaves within `eagle_config` (SGLang). What is not served is refused by name.
Written is speculators' format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from specwire.core.model import ModelError
from specwire.files import replaced_in
from specwire.lm.heads.files import CONFIG, ConfigKeys, Tensors, read_config
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
    rotations,
)
from specwire.lm.linear import LinearWeights, pack_rounded, weights_of
from specwire.lm.model_files import INDEX
from specwire.lm.plain_decoder import RmsNorm
from specwire.lm.runners.decoder import FedRows, Model

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
KIND = "eagle3"
LAYER = "layers.0."
ORIGINAL_LAYER = "midlayer."
FUSED = "fc.weight"
EMBEDDING = "embed_tokens.weight"
TAPS = 3
TAP_IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA, QWEN3 = LAYERS = ("llama", "qwen3")
# Tensors that say nothing more: the target's own, what `d2t` tells, and frequencies of the rotation.
NEEDLESS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", f"{LAYER}self_attn.rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """Shapes, and where readers of the format differ.

    taps: hidden states are those that enter these layers of the target, counted from 0.
    norm_before_residual: the residual stream begins with the normalised features. norm_before_fc: features are
    normalised before they are fused, all taps as one; fc_norm: each tap by itself. norm_output: the next step reads the
    output after its norm. head_norms: queries and keys are normalised, as Qwen3's.
    draft_vocabulary: ids that the head can say. target_hidden: width of a tap; None: `hidden`.
    rope: rotation of another kind than the default one, as transformers describes it; only the target's own is served.
    """

    draft_vocabulary: int
    taps: tuple[int, int, int]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    target_hidden: int | None = None
    fc_norm: bool = False
    head_norms: bool = False
    flat: bool = False
    rope: Mapping[str, Any] | None = None

    @property
    def fused(self) -> int:
        """Width of the taps side by side."""
        return TAPS * (self.target_hidden or self.hidden)

    @classmethod
    def read(cls, folder: Path, target_layers: int) -> Eagle3Config:
        """Of either format. Raises ModelError that names file and key."""
        whole = ConfigKeys(folder / CONFIG, read_config(folder))
        whole.only("speculators_model_type", KIND)
        layer = whole.object("transformer_layer_config") if "transformer_layer_config" in whole else whole
        nested = whole.object("eagle_config")
        if layer.whole_number("num_hidden_layers") != 1:
            raise layer.wrong(
                "num_hidden_layers", f"only heads of 1 layer are served, not {layer.any('num_hidden_layers')}"
            )
        _check_layer(layer)
        _check_nested(nested)

        def flag(key: str) -> bool:
            return (nested if key in nested else whole).flag(key)

        sizes, rope = layer_sizes(layer), _rope(layer)
        vocabulary = sizes["vocabulary"]
        config = cls(
            **sizes,
            draft_vocabulary=whole.whole_number("draft_vocab_size", vocabulary),
            taps=_taps(whole, nested, target_layers),
            theta=rope.number("rope_theta", layer.number("rope_theta", 10_000.0)),
            norm_before_residual=flag("norm_before_residual"),
            norm_before_fc=flag("norm_before_fc"),
            norm_output=flag("norm_output") or nested.flag("return_hidden_post_norm"),
            target_hidden=whole.whole_number("target_hidden_size") if "target_hidden_size" in whole else None,
            fc_norm=flag("fc_norm"),
            head_norms=layer.text("model_type", LLAMA) == QWEN3,
            flat=layer is whole,
            rope=_other_rope(layer, rope),
        )
        if config.norm_before_fc and config.fc_norm:
            raise whole.wrong("fc_norm", "cannot be beside norm_before_fc: only one of the two is served")
        if config.draft_vocabulary > vocabulary:
            raise whole.wrong("draft_vocab_size", f"must be at most vocab_size, {vocabulary}")
        if config.head_dim % 2:
            raise layer.wrong("head_dim", f"must be even, not {config.head_dim}")
        return config

    def written(self, verifier: str) -> dict[str, Any]:
        """As speculators has it. verifier: the target's name."""
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": KIND,
            "draft_vocab_size": self.draft_vocabulary,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "target_hidden_size": self.target_hidden,
            TAP_IDS: list(self.taps),
            "transformer_layer_config": {
                "model_type": QWEN3 if self.head_norms else LLAMA,
                "hidden_size": self.hidden,
                "intermediate_size": self.inner,
                "num_hidden_layers": 1,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.key_heads,
                "head_dim": self.head_dim,
                "vocab_size": self.vocabulary,
                "rms_norm_eps": self.eps,
                "rope_parameters": self.rope or {"rope_type": DEFAULT_ROPE, "rope_theta": self.theta},
            },
            "speculators_config": {
                "algorithm": KIND,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
            },
        }


def _taps(whole: ConfigKeys, nested: ConfigKeys, target_layers: int) -> tuple[int, int, int]:
    given = nested if TAP_IDS in nested else whole
    found = given.whole_numbers(TAP_IDS)
    if not found:  # vLLM takes an empty list likewise
        return default_taps(target_layers)
    left = int(given is nested)  # the stream that leaves a layer enters the next one
    if len(found) != TAPS or not all(0 <= tap + left <= target_layers for tap in found):
        layers = f"{0 - left} to {target_layers - left}"
        raise given.wrong(TAP_IDS, f"must be {TAPS} of the target's layers {layers}, not {short(found)}")
    early, middle, late = (tap + left for tap in found)
    return early, middle, late


def default_taps(layers: int) -> tuple[int, int, int]:
    """Those of EAGLE-3's own code for a target of so many layers. Of fewer than 7 these would not be three: then they
    are those behind the first layer, in the middle and before the last one.
    """
    return (2, layers // 2, layers - 3) if layers >= 7 else (min(1, layers), layers // 2, max(0, layers - 1))


def _check_layer(layer: ConfigKeys) -> None:
    """ModelError for a layer that is computed otherwise than a Llama's, or a Qwen3's."""
    kind = layer.text("model_type", LLAMA)
    if kind not in LAYERS:
        raise layer.wrong("model_type", f"only layers of {' and '.join(LAYERS)} are served, not {short(kind)}")
    layer.only("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "bias", "qkv_bias"):
        layer.only(key, False)
    layer.only("layer_types", ["full_attention"])


def _check_nested(nested: ConfigKeys) -> None:
    """ModelError for a head whose `eagle_config` says that it reads other things, or in another order."""
    for key in ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"):
        nested.only(key, True)
    for key in ("eh_proj_before_attn", "use_mtp_layernorm"):
        nested.only(key, False)
    nested.only("parallel_draft_step", 1)


def _rope(layer: ConfigKeys) -> ConfigKeys:
    """As transformers 5 has it, or those before; they may not contradict each other."""
    rope, before = layer.object("rope_parameters"), layer.object("rope_scaling")
    if not any(rope):
        return before
    if any(before) and _rope_kind(before) != _rope_kind(rope):
        raise layer.wrong("rope_scaling", f"is {_rope_kind(before)}, and rope_parameters are {_rope_kind(rope)}")
    return rope


def _rope_kind(rope: ConfigKeys) -> str:
    return rope.text("rope_type", rope.text("type", DEFAULT_ROPE))


def _other_rope(layer: ConfigKeys, rope: ConfigKeys) -> dict[str, Any] | None:
    """See `Eagle3Config.rope`."""
    rope.only("partial_rotary_factor", 1.0)
    for key in rope:
        if isinstance(rope.any(key), dict):
            raise rope.wrong(key, "only one rotation is served")
    kind = _rope_kind(rope)
    if kind == DEFAULT_ROPE:
        return None
    theta = rope.number("rope_theta", layer.number("rope_theta", 10_000.0))
    own = {key: rope.any(key) for key in rope if key not in ("type", "partial_rotary_factor")}
    return {**own, "rope_type": kind, "rope_theta": theta}


class KeysValues(NamedTuple):
    """(batch, key heads, length, head_dim) each."""

    keys: torch.Tensor
    values: torch.Tensor


class Eagle3(HeadLayer):
    """The head. Ids in and out are the target's, except those of `logits`, which are its own: `d2t` maps them.

    d2t[i]: what is to be added to its own id i. embed: the target's embedding, where the head brings none.
    """

    d2t: torch.Tensor

    def __init__(self, config: Eagle3Config, embed: torch.Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        if embed is None:
            self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        else:
            self.embed_tokens = nn.Embedding.from_pretrained(embed)
        self.fc = nn.Linear(config.fused, config.hidden, bias=False)
        self.input_norm = RmsNorm(config.fused, config.eps) if config.norm_before_fc else None
        parts = [RmsNorm(config.fused // TAPS, config.eps) for _ in range(TAPS)] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(parts)
        self.hidden_norm = RmsNorm(config.hidden, config.eps)
        self.add_layer(config, 2 * config.hidden, config.head_norms)
        self.lm_head = nn.Linear(config.hidden, config.draft_vocabulary, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocabulary, dtype=torch.int64))

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """(..., 3 target_hidden) features to (..., hidden)."""
        fused: torch.Tensor = Fuse(self)(taps)
        return fused

    def reads(self, features: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads of features and the tokens behind them, and the residual stream."""
        normed = self.hidden_norm(features)
        embedded = functional.embedding(tokens, self.embed_tokens.weight).to(features.dtype)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        return both, normed if self.config.norm_before_residual else features

    def fed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.post_attention_layernorm(hidden)
        out: torch.Tensor = hidden + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return out

    def target_ids(self, own: torch.Tensor) -> torch.Tensor:
        ids: torch.Tensor = own + self.d2t[own]
        return ids

    def split(self, x: torch.Tensor, heads: int, norm: nn.Module | None = None) -> torch.Tensor:
        parted: torch.Tensor = x.unflatten(-1, (heads, self.config.head_dim))
        return (parted if norm is None else norm(parted)).transpose(1, 2)


class Fuse(nn.Module):
    """`Eagle3.fuse` as a module, which holds nothing else of the head: a copy is made of it."""

    def __init__(self, head: Eagle3) -> None:
        super().__init__()
        self.input_norm, self.fc_norm, self.fc = head.input_norm, head.fc_norm, head.fc

    def forward(self, taps: torch.Tensor) -> torch.Tensor:
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if len(self.fc_norm):
            parts = taps.chunk(TAPS, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: torch.Tensor = self.fc(taps)
        return fused


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary positions (Su et al. 2021), halves as in Llama. x: (batch, heads, length, head_dim)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = positions.float()[:, None] * frequencies
    cos, sin = (torch.cat([part, part], -1).to(x.dtype) for part in (angles.cos(), angles.sin()))
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


# Over the slots of a target


class Eagle3Layer(HeadLayers):
    """norms: of the embedding, behind attention, before the output layer, of the state.

    fused_norms: (parts, width of each) of the taps before they are fused; no parts where they are not normalised.
    """

    def __init__(self, head: Eagle3, model: Model, cache: torch.Tensor) -> None:
        super().__init__(head.config.shape, model, cache)
        config = head.config
        self.normed_residual, self.normed_output = config.norm_before_residual, config.norm_output
        self.norms.append(head.hidden_norm.weight.detach())
        norms = [*head.fc_norm] if head.input_norm is None else [head.input_norm]
        weights = [norm.get_parameter("weight").detach() for norm in norms]
        self.fused_norms = torch.stack(weights) if weights else torch.empty(0, 0)
        self.fusing, (packed,) = pack_rounded([weights_of(head.fc)])
        self.fuse_weight, self.fuse_bias = packed

    def forward(
        self, states: torch.Tensor, tokens: list[int], fed: FedRows, first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last token of each feed leads to: states (feeds, hidden), and logits (feeds, draft vocabulary).

        states: (tokens, 3 target_hidden) of the target where `first`, else (tokens, hidden) of the step before; the one
        at a row is of the position before its token's.
        """
        if first:
            parts, width = self.fused_norms.size(0), self.fused_norms.size(1)
            if parts > 0:
                taps = functional.rms_norm(states.reshape(-1, parts, width), [width], None, self.epsilon)
                states = taps.mul_(self.fused_norms).view(states.size(0), -1)
            states = self.fusing(states, self.fuse_weight, self.fuse_bias)
        ids = torch.tensor(tokens, dtype=torch.long, device=states.device)
        normed = self._normed(3, states)
        both = torch.cat((self._normed(0, functional.embedding(ids, self.embedding)), normed), dim=-1)
        x = normed if self.normed_residual else states
        x = x + self._attention(0, both, fed, self._lines(fed))
        last = self._last(x + self._fed_forward(0, x), fed.counts)
        normed = self._normed(2, last)
        return normed if self.normed_output else last, self._multiply(4, normed)


class Eagle3Runner(LayerRunner):
    """A `Head`. served: ids from this one on are no tokens, and are not said."""

    def __init__(
        self,
        head: Eagle3,
        served: int,
        slots: int,
        context: int,
        dtype: torch.dtype,
        turns: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        """turns: rotations of another kind than the default one, see `runners.decoder.Model`. device: the target's."""
        config, head = head.config, head.to(device, dtype).eval()
        ids = head.target_ids(torch.arange(config.draft_vocabulary, device=device))
        said = ids < served
        output = LinearWeights(head.lm_head.weight.detach()[said], None)
        if turns is None:
            turns = rotations(context, config.head_dim, config.head_dim, config.theta)
        embedding, norm = head.embed_tokens.weight.detach(), head.norm.weight.detach()
        model = model_of(head, config, embedding, norm, output, turns)
        room = slots, context, dtype, device
        super().__init__(lambda cache: Eagle3Layer(head, model, cache), config, config.fused, ids[said], room)


# Files


def described(whole: Mapping[str, Any]) -> bool:
    """Whether a config.json says that it is of such a head."""
    return whole.get("speculators_model_type") == KIND or "draft_vocab_size" in whole


def names(config: Eagle3Config) -> dict[str, str]:
    """What a tensor of the module is called in speculators' files."""
    parts = PARTS | {"hidden_norm": "hidden_norm"} | (HEAD_NORMS if config.head_norms else {})
    layer = {part: f"{LAYER}{name}" for part, name in parts.items()}
    whole = ["embed_tokens", "fc", "norm", "lm_head", *["input_norm"] * config.norm_before_fc]
    whole += [f"fc_norm.{tap}" for tap in range(TAPS if config.fc_norm else 0)]
    return {f"{part}.weight": f"{name}.weight" for part, name in (layer | dict(zip(whole, whole, strict=True))).items()}


def shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Of the module's tensors, by their names there."""
    return config.parts(2 * config.hidden) | {
        EMBEDDING: (config.vocabulary, config.hidden),
        FUSED: (config.hidden, config.fused),
        "lm_head.weight": (config.draft_vocabulary, config.hidden),
        "hidden_norm.weight": (config.hidden,),
        "input_norm.weight": (config.fused,),
        **{f"fc_norm.{tap}.weight": (config.fused // TAPS,) for tap in range(TAPS)},
    }


def load(folder: Path, target_layers: int, embed: torch.Tensor) -> Eagle3:
    """Read a head of either format. embed: the target's embedding, for a head without one.

    Raises:
        ModelError: names file and key or tensor.
    """
    config, stored = Eagle3Config.read(folder, target_layers), _stored(folder)
    if config.flat:
        config = replace(config, head_norms=f"{LAYER}self_attn.q_norm.weight" in stored)
    needed, called = shapes(config), names(config)
    if EMBEDDING not in stored:
        own = called.pop(EMBEDDING)
        if embed.shape != needed[own]:
            raise stored.wrong(own, f"is not there, and the target's is {tuple(embed.shape)}, not {needed[own]}")
    known = {*called.values(), *NEEDLESS, EMBEDDING, "d2t"}
    stored.check_names(known, "an EAGLE-3 head as its config.json describes it")
    for own, name in called.items():
        stored.check(name, needed[own])
    state = {own: stored.weights(name, needed[own]) for own, name in called.items()}
    state.setdefault(EMBEDDING, embed)
    state["d2t"] = _offsets(stored, config)
    with torch.device("meta"):
        head = Eagle3(config, state[EMBEDDING])
    head.load_state_dict(state, assign=True)
    return head


def _stored(folder: Path) -> Tensors:
    readable = (folder / WEIGHTS).exists() or (folder / INDEX).exists()
    if not readable and (folder / PICKLED).exists():
        raise ModelError(f"{folder / PICKLED}: is a pickle, which is not read; docs/MODELS.md says how to convert it")
    return Tensors.of_folder(folder, lambda name: name.replace(ORIGINAL_LAYER, LAYER))


def _offsets(stored: Tensors, config: Eagle3Config) -> torch.Tensor:
    """`d2t`."""
    count, vocabulary = config.draft_vocabulary, config.vocabulary
    if "d2t" not in stored and count == vocabulary:
        return torch.zeros(count, dtype=torch.int64)
    if "d2t" not in stored:
        raise stored.wrong("d2t", f"is not there, and the head says {count} of {vocabulary} ids")
    offsets, own = stored.ids("d2t", count), torch.arange(count)
    # Compared like this, no sum can overflow.
    if bool(((offsets < -own) | (offsets >= vocabulary - own)).any()):
        raise stored.wrong("d2t", f"points beyond the vocabulary of {vocabulary}")
    return offsets


def save(head: Eagle3, folder: Path, verifier: str, *, with_embedding: bool = False) -> None:
    """Write it as speculators does, in the dtype that it has."""
    state: Mapping[str, torch.Tensor] = head.state_dict()
    stored = {name: state[own].contiguous() for own, name in names(head.config).items()}
    if not with_embedding:
        del stored["embed_tokens.weight"]
    said = torch.zeros(head.config.vocabulary, dtype=torch.bool)
    said[torch.arange(head.config.draft_vocabulary) + head.d2t.cpu()] = True
    with replaced_in(folder) as beside:
        save_file({**stored, "d2t": head.d2t.cpu(), "t2d": said}, beside / WEIGHTS, metadata={"format": "pt"})
        (beside / CONFIG).write_text(json.dumps(head.config.written(verifier), indent=1) + "\n")
