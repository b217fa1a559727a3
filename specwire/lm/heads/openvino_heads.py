"""Heads by OpenVINO, beside a target that it computes too: EAGLE-3, an MTP layer, Medusa and Hydra.

A draft is a handful of very short forwards: as a graph of few operations one takes half of what TorchScript needs.
The target's graph tells what a head's first product makes of its taps, not the taps (see `DecoderGraph`); of
Medusa's, whose states are added as they are, what the target's last norm makes (see `Apart`).

Steps of a layer choose what is said: between two of them hardly anything is done. All steps of a draft behind the first
run the same graph over the same memory. As one graph of all steps they took longer: each step's operations lie
elsewhere then, and a target's forward has left none of them in the caches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino
import torch
from openvino import Type
from openvino import opset13 as opset
from torch import nn

from specwire.core.draft import HeadRequest
from specwire.core.law.noise import gumbel
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed
from specwire.lm.guesses import CANDIDATES
from specwire.lm.heads.eagle3 import Eagle3
from specwire.lm.heads.layer import HeadLayer, LayerConfig, rotations
from specwire.lm.heads.medusa import Medusa, MedusaRunner
from specwire.lm.heads.mtp import Mtp
from specwire.lm.kv_cache import StoredSlots
from specwire.lm.linear import GROUP, LEAST_ROUNDED, LinearWeights
from specwire.lm.runners.decoder import Model
from specwire.lm.runners.openvino.graph import (
    CACHES,
    LOGITS,
    MOST_COPIED_BYTES,
    ROWS,
    CompiledGraph,
    Pages,
    SteadyRows,
    compile_options,
    constant_bytes,
    name_ports,
    round_weights,
    traced,
)
from specwire.lm.runners.openvino.runner import LayerGraph, named_input

# Inputs and outputs share one space of names.
STATES, NEXT_STATES = "states", "next_states"
TOKENS, SUMS = "tokens", "sums"
NOISE, SCALE, FILTERED, TOP_K, TOP_P = "noise", "scale", "filtered", "top_k", "top_p"

# What a part of Medusa's heads computes.
TOLD = "told"

HEAD_DTYPE = torch.float32
# What a change of shape costs a small head: of the rows that are read, in rows; of the texts, in texts.
ROW_PRICE, TEXT_PRICE = 12, 8
# Rows of padding with which the first step's graph goes on. With more of them another one does, which is not in the
# caches.
SPARE_ROWS = 6
# Tokens of a feed that are a sequence each. OpenVINO's attention over sequences of one token is the quicker one, as
# long as these are few.
FEW_TOKENS = 8

GREEDY = Sampling()
Node = Any
Floats = npt.NDArray[np.float32]


# ----------------------------------------------------------------------------------------------------------------------
# Layers as graphs.


class HeadGraph(LayerGraph):
    """`graph`: a head's layer over the states that its rows read, large weights in 8 bits. Logits of chosen rows only.

    Of rows that are read for their keys and values alone nothing else is computed. width: of a state.
    """

    def __init__(
        self,
        layer: HeadLayer,
        config: LayerConfig,
        embedding: torch.Tensor,
        output: LinearWeights,
        turns: torch.Tensor,
        turned: int | None = None,
    ) -> None:
        """The arguments are those of `layer.model_of`, but for its norm."""
        super().__init__(config.shape, turns, turned, LEAST_ROUNDED)
        self.width = config.hidden
        states = named_input(STATES, [-1, config.hidden], Type.f32)
        read, x = self.entered(self.looked_up(embedding, self.of_token("input_ids")), states)
        read, x, seen = (self.chosen(each) for each in (read, x, self.attended(0, layer, read)))
        x = opset.add(x, self.product(self.seen(read, seen), [layer.o_proj]))
        x = self.fed_forward(x, layer.post_attention_layernorm.weight, layer)
        last = self.normed(x, layer.norm.weight)
        self.graph = self.finished([(LOGITS, self.product(last, [output])), (NEXT_STATES, self.left(x, last))], states)

    @abstractmethod
    def entered(self, embedded: Node, states: Node) -> tuple[Node, Node]:
        """What attention reads of tokens and states, and the residual stream."""

    def seen(self, read: Node, seen: Node) -> Node:
        """What is taken of what attention saw. read: what it had read."""
        return seen

    @abstractmethod
    def left(self, x: Node, last: Node) -> Node:
        """What the next step reads of the stream behind the layer. last: likewise, behind the layer's last norm."""


