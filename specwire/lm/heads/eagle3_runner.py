"""An EAGLE-3 head over the slots of its target: one layer with a cache of its own, as one TorchScript call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from specwire.core.model import Feed
from specwire.lm.heads.eagle3 import Eagle3
from specwire.lm.heads.head import HeadStep, SteppedHead
from specwire.lm.heads.layer import HeadCache, HeadLayers, rotations
from specwire.lm.runners.decoder import AttentionBatch, DecoderShape, Layer, Model, compiled
from specwire.lm.runners.linear import LinearWeights, pack_rounded
from specwire.lm.runners.llama import fused, pairwise


class Eagle3Layer(HeadLayers):
    """One layer, which reads an embedding and a state beside it.

    norms: of the embedding, behind attention, before the output layer, of the state.
    fused_norms: (parts, width of each) of the taps before they are fused; no parts where they are not normalised.
    """

    def __init__(self, head: Eagle3, shape: DecoderShape, model: Model, cache: torch.Tensor) -> None:
        super().__init__(shape, model, cache)
        config = head.config
        self.normed_residual, self.normed_output = config.norm_before_residual, config.norm_output
        self.norms.append(head.hidden_norm.weight.detach())
        self.fused_norms = _fused_norms(head)
        self.fusing, (packed,) = pack_rounded([_linear(head.fc)])
        self.fuse_weight, self.fuse_bias = packed

    def forward(
        self,
        states: torch.Tensor,
        tokens: list[int],
        slots: list[int],
        starts: list[int],
        counts: list[int],
        batch: AttentionBatch,
        fuse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last token of each feed leads to: states (feeds, hidden), and logits (feeds, draft vocabulary).

        states: (tokens, 3 target_hidden) of the target where `fuse`, else (tokens, hidden) of the step before; the one
        at a row is of the position before its token's. The others are as in `Decoder.forward`.
        """
        if fuse:
            parts, width = self.fused_norms.size(0), self.fused_norms.size(1)
            if parts > 0:
                taps = functional.rms_norm(states.reshape(-1, parts, width), [width], None, self.epsilon)
                states = taps.mul_(self.fused_norms).view(states.size(0), -1)
            states = self.fusing(states, self.fuse_weight, self.fuse_bias)
        ids = torch.tensor(tokens, dtype=torch.long, device=states.device)
        normed = self._normed(3, states)
        both = torch.cat((self._normed(0, functional.embedding(ids, self.embedding)), normed), dim=-1)
        rotation = self._rotation(starts, counts)
        masks = self._masks(starts, counts, batch)
        x = normed if self.normed_residual else states
        x = x + self._attention(0, both, rotation, slots, starts, counts, masks, batch)
        last = self._last(x + self._fed_forward(0, x), counts)
        normed = self._normed(2, last)
        return normed if self.normed_output else last, self._multiply(4, normed)


class Eagle3Runner(HeadCache, SteppedHead):
    """A `Head`: EAGLE-3 over `slots` texts. served: ids from this one on are no tokens, and are not said."""

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
        config = head.config
        self.width = config.fused
        head = head.to(device, dtype).eval()
        ids = head.target_ids(torch.arange(config.draft_vocabulary, device=device))
        said = ids < served
        shape = DecoderShape(1, config.heads, config.key_heads, config.head_dim, config.eps)
        super().__init__(shape, slots, context, dtype, device)
        self._decode: Any = compiled(Eagle3Layer(head, shape, layer_of(head, said, context, turns), self.cache))
        self.target_ids = ids[said]

    def read(self, feeds: Sequence[Feed], features: torch.Tensor) -> HeadStep:
        return self._run(feeds, features, fuse=True)

    def follow(self, feeds: Sequence[Feed], states: torch.Tensor, depth: int) -> HeadStep:
        return self._run(feeds, states, fuse=False)

    def _run(self, feeds: Sequence[Feed], states: torch.Tensor, fuse: bool) -> HeadStep:
        return HeadStep(*self._decode(states.to(self.cache.dtype), *self.rows(feeds), fuse))


def _fused_norms(head: Eagle3) -> torch.Tensor:
    norms = [*head.fc_norm] if head.input_norm is None else [head.input_norm]
    weights = [norm.get_parameter("weight").detach() for norm in norms]
    return torch.stack(weights) if weights else torch.empty(0, 0)


def layer_of(head: Eagle3, said: torch.Tensor, context: int, turns: torch.Tensor | None) -> Model:
    """said: which of its ids it may say. turns: see `Eagle3Runner`."""
    config = head.config
    q, k = (pairwise(_linear(part), config.head_dim) for part in (head.q_proj, head.k_proj))
    layer = Layer(
        head.input_layernorm.weight.detach(),
        fused(q, k, _linear(head.v_proj)),
        _head_norm(head),
        _linear(head.o_proj),
        head.post_attention_layernorm.weight.detach(),
        fused(_linear(head.gate_proj), _linear(head.up_proj)),
        _linear(head.down_proj),
    )
    if turns is None:
        turns = rotations(context, config.head_dim, config.head_dim, config.theta)
    embedding, output = head.embed_tokens.weight.detach(), LinearWeights(head.lm_head.weight.detach()[said], None)
    return Model(embedding, [layer], head.norm.weight.detach(), output, turns.to(embedding.device))


def _head_norm(head: Eagle3) -> torch.Tensor | None:
    """See `Layer.head_norm`."""
    if head.q_norm is None or head.k_norm is None:
        return None
    config = head.config
    q, k = (
        pairwise(LinearWeights(norm.weight.detach().view(-1, 1), None), config.head_dim).weight.view(-1)
        for norm in (head.q_norm, head.k_norm)
    )
    return torch.cat((q.expand(config.heads, -1), k.expand(config.key_heads, -1)))


def _linear(layer: torch.nn.Linear) -> LinearWeights:
    return LinearWeights(layer.weight.detach(), None)
