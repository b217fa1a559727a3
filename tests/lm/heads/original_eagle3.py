"""A reader of EAGLE-3's original files, written from the paper and from what the format's tensors are.

It shares nothing with `specwire.lm.heads.eagle3`: neither names, nor the reading of a config.json, nor a line of the
forward. It computes whole texts at once, as matrices with a mask, and keeps keys and values for what it drafts itself.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
IDS = "eagle_aux_hidden_state_layer_ids"
ATTENTION = ("midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight")


def original_of(folder: Path, out: Path, *, nested: bool = False) -> None:
    """A head in speculators' format as the original one has it. nested: ids of taps as SGLang counts them."""
    whole = json.loads((folder / "config.json").read_text())
    layer = dict(whole["transformer_layer_config"])
    # A flat configuration is as old as transformers 4.
    layer["rope_theta"] = layer.pop("rope_parameters")["rope_theta"]
    flags = {key: whole[key] for key in FLAGS if key in whole}
    flat = {**layer, "draft_vocab_size": whole["draft_vocab_size"]}
    if nested:
        flat["eagle_config"] = {**flags, IDS: [tap - 1 for tap in whole[IDS]]}
    else:
        flat |= {**flags, IDS: whole[IDS]}
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(flat))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(renamed, out / "model.safetensors")


class OriginalEagle3:
    """A head in a folder, float32. A row is of a state, the target's fused taps or its own last output, and the token
    that follows; `extend` puts rows behind those that it has. embed: the target's embedding, for a head without one.
    slower: positions turn by so many times less.
    """

    slower = 1

    def __init__(self, folder: Path, embed: torch.Tensor | None = None) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        if embed is not None:
            self.tensors.setdefault("embed_tokens.weight", embed)
        self.size: int = self.config["head_dim"]
        # In the paper's own code the residual is the state itself, and nothing else is normed before or behind the
        # layer; others' heads have flags for what is.
        self.flags = {**dict.fromkeys(FLAGS, False), **self.config, **self.config.get("eagle_config", {})}
        self.forget()

    def forget(self) -> None:
        """All rows."""
        self.keys = self.values = torch.empty(self.config["num_attention_heads"], 0, self.size)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """(rows, 3 width), low, middle and high features side by side, to (rows, width)."""
        if self.flags["norm_before_fc"]:
            taps = self._normed("input_norm", taps)
        if self.flags["fc_norm"]:
            taps = torch.cat([self._normed(f"fc_norm.{at}", part) for at, part in enumerate(taps.chunk(3, 1))], 1)
        return self._times("fc", taps)

    def extend(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """(rows, width) of the layer's output, which is what the head's own next row reads."""
        normed = self._normed("midlayer.hidden_norm", states)
        embedded = self._normed("midlayer.input_layernorm", self.tensors["embed_tokens.weight"][tokens])
        found = self._attention(torch.cat((embedded, normed), 1))
        states = normed if self.flags["norm_before_residual"] else states
        states = states + self._times("midlayer.self_attn.o_proj", found)
        inside = self._normed("midlayer.post_attention_layernorm", states)
        gate, up = self._times("midlayer.mlp.gate_proj", inside), self._times("midlayer.mlp.up_proj", inside)
        out = states + self._times("midlayer.mlp.down_proj", gate * gate.sigmoid() * up)
        return self._normed("norm", out) if self.flags["norm_output"] else out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """(rows, draft vocabulary)."""
        return self._times("lm_head", out if self.flags["norm_output"] else self._normed("norm", out))

    def target_ids(self, own: torch.Tensor) -> torch.Tensor:
        return own + self.tensors["d2t"][own]

    def draft(self, taps: torch.Tensor, text: list[int], depth: int) -> tuple[list[int], torch.Tensor]:
        """The best ids behind `text`, and logits, (depth, draft vocabulary). taps: of all but its last token."""
        self.forget()
        last = self.extend(self.fuse(taps), torch.tensor(text[1:]))[-1:]
        ids, logits = list[int](), [self.logits(last)]
        while True:
            ids.append(int(self.target_ids(logits[-1].argmax())))
            if len(ids) == depth:
                return ids, torch.cat(logits)
            last = self.extend(last, torch.tensor(ids[-1:]))
            logits.append(self.logits(last))

    def _attention(self, both: torch.Tensor) -> torch.Tensor:
        rows, before = len(both), self.keys.shape[1]
        queries, keys, values = (
            (both @ self.tensors[name].T).view(rows, -1, self.size).transpose(0, 1) for name in ATTENTION
        )
        if "midlayer.self_attn.q_norm.weight" in self.tensors:
            queries, keys = (
                self._normed(f"midlayer.self_attn.{name}_norm", part) for name, part in (("q", queries), ("k", keys))
            )
        share = len(queries) // len(keys)
        at = torch.arange(before, before + rows)
        self.keys = torch.cat((self.keys, self._turned(keys, at).repeat_interleave(share, 0)), 1)
        self.values = torch.cat((self.values, values.repeat_interleave(share, 0)), 1)
        scores = self._turned(queries, at) @ self.keys.transpose(1, 2) / math.sqrt(self.size)
        seen = torch.arange(before + rows) <= at[:, None]
        weights = torch.where(seen, scores, -math.inf).softmax(-1)
        return (weights @ self.values).transpose(0, 1).reshape(rows, -1)

    def _turned(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Numbers i and i + size / 2 of a head are one complex number, turned by at x theta^(-2i / size)."""
        half = self.size // 2
        angles = at[:, None] / self.slower * self.config["rope_theta"] ** (-2 * torch.arange(half) / self.size)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    def _times(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.tensors[f"{name}.weight"]
