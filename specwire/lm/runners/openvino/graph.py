"""OpenVINO graphs over pages of a cache that lies here, as they are run: what the target and a head share."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino
import torch
from openvino import opset13 as opset
from openvino._offline_transformations import apply_moc_transformations
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from torch import nn

from specwire.core.messages import MOST_WINDOW
from specwire.core.model import Feed
from specwire.lm.kv_cache import forget, unused
from specwire.lm.linear import rounded_groups

# ----------------------------------------------------------------------------------------------------------------------
# Parts of graphs: functions of tensors that are traced, weights in 8 bits.
#
# The usual converter reports usage statistics; the frontend below it, which is called here, does not.

LOGITS = "logits"
ROWS = "rows"


@torch.inference_mode()
def traced(module: nn.Module, example: tuple[torch.Tensor, ...]) -> openvino.Model:
    """A function of tensors as a graph. The weights, float32, are shared with the module."""
    with warnings.catch_warnings():  # tracing fixes Python's decisions, as is intended here
        warnings.simplefilter("ignore")
        frontend = FrontEndManager().load_by_framework("pytorch")
        once = {"check_trace": False}  # traced again, to compare, it took twice as long
        decoder = TorchScriptPythonDecoder(module.eval(), example_input=example, trace_kwargs=once)
        graph = openvino.Model(frontend.convert(frontend.load(decoder)))
    # What the converter does too.
    apply_moc_transformations(graph, cf=False, smart_reshape=True)
    return graph


def name_ports(graph: openvino.Model, inputs: Sequence[tuple[str, Sequence[int]]], outputs: Sequence[str]) -> None:
    """Give inputs names and shapes, and outputs names, in their order."""
    for port, (name, shape) in zip(graph.inputs, inputs, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape(list(shape)))
    for port, name in zip(graph.outputs, outputs, strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()


def round_weights(graph: openvino.Model, least: int = 0) -> None:
    """Put integers and scales in the place of products' weights, as OpenVINO recognises compressed ones.

    least: weights of a product that is worth it.
    """
    for node in graph.get_ordered_ops():
        source = node.input_value(1).get_node() if node.get_type_name() == "MatMul" else None
        if source is None or source.get_type_name() != "Constant" or source.data.size < least:
            continue
        integers, scale = rounded_groups(torch.tensor(source.data))
        grouped = integers.unflatten(1, (scale.shape[1], -1)).numpy()
        weight = unrounded(opset.constant(grouped, dtype=openvino.Type.i8), scale)
        node.input(1).replace_source_output(weight.output(0))
    graph.validate_nodes_and_infer_types()


def unrounded(integers: Any, scale: torch.Tensor) -> Any:
    """A weight (out, in) in float32 of integers (out, groups, any) and scales (out, groups), as OpenVINO knows them."""
    groups = opset.multiply(opset.convert(integers, "f32"), opset.constant(scale.float()[:, :, None].numpy()))
    shape = np.array([scale.shape[0], -1], np.int64)
    return opset.reshape(groups, opset.constant(shape), special_zero=False)


# ----------------------------------------------------------------------------------------------------------------------
# Graphs as they are run.

DEVICE, CPU = "CPU", torch.device("cpu")
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
CACHES = ("key_cache.", "value_cache.")

Numbers = npt.NDArray[np.int32] | npt.NDArray[np.int64] | npt.NDArray[np.float32] | npt.NDArray[np.bool_]
NOTHING: npt.NDArray[np.float32] = np.zeros(0, np.float32)


@cache
def _openvino() -> openvino.Core:
    """OpenVINO in this process, for as long as it lives.

    Its CPU plugin gives the thread that first asks for it a stack for signals, and frees that stack when the last model
    is dropped, in whichever thread that is: the next signal then killed the process.
    """
    return openvino.Core()


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which this processor computes forwards, keys and values of a model in `dtype`.

    OpenVINO's attention over pages takes bfloat16 only where the processor has instructions for it. Elsewhere it is
    float32, which holds each bfloat16 weight exactly.
    """
    native = "BF16" in _openvino().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
    return dtype if native else torch.float32


def compile_options(dtype: torch.dtype, threads: int, group: int = 0) -> dict[str, object]:
    """One forward at a time on so many threads, not pinned: other processes work on the same cores.

    group: as `PagedGraph`.
    """
    return {
        "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
        "KV_CACHE_PRECISION": PRECISIONS[dtype],
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        # Unless told it would round activations of products whose weights are integers.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
    }


