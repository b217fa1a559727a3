"""An EAGLE-3 head over the slots of its target: one layer with a cache of its own, as one TorchScript call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from specwire.core.model import Feed
from specwire.lm.heads.eagle3 import Eagle3
from specwire.lm.heads.layer import HeadCache, HeadLayers, rotations
from specwire.lm.heads.slots import Step
from specwire.lm.runners.decoder import AttentionBatch, DecoderShape, Layer, Model, TreeRows, compiled
from specwire.lm.runners.linear import LinearWeights, pack_rounded
from specwire.lm.runners.llama import fused, pairwise


class Eagle3Layer(HeadLayers):
    """One layer, which reads an embedding and a state beside it.

    norms: of the embedding, behind attention, before the output layer, of the state.
    """

    def __init__(self, head: Eagle3, shape: DecoderShape, model: Model, cache: torch.Tensor) -> None:
        super().__init__(shape, model, cache)
        config = head.config
        self.normed_residual, self.normed_output = config.norm_before_residual, config.norm_output
        state_norm = head.hidden_norm.weight.detach()
        self.norms.append(self._scaled(state_norm))
        self.fused_norm = head.fc_norm.weight.detach() if head.fc_norm is not None else state_norm.new_empty(0)
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
        trees: TreeRows,
        fuse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last token of each feed leads to: states (feeds, hidden), and logits (feeds, draft vocabulary).

        states: (tokens, 3 target_hidden) of the target where `fuse`, else (tokens, hidden) of the step before; the one
        at a row is of the position before its token's. The others are as in `Decoder.forward`.
        """
        if fuse:
            if self.fused_norm.numel() > 0:
                states = functional.rms_norm(states, [states.size(-1)], self.fused_norm, self.epsilon)
            states = self.fusing(states, self.fuse_weight, self.fuse_bias)
        ids = torch.tensor(tokens, dtype=torch.long, device=states.device)
        normed = self._normed(3, states)
        both = torch.cat((self._normed(0, functional.embedding(ids, self.embedding)), normed), dim=-1)
        rotation = self._rotation(starts, counts, trees).unsqueeze(1)
        masks = self._masks(starts, counts, batch, trees)
        x = normed if self.normed_residual else states
        x = x + self._attention(0, both, rotation, slots, starts, counts, masks, batch)
        last = self._last(x + self._fed_forward(0, x), counts)
        normed = self._normed(2, last)
        return normed if self.normed_output else last, self._multiply(4, normed)


class Eagle3Runner(HeadCache):
    """A `Head`: EAGLE-3 over `slots` texts. served: ids from this one on are no tokens, and are not said."""

    def __init__(self, head: Eagle3, served: int, slots: int, context: int, dtype: torch.dtype) -> None:
        config = head.config
        ids = head.target_ids(torch.arange(config.draft_vocabulary))
        said = ids < served
        self.width = config.fused
        head = head.to(dtype).eval()
        shape = DecoderShape(1, config.heads, config.key_heads, config.head_dim, config.eps)
        super().__init__(shape, slots, context, dtype)
        self._decode: Any = compiled(Eagle3Layer(head, shape, _model(head, said, context), self.cache))
        self.target_ids = ids[said]

    def read(self, feeds: Sequence[Feed], features: torch.Tensor) -> Step:
        return self._run(feeds, features, fuse=True)

    def follow(self, feeds: Sequence[Feed], states: torch.Tensor, depth: int) -> Step:
        return self._run(feeds, states, fuse=False)

    def _run(self, feeds: Sequence[Feed], states: torch.Tensor, fuse: bool) -> Step:
        return Step(*self._decode(states.to(self.cache.dtype), *self.rows(feeds), fuse))


def _model(head: Eagle3, said: torch.Tensor, context: int) -> Model:
    """said: which of its ids it may say."""
    config = head.config
    q, k = (pairwise(_linear(part), config.head_dim) for part in (head.q_proj, head.k_proj))
    layer = Layer(
        head.input_layernorm.weight.detach(),
        fused(q, k, _linear(head.v_proj)),
        None,
        _linear(head.o_proj),
        head.post_attention_layernorm.weight.detach(),
        fused(_linear(head.gate_proj), _linear(head.up_proj)),
        _linear(head.down_proj),
    )
    turns = rotations(context, config.head_dim, config.head_dim, config.theta)
    embedding, output = head.embed_tokens.weight.detach(), LinearWeights(head.lm_head.weight.detach()[said], None)
    return Model(embedding, [layer], head.norm.weight.detach(), output, turns)


def _linear(layer: torch.nn.Linear) -> LinearWeights:
    return LinearWeights(layer.weight.detach(), None)
