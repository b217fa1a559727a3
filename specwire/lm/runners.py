"""Which runner serves a model: the fastest that agrees with the model's own cache-less forward."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from specwire.lm.apart import ALONE, Apart, agreeing_widths
from specwire.lm.cached import Runner
from specwire.lm.checks import deviation, first_line
from specwire.lm.compiled import CompiledRunner
from specwire.lm.hugging_face import HuggingFaceRunner
from specwire.lm.int8 import check_int8, round_layers
from specwire.lm.interface import AUTO, INT8, NONE, OPENVINO, TORCH, ModelError
from specwire.lm.llama import MODEL_TYPES, LlamaRunner, Unsuited
from specwire.lm.memory import out_of_memory
from specwire.lm.party import Rank
from specwire.lm.windows import window_of

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
        from specwire.lm.openvino_runner import computed_in  # as below
    except ImportError:
        return dtype
    return computed_in(dtype)


def runner_for(model: PreTrainedModel, sizes: Sizes, how: How) -> tuple[Runner, str]:
    """The runner, and the runtime that it is of; ModelError if the model cannot be served by that runtime.

    What an allocator raises is let through (`specwire.lm.memory.out_of_memory`).
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
        from specwire.lm.openvino_runner import OpenvinoRunner
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
