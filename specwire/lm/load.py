"""How a language model is loaded: from a path, a hub id, a GGUF file or "scripted:..."."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Unpack

import torch

from specwire.core.model import (
    AUTO,
    AUTO_KV,
    ENGINES,
    GGUF,
    INT8,
    INT8_DYNAMIC,
    LLAMACPP,
    NONE,
    QUANTIZATIONS,
    RANKS,
    RUNTIMES,
    SPECWIRE,
    TORCH,
    VLLM,
    WEIGHTS16,
    Loading,
    LoadOptions,
    ModelError,
    RankGroup,
    is_gguf,
)
from specwire.lm import pretrained
from specwire.lm.gguf_file import forget_read, read_gguf
from specwire.lm.gguf_weights import ARCHITECTURES
from specwire.lm.heads.self_speculation import is_self
from specwire.lm.kv_cache import KvMemory, LanguageModel
from specwire.lm.runners import llama
from specwire.lm.scripted import PREFIX, HeadedScript, ScriptedLM
from specwire.named_models import check_directory, included_head, located

logger = logging.getLogger(__name__)

# Bytes of a GGUF file up to which a row alone takes no longer on OpenVINO than on llama.cpp. It is known of two files
# (AMD EPYC with AVX512_BF16, runs of `make bench-real REAL=--short` that are not recorded): one of 98 MB took 0.8 times
# as long beside the rest of a stack, one of 1.1 GB 1.5 times, as OpenVINO GenAI computes it.
SMALL = 256 << 20


def load_model(spec: str, **options: Unpack[LoadOptions]) -> LanguageModel:
    """Load a causal language model.

    Args:
        spec: local directory, hub id, GGUF file, a named model (`specwire.named_models`), or a scripted model
            (`specwire.lm.scripted.USAGE`).
        options: see `specwire.core.model.Loading`.

    Raises:
        ModelError: with one sentence that names what is wrong.
    """
    try:
        return _loaded(located(spec), Loading(**options))
    finally:
        forget_read()


def _loaded(spec: str, asked: Loading) -> LanguageModel:
    _check(asked)
    _set_threads(asked)
    if asked.heads == AUTO:
        asked = replace(asked, heads=_included(spec, asked))
    if spec.startswith(PREFIX):
        return _scripted(spec, asked)
    by_llamacpp = is_gguf(spec) and computes_gguf(spec, asked) == LLAMACPP
    if by_llamacpp:
        _check_for_llamacpp(asked)
    else:
        _check_for_llamacpp_only(spec, asked)
    if not is_gguf(spec):
        check_directory(spec)
    elif asked.engine == VLLM:
        raise ModelError(f"engine: {VLLM} is not served with a {GGUF} file here")
    size = asked.slots if asked.kv_memory is None else KvMemory(asked.kv_memory)
    if by_llamacpp:
        return pretrained.load_gguf(spec, size, asked)
    dtype = _computed_in(asked)
    if asked.engine != VLLM:
        for quantization in _kept_in(spec, asked):
            rounded = replace(asked, quantization=quantization)
            try:
                return pretrained.load_pretrained(spec, size, _computed_in(rounded), rounded)
            except ModelError as reason:
                logger.info("%s is not computed as %s: %s", spec, quantization, reason)
        return pretrained.load_pretrained(spec, size, dtype, asked)
    otherwise = {"runtime": asked.runtime not in (TORCH, AUTO), "deterministic": asked.deterministic}
    _refuse({**otherwise, **_of_our_runtimes(asked)}, f"--engine {VLLM}")
    with _told_by(asked.ranks):
        return pretrained.load_in_vllm(spec, size, dtype, asked)


def _included(spec: str, asked: Loading) -> str | None:
    """The head that `auto` means: the included one, where rows are free, and a runtime serves heads."""
    otherwise = asked.deterministic or asked.compiled or asked.engine == VLLM
    for_llamacpp = asked.runtime == LLAMACPP or asked.kv_type != AUTO_KV or asked.gpu_layers > 0
    computed = asked.runtime != AUTO or find_spec("openvino") is not None
    if otherwise or for_llamacpp or not computed or not rows_are_free() or asked.device != "cpu" or not is_gguf(spec):
        return None
    folder = included_head(spec)
    return None if folder is None else str(folder)


def _kept_in(spec: str, asked: Loading) -> Sequence[str]:
    """How OpenVINO computes a GGUF file's weights of at most 8 bits, what is quickest first; nothing of others.

    A forward reads all weights, and of 8 bits half as much as of 16. Products of integers make rows cheap, too; without
    instructions for them rows are dear in 8 bits, so that where they are free in 16 those are kept.
    """
    said = asked.dtype != AUTO or asked.quantization != NONE or asked.compiled
    elsewhere = asked.runtime == TORCH or asked.device != "cpu" or (asked.heads is not None and is_self(asked.heads))
    if said or elsewhere or not is_gguf(spec) or find_spec("openvino") is None or rows_are_free():
        return ()
    if not read_gguf(spec).is_quantised:
        return ()
    try:
        from specwire.lm.runners.openvino.runner import rounds_activations  # an extra

        return (INT8_DYNAMIC, INT8) if rounds_activations() else (INT8,)
    except Exception as error:  # any error of an installation that does not fit: who is asked to compute tells of it
        logger.info("openvino cannot be tried: %s", error)
        return (INT8,)


def rows_are_free() -> bool:
    """Whether a forward of some rows takes hardly longer than one of a row in 16 bits: where products have AMX.

    Without it a row is quickest in 8 bits. There the included head, which was right a third of the time, gained nothing
    beside n-grams (docs/PERFORMANCE.md). That it pays with AMX was not seen.
    """
    return torch.cpu._is_amx_tile_supported() and native_dtype() != "float32"


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


def _check(asked: Loading) -> None:
    if asked.slots < 1:
        raise ModelError(f"slots: must be at least 1, not {asked.slots}")
    for name, value, known in (
        ("runtime", asked.runtime, RUNTIMES),
        ("quantization", asked.quantization, QUANTIZATIONS),
        ("engine", asked.engine, ENGINES),
    ):
        if value not in known:
            raise ModelError(f"{name}: must be one of {', '.join(known)}, not {value!r}")
    if asked.ranks is not None and asked.engine != VLLM:
        raise ModelError(f"{RANKS}: is vLLM's, and goes with --engine {VLLM} only, not {asked.ranks.size}")


def _computed_in(asked: Loading) -> str:
    """The dtype of what is computed."""
    if asked.quantization == WEIGHTS16:
        if asked.dtype not in (AUTO, "float32"):
            raise ModelError(f"quantization: {WEIGHTS16} keeps weights of float32's arithmetic, not of {asked.dtype}'s")
        return "float32"
    if asked.dtype != AUTO:
        return asked.dtype
    return native_dtype("cuda" if asked.engine == VLLM and torch.cuda.is_available() else asked.device)


def _of_our_runtimes(asked: Loading) -> dict[str, object]:
    """What of it neither llama.cpp nor vLLM has a use for, by name."""
    return {
        "quantization": asked.quantization != NONE,
        "compile": asked.compiled,
        "heads": asked.heads,
    }


def _refuse(asked: Mapping[str, object], by: str) -> None:
    """ModelError that names the first of these that was asked for, and what does not serve it."""
    for name, value in asked.items():
        if value:
            raise ModelError(f"{name}: is not served with {by}")


def computes_gguf(spec: str, asked: Loading) -> str:
    """Which runtime computes a GGUF file, or auto for the quicker one of those that are not llama.cpp.

    llama.cpp alone has keys and values in few bits, and layers on a GPU; the others alone have what `_of_our_runtimes`
    names, and on OpenVINO equal bits cost nothing. Else auto is llama.cpp where it is installed, but for small files:
    of large ones a row alone is quickest there, since it reads fewer bits; of small ones OpenVINO's rows are, and its
    prompts (docs/MODELS.md).
    """
    if asked.runtime != AUTO:
        return asked.runtime
    if asked.kv_type != AUTO_KV or asked.gpu_layers:
        return LLAMACPP
    ours = any(_of_our_runtimes(asked).values()) or asked.device != "cpu" or _is_small(spec)
    ours = ours or (asked.deterministic and find_spec("openvino") is not None and _is_read(spec))
    return AUTO if ours or find_spec("llama_cpp") is None else LLAMACPP


def _is_read(spec: str) -> bool:
    """Whether others than llama.cpp compute a GGUF file; True for one that cannot be read, of which they tell."""
    try:
        return read_gguf(spec).architecture in ARCHITECTURES
    except ModelError:
        return True


def _is_small(spec: str) -> bool:
    """Whether a GGUF file is quicker on OpenVINO than on llama.cpp."""
    if find_spec("openvino") is None or native_dtype() == "float32":
        return False
    with suppress(OSError):  # of a file that is not there, which is said where it is read
        size = Path(spec).expanduser().stat().st_size
        return 0 < size <= SMALL and read_gguf(spec).architecture in llama.MODEL_TYPES
    return False


def _check_for_llamacpp(asked: Loading) -> None:
    if asked.device != "cpu":
        raise ModelError(f"device: is not served with {LLAMACPP}; a file's layers go to a GPU by --gpu-layers")
    _refuse({**_of_our_runtimes(asked), "engine": asked.engine != SPECWIRE}, LLAMACPP)
    hindrances = {f"gpu-layers {asked.gpu_layers}": asked.gpu_layers, "kv-type f32": asked.kv_type == "f32"}
    for name, value in hindrances.items():
        if asked.deterministic and value:
            raise ModelError(f"deterministic: is not served by {LLAMACPP} with {name}")


def _check_for_llamacpp_only(spec: str, asked: Loading) -> None:
    for name, value in (("kv-type", asked.kv_type != AUTO_KV), ("gpu-layers", asked.gpu_layers)):
        if value:
            raise ModelError(f"{name}: is for {GGUF} files that {LLAMACPP} computes, not for {spec} on {asked.runtime}")
    if asked.runtime == LLAMACPP:
        raise ModelError(f"runtime: {LLAMACPP} is for {GGUF} files, not for {spec}")


def _scripted(spec: str, asked: Loading) -> LanguageModel:
    heads = asked.heads
    if asked.ranks is not None:
        raise ModelError(f"{RANKS}: a scripted model cannot be split over {asked.ranks.size} ranks")
    if heads is None:
        return ScriptedLM.parse(spec, slots=asked.slots, context=asked.context)
    if not heads.startswith(PREFIX):
        lacking = "layers to skip" if is_self(heads) else "features for them"
        raise ModelError(f"heads: a scripted model has no {lacking}")
    return HeadedScript.beside(spec, heads, slots=asked.slots, context=asked.context)


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


def _set_threads(asked: Loading) -> None:
    if asked.threads is None:
        return
    if asked.threads < 1:
        raise ModelError(f"threads: must be at least 1, not {asked.threads}")
    torch.set_num_threads(asked.threads)
