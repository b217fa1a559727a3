"""A second runtime for CPUs: OpenVINO computes the forward, over pages of a cache that lies here."""

from __future__ import annotations

import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino
import torch
from openvino import opset13 as opset
from openvino._offline_transformations import (
    apply_make_stateful_transformation,
    apply_moc_transformations,
    paged_attention_transformation,
)
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from specwire.core.model import Feed
from specwire.lm.kv_cache import LineRunner
from specwire.lm.runners.decoder import DecoderShape, Layer, Model
from specwire.lm.runners.linear import LinearWeights, rounded
from specwire.lm.runners.llama import model_of, shape_of

# ----------------------------------------------------------------------------------------------------------------------
# A causal model as a function of tensors, its KV cache among them: the form in which a graph can be traced.


class Stateless(nn.Module):
    """Attention stays one operation, which runtimes recognise.

    Attributes:
        layers: number of layers; each has keys and values.
        heads, head_size: of keys and values.
        tapped: whether residual streams are told, too.
    """

    tapped = False
    layers: int
    heads: int
    head_size: int

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        beam_idx: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Logits of the new tokens, and the cache with them behind `past`.

        Args:
            input_ids, position_ids: (sessions, new tokens).
            attention_mask: (sessions, all tokens), 0 where there is padding.
            beam_idx: (sessions,), which row of `past` each session goes on from.
            past: of each layer in turn keys and values, (sessions, heads, positions, head_size).

        Behind them what is `tapped`, (sessions, new tokens, any), if something is.
        """
        ...


def causal_mask(attention_mask: torch.Tensor, new: int) -> torch.Tensor:
    """Additive (sessions, 1, new, all): of all tokens, the last `new` see those before them that are no padding."""
    whole = attention_mask.shape[1]
    at = torch.arange(whole)
    seen = (at <= at[whole - new :, None]) & (attention_mask[:, None, None, :] > 0)
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


# ----------------------------------------------------------------------------------------------------------------------
# A causal model as an OpenVINO graph, traced once with its KV cache as arguments.
#
# The usual converter reports usage statistics; the frontend below it, which is called here, does not.

TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")
ROWS = "rows"
TAPPED = "tapped"


@torch.inference_mode()
def stateful(stateless: Stateless) -> openvino.Model:
    """The graph (input_ids, attention_mask, position_ids, beam_idx) -> logits; its state is the cache.

    The weights, float32, are shared with the module.
    """
    with warnings.catch_warnings():  # tracing fixes Python's decisions, as is intended here
        warnings.simplefilter("ignore")
        frontend = FrontEndManager().load_by_framework("pytorch")
        decoder = TorchScriptPythonDecoder(stateless.eval(), example_input=_example(stateless))
        graph = openvino.Model(frontend.convert(frontend.load(decoder)))
    # What the converter does too; the pass that pages the cache needs the shapes that this finds.
    apply_moc_transformations(graph, cf=False, smart_reshape=True)
    past = [f"past.{index}" for index in range(2 * stateless.layers)]
    present = [f"present.{index}" for index in range(2 * stateless.layers)]
    for port, name in zip(graph.inputs, (*TEXT_INPUTS, *past), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape(_shape(stateless, name)))
    tapped = (TAPPED,) if stateless.tapped else ()
    for port, name in zip(graph.outputs, ("logits", *present, *tapped), strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, dict(zip(past, present, strict=True)))
    _start_empty(graph, stateless)
    return graph


def paged(stateless: Stateless) -> openvino.Model:
    """The graph over a cache in pages (blocks of positions) that the caller owns, logits of chosen rows only.

    Inputs beside the caches: the tokens of all sessions one behind the other (`input_ids`, `position_ids`), where each
    session's tokens begin (`subsequence_begins`), how much of it is cached (`past_lens`), its pages (`block_indices`,
    `block_indices_begins`), the longest text (`max_context_len`), and the tokens whose logits are wanted (`rows`).
    """
    graph = stateful(stateless)
    paged_attention_transformation(graph)
    _select_rows(graph)
    return graph


def round_weights(graph: openvino.Model) -> None:
    """Put integers and scales in the place of each product's weights, as OpenVINO recognises compressed ones."""
    for node in graph.get_ordered_ops():
        source = node.input_value(1).get_node() if node.get_type_name() == "MatMul" else None
        if source is None or source.get_type_name() != "Constant":
            continue
        integers, scale = rounded(torch.tensor(source.data))
        wide = opset.convert(opset.constant(integers.numpy(), dtype=openvino.Type.i8), "f32")
        node.input(1).replace_source_output(opset.multiply(wide, opset.constant(scale.numpy())).output(0))
    graph.validate_nodes_and_infer_types()


