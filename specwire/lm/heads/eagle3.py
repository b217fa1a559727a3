"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer over the target's features and the newest token.

At text position t the head reads what the target's taps said there (fused by `fc`) and the embedding of the token at
t + 1, and says what stands at t + 2. Behind its own guess it reads, in place of features, its own output before.

Two formats are read: speculators' (`speculators_model_type: eagle3`) and the original one (a flat Llama configuration,
the layer under `midlayer.`). Written is speculators'.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import silu

from specwire.core.model import ModelError
from specwire.lm.heads.files import CONFIG, read_config, read_tensors

WEIGHTS = "model.safetensors"
KIND = "eagle3"
LAYER = "layers.0."
ORIGINAL_LAYER = "midlayer."
FUSED = "fc.weight"
TAPS = 3


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Shapes, and where readers of the format differ.

    taps: hidden states are those that enter these layers of the target, counted from 0.
    norm_before_residual: the residual stream begins with the normalised features. norm_before_fc: features are
    normalised before they are fused. norm_output: the next step reads the output after its norm.
    draft_vocabulary: ids that the head can say. target_hidden: width of a tap; None: `hidden`.
    """

    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    draft_vocabulary: int
    taps: tuple[int, int, int]
    eps: float = 1e-6
    theta: float = 10_000.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    target_hidden: int | None = None

    @property
    def fused(self) -> int:
        """Width of the taps side by side."""
        return TAPS * (self.target_hidden or self.hidden)

    @classmethod
    def read(cls, folder: Path, target_layers: int) -> Eagle3Config:
        """Of either format. Raises ModelError that names file and key."""
        path, whole = folder / CONFIG, read_config(folder)
        layer = whole.get("transformer_layer_config", whole)

        def needed(key: str) -> int:
            if not isinstance(layer.get(key), int):
                raise ModelError(f"{path}: {key}: must be a whole number, not {layer.get(key)!r}")
            return int(layer[key])

        if needed("num_hidden_layers") != 1:
            raise ModelError(
                f"{path}: num_hidden_layers: only heads of 1 layer are served, not {needed('num_hidden_layers')}"
            )
        heads = needed("num_attention_heads")
        taps = whole.get("eagle_aux_hidden_state_layer_ids") or default_taps(target_layers)
        if len(taps) != TAPS or not all(isinstance(tap, int) and 0 <= tap <= target_layers for tap in taps):
            key = "eagle_aux_hidden_state_layer_ids"
            raise ModelError(f"{path}: {key}: must be {TAPS} of the target's layers 0 to {target_layers}, not {taps!r}")
        rope = layer.get("rope_parameters") or {}
        return cls(
            hidden=needed("hidden_size"),
            inner=needed("intermediate_size"),
            heads=heads,
            key_heads=int(layer.get("num_key_value_heads") or heads),
            head_dim=int(layer.get("head_dim") or needed("hidden_size") // heads),
            vocabulary=needed("vocab_size"),
            draft_vocabulary=int(whole.get("draft_vocab_size") or needed("vocab_size")),
            taps=tuple(taps),
            eps=float(layer.get("rms_norm_eps", 1e-6)),
            theta=float(rope.get("rope_theta") or layer.get("rope_theta") or 10_000.0),
            norm_before_residual=bool(whole.get("norm_before_residual", False)),
            norm_before_fc=bool(whole.get("norm_before_fc") or whole.get("fc_norm") or False),
            norm_output=bool(whole.get("norm_output", False)),
            target_hidden=whole.get("target_hidden_size"),
        )

    def written(self, verifier: str) -> dict[str, Any]:
        """As speculators has it. verifier: the target's name."""
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": KIND,
            "draft_vocab_size": self.draft_vocabulary,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "target_hidden_size": self.target_hidden,
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "transformer_layer_config": {
                "model_type": "llama",
                "hidden_size": self.hidden,
                "intermediate_size": self.inner,
                "num_hidden_layers": 1,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.key_heads,
                "head_dim": self.head_dim,
                "vocab_size": self.vocabulary,
                "rms_norm_eps": self.eps,
                "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            },
            "speculators_config": {
                "algorithm": KIND,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
            },
        }


def default_taps(layers: int) -> tuple[int, int, int]:
    """Those of EAGLE-3's own code for a target of so many layers."""
    return 2, layers // 2, layers - 3


