"""An EAGLE-3 head by OpenVINO, beside a target that it computes too, whose graph tells the features fused.

A draft is a handful of very short forwards: as a graph of few operations one takes half of what TorchScript needs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from specwire.lm.heads.eagle3 import Eagle3
from specwire.lm.heads.eagle3_runner import layer_of
from specwire.lm.heads.openvino_steps import NEXT_STATES, STATES, OpenvinoHead
from specwire.lm.runners.decoder import DecoderShape, Model
from specwire.lm.runners.linear import LEAST_ROUNDED
from specwire.lm.runners.openvino.graph import (
    EXAMPLE,
    ROWS,
    Given,
    causal_mask,
    normed,
    paged,
    round_weights,
)
from specwire.lm.runners.openvino.runner import OpenvinoDecoder


class Eagle3Graph(OpenvinoDecoder):
    """The head's layer as a function of tensors, over the states that its rows read. Logits of chosen rows only.

    Of rows that are read for their keys and values alone nothing else is computed.
    """

    def __init__(self, head: Eagle3, shape: DecoderShape, model: Model) -> None:
        super().__init__(shape, model)
        hidden = head.config.hidden
        self.told = (NEXT_STATES,)
        self.given = (
            Given(STATES, torch.zeros(*EXAMPLE, hidden), (-1, -1, hidden)),
            Given(ROWS, torch.arange(EXAMPLE[0], dtype=torch.int32), (-1,)),
        )
        self._config = head.config
        self._state_norm = head.hidden_norm.weight.detach()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        beam_idx: torch.Tensor,
        *more: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        states, rows, *past = more
        model, (layer,) = self._model, self._model.layers
        keys, values = (each.index_select(0, beam_idx) for each in past)
        fed = normed(functional.embedding(input_ids, model.embedding), layer.attention_norm, self.epsilon)
        read = normed(states, self._state_norm, self.epsilon)
        query, key, value = self.projected(0, torch.cat((fed, read), dim=-1), *self.turns(position_ids))
        keys, values = torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)
        seen = self.attended(query, keys, values, causal_mask(attention_mask, input_ids.shape[1]))
        x = read if self._config.norm_before_residual else states
        x = self.fed_forward(layer, *(each.index_select(0, rows) for each in (x, seen)))
        last = normed(x, model.norm, self.epsilon)
        return functional.linear(last, *model.head), keys, values, last if self._config.norm_output else x


class Eagle3Openvino(OpenvinoHead):
    """A `Head`: EAGLE-3 over `slots` texts, whose features are fused already. Large weights are in 8 bits.

    Raises what OpenVINO raises for a graph that it cannot make.
    """

    def __init__(
        self, head: Eagle3, served: int, slots: int, context: int, dtype: torch.dtype, turns: torch.Tensor | None = None
    ) -> None:
        """The arguments are those of `Eagle3Runner`."""
        config, threads = head.config, torch.get_num_threads()
        head = head.float().eval()
        ids = head.target_ids(torch.arange(config.draft_vocabulary))
        shape = DecoderShape(1, config.heads, config.key_heads, config.head_dim, config.eps)
        step = paged(Eagle3Graph(head, shape, layer_of(head, ids < served, context, turns)))
        round_weights(step, LEAST_ROUNDED)
        super().__init__(step, ids[ids < served], config.hidden, slots, context, dtype, threads)
