"""A second runtime for CPUs: OpenVINO computes the forward, over pages of a cache that lies here.

Its attention over pages takes for each session how much is cached and which pages hold it. So a slot is a fixed run of
pages, a rollback is an integer, and a forward of many sessions copies no cache: keys and values are written in place.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino
import torch
from transformers import PreTrainedModel

from specwire.lm.interface import Feed
from specwire.lm.llama import model_of, shape_of
from specwire.lm.openvino_decoder import OpenvinoDecoder
from specwire.lm.openvino_graph import ROWS, paged, round_weights
from specwire.lm.steady import FEW, SteadyRows, price_of_change

DEVICE = "CPU"
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
CACHES = ("key_cache.", "value_cache.")

Numbers = npt.NDArray[np.int32] | npt.NDArray[np.int64]


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """What forwards, keys and values of a model in `dtype` are computed in on this processor.

    OpenVINO's attention over pages takes bfloat16 only where the processor has instructions for it. Elsewhere it is
    float32, in which each bfloat16 weight is what it was.
    """
    native = "BF16" in openvino.Core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
    return dtype if native else torch.float32


class OpenvinoRunner:
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
    ) -> None:
        """Compute in `computed_in(dtype)` with the weights of a model that is in float32, rounded to 8 bits if `int8`.

        Raises Unsuited for a model that only looks like the family, and whatever OpenVINO raises for one that it cannot
        trace, page or compile.
        """
        shape = shape_of(model)
        decoder = OpenvinoDecoder(shape, model_of(model, shape, context, vocabulary))
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
        logits: npt.NDArray[np.float32] = self._request.get_output_tensor(0).data
        return torch.from_numpy(logits.reshape(-1, logits.shape[-1])).clone()  # the next forward overwrites it

    def _inputs(self, wanted: Sequence[Feed], padding: Sequence[Feed]) -> list[tuple[str, Numbers]]:
        """As `openvino_graph.paged` takes them. The padding lies behind all rows that are wanted."""
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