class Eagle3Graph(HeadGraph):
    """States are fused already."""

    def __init__(self, head: Eagle3, output: LinearWeights, turns: torch.Tensor) -> None:
        self._head = head
        super().__init__(head, head.config, head.embed_tokens.weight.detach(), output, turns)

    def entered(self, embedded: Node, states: Node) -> tuple[Node, Node]:
        fed = self.normed(embedded, self._head.input_layernorm.weight)
        read = self.normed(states, self._head.hidden_norm.weight)
        return opset.concat([fed, read], axis=-1), read if self._head.config.norm_before_residual else states

    def left(self, x: Node, last: Node) -> Node:
        return last if self._head.config.norm_output else x


class MtpGraph(HeadGraph):
    """States are what `StatePart` made of them: the end of a step, or of the target's forward, not the next one's.

    So rows that only keys and values are wanted of need one product fewer.
    """

    def __init__(self, mtp: Mtp, target: Model) -> None:
        self._mtp = mtp
        super().__init__(mtp, mtp.config, target.embedding, target.head, target.rotations, mtp.config.turned)

    def entered(self, embedded: Node, states: Node) -> tuple[Node, Node]:
        own = LinearWeights(self._mtp.columns()[1], self._mtp.fuse.bias)
        x = opset.add(self.product(self.normed(embedded, self._mtp.embedding_norm.weight), [own]), states)
        return self.normed(x, self._mtp.input_layernorm.weight), x

    def seen(self, read: Node, seen: Node) -> Node:
        gate = self._mtp.gate
        return seen if gate is None else opset.multiply(seen, opset.sigmoid(self.product(read, [gate])))

    def left(self, x: Node, last: Node) -> Node:
        own = LinearWeights(self._mtp.columns()[0], None)
        return self.product(self.normed(last, self._mtp.state_norm.weight), [own])


# ----------------------------------------------------------------------------------------------------------------------
# What says tokens in place of logits.


def choosing(step: openvino.Model, target_ids: torch.Tensor) -> openvino.Model:
    """A step that says tokens in place of logits; `step` is changed.

    step: a `LayerGraph`'s, which tells LOGITS over the head's own ids and the STATES of its next step.
    target_ids: of each of its own ids the target's.

    Further inputs: NOISE (texts, own ids), SCALE, TOP_K, TOP_P (texts, 1), FILTERED (). Outputs: TOKENS, and SUMS of
    the logits (texts,), and NEXT_STATES.
    """
    noise = named_input(NOISE, [-1, len(target_ids)], Type.f32)
    scale, top_k, top_p = (named_input(name, [-1, 1], Type.f32) for name in (SCALE, TOP_K, TOP_P))
    filtered = named_input(FILTERED, [], Type.boolean)
    logits, states = (step.output(name).get_node().input_value(0) for name in (LOGITS, NEXT_STATES))
    scaled, none = opset.multiply(logits, scale), opset.constant(np.float32(-np.inf))
    inner = [opset.parameter([-1, size], Type.f32) for size in (len(target_ids), 1, 1)]
    least, every = (opset.result(node) for node in (_least_kept(*inner), opset.constant([[np.float32(-np.inf)]])))
    # What is read within the first body alone is not copied where nothing is filtered.
    choice = opset.if_op(filtered)
    choice.set_then_body(openvino.Model([least], inner, "filtered"))
    choice.set_else_body(openvino.Model([every], [], "whole"))
    for value, parameter in zip((scaled, top_k, top_p), inner, strict=True):
        choice.set_input(value.output(0), parameter, None)
    heard = opset.select(opset.less(scaled, choice.set_output(least, every)), none, opset.add(scaled, noise))
    loudest = opset.topk(heard, opset.constant(1), 1, "max", "none", index_element_type="i32").output(1)
    tokens = opset.gather(
        opset.constant(target_ids.numpy()), opset.squeeze(loudest, opset.constant([1])), opset.constant(0)
    )
    axis, results = opset.constant([1]), []
    told = ((TOKENS, tokens), (SUMS, opset.reduce_sum(logits, axis)), (NEXT_STATES, states))
    for name, value in told:
        results.append(opset.result(value))
        results[-1].input_value(0).get_tensor().set_names({name})
    return openvino.Model(results, [*step.get_parameters(), noise, scale, top_k, top_p, filtered], "step")


