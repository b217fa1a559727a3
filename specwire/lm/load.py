"""How a language model is loaded: from a path, a hub id, a GGUF file, "scripted:..." or "table:..."."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specwire.core.model import (
    AUTO,
    AUTO_KV,
    ENGINES,
    GGUF,
    INT8_DYNAMIC,
    LLAMACPP,
    NONE,
    QUANTIZATIONS,
    RANKS,
    RUNTIMES,
    SPECWIRE,
    TORCH,
    VLLM,
    ModelError,
    RankGroup,
    is_gguf,
)
from specwire.lm.heads.scripted import HeadedScript
from specwire.lm.heads.self_speculation import is_self
from specwire.lm.kv_cache import LanguageModel
from specwire.lm.scripted import PREFIX, ScriptedLM
from specwire.lm.table_model import PREFIX as TABLE_PREFIX
from specwire.lm.table_model import load_table_model


def load_model(
    spec: str,
    *,
    slots: int,
    dtype: str = "float32",
    device: str = "cpu",
    context: int | None = None,
    threads: int | None = None,
    prompt_threads: int = 0,
    lean: bool = True,
    runtime: str = TORCH,
    deterministic: bool = False,
    quantization: str = NONE,
    kv_memory: int | None = None,
    compiled: bool = False,
    ranks: RankGroup | None = None,
    heads: str | None = None,
    engine: str = SPECWIRE,
    engine_options: Mapping[str, Any] | None = None,
    kv_type: str = AUTO_KV,
    gpu_layers: int = 0,
    stages: int = 1,
) -> LanguageModel:
    """Load a causal language model to serve `slots` texts at once.

    Args:
        spec: local directory, hub id, GGUF file, a scripted model (`specwire.lm.scripted.USAGE`), or a table of
            n-grams (`table:FILE`). Of what follows, the last two know only context and, a scripted model, heads.
        dtype: float32, bfloat16, float16, or "auto": what `native_dtype` says of the device, with int8-dynamic float32,
            which the model then tells as its own.
        context: positions per slot; the model's own maximum if None. Memory is set aside for slots x context.
        threads: threads that PyTorch computes with in this process; unchanged if None.
        runtime, lean, deterministic, quantization, compiled, prompt_threads: see `specwire.lm.runners.select.How`.
        kv_memory: bytes for keys and values, states, and what a head keeps of each text; `slots` is then as many as
            fit. If not one does with all states of a window, a slot has fewer, and windows are shorter.
        ranks: those that the model is split over (`runners.tensor_parallel`), which all load it with the same
            arguments; None for one process.
        heads: directory of a head (`specwire.lm.heads`), or which of the model's own layers draft
            (`specwire.lm.heads.self_speculation`), then `auto` is torch; of a scripted model, another one.
        engine, engine_options, stages: "vllm" is told of in `specwire.lm.pretrained.load_in_vllm`.
        kv_type, gpu_layers: of a GGUF file, see `specwire.lm.pretrained.load_gguf`.

    Raises:
        ModelError: with one sentence that names what is wrong.
    """
    _check(slots, runtime, quantization, engine)
    _set_threads(threads, prompt_threads)
    if spec.startswith(PREFIX):
        return _scripted(spec, slots, context, ranks, heads)
    if spec.startswith(TABLE_PREFIX):
        return _table(spec, slots, context, ranks, heads)
    asked = {"deterministic": deterministic, "quantization": quantization != NONE, "compile": compiled, "heads": heads}
    if is_gguf(spec):
        _check_for_gguf(asked, device, ranks, engine)
    else:
        _check_for_gguf_only(spec, runtime, kv_type, gpu_layers)
        check_directory(spec)
    # Imported here because transformers takes seconds to import: neither a scripted model, nor a table, nor whoever is
    # told of a mistake needs to wait for it.
    from specwire.lm import pretrained
    from specwire.lm.kv_memory import KvMemory
    from specwire.lm.runners.select import How

    size = slots if kv_memory is None else KvMemory(kv_memory)
    if is_gguf(spec):
        return pretrained.load_gguf(spec, size, context, kv_type, gpu_layers, prompt_threads)
    dtype = _computed_in(dtype, quantization, engine, device)
    with _told_by(ranks):
        if engine == VLLM:
            _refuse({"runtime": runtime != TORCH, **asked}, f"--engine {VLLM}")
            return pretrained.load_in_vllm(spec, size, dtype, device, context, engine_options or {}, ranks, stages)
        how = How(runtime, lean, deterministic, quantization, compiled, prompt_threads)
        return pretrained.load_pretrained(spec, size, dtype, device, context, how, ranks, heads)


class Precision(NamedTuple):
    """reason: why it is this dtype, for people."""

    dtype: str
    reason: str


def native_precision(device: str = "cpu") -> Precision:
    """bfloat16 where the device computes it itself, else float32. Emulated, bfloat16 is slower than float32.

    Whether there is such a device is found out when it is used.
    """
    kind = device.partition(":")[0]
    if kind == "cuda" and torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        words = "computes" if native else "would emulate"
        return Precision("bfloat16" if native else "float32", f"{device} {words} bfloat16")
    if kind != "cpu":
        return Precision("float32", f"{device} is not known to compute bfloat16")
    if platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx512_bf16_supported():
        return Precision("float32", "the processor would emulate bfloat16: it has no AVX512_BF16")
    # oneDNN takes bfloat16 wherever it has AVX-512, and may be held to less (ONEDNN_MAX_CPU_ISA).
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return Precision("float32", "oneDNN does not compute bfloat16 here")
    return Precision("bfloat16", "the processor computes bfloat16")


def native_dtype(device: str = "cpu") -> str:
    """What `--dtype auto` means there."""
    return native_precision(device).dtype


def _check(slots: int, runtime: str, quantization: str, engine: str) -> None:
    if slots < 1:
        raise ModelError(f"slots: must be at least 1, not {slots}")
    if runtime not in RUNTIMES:
        raise ModelError(f"runtime: must be one of {', '.join(RUNTIMES)}, not {runtime!r}")
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"quantization: must be one of {', '.join(QUANTIZATIONS)}, not {quantization!r}")
    if engine not in ENGINES:
        raise ModelError(f"engine: must be one of {', '.join(ENGINES)}, not {engine!r}")


def _computed_in(dtype: str, quantization: str, engine: str, device: str) -> str:
    """The dtype of what is computed."""
    if quantization == INT8_DYNAMIC:  # beside products of integers OpenVINO rounds no other activations
        if dtype not in (AUTO, "float32"):
            raise ModelError(f"dtype: must be float32 with quantization {INT8_DYNAMIC}, not {dtype}")
        return "float32"
    if dtype != AUTO:
        return dtype
    return native_dtype("cuda" if engine == VLLM and torch.cuda.is_available() else device)


def _refuse(asked: Mapping[str, object], by: str) -> None:
    """ModelError that names the first of these that was asked for, and what does not serve it."""
    for name, value in asked.items():
        if value:
            raise ModelError(f"{name}: is not served with {by}")


def _check_for_gguf(asked: Mapping[str, object], device: str, ranks: RankGroup | None, engine: str) -> None:
    if device != "cpu":
        raise ModelError(f"device: is not served with a {GGUF} file; its layers go to a GPU by --gpu-layers")
    _refuse({**asked, RANKS: ranks, "engine": engine != SPECWIRE}, f"a {GGUF} file")


def _check_for_gguf_only(spec: str, runtime: str, kv_type: str, gpu_layers: int) -> None:
    for name, value in (("runtime", runtime == LLAMACPP), ("kv-type", kv_type != AUTO_KV), ("gpu-layers", gpu_layers)):
        if value:
            raise ModelError(f"{name}: {LLAMACPP if name == 'runtime' else value} is for {GGUF} files, not for {spec}")


def check_directory(spec: str) -> None:
    """ModelError for what can only be a local directory, and is none."""
    looks_local = spec.startswith(("/", ".", "~")) or spec.count("/") > 1
    if not spec or (looks_local and not Path(spec).expanduser().is_dir()):
        raise ModelError(f"model {spec!r}: there is no such directory")


def _scripted(spec: str, slots: int, context: int | None, ranks: RankGroup | None, heads: str | None) -> LanguageModel:
    if ranks is not None:
        raise ModelError(f"{RANKS}: a scripted model cannot be split over {ranks.size} ranks")
    if heads is None:
        return ScriptedLM.parse(spec, slots=slots, context=context)
    if not heads.startswith(PREFIX):
        lacking = "layers to skip" if is_self(heads) else "features for them"
        raise ModelError(f"heads: a scripted model has no {lacking}")
    return HeadedScript.beside(spec, heads, slots=slots, context=context)


def _table(spec: str, slots: int, context: int | None, ranks: RankGroup | None, heads: str | None) -> LanguageModel:
    if ranks is not None or heads is not None:
        raise ModelError(f"model: {spec} is a table, which drafts and is no target")
    return load_table_model(spec, slots, context)


@contextmanager
def _told_by(ranks: RankGroup | None) -> Iterator[None]:
    """Prefer the error of the rank that ended to the error of a broken connection between ranks."""
    try:
        yield
    except Exception as error:
        loss = "" if ranks is None else ranks.loss()
        if loss and str(error) not in loss:
            raise ModelError(f"{RANKS}: {loss}") from error
        raise


def _set_threads(threads: int | None, prompt_threads: int) -> None:
    if prompt_threads < 0:
        raise ModelError(f"prompt-threads: must not be negative, not {prompt_threads}")
    if threads is None:
        return
    if threads < 1:
        raise ModelError(f"threads: must be at least 1, not {threads}")
    torch.set_num_threads(threads)
