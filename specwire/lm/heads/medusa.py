"""Medusa (Cai et al. 2024, arXiv 2401.10774) and Hydra (Ankner et al. 2024, arXiv 2402.05109): a head for each step.

All heads read what the target says behind its last norm of text position t. Head k (from 1) says what stands at t+1+k:
residual layers x + silu(W x), and an output layer. Medusa's heads read nothing else. Hydra's head k reads the
embeddings of the k tokens at t+1 .. t+k too, side by side behind the state; its first layer is R x + silu(W x), which
has a matrix in the residual's place.

Blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115) is Medusa with an output layer that all heads share,
whose guesses are compared with the target's best ids: greedy sampling here.

Formats, each with a `config.json`:

- Medusa as its own code has it (FasterDecoding/Medusa: medusa/model/medusa_model.py, medusa/train/train_legacy.py):
  `medusa_num_heads`, `medusa_num_layers`; tensors `{head}.{layer}.linear.weight|bias` and `{head}.{layers}.weight`,
  under `medusa_head.` or not, counted from 0.
- Medusa as vLLM reads it (vllm/model_executor/models/medusa.py, vllm/transformers_utils/configs/medusa.py): also
  `num_heads`, `num_hidden_layers`; `medusa_fc_bias`, `original_lm_head`, `logit_scale`, `truncated_vocab_size`; tensors
  `blocks.{head}.layers.{layer}.weight|bias`, `lm_heads.{head}.weight` or one `lm_head.weight`, and `token_map`, the
  target's ids of a truncated vocabulary.
- Hydra as its own code has it (zankner/Hydra: hydra/model/hydra_model.py, hydra/model/hydra_heads/mlp_head.py):
  `hydra_num_heads`, `hydra_num_layers`, `hydra_head_arch` (only `mlp`), `grounded_heads` (whether embeddings are read),
  `hidden_state_offset` (so many layers earlier than the last, and then before any norm); tensors
  `hydra_mlp.{head}.{layer}.linear.weight|bias`, `hydra_mlp.{head}.0.res_connection.weight|bias` and
  `hydra_lm_head.{head}.weight|bias`.

Both projects' own code pickles its tensors (`medusa_lm_head.pt`, `hydra_lm_head.pt`). Only safetensors are read, of
the same names: `medusa_lm_head.safetensors` or `model.safetensors`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specwire.core.model import Feed, ModelError
from specwire.lm.heads.files import CONFIG, ConfigKeys, Tensors
from specwire.lm.heads.slots import HeadStep, SteppedHead
from specwire.lm.linear import LinearWeights, pack_rounded, weights_of

MEDUSA, HYDRA = "medusa", "hydra"
FILES = {MEDUSA: "medusa_lm_head", HYDRA: "hydra_lm_head"}
MODEL_FILE = "model.safetensors"
# Tensors that are read otherwise, and Hydra's copy of the target's embedding.
NEEDLESS = ("token_map", "input_embed_fn.weight")
# Names of output layers begin so.
OUTPUTS = "outputs."


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Which of the two a config.json is of; None for neither."""
    if "hydra_num_heads" in config:
        return HYDRA
    return MEDUSA if "medusa_num_heads" in config or config.get("model_type") == MEDUSA else None


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Shapes of heads of either kind.

    heads: how many tokens they guess. layers: of each. tap: of the target, see `specwire.lm.runners.decoder.Decoder`;
    normed: it is read behind the target's last norm. grounded: embeddings are read (Hydra's). bias, output_bias: of
    residual and output layers. shared: all heads have one output layer, named so or with equal weights.
    draft_vocabulary: ids that they can say. scale: of logits, which output layers have.
    """

    kind: str
    heads: int
    layers: int
    hidden: int
    vocabulary: int
    draft_vocabulary: int
    tap: int
    normed: bool = True
    grounded: bool = False
    bias: bool = True
    output_bias: bool = False
    shared: bool = False
    scale: float = 1.0

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.tap,)

    def width(self, head: int) -> int:
        """Of what 0-based `head` reads."""
        return self.hidden * (head + 2 if self.grounded else 1)


class ResidualLayer(nn.Module):
    """x + silu(W x), or R x + silu(W x) where that is narrower than x."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden, bias=bias)
        self.residual = nn.Linear(width, hidden) if width != hidden else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = x if self.residual is None else self.residual(x)
        return kept + functional.silu(self.linear(x))


