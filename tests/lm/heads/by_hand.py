"""EAGLE-3 as a loop over rows, written from the paper, and heads of random weights that it is compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu
from transformers import PreTrainedModel

from specwire.lm.heads.eagle3 import Eagle3, Eagle3Config, save
from tests.lm import models

LAYERS = 6
OUTPUT = "lm_head.weight"
CONFIG = Eagle3Config(
    hidden=16,
    inner=24,
    heads=4,
    key_heads=2,
    head_dim=8,
    vocabulary=40,
    draft_vocabulary=20,
    taps=(1, 3, 5),
    theta=100.0,
)


def head_of(config: Eagle3Config, seed: int = 0) -> Eagle3:
    """With random weights; it says every second id."""
    torch.manual_seed(seed)
    head = Eagle3(config).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    own = torch.arange(config.draft_vocabulary)
    head.d2t.copy_(own * (config.vocabulary // config.draft_vocabulary) - own)
    return head


def nearly_bigram(folder: Path, context: int, words: dict[str, int] | None = None) -> tuple[str, str]:
    """Where a target is whose next token hangs on the last one mostly, and a head that knows nothing else."""
    made: Any = models.config("llama")
    made.eos_token_id, made.max_position_embeddings = None, context
    target = models.build(made, seed=3)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.05)
    where = models.save(target, folder / "target", words)
    width = made.hidden_size
    shape = replace(
        CONFIG,
        hidden=width,
        heads=2,
        key_heads=2,
        head_dim=width // 2,
        vocabulary=made.vocab_size,
        draft_vocabulary=made.vocab_size,
        taps=(0, 1, 2),
        norm_before_residual=True,
    )
    save(_of_last_token(shape, target), folder / "head", where, with_embedding=True)
    return where, str(folder / "head")


@torch.no_grad()
def _of_last_token(shape: Eagle3Config, target: PreTrainedModel) -> Eagle3:
    """Each row attends to itself, by its embedding, and adds that to nothing."""
    head, eye = Eagle3(shape).eval(), torch.eye(shape.hidden)
    for parameter in (head.fc.weight, head.hidden_norm.weight, head.down_proj.weight):
        parameter.zero_()
    for projection, scale in ((head.q_proj, 3.0), (head.k_proj, 3.0), (head.v_proj, 1.0)):
        projection.weight.zero_()
        projection.weight[:, : shape.hidden] = scale * eye
    head.o_proj.weight.copy_(eye)
    for own, name in ((head.embed_tokens, models.EMBEDDING), (head.norm, "model.norm.weight"), (head.lm_head, OUTPUT)):
        own.weight.copy_(target.get_parameter(name))
    return head


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def turned(x: torch.Tensor, position: float, theta: float) -> torch.Tensor:
    """One head's vector, by its position: dimension i with i + half."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-i / half))
        out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return out


class ByHand:
    """One row at a time. cache: keys and values, (heads, head_dim) each, of the rows that a new one sees.

    slower: positions turn by so many times less.
    """

    slower = 1

    def __init__(self, head: Eagle3) -> None:
        self.head, self.config = head, head.config
        self.cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Of one position."""
        head, c = self.head, self.config
        if c.norm_before_fc:
            taps = normed(taps, head.state_dict()["input_norm.weight"], c.eps)
        if c.fc_norm:
            width = len(taps) // 3
            parts = [taps[:width], taps[width : 2 * width], taps[2 * width :]]
            weights = [head.state_dict()[f"fc_norm.{tap}.weight"] for tap in range(3)]
            taps = torch.cat([normed(part, weight, c.eps) for part, weight in zip(parts, weights, strict=True)])
        return head.fc.weight @ taps

    def row(self, feature: torch.Tensor, token: int, position: int) -> torch.Tensor:
        head, c = self.head, self.config
        hidden = normed(feature, head.hidden_norm.weight, c.eps)
        residual = hidden if c.norm_before_residual else feature
        both = torch.cat([normed(head.embed_tokens.weight[token], head.input_layernorm.weight, c.eps), hidden])
        queries, keys, values = (
            (projection.weight @ both).view(-1, c.head_dim) for projection in (head.q_proj, head.k_proj, head.v_proj)
        )
        if c.head_norms:
            scales = [head.state_dict()[f"{part}.weight"] for part in ("q_norm", "k_norm")]
            queries, keys = (
                torch.stack([normed(one, scale, c.eps) for one in ones])
                for ones, scale in zip((queries, keys), scales, strict=True)
            )
        self.cache.append((torch.stack([turned(key, position / self.slower, c.theta) for key in keys]), values))
        found = []
        for index, query in enumerate(queries):
            query, own = turned(query, position / self.slower, c.theta), index * c.key_heads // c.heads
            scores = torch.stack([query @ key[own] for key, _ in self.cache]) / c.head_dim**0.5
            weights = scores.softmax(0)
            found.append(sum(weight * value[own] for weight, (_, value) in zip(weights, self.cache, strict=True)))
        x = residual + head.o_proj.weight @ torch.cat(found)
        inside = normed(x, head.post_attention_layernorm.weight, c.eps)
        x = x + head.down_proj.weight @ (silu(head.gate_proj.weight @ inside) * (head.up_proj.weight @ inside))
        return normed(x, head.norm.weight, c.eps) if c.norm_output else x

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        c = self.config
        return self.head.lm_head.weight @ (out if c.norm_output else normed(out, self.head.norm.weight, c.eps))

    def read(self, features: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """What the last row of a text leads to. features: (len(tokens) - 1, 3 target_hidden)."""
        rows = [self.row(self.fuse(each), tokens[at + 1], at) for at, each in enumerate(features)]
        return rows[-1]

    def draft(self, features: torch.Tensor, tokens: list[int], depth: int) -> list[int]:
        """The head's own best ids behind `tokens`, one after the other."""
        out = self.read(features, tokens)
        found: list[int] = []
        for position in range(len(features), len(features) + depth):
            best = self.logits(out).argmax()
            found.append(int(best + self.head.d2t[best]))
            out = self.row(out, found[-1], position)
        return found