class RmsNorm(nn.Module):
    """Root-mean-square normalisation (Zhang, Sennrich 2019), in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return (scaled.to(x.dtype) * self.weight).to(x.dtype)


class KeysValues(NamedTuple):
    """(batch, key heads, length, head_dim) each."""

    keys: torch.Tensor
    values: torch.Tensor


class Eagle3(nn.Module):
    """The head. Ids in and out are the target's, except those of `logits`, which are its own: `d2t` maps them.

    d2t[i]: what is to be added to its own id i. embed: the target's embedding, where the head brings none.
    """

    d2t: torch.Tensor

    def __init__(self, config: Eagle3Config, embed: torch.Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        both, queries, keys = 2 * config.hidden, config.heads * config.head_dim, config.key_heads * config.head_dim
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        if embed is not None:
            self.embed_tokens.weight = nn.Parameter(embed, requires_grad=False)
        self.fc = nn.Linear(config.fused, config.hidden, bias=False)
        self.fc_norm = RmsNorm(config.fused, config.eps) if config.norm_before_fc else None
        self.input_layernorm = RmsNorm(config.hidden, config.eps)
        self.hidden_norm = RmsNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.eps)
        self.q_proj = nn.Linear(both, queries, bias=False)
        self.k_proj = nn.Linear(both, keys, bias=False)
        self.v_proj = nn.Linear(both, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden, bias=False)
        self.gate_proj = nn.Linear(config.hidden, config.inner, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.inner, bias=False)
        self.down_proj = nn.Linear(config.inner, config.hidden, bias=False)
        self.norm = RmsNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.draft_vocabulary, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocabulary, dtype=torch.int64))

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """(..., 3 target_hidden) features to (..., hidden)."""
        fused: torch.Tensor = self.fc(taps if self.fc_norm is None else self.fc_norm(taps))
        return fused

    def step(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, before: Sequence[KeysValues] = ()
    ) -> tuple[torch.Tensor, KeysValues]:
        """One step for all places of texts at once, as in training-time test.

        features: (batch, length, hidden), fused, or what the step before returned. tokens: (batch, length), those that
        follow. positions: (length,), for rotation. before: of the steps before, the first of which has the text's.

        Returns (batch, length, hidden), what the next step reads, and this step's keys and values.
        """
        normed = self.hidden_norm(features)
        residual = normed if self.config.norm_before_residual else features
        both = torch.cat([self.input_layernorm(self.embed_tokens(tokens).to(features.dtype)), normed], dim=-1)
        own = KeysValues(
            rotated(self._split(self.k_proj(both), self.config.key_heads), positions, self.config.theta),
            self._split(self.v_proj(both), self.config.key_heads),
        )
        queries = rotated(self._split(self.q_proj(both), self.config.heads), positions, self.config.theta)
        hidden = residual + self.o_proj(self._joined(attended(queries, [*before, own])))
        normed = self.post_attention_layernorm(hidden)
        out: torch.Tensor = hidden + self.down_proj(silu(self.gate_proj(normed)) * self.up_proj(normed))
        return (self.norm(out) if self.config.norm_output else out), own

    def unrolled(self, tokens: torch.Tensor, taps: torch.Tensor, depth: int) -> Iterator[torch.Tensor]:
        """Logits of each step, (rows, places, draft vocabulary): place t reads taps at t and tokens from t + 1 on.

        tokens: (rows, length). taps: (rows, length, 3 target_hidden). Places are those of which all steps are within.
        """
        places = tokens.shape[1] - depth - 1
        features = self.fuse(taps[:, :places])
        before: list[KeysValues] = []
        for step in range(depth):
            positions = torch.arange(step, step + places, device=tokens.device)
            features, own = self.step(features, tokens[:, step + 1 : step + 1 + places], positions, before)
            before.append(own)
            yield self.logits(features)

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """(..., draft_vocabulary) of what a step returned."""
        found: torch.Tensor = self.lm_head(out if self.config.norm_output else self.norm(out))
        return found

    def target_ids(self, own: torch.Tensor) -> torch.Tensor:
        ids: torch.Tensor = own + self.d2t[own]
        return ids

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        parted: torch.Tensor = x.unflatten(-1, (heads, self.config.head_dim))
        return parted.transpose(1, 2)

    @staticmethod
    def _joined(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(-2)


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary positions (Su et al. 2021), halves as in Llama. x: (batch, heads, length, head_dim)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = positions.float()[:, None] * frequencies
    cos, sin = (torch.cat([part, part], -1).to(x.dtype) for part in (angles.cos(), angles.sin()))
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


def attended(queries: torch.Tensor, steps: Sequence[KeysValues]) -> torch.Tensor:
    """Of the first step a place sees the text up to itself, of each later one itself alone.

    queries: (batch, heads, length, head_dim).
    """
    share = queries.shape[1] // steps[0].keys.shape[1]
    wide = [KeysValues(*(part.repeat_interleave(share, 1) for part in step)) for step in steps]
    scale, length = queries.shape[-1] ** -0.5, queries.shape[2]
    text = (queries @ wide[0].keys.transpose(-1, -2)) * scale
    later = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
    text = text.masked_fill(later, float("-inf"))
    own = [(queries * step.keys).sum(-1, keepdim=True) * scale for step in wide[1:]]
    weights = torch.cat([text, *own], -1).float().softmax(-1).to(queries.dtype)
    found = weights[..., :length] @ wide[0].values
    for number, step in enumerate(wide[1:], length):
        found = found + weights[..., number : number + 1] * step.values
    return found


# Files


def described(whole: Mapping[str, Any]) -> bool:
    """Whether a config.json says that it is of such a head."""
    return whole.get("speculators_model_type") == KIND or "draft_vocab_size" in whole


def names(config: Eagle3Config) -> dict[str, str]:
    """What a tensor of the module is called in speculators' files."""
    attention = {part: f"{LAYER}self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")}
    mlp = {part: f"{LAYER}mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")}
    norms = {part: f"{LAYER}{part}" for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    whole = {part: part for part in ("embed_tokens", "fc", "norm", "lm_head")}
    fused = {"fc_norm": "input_norm"} if config.norm_before_fc else {}
    return {f"{part}.weight": f"{name}.weight" for part, name in (attention | mlp | norms | whole | fused).items()}


def load(folder: Path, target_layers: int, embed: torch.Tensor) -> Eagle3:
    """Read a head of either format. embed: the target's embedding, for a head without one.

    Raises:
        ModelError: names file and tensor.
    """
    config = Eagle3Config.read(folder, target_layers)
    path = folder / WEIGHTS
    stored = {name.replace(ORIGINAL_LAYER, LAYER): tensor for name, tensor in read_tensors(path).items()}
    head = Eagle3(config, None if "embed_tokens.weight" in stored else embed)
    state = head.state_dict()
    for own, name in names(config).items():
        if name in stored:
            if stored[name].shape != state[own].shape:
                raise ModelError(f"{path}: {name}: is {tuple(stored[name].shape)}, not {tuple(state[own].shape)}")
            state[own] = stored[name]
        elif own != "embed_tokens.weight":
            raise ModelError(f"{path}: {name}: is not there")
    if "d2t" in stored:
        state["d2t"] = stored["d2t"].long()
    elif config.draft_vocabulary != config.vocabulary:
        raise ModelError(
            f"{path}: d2t: is not there, and the head says {config.draft_vocabulary} of {config.vocabulary} ids"
        )
    ids = torch.arange(config.draft_vocabulary) + state["d2t"]
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocabulary:
        raise ModelError(f"{path}: d2t: points beyond the vocabulary of {config.vocabulary}")
    head.load_state_dict(state)
    return head


def save(head: Eagle3, folder: Path, verifier: str, *, with_embedding: bool = False) -> None:
    """Write it as speculators does, in the dtype that it has."""
    folder.mkdir(parents=True, exist_ok=True)
    state: Mapping[str, torch.Tensor] = head.state_dict()
    stored = {name: state[own].contiguous() for own, name in names(head.config).items()}
    if not with_embedding:
        del stored["embed_tokens.weight"]
    said = torch.zeros(head.config.vocabulary, dtype=torch.bool)
    said[torch.arange(head.config.draft_vocabulary) + head.d2t.cpu()] = True
    save_file({**stored, "d2t": head.d2t.cpu(), "t2d": said}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(head.config.written(verifier), indent=1) + "\n")
