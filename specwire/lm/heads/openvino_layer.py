"""Heads by OpenVINO, beside a target that it computes too: EAGLE-3, an MTP layer, Medusa and Hydra.

A draft is a handful of very short forwards: as a graph of few operations one takes half of what TorchScript needs.
The target's graph tells what a head's first product makes of its taps, not the taps (see `OpenvinoDecoder`); of
Medusa's, whose states are added as they are, what the target's last norm makes.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn
from torch.nn import functional

from specwire.lm.heads.eagle3 import Eagle3
from specwire.lm.heads.eagle3_runner import layer_of
from specwire.lm.heads.medusa import Medusa, MedusaRunner
from specwire.lm.heads.mtp import EmbeddingPart, Mtp, StatePart
from specwire.lm.heads.mtp_runner import Shared, model_of, placed
from specwire.lm.heads.openvino_steps import HEAD_DTYPE, NEXT_STATES, STATES, OpenvinoHead
from specwire.lm.rounding import GROUP
from specwire.lm.runners.decoder import DecoderShape, Model
from specwire.lm.runners.linear import LEAST_ROUNDED
from specwire.lm.runners.openvino.graph import (
    EXAMPLE,
    ROWS,
    CompiledGraph,
    Given,
    causal_mask,
    compile_options,
    name_ports,
    normed,
    round_weights,
    traced,
)
from specwire.lm.runners.openvino.runner import OpenvinoDecoder

# What a part of Medusa's heads computes.
TOLD = "told"


class LayerGraph(OpenvinoDecoder):
    """A head's layer as a function of tensors, over the states that its rows read. Logits of chosen rows only.

    Of rows that are read for their keys and values alone nothing else is computed.
    """

    def __init__(self, hidden: int, shape: DecoderShape, model: Model) -> None:
        super().__init__(shape, model)
        self.told = (NEXT_STATES,)
        self.given = (
            Given(STATES, torch.zeros(*EXAMPLE, hidden), (-1, -1, hidden)),
            Given(ROWS, torch.arange(EXAMPLE[0], dtype=torch.int32), (-1,)),
        )

    @abstractmethod
    def entered(self, embedded: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads of tokens and states, and the residual stream."""

    def seen(self, read: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """What is taken of what attention saw. read: what it had read."""
        return seen

    @abstractmethod
    def left(self, x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """What the next step reads of the stream behind the layer. last: likewise, behind the layer's last norm."""

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
        read, x = self.entered(functional.embedding(input_ids, model.embedding).float(), states)
        query, key, value = self.projected(0, read, *self.turns(position_ids))
        keys, values = torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)
        seen = self.attended(query, keys, values, causal_mask(attention_mask, input_ids.shape[1]))
        read, x, seen = (each.index_select(0, rows) for each in (read, x, seen))
        x = self.fed_forward(layer, x, self.seen(read, seen))
        last = normed(x, model.norm, self.epsilon)
        return functional.linear(last, *model.head), keys, values, self.left(x, last)


class Eagle3Graph(LayerGraph):
    """States are fused already."""

    def __init__(self, head: Eagle3, shape: DecoderShape, model: Model) -> None:
        super().__init__(head.config.hidden, shape, model)
        self._config = head.config
        self._state_norm = head.hidden_norm.weight.detach()

    def entered(self, embedded: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fed = normed(embedded, self._model.layers[0].attention_norm, self.epsilon)
        read = normed(states, self._state_norm, self.epsilon)
        return torch.cat((fed, read), dim=-1), read if self._config.norm_before_residual else states

    def left(self, x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return last if self._config.norm_output else x


class MtpGraph(LayerGraph):
    """States are what `StatePart` made of them: the end of a step, or of the target's forward, not the next one's.

    So rows that only keys and values are wanted of need one product fewer.
    """

    def __init__(self, mtp: Mtp, shape: DecoderShape, model: Model) -> None:
        super().__init__(mtp.config.hidden, shape, model)
        self._fused, self._state, self._gate = EmbeddingPart(mtp), StatePart(mtp), mtp.layer.gate

    def entered(self, embedded: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._fused(embedded) + states
        return normed(x, self._model.layers[0].attention_norm, self.epsilon), x

    def seen(self, read: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return seen if self._gate is None else seen * torch.sigmoid(functional.linear(read, *self._gate))

    def left(self, x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        told: torch.Tensor = self._state(last)
        return told


class Eagle3Openvino(OpenvinoHead):
    """A `Head`: EAGLE-3 over `slots` texts, whose features are fused already. Large weights are in 8 bits.

    Raises what OpenVINO raises for a graph that it cannot make.
    """

    def __init__(self, head: Eagle3, served: int, slots: int, context: int, turns: torch.Tensor | None = None) -> None:
        """The arguments are those of `Eagle3Runner`."""
        config, head = head.config, _widened(head)
        ids = head.target_ids(torch.arange(config.draft_vocabulary))
        shape = DecoderShape(1, config.heads, config.key_heads, config.head_dim, config.eps)
        graph = Eagle3Graph(head, shape, layer_of(head, ids < served, context, turns))
        super().__init__(graph, ids[ids < served], config.hidden, slots, context)


def _widened(head: Eagle3) -> Eagle3:
    """In float32, but for the embedding, which is as large as all the rest: rows of it are widened as they are read."""
    for part in head.children():
        if part is not head.embed_tokens:
            part.float()
    return head.eval()


class MtpOpenvino(OpenvinoHead):
    """A `Head`: an MTP layer over `slots` texts, whose features are what `mtp.told_of` has; else as EAGLE-3's."""

    def __init__(self, mtp: Mtp, shared: Shared, slots: int, context: int) -> None:
        """The arguments are those of `MtpRunner`."""
        config, mtp = mtp.config, placed(mtp, torch.float32, torch.device("cpu"))
        shape = DecoderShape(1, config.heads, config.key_heads, config.head_dim, config.eps)
        model = model_of(mtp, shared, torch.float32)._replace(norm=mtp.layer.norm)
        ids = torch.arange(len(shared.output.weight))
        super().__init__(MtpGraph(mtp, shape, model), ids, config.hidden, slots, context)


class MedusaOpenvino(MedusaRunner):
    """A `Head`: Medusa or Hydra, whose features are behind the target's last norm if they read there.

    Each head is a graph of its few products, of which PyTorch draws. An output layer that they share is a graph of its
    own: a compilation has its weights for itself. Large weights are in 8 bits.
    Raises what OpenVINO raises for a graph that it cannot make.
    """

    def __init__(self, heads: Medusa) -> None:
        """The heads' layers go over into the graphs."""
        for layers in (heads.blocks, heads.outputs):
            layers.float()
        super().__init__(heads.eval(), None, HEAD_DTYPE)
        config, self._graphs = heads.config, list[tuple[CompiledGraph, ...]]()
        shared = _compiled(_Output(heads), config.hidden) if config.shared else None
        for head, block in enumerate(heads.blocks):
            if shared is None:
                self._graphs.append((_compiled(_Logits(heads, head), config.width(head)),))
            else:
                self._graphs.append((_compiled(block, config.width(head)), shared))
        heads.blocks, heads.outputs = nn.ModuleList(), nn.ModuleList()

    def _logits(self, head: int, read: torch.Tensor) -> torch.Tensor:
        told = read.numpy()
        for graph in self._graphs[head]:
            graph.give(STATES, told)
            graph.request.infer(share_outputs=True)
            told = graph.request.get_tensor(TOLD).data
        return torch.from_numpy(told)


def _compiled(part: nn.Module, width: int) -> CompiledGraph:
    graph = traced(part, (torch.zeros(EXAMPLE[0], width),))
    name_ports(graph, [(STATES, (-1, width))], [TOLD])
    round_weights(graph, LEAST_ROUNDED)
    return CompiledGraph(graph, compile_options(HEAD_DTYPE, torch.get_num_threads(), GROUP))


class _Logits(nn.Module):
    """Of one head."""

    def __init__(self, heads: Medusa, head: int) -> None:
        super().__init__()
        self._heads, self._head = heads, head

    def forward(self, read: torch.Tensor) -> torch.Tensor:
        return self._heads.logits(self._head, read)


class _Output(nn.Module):
    """Of all heads."""

    def __init__(self, heads: Medusa) -> None:
        super().__init__()
        self._heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._heads.said(0, x)
