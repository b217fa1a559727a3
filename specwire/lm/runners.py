"""Which runner serves a model: the fastest that agrees with the model's own cache-less forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from specwire.lm.cached import Runner
from specwire.lm.checks import deviation, first_line, window_of
from specwire.lm.compiled import CompiledRunner
from specwire.lm.hugging_face import HuggingFaceRunner
from specwire.lm.int8 import check_int8, round_layers
from specwire.lm.interface import (
    AUTO,
    INT8,
    NONE,
    OPENVINO,
    TORCH,
    Feed,
    ModelError,
    out_of_memory,
)
from specwire.lm.linear import LinearWeights
from specwire.lm.llama import MODEL_TYPES, LlamaRunner, Unsuited
from specwire.lm.party import Rank

# ----------------------------------------------------------------------------------------------------------------------
# How many rows a forward computes, where a forward of another number of rows than the last one costs extra.
#
# A runtime that plans its memory and kernels for the shapes that it meets has work to do when they change. Rows of
# padding are then cheaper than a change, as long as there are few.

# Rows of the two shapes that are timed, and how often each is.
ONE, FEW = 1, 5
TIMES = 4
# Where rows seem to cost nothing. Below the drop from the widest to the narrowest window that a verifier measures at
# start: V(1) must not be measured with the padding of the widest.
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

    Minima of a few: whatever else the machine does only adds.
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


# ----------------------------------------------------------------------------------------------------------------------
# Rows whose bits depend on their text alone: not on how many are computed together, nor with whom, nor in which order.
#
# Floating-point sums depend on their order, and kernels choose it by shape. So the row of position p is computed in
# shapes that p alone determines: its attention is one query over p + 1 keys. Only the matrix products, which read all
# of the weights, are shared by several rows, in blocks of those numbers of rows for which the kernels here were found
# to give each row the same bits at each place in the block. Where none were found each row is computed alone, which is
# right by construction. A prompt is fed the same way, so a text that another verifier of this kind prefills goes on
# with the same bits.

# Rows of a block that are tried, and the number that the others are held against: one that any step can do with.
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
REFERENCE = 8
ALONE = (1,)
# Rows that are computed for the comparison, and by how many they are shifted in their blocks.
ROWS, SHIFT = 192, 5


class Apart:
    """`Runner` that feeds another one single rows, in blocks of the given numbers of them.

    That other runner must take several feeds of one slot in order, and compute all but matrix products row by row;
    it has a slot more than this one, number `spare`, for the rows that fill a block up. With blocks of one row neither
    is asked of it.
    """

    def __init__(self, runner: Runner, widths: Sequence[int], spare: int) -> None:
        self.runner = runner
        self.widths = tuple(sorted(widths))
        self._filler = Feed(spare, 0, (0,), 1)

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        rows = [
            Feed(feed.slot, feed.start + index, (token,), 1)
            for feed in feeds
            for index, token in enumerate(feed.tokens)
        ]
        logits = torch.cat([self._run(block) for block in self._blocks(rows)])
        kept = [index >= len(feed.tokens) - max(feed.wanted, 1) for feed in feeds for index in range(len(feed.tokens))]
        return logits[torch.tensor(kept, device=logits.device)]

    def zero(self, slot: int, stop: int) -> None:
        self.runner.zero(slot, stop)

    def copy(self, source: int, target: int, stop: int) -> None:
        self.runner.copy(source, target, stop)

    @property
    def kv_bytes(self) -> int:
        return self.runner.kv_bytes

    def _blocks(self, rows: Sequence[Feed]) -> Iterator[Sequence[Feed]]:
        widest = self.widths[-1]
        return (rows[begin : begin + widest] for begin in range(0, len(rows), widest))

    def _run(self, block: Sequence[Feed]) -> torch.Tensor:
        width = next(width for width in self.widths if width >= len(block))
        return self.runner.run([*block, *[self._filler] * (width - len(block))])[: len(block)]


@torch.inference_mode()
def agreeing_widths(multiply: nn.Module, layers: Sequence[LinearWeights], dtype: torch.dtype) -> tuple[int, ...]:
    """Those of WIDTHS whose blocks give each row the bits that REFERENCE gives it, by trial, or ALONE.

    A kernel's order of summation depends on shapes, so one layer of each shape is tried, on random numbers: another
    order shows in some of the thousands of sums.
    """
    shapes = {(tuple(layer.weight.shape), layer.bias is None): layer for layer in layers}
    widths: tuple[int, ...] = WIDTHS
    for layer in shapes.values():
        widths = tuple(width for width in widths if width in _agreeing(multiply, layer, dtype))
    return widths or ALONE


def _agreeing(multiply: nn.Module, layer: LinearWeights, dtype: torch.dtype) -> tuple[int, ...]:
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, layer.weight.shape[1], generator=source).to(dtype)
    expected = _in_blocks(multiply, layer, rows, REFERENCE)
    shifted = _in_blocks(multiply, layer, rows.roll(SHIFT, 0), REFERENCE).roll(-SHIFT, 0)
    if not torch.equal(shifted, expected):
        return ()
    return tuple(width for width in WIDTHS if torch.equal(_in_blocks(multiply, layer, rows, width), expected))


def _in_blocks(multiply: nn.Module, layer: LinearWeights, rows: torch.Tensor, width: int) -> torch.Tensor:
    return torch.cat([multiply(block, *layer) for block in rows.split(width)])


logger = logging.getLogger(__name__)

OPENVINO_DTYPES = (torch.float32, torch.bfloat16)


class Sizes(NamedTuple):
    """What a runner keeps a cache for."""

    slots: int
    context: int
    vocabulary: int


class How(NamedTuple):
    """How a model is to be computed; see `specwire.lm.load.load_model`. rank: of a model that is split already."""

    runtime: str = TORCH
    lean: bool = True
    deterministic: bool = False
    quantization: str = NONE
    compiled: bool = False
    rank: Rank | None = None


def cache_dtype(dtype: torch.dtype, how: How) -> torch.dtype:
    """What keys and values of a model in `dtype` may take: OpenVINO may keep wider ones than torch does."""
    if how.runtime == TORCH or dtype not in OPENVINO_DTYPES:
        return dtype
    try:
        from specwire.lm.openvino import computed_in
    except ImportError:
        return dtype
    return computed_in(dtype)


def runner_for(model: PreTrainedModel, sizes: Sizes, how: How) -> tuple[Runner, str]:
    """The runner, and the runtime that it is of; ModelError if the model cannot be served by that runtime.

    What an allocator raises is let through (`specwire.lm.interface.out_of_memory`).
    Under int8 the model's linear layers are rounded meanwhile.
    """
    if how.compiled:
        return _compiled_runner(model, sizes, how), TORCH
    if how.quantization == INT8:
        check_int8(model)
    if how.runtime == TORCH:
        return _torch_runner(model, sizes, how), TORCH
    try:
        return _openvino_runner(model, sizes, how), OPENVINO
    except Exception as reason:
        # OpenVINO needs more memory while it loads than torch does.
        if how.runtime != AUTO or not (isinstance(reason, ModelError) or out_of_memory(reason)):
            raise
        logger.info("%s is served by torch: %s", type(model).__name__, reason)
    # Behind the block: an exception that is looked at keeps alive what OpenVINO had begun to build.
    return _torch_runner(model, sizes, how), TORCH


def _compiled_runner(model: PreTrainedModel, sizes: Sizes, how: How) -> Runner:
    """Whoever asks for compilation is not served anything else: ModelError where it cannot be had."""
    name = type(model).__name__
    if how.runtime == OPENVINO or how.deterministic or how.quantization != NONE:
        raise ModelError("compiled: needs torch, without deterministic and without quantization")
    if model.config.model_type not in MODEL_TYPES:
        raise ModelError(f"compiled: serves the Llama family ({', '.join(sorted(MODEL_TYPES))}), not {name}")
    try:
        runner = CompiledRunner(model, *sizes)
        off = deviation(model, runner, *sizes, next(model.parameters()).dtype)
    except Exception as failure:  # unsuited, or whatever capturing, generating code or its compiler raises
        if out_of_memory(failure):
            raise
        raise ModelError(f"compiled: cannot compile this {name}: {first_line(failure)}") from failure
    if not off <= 1:
        raise ModelError(f"compiled: gives other logits than this {name} ({off:.1f} times the tolerance)")
    return runner


def _openvino_runner(model: PreTrainedModel, sizes: Sizes, how: How) -> Runner:
    """ModelError where OpenVINO is not installed, does not take the model, or computes something else."""
    if how.deterministic:
        raise ModelError("runtime: openvino rounds by what it computes together; deterministic needs torch")
    first = next(model.parameters())
    if first.device.type != "cpu":
        raise ModelError(f"runtime: openvino computes on cpu here, not on {first.device}")
    if first.dtype not in OPENVINO_DTYPES:
        raise ModelError(f"runtime: openvino computes in float32 or bfloat16, not in {str(first.dtype)[6:]}")
    dtype, name = first.dtype, type(model).__name__
    if model.config.model_type not in MODEL_TYPES:
        raise ModelError(f"runtime: openvino serves the Llama family ({', '.join(sorted(MODEL_TYPES))}), not {name}")
    try:
        # An extra, and slow to import: only where it was asked for.
        from specwire.lm.openvino import OpenvinoRunner
    except ImportError as error:
        raise ModelError("runtime: openvino is not installed (pip install 'specwire[openvino]')") from error
    try:
        model.float()  # what OpenVINO rounds back; each value of a shorter type has its own in float32
        runner = OpenvinoRunner(model, *sizes, dtype, torch.get_num_threads(), how.quantization == INT8)
        _round(model, how)
        off = deviation(model, runner, *sizes, dtype)
    except Unsuited as reason:
        raise ModelError(f"runtime: openvino cannot run this {name}: {reason}") from reason
    except Exception as failure:  # whatever tracing, paging or compiling a model of a kind they do not know raises
        if out_of_memory(failure):
            raise
        raise ModelError(f"runtime: openvino cannot run this {name}: {_last_line(failure)}") from failure
    finally:
        nn.Module.to(model, dtype)
    if cache_dtype(dtype, how) != dtype:
        logger.info("openvino computes in float32, keys and values too: this processor has no %s", str(dtype)[6:])
    if not off <= 1:
        raise ModelError(f"runtime: openvino gives other logits than this {name} ({off:.1f} times the tolerance)")
    return runner


def _last_line(error: BaseException) -> str:
    """OpenVINO's errors begin with where it was and end with what it was."""
    lines = str(error).strip().splitlines()
    return lines[-1].rstrip(".") if lines else type(error).__name__


