"""From a path, a hub id or "scripted:..." to a LanguageModel."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specwire.lm.interface import NONE, QUANTIZATIONS, RUNTIMES, TORCH, LanguageModel, ModelError
from specwire.lm.party import FIELD, Party
from specwire.lm.scripted import PREFIX, ScriptedLM


def load_model(
    spec: str,
    *,
    slots: int,
    dtype: str = "float32",
    device: str = "cpu",
    context: int | None = None,
    threads: int | None = None,
    lean: bool = True,
    runtime: str = TORCH,
    deterministic: bool = False,
    quantization: str = NONE,
    kv_memory: int | None = None,
    compiled: bool = False,
    party: Party | None = None,
) -> LanguageModel:
    """Load a causal language model to serve `slots` texts at once.

    Args:
        spec: local directory, hub id, or a scripted model (`specwire.lm.scripted.USAGE`).
        dtype: float32, bfloat16 or float16. A scripted model ignores it, and the device.
        context: positions per slot; the model's own maximum if None. Memory is set aside for slots x context.
        threads: threads that PyTorch computes with in this process; unchanged if None.
        lean: use our own decoder where the model has one; False keeps to the model's own modules.
        runtime: what computes the forwards: "torch"; "openvino" (the extra of that name, the Llama family, on cpu; its
            weights take room as float32 too while it loads); or "auto": openvino where it is installed and agrees with
            the model, else torch. A scripted model ignores it.
        deterministic: the logits of a position are a function of the text before it, bit for bit, whatever else is
            computed with it (`specwire.lm.apart`; cpu and torch only). The same bits come from the same machine, build
            and number of threads. A scripted model always does so.
        quantization: "none", or "int8": linear layers' weights rounded to 8 bits (`specwire.lm.int8`). A scripted model
            ignores it.
        compiled: run the Llama family as graphs of `torch.compile`, on CUDA replayed as CUDA graphs
            (`specwire.lm.compiled`; torch only). Loading takes minutes longer. A scripted model ignores it.
        kv_memory: bytes for keys and values; `slots` is then as many as fit. A scripted model ignores it.
        party: the ranks that the model is split over (`specwire.lm.split`), each of which loads it with the same
            arguments; None for one process.

    Raises:
        ModelError: with one sentence that names what is wrong.
    """
    _check(slots, runtime, quantization)
    _set_threads(threads)
    if spec.startswith(PREFIX):
        return _scripted(spec, slots, context, party)
    # Imported here because transformers takes seconds to import, which a scripted model need not wait for.
    from specwire.lm.kv_memory import KvMemory
    from specwire.lm.pretrained import load_pretrained
    from specwire.lm.runners import How

    how = How(runtime, lean, deterministic, quantization, compiled)
    size = slots if kv_memory is None else KvMemory(kv_memory)
    with _told_by(party):
        return load_pretrained(spec, slots=size, dtype=dtype, device=device, context=context, how=how, party=party)


def native_dtype(device: str = "cpu") -> str:
    """bfloat16 where the device computes it itself, else float32. Emulated, bfloat16 is slower than float32."""
    if torch.device(device).type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        # oneDNN takes bfloat16 wherever it has AVX-512, and may be held to less (ONEDNN_MAX_CPU_ISA).
        native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if platform.machine() in ("x86_64", "AMD64"):
            native = native and torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if native else "float32"


def _check(slots: int, runtime: str, quantization: str) -> None:
    if slots < 1:
        raise ModelError(f"slots: must be at least 1, not {slots}")
    if runtime not in RUNTIMES:
        raise ModelError(f"runtime: must be one of {', '.join(RUNTIMES)}, not {runtime!r}")
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"quantization: must be one of {', '.join(QUANTIZATIONS)}, not {quantization!r}")


def _scripted(spec: str, slots: int, context: int | None, party: Party | None) -> LanguageModel:
    if party is not None:
        raise ModelError(f"{FIELD}: a scripted model cannot be split over {party.size} ranks")
    return ScriptedLM.parse(spec, slots=slots, context=context)


@contextmanager
def _told_by(party: Party | None) -> Iterator[None]:
    """What breaks off between the ranks says less than the rank that ended; what all of them found is known already."""
    try:
        yield
    except Exception as error:
        loss = "" if party is None else party.loss()
        if loss and str(error) not in loss:
            raise ModelError(f"{FIELD}: {loss}") from error
        raise


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if threads < 1:
        raise ModelError(f"threads: must be at least 1, not {threads}")
    torch.set_num_threads(threads)