class CompiledGraph:
    """One compilation of a graph. It keeps its last inputs: a forward of the same shape is given only what changed.

    steady: how many rows it computes; as many as are needed, until a price is set.
    """

    def __init__(self, graph: openvino.Model, options: Mapping[str, object], caches: Sequence[Any] = ()) -> None:
        """caches: tensors, see `name_caches`; they may be named later."""
        compiled = _openvino().compile_model(graph, DEVICE, options)
        self.caches = [port for port in compiled.inputs if port.any_name.startswith(CACHES)]
        self.request = compiled.create_infer_request()
        self.steady = SteadyRows(0)
        self.layout: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self.counts: list[int] = []
        self._given: dict[str, Numbers] = {}
        if caches:
            self.name_caches(caches)

    def name_caches(self, tensors: Sequence[Any]) -> None:
        """Let it read and write keys and values there."""
        for port, tensor in zip(self.caches, tensors, strict=True):
            self.request.set_tensor(port, tensor)

    def give(self, name: str, numbers: Numbers) -> None:
        """Into the memory of the last forward where the shape is the same: it takes time to name new memory."""
        held = self._given.get(name)
        if held is not None and held.shape == numbers.shape:
            np.copyto(held, numbers)
            return
        self._given[name] = fresh = numbers.copy()
        self.request.set_tensor(name, openvino.Tensor(fresh, shared_memory=True))

    def held(self, name: str) -> npt.NDArray[Any]:
        """What was given last, to be changed where it lies; nothing if nothing was."""
        return self._given.get(name, NOTHING)