def _fix_shapes(graph: openvino.Model, rows: int, pages: Pages) -> None:
    """Change it to one for so many sequences of one token each, of which one is drawn."""
    sizes = {"subsequence_begins": rows + 1, "block_indices_begins": rows + 1, "block_indices": rows * pages.per_slot}
    sizes |= dict.fromkeys((ROWS, NOISE, SCALE, TOP_K, TOP_P), 1)
    shapes: dict[Any, openvino.PartialShape] = {}
    caches = iter(pages.tensors)
    for port in graph.inputs:
        shape = [*port.partial_shape]
        if port.any_name.startswith(CACHES):
            shapes[port] = openvino.PartialShape([*next(caches).shape])
        elif shape:
            rest = [size.get_length() if size.is_static else 1 for size in shape[1:]]
            shapes[port] = openvino.PartialShape([sizes.get(port.any_name, rows), *rest])
    graph.reshape(shapes)


def _least_kept(scaled: Node, top_k: Node, top_p: Node) -> Node:
    """The smallest score of each row that filters leave, (rows, 1). They apply in the target's order.

    top_k: CANDIDATES + 1 for none.
    """
    width = scaled.get_output_partial_shape(0)[1].get_length()
    most, axis, zero = min(CANDIDATES, width), opset.constant([1]), opset.constant(np.float32(0.0))
    scores = opset.topk(scaled, opset.constant(most), 1, "max", "value", index_element_type="i32").output(0)
    largest = opset.reduce_max(scores, axis, keep_dims=True)
    ranks = opset.constant(np.arange(most, dtype=np.float32)[None])
    within = opset.less(ranks, top_k)
    weights = opset.select(within, opset.exp(opset.subtract(scores, largest)), zero)
    every = opset.reduce_sum(opset.exp(opset.subtract(scaled, largest)), axis, keep_dims=True)
    limited = opset.less_equal(top_k, opset.constant(np.float32(CANDIDATES)))
    mass = opset.select(limited, opset.reduce_sum(weights, axis, keep_dims=True), every)
    before = opset.cum_sum(weights, opset.constant(1), exclusive=True)
    likely = opset.logical_or(opset.less(before, opset.multiply(mass, top_p)), opset.equal(ranks, zero))
    kept = opset.select(opset.logical_and(within, likely), scores, opset.constant(np.float32(np.inf)))
    return opset.reduce_min(kept, axis, keep_dims=True)


# ----------------------------------------------------------------------------------------------------------------------
# As it is run.


class _Step:
    """A compilation of the graph.

    texts: rows that are drawn, with padding. fixed: rows of one whose shapes are all fixed; 0 where they are not. loud:
    whether any noise is not 0.
    """

    def __init__(self, graph: CompiledGraph, row_price: int = 0, text_price: int = 0, fixed: int = 0) -> None:
        self.graph, self._rows, self._steady = graph, SteadyRows(row_price), SteadyRows(text_price)
        self.texts, self.fixed, self._loud = 0, fixed, False

    def rows(self, needed: int) -> int:
        """The rows to compute."""
        return self.fixed or self._rows.shape(needed)

    def choose(self, requests: Sequence[HeadRequest], own: int) -> None:
        """Say how the requests' tokens are chosen. own: how many ids the head has."""
        self.texts = self._steady.shape(len(requests))
        scale, top_k, top_p = (np.full((self.texts, 1), value, np.float32) for value in (1.0, CANDIDATES + 1, 1.0))
        filtered = False
        for row, sampling in enumerate(request.sampling for request in requests):
            if sampling.temperature > 0.0:
                scale[row] = 1.0 / sampling.temperature
                if sampling.top_p < 1.0 or sampling.top_k:
                    filtered, top_p[row] = True, sampling.top_p
                    top_k[row] = min(sampling.top_k or CANDIDATES + 1, CANDIDATES + 1)
        for name, values in ((SCALE, scale), (TOP_K, top_k), (TOP_P, top_p), (FILTERED, np.array(filtered))):
            self.graph.give(name, values)
        if self._loud or self.graph.held(NOISE).shape != (self.texts, own):
            self.graph.give(NOISE, np.zeros((self.texts, own), np.float32))
            self._loud = False

    def hear(self, requests: Sequence[HeadRequest], drafted: int, ids: npt.NDArray[np.int64]) -> None:
        """Give it the noise that the target will draw by, of the tokens behind so many."""
        for row, request in enumerate(requests):
            sampling = request.sampling
            if sampling.temperature > 0.0 and drafted < request.depth:
                position = len(request.tokens) + drafted
                self.graph.held(NOISE)[row] = gumbel(sampling.seed, sampling.choice, position, ids)
                self._loud = True

    def told(self, name: str, count: int) -> Any:
        """Of the first `count` texts; the next step overwrites it."""
        return self.graph.request.get_tensor(name).data[:count]