def _start_empty(graph: openvino.Model, stateless: Stateless) -> None:
    """Say what the cache is before the first token; the pass that pages the cache looks for this."""
    sessions = opset.gather(opset.shape_of(graph.input("input_ids"), "i64"), opset.constant([0]), opset.constant(0))
    rest = (opset.constant([size]) for size in (stateless.heads, 0, stateless.head_size))
    empty = opset.broadcast(opset.constant(0.0, dtype=openvino.Type.f32), opset.concat([sessions, *rest], axis=0))
    for operation in graph.get_ops():
        if operation.get_type_name() == "ReadValue":
            operation.set_arguments([empty])
    graph.validate_nodes_and_infer_types()


def _select_rows(graph: openvino.Model) -> None:
    """Put a selection of rows before the output layer, whose product is the largest of a forward."""
    rows = opset.parameter([-1], openvino.Type.i32, name=ROWS)
    rows.output(0).get_tensor().set_names({ROWS})
    node = graph.output("logits").get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    chosen = opset.gather(node.input_value(0), rows, opset.constant(0))
    node.input(0).replace_source_output(chosen.output(0))
    graph.add_parameters([rows])
    graph.validate_nodes_and_infer_types()


def _example(stateless: Stateless) -> tuple[torch.Tensor, ...]:
    """Inputs to trace with: two sessions, four new tokens behind three. A dimension of 1 would become a constant."""
    past = (torch.zeros(2, stateless.heads, 3, stateless.head_size) for _ in range(2 * stateless.layers))
    tokens, beams = torch.zeros(2, 4, dtype=torch.int64), torch.arange(2, dtype=torch.int32)
    # Positions are all 0, which the shortest context has too: values are not traced.
    return tokens, torch.ones(2, 7, dtype=torch.int64), tokens.clone(), beams, *past


def _shape(stateless: Stateless, name: str) -> list[int]:
    """-1: any."""
    if name == "beam_idx":
        return [-1]
    return [-1, -1] if name in TEXT_INPUTS else [-1, stateless.heads, -1, stateless.head_size]


# ----------------------------------------------------------------------------------------------------------------------
# The decoder of the Llama family in the form in which OpenVINO reads it: few operations, the cache as arguments.
#
# The weights are those of `runners.decoder`. Rotations are looked up by position, not computed: traced from the model's
# own modules, OpenVINO rounds the angles to bfloat16 before it takes their cosine, and far positions are lost.
# Each operation also costs when a step has another number of rows than the one before; here are half as many.