class Medusa(nn.Module):
    """Heads of either kind. embed: the target's embedding. ids: of each id that they can say the target's."""

    embed: torch.Tensor
    ids: torch.Tensor

    def __init__(self, config: MedusaConfig, embed: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(
                    ResidualLayer(config.hidden if layer else config.width(head), config.hidden, config.bias)
                    for layer in range(config.layers)
                )
            )
            for head in range(config.heads)
        )
        self.outputs = nn.ModuleList(
            nn.Linear(config.hidden, config.draft_vocabulary, bias=config.output_bias)
            for _ in range(1 if config.shared else config.heads)
        )
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("ids", torch.arange(config.draft_vocabulary, device=embed.device), persistent=False)

    def reads(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What the next head reads, (..., width); states: what the last one has read, or the target's. tokens: (...)"""
        if not self.config.grounded:
            return states
        return torch.cat([states, functional.embedding(tokens, self.embed).to(states.dtype)], dim=-1)

    def logits(self, head: int, read: torch.Tensor) -> torch.Tensor:
        """(..., draft vocabulary) of what 0-based `head` reads."""
        found: torch.Tensor = self.outputs[0 if self.config.shared else head](self.blocks[head](read))
        return found


# Over the slots of a target


class PackedLayer(nn.Module):
    """A linear layer in the form that is quick here."""

    def __init__(self, product: nn.Module, layer: LinearWeights) -> None:
        super().__init__()
        self._product, self._layer = product, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._product(x, *self._layer)
        return y


class MedusaRunner(SteppedHead):
    """A `Head` of either kind. It keeps nothing of a text."""

    kv_bytes = 0
    most_depth: int | None

    def __init__(self, head: Medusa, norm: nn.Module | None, dtype: torch.dtype) -> None:
        """head: computes in `dtype`, see `packed`. norm: the target's last one, if it is still to be applied."""
        self.width, self.most_depth = head.config.hidden, head.config.heads
        self.target_ids = head.ids
        self._norm, self._dtype, self._head = deepcopy(norm), dtype, head

    def read(self, feeds: Sequence[Feed], features: torch.Tensor) -> HeadStep:
        ends = torch.tensor([len(feed.tokens) for feed in feeds], device=features.device).cumsum(0)
        states = features[ends - 1]
        if self._norm is not None:
            states = self._norm(states.to(next(self._norm.parameters()).dtype))
        return self._run(0, feeds, states.to(self._dtype))

    def follow(self, feeds: Sequence[Feed], states: torch.Tensor, depth: int) -> HeadStep:
        return self._run(depth, feeds, states)

    def _run(self, head: int, feeds: Sequence[Feed], states: torch.Tensor) -> HeadStep:
        tokens = torch.tensor([feed.tokens[-1] for feed in feeds], device=states.device)
        states = self._head.reads(states, tokens)
        return HeadStep(states, self._logits(head, states))

    def _logits(self, head: int, read: torch.Tensor) -> torch.Tensor:
        return self._head.logits(head, read)

    def zero(self, slot: int, stop: int) -> None:
        """There is nothing."""

    def copy(self, source: int, target: int, stop: int) -> None:
        """There is nothing."""


def packed(head: Medusa, dtype: torch.dtype) -> Medusa:
    """It itself beside its embedding, with layers that compute in `dtype`; large ones on a CPU are in 8 bits."""
    head = head.to(head.embed.device).eval()
    found = [
        (parent, name, child)
        for parent in head.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    cast = [child.to(dtype) for _, _, child in found]
    product, layers = pack_rounded([weights_of(child) for child in cast])
    for (parent, name, _), layer in zip(found, layers, strict=True):
        setattr(parent, name, PackedLayer(product, layer))
    return head


# Files


def load(folder: Path, config: Mapping[str, Any], layers: int, embed: torch.Tensor, served: int) -> Medusa:
    """Read heads of either kind.

    Args:
        config: of config.json in `folder`.
        layers, embed: the target's; what the file does not tell of its shapes is taken from there.
        served: ids from this one on are no tokens, and are not said.

    Raises:
        ModelError: names file and key or tensor.
    """
    kind = kind_of(config) or MEDUSA
    keys, path = ConfigKeys(folder / CONFIG, config), _weights(folder, kind)
    stored = Tensors.of_file(path, lambda name: name.removeprefix("medusa_head.").removeprefix("medusa_heads."))
    told = _hydra(keys, layers, embed) if kind == HYDRA else _medusa(keys, stored, layers, embed)
    ids = _ids(stored, told)
    said = ids < served
    state: dict[str, torch.Tensor] = {}
    known: set[str] = set()
    for own, name, shape in _parts(told, stored):
        known.add(name)
        if own.startswith(OUTPUTS):
            tensor = stored.weights(name, (len(ids), *shape), (told.vocabulary, *shape))
            tensor = (tensor[ids] if len(tensor) > len(ids) else tensor)[said]
            tensor = tensor if told.scale == 1.0 else tensor * told.scale
            first = state.setdefault(_first(own), tensor)
            state[own] = first if first.dtype == tensor.dtype and torch.equal(first, tensor) else tensor
        else:
            state[own] = stored.weights(name, shape)
    stored.check_names({*known, *NEEDLESS}, "the heads as config.json describes them")
    further = [own for own in state if own != _first(own)]
    shared = told.shared or (len(further) > 0 and all(state[own] is state[_first(own)] for own in further))
    for own in further if shared else ():
        del state[own]
    head = Medusa(replace(told, draft_vocabulary=int(said.sum()), shared=shared), embed)
    head.load_state_dict(state)
    head.ids.copy_(ids[said])
    return head


def _first(own: str) -> str:
    """Of an output layer's tensor the first head's; of any other itself."""
    return f"{OUTPUTS}0.{own.rpartition('.')[2]}" if own.startswith(OUTPUTS) else own


def _weights(folder: Path, kind: str) -> Path:
    named = folder / f"{FILES[kind]}.safetensors"
    if named.exists():
        return named
    pickled = folder / f"{FILES[kind]}.pt"
    if pickled.exists() and not (folder / MODEL_FILE).exists():
        raise ModelError(f"{pickled}: is a pickle, which is not read; write its tensors to {named.name}")
    return folder / MODEL_FILE


def _medusa(keys: ConfigKeys, stored: Tensors, layers: int, embed: torch.Tensor) -> MedusaConfig:
    vocabulary = keys.whole_number("vocab_size", len(embed))
    said = keys.whole_number("truncated_vocab_size", vocabulary)
    if said > vocabulary:
        raise keys.wrong("truncated_vocab_size", f"must be at most vocab_size, {vocabulary}, not {said}")
    # vLLM's reader takes any key with "num" and "heads", or "layers".
    heads, depth = (
        keys.whole_number(own if own in keys else other, default)
        for own, other, default in (("medusa_num_heads", "num_heads", 5), ("medusa_num_layers", "num_hidden_layers", 1))
    )
    return MedusaConfig(
        MEDUSA,
        max(heads, _stored_heads(stored)),
        depth,
        keys.whole_number("hidden_size", embed.shape[1]),
        vocabulary,
        said,
        tap=layers,
        bias=_original(stored) or keys.flag("medusa_fc_bias") or "blocks.0.layers.0.bias" in stored,
        shared=keys.flag("original_lm_head") or "lm_head.weight" in stored,
        scale=keys.number("logit_scale", 1.0),
    )


def _stored_heads(stored: Tensors) -> int:
    """Those of the file: Medusa's own code takes five, whatever a config.json says, where published ones say two."""
    heads = [re.match(r"(?:blocks\.)?(\d{1,4})\.", name) for name in stored]
    return max((int(head[1]) + 1 for head in heads if head is not None), default=0)


def _hydra(keys: ConfigKeys, layers: int, embed: torch.Tensor) -> MedusaConfig:
    keys.only("hydra_head_arch", "mlp")
    offset = keys.whole_number("hidden_state_offset", 0, least=0)
    if offset > layers:
        raise keys.wrong("hidden_state_offset", f"must be at most the target's {layers} layers, not {offset}")
    vocabulary = keys.whole_number("vocab_size", len(embed))
    return MedusaConfig(
        HYDRA,
        keys.whole_number("hydra_num_heads"),
        keys.whole_number("hydra_num_layers", 1),
        keys.whole_number("hidden_size", embed.shape[1]),
        vocabulary,
        vocabulary,
        tap=layers - offset,
        normed=offset == 0,
        grounded=keys.flag("grounded_heads"),
        output_bias=True,
    )


def _original(stored: Tensors) -> bool:
    """Whether names of tensors are those of Medusa's own code."""
    return "blocks.0.layers.0.weight" not in stored


def _ids(stored: Tensors, config: MedusaConfig) -> torch.Tensor:
    """The target's id of each that the file's heads can say."""
    if config.draft_vocabulary == config.vocabulary:
        return torch.arange(config.vocabulary)
    ids = stored.ids("token_map", config.draft_vocabulary)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocabulary:
        raise stored.wrong("token_map", f"points beyond the vocabulary of {config.vocabulary}")
    return ids


def _parts(config: MedusaConfig, stored: Tensors) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Of each tensor its name here, its name in the file, and its shape there, without the ids of output layers."""
    for head in range(config.heads):
        for layer in range(config.layers):
            width = config.hidden if layer else config.width(head)
            if config.kind == HYDRA:
                linear = f"hydra_mlp.{head}.{layer}.linear"
            elif _original(stored):
                linear = f"{head}.{layer}.linear"
            else:
                linear = f"blocks.{head}.layers.{layer}"
            yield f"blocks.{head}.{layer}.linear.weight", f"{linear}.weight", (config.hidden, width)
            if config.bias:
                yield f"blocks.{head}.{layer}.linear.bias", f"{linear}.bias", (config.hidden,)
            if width > config.hidden:
                residual = f"hydra_mlp.{head}.{layer}.res_connection"
                yield f"blocks.{head}.{layer}.residual.weight", f"{residual}.weight", (config.hidden, width)
                yield f"blocks.{head}.{layer}.residual.bias", f"{residual}.bias", (config.hidden,)
        if head == 0 or not config.shared:
            if config.kind == HYDRA:
                output = f"hydra_lm_head.{head}"
            elif f"{head}.{config.layers}.weight" in stored:
                output = f"{head}.{config.layers}"
            else:
                output = "lm_head" if config.shared and "lm_head.weight" in stored else f"lm_heads.{head}"
            yield f"{OUTPUTS}{head}.weight", f"{output}.weight", (config.hidden,)
            if config.output_bias:
                yield f"{OUTPUTS}{head}.bias", f"{output}.bias", ()