class Pages:
    """Keys and values of so many slots: each slot is a fixed run of pages of caches that lie here.

    tensors: the caches as graphs take them. per_slot: pages of a slot, of `size` positions each.
    """

    def __init__(self, ports: Sequence[Any], slots: int, context: int) -> None:
        """ports: of a graph's caches. A page is as long as this processor's kernels want it."""
        self.size = int(ports[0].partial_shape[2].get_length())
        self.per_slot = -(-context // self.size)
        allocated = [self._allocate(port, slots) for port in ports]
        self._caches, self.tensors = [memory for memory, _ in allocated], [tensor for _, tensor in allocated]

    def _allocate(self, port: Any, slots: int) -> tuple[torch.Tensor, Any]:
        """One layer's keys or values, zero: (slots x pages, heads, page, head_dim x size) bytes, and as a tensor."""
        shape = [slots * self.per_slot, *(port.partial_shape[axis].get_length() for axis in (1, 2, 3))]
        memory = unused([*shape[:3], shape[3] * port.element_type.size], torch.uint8, CPU)
        return memory, openvino.Tensor(memory.numpy(), openvino.Shape(shape), port.element_type)

    def zero(self, slot: int, stop: int) -> None:
        """Zero at least [0, stop): whole pages."""
        for memory in self._caches:
            forget(memory[self._up_to(slot, stop)])

    def copy(self, source: int, target: int, stop: int) -> None:
        """Whole pages, so the last one may hold more than [0, stop)."""
        for memory in self._caches:
            memory[self._up_to(target, stop)] = memory[self._up_to(source, stop)]

    @property
    def kv_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._caches)

    def _up_to(self, slot: int, stop: int) -> slice:
        first = slot * self.per_slot
        return slice(first, first - (-stop // self.size))


def prompt_part(feed: Feed) -> int:
    """How many of a feed's tokens are computed together: those that are no rows. All tokens of a window are rows."""
    window = feed.wanted == len(feed.tokens) <= MOST_WINDOW + 1
    return 0 if window else len(feed.tokens) - feed.rows


def in_sequences(feed: Feed) -> Iterator[Feed]:
    """A feed's tokens as sequences of attention: a prompt's together, since one by one they would take longer, or rows,
    each alone. Each row sees those before it in the forward; a sequence of several tokens is not seen by another.
    """
    if prompt_part(feed) > 1:
        yield feed
        return
    for at, token in enumerate(feed.tokens, feed.start):
        yield Feed(feed.slot, at, (token,), 1)


class PagedGraph:
    """A graph of a `LayerGraph`, over slots.

    Inputs beside the caches: the tokens of all sessions one behind the other (`input_ids`, `position_ids`), where each
    session's tokens begin (`subsequence_begins`), how much of it is cached (`past_lens`), its pages (`block_indices`,
    `block_indices_begins`), the longest text (`max_context_len`), and the tokens whose logits are wanted (`rows`).

    Its attention over pages takes for each session how much is cached and which pages hold it. So a slot is a fixed run
    of pages, a rollback is an integer, and a forward of many sessions copies no cache: keys and values are written in
    place. Rows of padding are a session of their own, behind all rows that are wanted.

    A row of a window has the logits of a plain step, bit for bit, whoever shares the forward: each token of a window is
    a sequence of its own over its session's pages, and there are at least as many sequences as threads, some of them
    empty. With fewer the runtime's attention divides a row's keys and values among threads, and with several tokens in
    one sequence it packs them anew; either adds in another order. (Weights in 8 bits whose products are of floats are
    multiplied otherwise in forwards of several rows, so that this does not hold for them.)

    A small graph is compiled twice, over the same caches: for plain steps, and for windows and prompts. One of those
    between two plain steps would change the shape twice, which takes SmolLM2 some 4 ms each time (a plain step of it
    14), or have the steps behind it padded. So drafting makes no plain step longer; none is padded.
    """

    def __init__(
        self,
        graph: openvino.Model,
        slots: int,
        context: int,
        dtype: torch.dtype,
        threads: int,
        group: int = 0,
    ) -> None:
        """group: activations that share a scale where their product's weights are integers; 0 rounds none."""
        options = compile_options(computed_in(dtype), threads, group)
        self._compiled = CompiledGraph(graph, options)
        self._padding, self._threads = slots, threads
        self.pages = Pages(self._compiled.caches, slots + 1, context)
        tensors, total = self.pages.tensors, (slots + 1) * self.pages.per_slot
        self._compiled.name_caches(tensors)
        self._indices = np.arange(total, dtype=np.int32).reshape(slots + 1, self.pages.per_slot)
        self._wide = self._plain = self._compiled
        if context < FEW:
            return
        self._wide.steady = SteadyRows(min(price_of_change(self._time), context))
        if constant_bytes(graph) <= MOST_COPIED_BYTES:
            self._plain = CompiledGraph(graph, options, tensors)

    def _time(self, rows: int) -> float:
        """Seconds of a forward of so many rows, on the slot of the padding."""
        began = time.perf_counter()
        self.run([Feed(self._padding, 0, [0] * rows, rows)])
        return time.perf_counter() - began

    def run(self, feeds: Sequence[Feed]) -> int:
        """Returns how many tokens were fed."""
        needed = sum(len(feed.tokens) for feed in feeds)
        sequences = feeds
        if any(len(feed.tokens) > 1 for feed in feeds):
            sequences = [*chain.from_iterable(map(in_sequences, feeds))]
        self._compiled = self._plain if needed == len(feeds) else self._wide
        rows = self._compiled.steady.shape(needed)
        spare = rows - needed
        padding = [Feed(self._padding, 0, [0] * spare, 0)] if spare else []
        empty = [Feed(self._padding, 0, (), 0)] * (self._threads - len(sequences) - len(padding))
        self._place([*sequences, *padding, *empty], feeds)
        # What is told is read by name, so no copy of all of it is made here.
        self._compiled.request.infer(share_outputs=True)
        return needed

    def told(self, name: str) -> torch.Tensor:
        """(rows, any) of the last forward, in memory that the next one overwrites."""
        values: npt.NDArray[np.float32] = self._compiled.request.get_tensor(name).data
        return torch.from_numpy(values.reshape(-1, values.shape[-1]))

    def _place(self, sequences: Sequence[Feed], feeds: Sequence[Feed]) -> None:
        """Give the graph where the sequences' tokens lie in its pages. Logits are wanted of the feeds' tokens: they are
        the first ones.

        Often the same sessions are fed as many tokens as before: then only the positions change.
        """
        compiled, give, stops = self._compiled, self._compiled.give, [each.stop for each in sequences]
        asked = [(len(feed.tokens), feed.wanted) for feed in feeds]
        layout = [(each.slot, len(each.tokens)) for each in sequences], asked
        counts = [-(-stop // self.pages.size) for stop in stops]
        if layout != compiled.layout:
            ends = accumulate(len(feed.tokens) for feed in feeds)
            rows = [range(end - max(feed.wanted, 1), end) for end, feed in zip(ends, feeds, strict=True)]
            give("subsequence_begins", np.array([0, *accumulate(len(each.tokens) for each in sequences)], np.int32))
            give(ROWS, np.array([*chain.from_iterable(rows)], np.int32))
        if layout != compiled.layout or counts != compiled.counts:
            pages = [self._indices[each.slot, :count] for each, count in zip(sequences, counts, strict=True)]
            give("block_indices", np.concatenate(pages))
            give("block_indices_begins", np.array([0, *accumulate(counts)], np.int32))
        compiled.layout, compiled.counts = layout, counts
        tokens = chain.from_iterable(each.tokens for each in sequences)
        positions = chain.from_iterable(range(each.start, each.stop) for each in sequences)
        give("input_ids", np.array([*tokens], np.int64))
        give("position_ids", np.array([*positions], np.int64))
        give("past_lens", np.array([each.start for each in sequences], np.int32))
        give("max_context_len", np.array(max(stops), np.int32))


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
# Constants of a graph that is compiled more than once. A larger one takes too much memory for what it would save.
MOST_COPIED_BYTES = 256 << 20


def constant_bytes(graph: openvino.Model) -> int:
    """Bytes of the numbers that a graph holds."""
    held = (node.output(0) for node in graph.get_ops() if node.get_type_name() == "Constant")
    return sum(math.prod(output.get_shape()) * int(output.get_element_type().size) for output in held)


class SteadyRows:
    """Keeps a graph to the number of rows that it has, until padding has cost as much as a change would have.

    It then costs at most twice what the best choice in hindsight would have (renting until the price is paid), beside
    the grain of each growth. `price` is what a change costs, in rows.
    """

    def __init__(self, price: int) -> None:
        self.price = price
        self._rows = self._padded = 0  # computed last; padding since they were all needed

    def shape(self, needed: int) -> int:
        """The rows to compute, at least `needed`."""
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