class OpenvinoDecoder(Stateless):
    """A model of the family, in float32, as a function of tensors."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: DecoderShape, model: Model, taps: Sequence[int] = ()) -> None:
        """taps: as `specwire.lm.runners.decoder.Decoder`."""
        super().__init__()
        self._taps, self.tapped = tuple(taps), len(taps) > 0
        self.layers, self.queries, self.heads, self.head_size, self.epsilon = shape
        angles = model.rotations
        # Signs of the rotation: (a, b) -> (a cos - b sin, b cos + a sin).
        self.register_buffer("cos", torch.cat((angles.real, angles.real), dim=-1))
        self.register_buffer("sin", torch.cat((-angles.imag, angles.imag), dim=-1))
        self._model = model
        self._qkv = [_in_halves(layer.qkv, shape) for layer in model.layers]
        self._head_norms = [_norms_in_halves(layer, shape) for layer in model.layers]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        beam_idx: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        held = [each.index_select(0, beam_idx) for each in past]
        mask = causal_mask(attention_mask, input_ids.shape[1])
        cos = functional.embedding(position_ids, self.cos).unsqueeze(2)
        sin = functional.embedding(position_ids, self.sin).unsqueeze(2)
        x = functional.embedding(input_ids, self._model.embedding)
        streams = [x]
        for index, layer in enumerate(self._model.layers):
            query, key, value = self._heads(index, self._normed(x, layer.attention_norm), cos, sin)
            for at, fresh in ((2 * index, key), (2 * index + 1, value)):
                held[at] = torch.cat((held[at], fresh), dim=2)
            seen = self._attended(query, held[2 * index], held[2 * index + 1], mask)
            x = x + functional.linear(seen, *layer.output)
            gate, up = functional.linear(self._normed(x, layer.mlp_norm), *layer.gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, *layer.down)
            streams.append(x)
        tapped = [torch.cat([streams[tap] for tap in self._taps], dim=-1)] if self._taps else []
        return functional.linear(self._normed(x, self._model.norm), *self._model.head), *held, *tapped

    def _heads(
        self, index: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values (sessions, heads, tokens, head_size); the first two turned by their positions."""
        size, turned = self.head_size, self.queries + self.heads
        both, value = functional.linear(x, *self._qkv[index]).split((turned * size, self.heads * size), dim=-1)
        both = both.view(*x.shape[:2], turned, size)
        norm = self._head_norms[index]
        if norm is not None:
            both = self._normed(both, norm)
        first, second = both.chunk(2, dim=-1)
        both = both * cos + torch.cat((second, first), dim=-1) * sin
        query, key = both.split((self.queries, self.heads), dim=2)
        value = value.view(*x.shape[:2], self.heads, size)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _attended(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """(sessions, tokens, queries x head_size). The paged operation undoes the repetition of keys and values."""
        key, value = (self._repeated(each) for each in (key, value))
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return seen.transpose(1, 2).reshape(query.shape[0], query.shape[2], self.queries * self.head_size)

    def _repeated(self, states: torch.Tensor) -> torch.Tensor:
        sessions, heads, positions, size = states.shape
        shape = (sessions, heads, self.queries // heads, positions, size)
        return states[:, :, None].expand(shape).reshape(sessions, self.queries, positions, size)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Spelt out, as OpenVINO recognises it."""
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


def _in_halves(qkv: LinearWeights, shape: DecoderShape) -> LinearWeights:
    """Rows of q and k reordered: dimensions that are rotated together lie half a head apart, not side by side."""
    order = _order(shape)
    return LinearWeights(qkv.weight[order], None if qkv.bias is None else qkv.bias[order])


def _norms_in_halves(layer: Layer, shape: DecoderShape) -> torch.Tensor | None:
    return None if layer.head_norm is None else layer.head_norm[:, _half_order(shape.head_dim)]


def _order(shape: DecoderShape) -> torch.Tensor:
    turned, values = shape.heads + shape.kv_heads, shape.kv_heads
    starts = torch.arange(turned) * shape.head_dim
    first = (starts[:, None] + _half_order(shape.head_dim)).reshape(-1)
    return torch.cat((first, torch.arange(turned * shape.head_dim, (turned + values) * shape.head_dim)))


def _half_order(head_dim: int) -> torch.Tensor:
    """Undoes the order of pairs."""
    return torch.arange(head_dim).view(-1, 2).t().reshape(-1)


# ----------------------------------------------------------------------------------------------------------------------
# A second runtime for CPUs: OpenVINO computes the forward, over pages of a cache that lies here.
#
# Its attention over pages takes for each session how much is cached and which pages hold it. So a slot is a fixed run
# of pages, a rollback is an integer, and a forward of many sessions copies no cache: keys and values are written in
# place.

DEVICE = "CPU"
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
CACHES = ("key_cache.", "value_cache.")

Numbers = npt.NDArray[np.int32] | npt.NDArray[np.int64]


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which this processor computes forwards, keys and values of a model in `dtype`.

    OpenVINO's attention over pages takes bfloat16 only where the processor has instructions for it. Elsewhere it is
    float32, which holds each bfloat16 weight exactly.
    """
    native = "BF16" in openvino.Core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
    return dtype if native else torch.float32


class OpenvinoRunner(LineRunner):
    """`Runner` with the weights of a Hugging Face model of MODEL_TYPES, which can be freed."""

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        context: int,
        vocabulary: int,
        dtype: torch.dtype,
        threads: int,
        int8: bool = False,
        taps: Sequence[int] = (),
    ) -> None:
        """Compute in `computed_in(dtype)` with the weights of a model that is in float32, rounded to 8 bits if `int8`.

        Raises Unsuited for a model that only looks like the family, and whatever OpenVINO raises for one that it cannot
        trace, page or compile.
        """
        shape = shape_of(model)
        decoder = OpenvinoDecoder(shape, model_of(model, shape, context, vocabulary), taps)
        self.tapped, self._taps = torch.empty(0), len(taps)
        graph = paged(decoder)
        if int8:
            round_weights(graph)
        compiled = openvino.Core().compile_model(graph, DEVICE, _options(computed_in(dtype), threads))
        self._request = compiled.create_infer_request()
        ports = [port for port in compiled.inputs if port.any_name.startswith(CACHES)]
        # Positions of a page, as this processor's kernels want it.
        self._page = int(ports[0].partial_shape[2].get_length())
        self._pages = -(-context // self._page)
        # One more than asked for: rows of padding are a session, too.
        self._padding = slots
        self._caches = [self._allocate(port, slots + 1) for port in ports]
        self._indices = np.arange((slots + 1) * self._pages, dtype=np.int32).reshape(slots + 1, self._pages)
        self._steady = SteadyRows(0)
        if context >= FEW:
            self._steady = SteadyRows(min(price_of_change(self._time), context))

    def _allocate(self, port: Any, slots: int) -> torch.Tensor:
        """The bytes of one layer's keys or values, zero, (slots x pages, heads, page, head_dim x size)."""
        shape = [slots * self._pages, *(port.partial_shape[axis].get_length() for axis in (1, 2, 3))]
        memory = torch.zeros(*shape[:3], shape[3] * port.element_type.size, dtype=torch.uint8)
        self._request.set_tensor(port, openvino.Tensor(memory.numpy(), openvino.Shape(shape), port.element_type))
        return memory

    def zero(self, slot: int, stop: int) -> None:
        """Zero at least [0, stop): whole pages."""
        for memory in self._caches:
            memory[self._pages_of(slot, stop)].zero_()

    def copy(self, source: int, target: int, stop: int) -> None:
        """Whole pages, so the last one may hold more than [0, stop)."""
        for memory in self._caches:
            memory[self._pages_of(target, stop)] = memory[self._pages_of(source, stop)]

    @property
    def kv_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._caches)

    def _pages_of(self, slot: int, stop: int) -> slice:
        first = slot * self._pages
        return slice(first, first - (-stop // self._page))

    def _time(self, rows: int) -> float:
        """Seconds of a forward of so many rows, on the slot of the padding."""
        began = time.perf_counter()
        self.run([Feed(self._padding, 0, [0] * rows, 1)])
        return time.perf_counter() - began

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        needed = sum(len(feed.tokens) for feed in feeds)
        spare = self._steady.rows(needed) - needed
        padding = [Feed(self._padding, 0, [0] * spare, 0)] if spare else []
        for name, numbers in self._inputs(feeds, padding):
            self._request.set_tensor(name, openvino.Tensor(numbers))
        self._request.infer()
        if self._taps:
            self.tapped = _copied(self._request.get_tensor(TAPPED))[:needed]
        return _copied(self._request.get_tensor("logits"))

    def _inputs(self, wanted: Sequence[Feed], padding: Sequence[Feed]) -> list[tuple[str, Numbers]]:
        """As the graph that `paged` makes takes them. The padding lies behind all rows that are wanted."""
        feeds = [*wanted, *padding]
        stops = [feed.stop for feed in feeds]
        ends = list(accumulate(len(feed.tokens) for feed in feeds))
        counts = [-(-stop // self._page) for stop in stops]
        rows = chain.from_iterable(
            range(end - max(feed.wanted, 1), end) for end, feed in zip(ends, wanted, strict=False)
        )
        pages = [self._indices[feed.slot, :count] for feed, count in zip(feeds, counts, strict=True)]
        tokens = chain.from_iterable(feed.tokens for feed in feeds)
        positions = chain.from_iterable(range(feed.start, feed.stop) for feed in feeds)
        return [
            ("input_ids", np.fromiter(tokens, np.int64, ends[-1])),
            ("position_ids", np.fromiter(positions, np.int64, ends[-1])),
            ("past_lens", _integers(feed.start for feed in feeds)),
            ("subsequence_begins", _integers([0, *ends])),
            ("block_indices", np.concatenate(pages)),
            ("block_indices_begins", _integers([0, *accumulate(counts)])),
            ("max_context_len", np.array(max(stops), np.int32)),
            (ROWS, _integers(rows)),
        ]


def _copied(output: openvino.Tensor) -> torch.Tensor:
    """(rows, any); the next forward overwrites what it is copied from."""
    values: npt.NDArray[np.float32] = output.data
    return torch.from_numpy(values.reshape(-1, values.shape[-1])).clone()


def _integers(values: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.array(list(values), np.int32)


def _options(dtype: torch.dtype, threads: int) -> dict[str, object]:
    """One forward at a time on so many threads, not pinned: other processes work on the same cores."""
    return {
        "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
        "KV_CACHE_PRECISION": PRECISIONS[dtype],
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        # Only weights are rounded: where these are integers it would round activations too.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }


# ----------------------------------------------------------------------------------------------------------------------
# How many rows a forward computes, where a change of the number of rows costs extra. A runtime that plans memory and
# kernels for the shapes that it meets has work to do when they change. A few rows of padding are then cheaper than a
# change.

# Rows of the two shapes that are timed, and how often each is.
ONE, FEW = 1, 5
TIMES = 4
# The price where rows seem to cost nothing. It is below the drop from the widest to the narrowest window that a
# verifier measures at start: V(1) must not be measured with the padding of the widest.
MOST_PRICE = 16
# Beyond so many rows a growth is to a multiple of it, where a change costs as much: with windows that come and go, a
# batch has another number of rows in every step.
GRAIN = 4


class SteadyRows:
    """Keeps to the last number of rows until padding has cost as much as a change would have.

    It then costs at most twice what the best choice in hindsight would have (renting until the price is paid), beside
    the grain of each growth. `price` is what a change costs, in rows.
    """

    def __init__(self, price: int) -> None:
        self.price = price
        self._rows = 0
        self._padded = 0

    def rows(self, needed: int) -> int:
        """Rows to compute, at least `needed`."""
        if needed > self._rows:
            self._rows, self._padded = self._grown(needed), 0
        self._padded = self._padded + self._rows - needed if needed < self._rows else 0
        if self._padded > self.price:
            self._rows, self._padded = needed, 0
        return self._rows

    def _grown(self, needed: int) -> int:
        return -(-needed // GRAIN) * GRAIN if needed > GRAIN <= self.price else needed


def price_of_change(time: Callable[[int], float]) -> int:
    """What a change of shape costs, in rows; `time` runs a forward of so many rows and returns its seconds.

    Minima of a few: other work of the machine can only add time.
    """
    changed: dict[int, list[float]] = {ONE: [], FEW: []}
    for _ in range(TIMES):
        for rows, seconds in changed.items():
            seconds.append(time(rows))
    steady = {rows: min(time(rows) for _ in range(TIMES)) for rows in (FEW, ONE)}
    change = min(min(changed[rows]) - steady[rows] for rows in steady)
    row = (steady[FEW] - steady[ONE]) / (FEW - ONE)
    if change <= 0:
        return 0
    return min(int(change / row), MOST_PRICE) if row > 0 else MOST_PRICE
