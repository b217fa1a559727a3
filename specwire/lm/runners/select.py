"""Which runner serves a model: the fastest that agrees with the model's own cache-less forward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from specwire.core.model import (
    AUTO,
    INT8,
    INT8_DYNAMIC,
    NONE,
    OPENVINO,
    TORCH,
    WEIGHTS16,
    Feed,
    Loading,
    ModelError,
    out_of_memory,
)
from specwire.lm.kv_cache import STATES, Runner, Sizes
from specwire.lm.linear import Int8Linear, is_dynamic, round_layers
from specwire.lm.model_config import (
    CausalModel,
    ModelConfig,
    first_line,
    is_recurrent,
    takes_own_positions,
    window_of,
)
from specwire.lm.plain_decoder import PlainDecoder
from specwire.lm.runners.compiled import CompiledRunner
from specwire.lm.runners.deterministic import ALONE, DeterministicRunner, agreeing_widths
from specwire.lm.runners.llama import MODEL_TYPES, LlamaRunner, Unsuited
from specwire.lm.runners.trial import Trial, held_once, made_up

logger = logging.getLogger(__name__)

# Tokens of the trial at load: long enough to cross a rollback, a ragged batch and a page of a cache in pages, half of
# them a part of a prompt, and short enough to cost little.
TRIAL_TOKENS = 72
# Largest deviation from the model's own cache-less forward, relative to the largest logit (at least 1).
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1 / 64, torch.bfloat16: 1 / 16}
# Likewise where activations are rounded: a sum in another order moves some of them to the next integer, which is up to
# 1/127 of the largest of their group away, and those move others, in a deep model as far as the rounding itself moves
# logits: a trial measures that, and allows twice as much. So no trial of a whole model can tell such rounding from
# none: `specwire.lm.runners.openvino.runner.rounds_activations` tries one product.
DYNAMIC_TOLERANCE = 1 / 16
OPENVINO_DTYPES = (torch.float32, torch.bfloat16)


class How(NamedTuple):
    """How a model is to be computed. Scripted models and GGUF files know nothing of it.

    Attributes:
        runtime: what computes the forwards: "torch"; "openvino" (the extra of that name, the Llama family, on cpu); or
            "auto": openvino where it is installed and agrees with the model, else torch.
        deterministic: serve only where the logits of a position are a function of the text before it, bit for bit,
            whatever else is computed with it (cpu only): on OpenVINO where a trial finds it so, on torch by
            `specwire.lm.runners.deterministic`. The same bits come from the same machine, build and number of threads.
            A scripted model always does so.
        quantization: "none"; of OpenVINO alone "int8": linear layers' weights rounded to 8 bits, "int8-dynamic":
            what they multiply, too, in float32 (`specwire.lm.linear`), and "bfloat16": weights rounded to that, for
            sums in float32.
        compiled: run the Llama family as graphs of `torch.compile`, on CUDA replayed as CUDA graphs
            (`specwire.lm.runners.compiled`; torch only). Loading takes minutes longer.
        taps: see `specwire.lm.runners.decoder.Decoder`. fuse: what OpenVINO makes of them; None for nothing.
        skims: by a runner that can leave layers out.
        states: of a slot with recurrent layers.
    """

    runtime: str = TORCH
    deterministic: bool = False
    quantization: str = NONE
    compiled: bool = False
    taps: tuple[int, ...] = ()
    fuse: nn.Module | None = None
    skims: bool = False
    states: int = STATES

    @classmethod
    def of(cls, asked: Loading) -> How:
        return cls(asked.runtime, asked.deterministic, asked.quantization, asked.compiled)


def check_recurrent(config: ModelConfig, how: How) -> None:
    """ModelError, which names it, for what models with recurrent layers are not served with."""
    for name, given in (
        ("heads", how.skims),
        ("deterministic", how.deterministic),
        ("quantization", how.quantization != NONE),
        ("compile", how.compiled),
        ("runtime", how.runtime == OPENVINO),
    ):
        if given:
            value = f" {how.runtime}" if name == "runtime" else ""
            raise ModelError(f"{name}:{value} is not served with the recurrent layers of {config.model_type} models")


def cache_dtype(dtype: torch.dtype, how: How) -> torch.dtype:
    """What keys and values of a model in `dtype` may take: OpenVINO may keep wider ones than torch does."""
    if how.runtime == TORCH or how.compiled or dtype not in OPENVINO_DTYPES:
        return dtype
    try:
        from specwire.lm.runners.openvino.graph import computed_in

        return computed_in(dtype)
    except Exception:  # not installed, or any error of an installation that does not fit: `runner_for` tells it
        return dtype


def runner_for(model: CausalModel, sizes: Sizes, how: How, weights: str = "") -> tuple[Runner, str]:
    """The runner, and the runtime that it is of; ModelError if the model cannot be served by that runtime.

    weights: their fingerprint, by which OpenVINO's trial is remembered; empty for one that is made each time.

    What an allocator raises is let through (`specwire.core.model.out_of_memory`).
    Under int8 the model's linear layers are rounded meanwhile, and no runtime stands in for OpenVINO.
    """
    if how.skims and how.deterministic:
        raise ModelError("heads: skipped layers are not served with deterministic")
    if how.skims and how.compiled:
        raise ModelError("heads: skipped layers are not served with compile: its graphs have all layers")
    if how.skims and how.runtime == OPENVINO:
        raise ModelError("heads: skipped layers need the runtime torch or auto: openvino's graph has all layers")
    if is_recurrent(model.config):
        from specwire.lm.runners.hybrid import HybridRunner  # as `model_config.CausalModel` says

        hybrid = HybridRunner(model, sizes.slots, sizes.context, how.states, how.taps)
        return _checked(model, hybrid, sizes), TORCH
    if how.compiled:
        return _compiled_runner(model, sizes, how), TORCH
    if how.runtime == TORCH:
        return _torch_runner(model, sizes, how), TORCH
    try:
        return _openvino_runner(model, sizes, how, weights), OPENVINO
    except Exception as reason:
        # OpenVINO needs more memory while it loads than torch does.
        stands_in = how.runtime == AUTO and how.quantization == NONE
        if not stands_in or not (isinstance(reason, ModelError) or out_of_memory(reason)):
            raise
        logger.info("%s is served by torch: %s", type(model).__name__, reason)
    # Behind the block: an exception that is looked at keeps alive what OpenVINO had begun to build.
    return _torch_runner(model, sizes, how), TORCH


def _compiled_runner(model: CausalModel, sizes: Sizes, how: How) -> Runner:
    """The compiled runner; ModelError where the model cannot be compiled: nothing else is served instead."""
    name = type(model).__name__
    if how.runtime == OPENVINO or how.deterministic:
        raise ModelError("compiled: needs torch, without deterministic")
    if model.config.model_type not in MODEL_TYPES:
        raise ModelError(f"compiled: serves the Llama family ({', '.join(sorted(MODEL_TYPES))}), not {name}")
    try:
        runner = CompiledRunner(model, *sizes, taps=how.taps)
        off = trial_of(model, sizes).held(runner, sizes.slots)
    except Exception as failure:  # unsuited, or any error of capturing, code generation or the compiler
        if out_of_memory(failure):
            raise
        raise ModelError(f"compiled: cannot compile this {name}: {first_line(failure)}") from failure
    if not off <= 1:
        raise ModelError(f"compiled: gives other logits than this {name} ({off:.1f} times the tolerance)")
    return runner


def _openvino_runner(model: CausalModel, sizes: Sizes, how: How, weights: str) -> Runner:
    """ModelError where OpenVINO is not installed, does not take the model, or computes something else."""
    first = next(model.parameters())
    if first.device.type != "cpu":
        raise ModelError(f"runtime: openvino computes on cpu here, not on {first.device}")
    if first.dtype not in OPENVINO_DTYPES:
        raise ModelError(f"runtime: openvino computes in float32 or bfloat16, not in {str(first.dtype)[6:]}")
    dtype, name = torch.float32 if how.quantization == WEIGHTS16 else first.dtype, type(model).__name__
    if model.config.model_type not in MODEL_TYPES:
        raise ModelError(f"runtime: openvino serves the Llama family ({', '.join(sorted(MODEL_TYPES))}), not {name}")
    try:
        # An extra, and slow to import: only where it was asked for.
        from specwire.lm.runners.openvino.runner import OpenvinoRunner, rounds_activations
    except ModuleNotFoundError as error:
        raise ModelError("runtime: openvino is not installed (pip install 'specwire[openvino]')") from error
    except Exception as error:  # any error of an installation that does not fit
        raise ModelError(f"runtime: openvino cannot be imported: {first_line(error)}") from error
    if how.quantization == INT8_DYNAMIC and not rounds_activations():
        raise ModelError(f"runtime: openvino needs VNNI instructions for {INT8_DYNAMIC}, and has none here")
    try:
        if how.quantization in (INT8, INT8_DYNAMIC):
            round_layers(model, how.quantization == INT8_DYNAMIC)
        runner = OpenvinoRunner(model, *sizes, dtype, torch.get_num_threads(), how.quantization, how.taps, how.fuse)
        # What a head's first matrix makes of states is in no fingerprint of the model.
        if weights and how.fuse is None:
            size = sum(each.nbytes for each in model.parameters())
            tried = (weights, sizes, str(dtype), how.quantization, how.taps)
            off = held_once(lambda: trial_of(model, sizes), runner, sizes.slots, size, *tried)
        else:
            off = trial_of(model, sizes).held(runner, sizes.slots)
    except Unsuited as reason:
        raise ModelError(f"runtime: openvino cannot run this {name}: {reason}") from reason
    except Exception as failure:  # any error of tracing, paging or compiling an unknown kind of model
        if out_of_memory(failure):
            raise
        raise ModelError(f"runtime: openvino cannot run this {name}: {_last_line(failure)}") from failure
    if cache_dtype(dtype, how) != dtype:
        logger.info("openvino computes in float32, keys and values too: this processor has no %s", str(dtype)[6:])
    if not off <= 1:
        raise ModelError(f"runtime: openvino gives other logits than this {name} ({off:.1f} times the tolerance)")
    if how.deterministic and not runner.invariant:
        rounded = "" if how.quantization == NONE else f" in {how.quantization}"
        raise ModelError(f"deterministic: openvino rounds a row of this {name}{rounded} by what it is computed with")
    return runner


def _last_line(error: BaseException) -> str:
    """The reason in an OpenVINO error, which begins with source locations."""
    lines = str(error).strip().splitlines()
    return lines[-1].rstrip(".") if lines else type(error).__name__


def _torch_runner(model: CausalModel, sizes: Sizes, how: How) -> Runner:
    """Our own decoder where it agrees with the model, else the model itself where it agrees; ModelError if not."""
    if how.taps and how.deterministic:
        raise ModelError("heads: are not served with deterministic on torch")
    if model.config.model_type in MODEL_TYPES:
        runner = _lean_runner(model, sizes, how)
        if runner is not None:
            return runner
    if not takes_own_positions(model.config, sizes.context):
        try:
            return _generic_runner(model, sizes, how, alone=False)
        except ModelError as reason:
            logger.info("%s is run with one text at a time: %s", type(model).__name__, reason)
    return _generic_runner(model, sizes, how, alone=True)


def _generic_runner(model: CausalModel, sizes: Sizes, how: How, alone: bool) -> Runner:
    from specwire.lm.runners.hugging_face import HuggingFaceRunner  # as `model_config.CausalModel` says

    window = window_of(model.config, sizes.context)
    runner = HuggingFaceRunner(model, sizes.slots, sizes.context, window, alone)
    return _checked(model, DeterministicRunner(runner, ALONE, sizes.slots) if how.deterministic else runner, sizes)


def _checked(model: CausalModel, runner: Runner, sizes: Sizes) -> Runner:
    """The runner, if the model's own modules agree with themselves in it; else ModelError."""
    name = type(model).__name__
    try:
        error = trial_of(model, sizes).held(runner, sizes.slots)
    except Exception as failure:  # models that cannot take such a cache or mask fail in many ways
        if out_of_memory(failure):
            raise
        raise ModelError(f"{name} cannot be run with a cache by absolute position: {first_line(failure)}") from failure
    if not error <= 1:
        raise ModelError(
            f"{name} gives other logits with a cache by absolute position than without a cache "
            f"({error:.1f} times the tolerance), so it cannot be served"
        )
    return runner