class OpenvinoHead(StoredSlots):
    """A `Head` whose step is a paged graph, in float32 with large weights in 8 bits.

    Products with weights that were rounded before round activations, too, where the processor has instructions for
    products of integers: guesses need not be exact. In bfloat16 the runtime would widen these weights, and take longer.

    Of a text that is alone all shapes are fixed, in a compilation of its own: a sixth of so short a forward would be
    the runtime's look at what may have another shape. Up to FEW_TOKENS rows cost it as much as one.
    """

    most_depth: int | None = None

    def __init__(self, step: HeadGraph, target_ids: torch.Tensor, slots: int, context: int) -> None:
        """target_ids: see `choosing`."""
        self.width, self._held = step.width, step.held
        self._ids, self._context, self._padding = target_ids.numpy(), context, slots
        graph, options = choosing(step.graph, target_ids), compile_options(HEAD_DTYPE, torch.get_num_threads(), GROUP)
        first = CompiledGraph(graph, options)
        self.store = Pages(first.caches, slots + 1, context)
        first.name_caches(self.store.tensors)
        self._alone: _Step | None = None
        if constant_bytes(graph) <= MOST_COPIED_BYTES:
            further = CompiledGraph(graph, options, self.store.tensors)
            self._first, self._further = (_Step(each, ROW_PRICE, TEXT_PRICE) for each in (first, further))
            _fix_shapes(graph, FEW_TOKENS, self.store)
            self._alone = _Step(CompiledGraph(graph, options, self.store.tensors), fixed=FEW_TOKENS)
        else:
            self._first = self._further = _Step(first)

    def read(self, feeds: Sequence[Feed], features: torch.Tensor) -> None:
        self._first.choose([HeadRequest(feed.slot, (), GREEDY, 1) for feed in feeds], len(self._ids))
        self._begin(self._first, feeds, features.numpy())

    def draft(
        self,
        feeds: Sequence[Feed],
        features: torch.Tensor,
        requests: Sequence[HeadRequest],
    ) -> list[list[int]]:
        """See `Head`. All texts are computed until the last one ends: another shape would take longer."""
        texts, deepest = len(feeds), max(request.depth for request in requests)
        alone = self._alone if texts == 1 else None
        step = alone if alone is not None and len(features) <= alone.fixed else self._first
        step.choose(requests, len(self._ids))
        step.hear(requests, 0, self._ids)
        rows = self._begin(step, feeds, features.numpy())
        tokens, sums = [step.told(TOKENS, texts).copy()], [step.told(SUMS, texts).copy()]
        if deepest > 1:
            states = step.told(NEXT_STATES, texts)
            if step is self._first and (alone is not None or rows - step.texts > SPARE_ROWS):
                step = self._further if alone is None else alone
                step.choose(requests, len(self._ids))
                rows = step.fixed or step.texts
                step.graph.give(STATES, np.zeros((rows, self.width), np.float32))
            behind = [
                Feed(feed.slot, feed.stop, [token], 1) for feed, token in zip(feeds, tokens[0].tolist(), strict=True)
            ]
            self._place(step, [*behind, *self._padded(rows - texts)], range(texts), deepest - 1)
            graph = step.graph
            fed, positions, past, read = (
                graph.held(name) for name in ("input_ids", "position_ids", "past_lens", STATES)
            )
            for drafted in range(1, deepest):
                if drafted > 1:
                    fed[:texts] = tokens[-1]
                    # A text that wants no more may be at the end of its slot.
                    np.minimum(positions[:texts] + 1, self._context - 1, out=positions[:texts])
                    past[:texts] = positions[:texts]
                read[:texts] = states
                step.hear(requests, drafted, self._ids)
                graph.request.infer(share_outputs=True)
                tokens.append(step.told(TOKENS, texts).copy())
                sums.append(step.told(SUMS, texts).copy())
                states = step.told(NEXT_STATES, texts)
        finite = np.isfinite(sums).cumprod(axis=0).sum(axis=0).tolist()
        drawn = np.stack(tokens, axis=1).tolist()
        return [each[: min(count, request.depth)] for each, count, request in zip(drawn, finite, requests, strict=True)]

    def _begin(self, step: _Step, feeds: Sequence[Feed], features: Floats) -> int:
        """Run the first step; returns its rows."""
        needed = len(features)
        rows = step.rows(needed)
        sequences = [*chain.from_iterable(map(_sequences, feeds)), *self._padded(rows - needed)]
        ends = accumulate(len(feed.tokens) for feed in feeds)
        self._place(step, sequences, [end - 1 for end in ends], 0)
        states = np.zeros((rows, self.width), np.float32)
        states[:needed] = features
        step.graph.give(STATES, states)
        step.graph.request.infer(share_outputs=True)
        return rows

    def _padded(self, count: int) -> list[Feed]:
        """Rows that nobody asks for."""
        return [Feed(self._padding, 0, [0], 0)] * count

    def _place(self, step: _Step, sequences: Sequence[Feed], drawn: Iterable[int], further: int) -> None:
        """Give the graph where its rows lie in the pages, and which are drawn.

        further: how many rows of each text will follow, for which pages are named, too.
        """
        give, size, per_slot = step.graph.give, self.store.size, self.store.per_slot
        rows = [*drawn]
        rows += [0] * (step.texts - len(rows))
        stops = [min(each.stop + further, self._context) for each in sequences]
        counts = [-(-stop // size) for stop in stops]
        pages = [
            range(each.slot * per_slot, each.slot * per_slot + count)
            for each, count in zip(sequences, counts, strict=True)
        ]
        positions = chain.from_iterable(range(each.start, each.stop) for each in sequences)
        give("input_ids", np.array([*chain.from_iterable(each.tokens for each in sequences)], np.int64))
        give("position_ids", np.array([*positions], np.int64))
        give("past_lens", np.array([each.start for each in sequences], np.int32))
        give("subsequence_begins", np.array([0, *accumulate(len(each.tokens) for each in sequences)], np.int32))
        unused = [0] * (step.fixed * per_slot - sum(counts))  # pages that no sequence has, where shapes are fixed
        give("block_indices", np.array([*chain.from_iterable(pages), *unused], np.int32))
        give("block_indices_begins", np.array([0, *accumulate(counts)], np.int32))
        give("max_context_len", np.array(max(stops), np.int32))
        give(ROWS, np.array(rows, np.int32))


def _sequences(feed: Feed) -> Sequence[Feed]:
    """See FEW_TOKENS. Each sees those before it in the same forward."""
    if not 1 < len(feed.tokens) <= FEW_TOKENS:
        return (feed,)
    return [Feed(feed.slot, at, (token,), 0) for at, token in enumerate(feed.tokens, feed.start)]


# ----------------------------------------------------------------------------------------------------------------------
# Heads.


class Eagle3Openvino(OpenvinoHead):
    """A `Head`: EAGLE-3 over `slots` texts, whose features are fused already.

    Raises what OpenVINO raises for a graph that it cannot make.
    """

    def __init__(self, head: Eagle3, served: int, slots: int, context: int, turns: torch.Tensor | None = None) -> None:
        """The arguments are those of `Eagle3Runner`."""
        config = head.config
        for part in head.children():
            if part is not head.embed_tokens:  # as large as all the rest: rows of it are widened as they are read
                part.float()
        ids = head.target_ids(torch.arange(config.draft_vocabulary))
        output = LinearWeights(head.lm_head.weight.detach()[ids < served], None)
        if turns is None:
            turns = rotations(context, config.head_dim, config.head_dim, config.theta)
        super().__init__(Eagle3Graph(head, output, turns), ids[ids < served], slots, context)


class MtpOpenvino(OpenvinoHead):
    """A `Head`: an MTP layer over `slots` texts, whose features are what `mtp.told_of` has; else as EAGLE-3's."""

    def __init__(self, mtp: Mtp, target: Model, slots: int, context: int) -> None:
        """The arguments are those of `MtpRunner`."""
        graph = MtpGraph(mtp.to("cpu", torch.float32), target)
        super().__init__(graph, torch.arange(len(target.head.weight)), slots, context)


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
        shared = _compiled(heads.outputs[0], config.hidden) if config.shared else None
        for head, block in enumerate(heads.blocks):
            if shared is None:
                self._graphs.append((_compiled(nn.Sequential(block, heads.outputs[head]), config.width(head)),))
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
    graph = traced(part, (torch.zeros(2, width),))
    name_ports(graph, [(STATES, (-1, width))], [TOLD])
    round_weights(graph, LEAST_ROUNDED)
    return CompiledGraph(graph, compile_options(HEAD_DTYPE, torch.get_num_threads(), GROUP))