def _torch_runner(model: PreTrainedModel, sizes: Sizes, how: How) -> Runner:
    """Our own decoder where it agrees with the model, else the model itself where it agrees; ModelError if not."""
    _round(model, how)
    if how.lean and model.config.model_type in MODEL_TYPES:
        runner = _lean_runner(model, sizes, how)
        if runner is not None:
            return runner
    try:
        return _generic_runner(model, sizes, how, alone=False)
    except ModelError as reason:
        logger.info("%s is run with one text at a time: %s", type(model).__name__, reason)
    return _generic_runner(model, sizes, how, alone=True)


def _round(model: PreTrainedModel, how: How) -> None:
    if how.quantization == INT8:
        round_layers(model)


def _generic_runner(model: PreTrainedModel, sizes: Sizes, how: How, alone: bool) -> Runner:
    window = window_of(model.config, sizes.context)
    generic: Runner = HuggingFaceRunner(model, sizes.slots, sizes.context, window, alone)
    if how.deterministic:
        generic = Apart(generic, ALONE, sizes.slots)
    name = type(model).__name__
    try:
        error = deviation(model, generic, *sizes, next(model.parameters()).dtype)
    except Exception as failure:  # models that cannot take a cache or a mask of this kind fail in ways of their own
        if out_of_memory(failure):
            raise
        raise ModelError(f"{name} cannot be run with a cache by absolute position: {first_line(failure)}") from failure
    if not error <= 1:
        raise ModelError(
            f"{name} gives other logits with a cache by absolute position than without a cache "
            f"({error:.1f} times the tolerance), so it cannot be served"
        )
    return generic


def _lean_runner(model: PreTrainedModel, sizes: Sizes, how: How) -> Runner | None:
    try:
        runner = _apart(model, sizes) if how.deterministic else LlamaRunner(model, *sizes, rank=how.rank)
    except (Unsuited, AttributeError) as reason:
        logger.info("%s is served by its own modules: %s", type(model).__name__, reason)
        return None
    error = deviation(model, runner, *sizes, next(model.parameters()).dtype)
    if error <= 1:
        return runner
    logger.warning(
        "%s is served by its own modules: our decoder is off by %.1f tolerances", type(model).__name__, error
    )
    return None


def _apart(model: PreTrainedModel, sizes: Sizes) -> Runner:
    runner = LlamaRunner(model, sizes.slots + 1, sizes.context, sizes.vocabulary, apart=True)
    widths = agreeing_widths(*runner.decoder.products())
    logger.info("rows are computed in blocks of %s", ", ".join(map(str, widths)))
    return Apart(runner, widths, spare=sizes.slots)