def _lean_runner(model: CausalModel, sizes: Sizes, how: How) -> Runner | None:
    try:
        runner = _deterministic_runner(model, sizes) if how.deterministic else LlamaRunner(model, *sizes, taps=how.taps)
    except (Unsuited, AttributeError) as unsuited:
        reason = str(unsuited)
    else:
        error = trial_of(model, sizes).held(runner, sizes.slots)
        if error <= 1:
            return runner
        reason = f"our decoder is off by {error:.1f} tolerances"
    if isinstance(model, PlainDecoder):  # of a file: it has no other modules
        raise ModelError(f"runtime: torch cannot run this {model.architecture}: {reason}")
    logger.warning("%s is served by its own modules: %s", type(model).__name__, reason)
    return None


def _deterministic_runner(model: CausalModel, sizes: Sizes) -> Runner:
    runner = LlamaRunner(model, sizes.slots + 1, sizes.context, sizes.vocabulary, apart=True)
    widths = agreeing_widths(*runner.decoder.products())
    logger.info("rows are computed in blocks of %s", ", ".join(map(str, widths)))
    return DeterministicRunner(runner, widths, spare=sizes.slots)


@torch.inference_mode()
def trial_of(model: CausalModel, sizes: Sizes) -> Trial:
    """By the model's own cache-less forward; the model may go."""
    first = next(model.parameters())
    text, tolerance = _trial_text(sizes), DYNAMIC_TOLERANCE if is_dynamic(model) else TOLERANCES[first.dtype]

    def plain() -> torch.Tensor:
        """Logits (tokens, vocabulary) of the text."""
        rows: torch.Tensor = model(input_ids=torch.tensor([text], device=first.device), use_cache=False).logits[0]
        return rows.float()

    expected = plain()
    dynamic = [module for module in model.modules() if isinstance(module, Int8Linear) and module.dynamic]
    if dynamic:
        for module in dynamic:
            module.dynamic = False
        moved = float((plain() - expected).abs().max() / expected.abs().max().clamp(min=1.0))
        for module in dynamic:
            module.dynamic = True
        tolerance = max(tolerance, 2 * moved)  # both may be as far from unrounded ones
    return _trial(text, expected[:, : sizes.vocabulary], tolerance)


@torch.inference_mode()
def own_trial(runner: Runner, sizes: Sizes, tolerance: float) -> Trial:
    """By a runner itself, which is fed the text at once, where there is nothing else to hold it to."""
    text = _trial_text(sizes)
    expected = runner.run([Feed(0, 0, text, len(text))])[:, : sizes.vocabulary].float().clone()
    runner.zero(0, len(text))
    return _trial(text, expected, tolerance)


def _trial_text(sizes: Sizes) -> list[int]:
    return made_up(min(TRIAL_TOKENS, sizes.context - 1), sizes.vocabulary)


def _trial(text: Sequence[int], expected: torch.Tensor, tolerance: float) -> Trial:
    """expected: of all tokens."""
    split, largest = len(text) // 2, expected.abs().max().clamp(min=1.0)

    def measure(rows: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((rows - wanted).abs().max() / largest) / tolerance

    return Trial(text, split, torch.cat((expected[split:], expected[:split])), measure)
