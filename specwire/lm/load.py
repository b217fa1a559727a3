"""What a language model is to the services, and how one is loaded: from a path, a hub id or "scripted:..."."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specwire.core.model import (
    AUTO,
    AUTO_KV,
    ENGINES,
    GGUF,
    LLAMACPP,
    NONE,
    QUANTIZATIONS,
    RUNTIMES,
    SPECWIRE,
    TORCH,
    VLLM,
    Feed,
    ModelError,
    ModelInfo,
    ModelLost,
    SlotModel,
    is_gguf,
    out_of_memory,
)
from specwire.lm.gguf_file import read_gguf
from specwire.lm.heads.scripted import HeadedScript
from specwire.lm.heads.select import load_head
from specwire.lm.heads.self_speculation import SkimmingModel, is_self, kept_layers
from specwire.lm.heads.slots import Head, HeadedModel
from specwire.lm.kv_cache import (
    CachedLM,
    KvMemory,
    Runner,
    Sizes,
    SkimmingRunner,
    TappedRunner,
    position_bytes,
    readable,
    slots_of,
    slots_of_size,
)
from specwire.lm.model_config import (
    check_class,
    check_kind,
    check_rotation,
    check_window,
    context_of,
    first_line,
    is_recurrent,
)
from specwire.lm.model_files import CONFIG, ModelText, check_files, read_text, weights_fingerprint
from specwire.lm.runners.hybrid import fitting_states, rows_of, state_bytes
from specwire.lm.runners.select import (
    TOLERANCES,
    How,
    OwnTrial,
    Trial,
    cache_dtype,
    check_recurrent,
    runner_for,
    split_way,
)
from specwire.lm.runners.tensor_parallel import FIELD, LeadingRunner, RankGroup, join, rank_device, split, turn
from specwire.lm.scripted import PREFIX, ScriptedLM
from specwire.lm.table_model import PREFIX as TABLE_PREFIX
from specwire.lm.table_model import load_table_model
from specwire.progress import LAST_LINE
from specwire.text.tokenizer import vocabulary_fingerprint


class LanguageModel(SlotModel, Protocol):
    """A causal language model whose rows are logits."""

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Feed tokens of several slots in one pass.

        Returns:
            float32 logits (sum of wanted, vocabulary) on the model's device, in the order of the feeds.

        Raises:
            ValueError: a feed is invalid; nothing was fed.
        """
        ...


# ----------------------------------------------------------------------------------------------------------------------
# From a local directory or hub id to a LanguageModel.

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Outline:
    """What is known of a model before its weights are loaded.

    location: of its files. context: positions to serve.
    """

    location: str
    config: PreTrainedConfig
    context: int
    text: ModelText


def outline(spec: str, context: int | None = None) -> Outline:
    """Outline of a directory or hub id. Raises ModelError for models that can be refused without weights."""
    config, location = _config(spec), _location(spec)
    check_kind(config)
    check_class(config)
    positions = context_of(config, context)
    check_window(config, positions)
    check_rotation(config, positions)
    text = read_text(location)
    check_files(location)
    return Outline(location, config, positions, text)


def load_pretrained(
    spec: str,
    *,
    slots: int | KvMemory,
    dtype: str,
    device: str,
    context: int | None,
    how: How,
    ranks: RankGroup | None = None,
    heads: str | None = None,
) -> LanguageModel:
    """The part of `load_model` that needs transformers."""
    target = _device(device if ranks is None else rank_device(device, ranks))
    if how.deterministic and target.type != "cpu":
        raise ModelError(f"deterministic: is known to hold on cpu only, not on {device}")
    if heads is not None and ranks is not None:
        raise ModelError(f"heads: are not served with {FIELD}, over {ranks.size} ranks")
    known = outline(spec, context)
    how = how._replace(skims=heads is not None and is_self(heads))
    config, positions = known.config, known.context
    if is_recurrent(config):
        check_recurrent(config, how, None if ranks is None else ranks.size)
    if (how.skims or is_recurrent(config)) and how.runtime == AUTO:
        how = how._replace(runtime=TORCH)
    cache = _cache_dtype(_dtype(dtype), how, target)
    count, beside = slots_of(slots, config, positions, cache), 0
    rank = None
    if ranks is not None:
        how = split_way(config, how, ranks.size)
        rank = join(ranks, target)
    with turn(rank):
        model = pretrained(spec, _dtype(dtype), target if rank is None else CPU)
        info, unassigned = _describe(spec, model, known, dtype, how)
        kept = kept_layers(heads, config.get_text_config().num_hidden_layers, info) if heads and how.skims else ()
        head = None if heads is None or kept else load_head(heads, model, info)
        if head is not None:
            how = how._replace(taps=head.taps, fuse=head.fuse)
            if how.runtime == AUTO and head.fuse is None:
                how = how._replace(runtime=TORCH)  # two runtimes side by side take what such a head gains (docs/LOG.md)
                cache = _cache_dtype(_dtype(dtype), how, target)
            beside = head.slot_bytes(positions, cache)
        if is_recurrent(config):
            one = state_bytes(model)
            how = _with_states(how, slots, positions * position_bytes(config, cache) + beside, one)
            beside += how.states * one
        count = slots_of(slots, config, positions, cache, beside)
        if rank is not None:
            split(model, rank)
            how = how._replace(rank=rank)
            nn.Module.to(model, target)
    try:
        runner, used = runner_for(model, Sizes(count, positions, info.vocabulary), how)
        drafting = None if head is None else head.over(count, positions, cache, used)
    except Exception as error:
        if not out_of_memory(error):
            raise
        size = readable(count * (positions * position_bytes(config, cache) + beside))
        message = f"slots: no memory for {count} of {positions} positions ({size}); give fewer, or a shorter context"
        raise ModelError(message) from error
    if ranks is not None and ranks.rank == 0:
        runner = LeadingRunner(runner, ranks)
    info = replace(info, runtime=used, device=str(next(model.parameters()).device))
    return _over_slots(runner, info, count, unassigned, kept, drafting)


def _with_states(how: How, slots: int | KvMemory, keys: int, state: int) -> How:
    """With as many states of so many bytes a slot as there is room for, beside `keys` bytes; ModelError if too few."""
    if isinstance(slots, KvMemory):
        how = how._replace(states=fitting_states(slots.size, keys, state))
    if how.taps and rows_of(how.states) == 1:
        raise ModelError("heads: kv_memory has no room for the states of a window; give more, or no heads")
    return how


def _check_for_vllm(how: How, heads: str | None) -> None:
    """ModelError, which names it, for what vLLM's worker does not do here."""
    given = {
        "runtime": how.runtime if how.runtime != TORCH else "",
        "deterministic": how.deterministic,
        "quantization": how.quantization if how.quantization != NONE else "",
        "compile": how.compiled,
        "heads": heads,
    }
    for name, value in given.items():
        if value:
            raise ModelError(f"{name}: is not served with --engine {VLLM}")


def load_in_vllm(
    spec: str,
    slots: int | KvMemory,
    dtype: str,
    device: str,
    context: int | None,
    options: Mapping[str, Any],
    ranks: RankGroup | None,
) -> LanguageModel:
    """The part of `load_model` for vLLM's worker; the model's own modules are read first, to hold it to them."""
    from specwire.lm.runners.vllm import VllmRank, VllmRunner, prepare, reason_of

    prepare(device, options)
    known = outline(spec, context)
    config, positions = known.config, known.context
    if is_recurrent(config):
        raise ModelError(f"engine: the recurrent layers of {config.model_type} models are not served with {VLLM}")
    sizes = Sizes(slots_of(slots, config, positions, _dtype(dtype)), positions, config.get_text_config().vocab_size)
    rank = None if ranks is None else VllmRank(ranks.meet(), ranks.rank, ranks.size)
    if rank is not None and rank.number > 0:  # what the model is, and whether it is that, rank 0 says
        follower = VllmRunner(known.location, sizes, _dtype(dtype), options, rank)
        nobody = ModelInfo("", "", sizes.vocabulary, positions, (), dtype, follower.device, "", "", VLLM)
        return CachedLM(follower, nobody, sizes.slots)
    model = pretrained(spec, _dtype(dtype), CPU)
    info, unassigned = _describe(spec, model, known, dtype, How())
    sizes = sizes._replace(vocabulary=info.vocabulary)
    trial = Trial(model, sizes, _dtype(dtype))
    del model
    try:
        own = VllmRunner(known.location, sizes, _dtype(dtype), options, rank)
        runner = own if ranks is None else LeadingRunner(own, ranks)
        off = trial.deviation(runner)
    except (ModelError, ModelLost):
        raise
    except Exception as error:  # any error of a large library for a model, an option or a machine
        if out_of_memory(error):
            message = (
                f"slots: no memory for {sizes.slots} of {positions} positions in vLLM; give fewer, or a shorter context"
            )
            raise ModelError(message) from error
        raise ModelError(f"engine: vLLM cannot serve this model: {reason_of(error)}") from error
    if not off <= 1:
        message = f"engine: vLLM gives other logits than this {info.architecture}"
        raise ModelError(f"{message} ({off:.1f} times the tolerance)")
    return CachedLM(runner, replace(info, runtime=VLLM, device=own.device), sizes.slots, unassigned)


def _check_for_gguf(device: str, how: How, ranks: RankGroup | None, heads: str | None, engine: str) -> None:
    """ModelError, which names it, for what a GGUF file is not served with."""
    given = {
        "device": device if device != "cpu" else "",
        "deterministic": how.deterministic,
        "quantization": how.quantization if how.quantization != NONE else "",
        "compile": how.compiled,
        "heads": heads,
        FIELD: ranks,
        "engine": engine if engine != SPECWIRE else "",
    }
    for name, value in given.items():
        if value:
            instead = "; its layers go to a GPU by --gpu-layers" if name == "device" else ""
            raise ModelError(f"{name}: is not served with a {GGUF} file{instead}")


def load_gguf(
    spec: str, slots: int | KvMemory, context: int | None, kv_type: str = AUTO_KV, gpu_layers: int = 0
) -> LanguageModel:
    """The part of `load_model` for GGUF files. They say in which numbers they are computed."""
    from specwire.lm.runners.llamacpp import GgufWeights, LlamaCppRunner

    file = read_gguf(spec)
    positions, kept = file.context(context), file.kv_type(kv_type)
    text = file.text()
    weights = GgufWeights(file, gpu_layers)
    weights.check_context(positions)
    if not text.tokenizer_json and (made := file.tokenizer()) and weights.agrees(made):
        text = text._replace(tokenizer_json=made)
    vocabulary = min(max(text.tokens) + 1, weights.width)
    slot = int(positions * file.position_bytes(kept))
    count = slots_of_size(slots.size, slot, positions) if isinstance(slots, KvMemory) else slots
    sizes = Sizes(count, positions, vocabulary)
    file.check_rotation(count, positions)
    runner = LlamaCppRunner(weights, file, sizes, kept, torch.get_num_threads())
    try:
        trial = OwnTrial(runner, sizes, TOLERANCES[torch.float32 if kept == "f32" else torch.float16])
        off = trial.deviation(runner)
    except (MemoryError, RuntimeError) as error:
        raise ModelError(f"{file.path.name} cannot be served: {first_line(error)}") from error
    if not off <= 1:
        raise ModelError(
            f"{file.path.name} gives other logits in pieces than at once ({off:.1f} times the tolerance), so it "
            "cannot be served"
        )
    info = ModelInfo(
        name=file.path.stem,
        architecture=file.architecture,
        vocabulary=vocabulary,
        context=positions,
        eos_ids=tuple(id_ for id_ in weights.eos_ids if id_ < vocabulary),
        dtype=file.dtype,
        device=f"gpu ({gpu_layers} layers)" if gpu_layers else "cpu",
        weights_fingerprint=file.fingerprint(),
        vocabulary_fingerprint=vocabulary_fingerprint(text.tokens),
        runtime=LLAMACPP,
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        special_tokens=text.special_tokens,
    )
    return CachedLM(runner, info, count, sorted(set(range(vocabulary)) - text.tokens.keys()))


def _cache_dtype(dtype: torch.dtype, how: How, device: torch.device) -> torch.dtype:
    return cache_dtype(dtype, how) if device.type == "cpu" else dtype


def _over_slots(
    runner: Runner, info: ModelInfo, slots: int, unassigned: Sequence[int], kept: Sequence[int], head: Head | None
) -> LanguageModel:
    """kept: layers that draft, or none. head: what drafts beside the model."""
    if kept:
        if not isinstance(runner, SkimmingRunner):
            raise ModelError(f"heads: a {info.architecture} is not computed by a runner that can leave layers out")
        return SkimmingModel(runner, info, slots, unassigned, kept)
    lm = CachedLM(runner, info, slots, unassigned)
    if head is None:
        return lm
    if not isinstance(runner, TappedRunner):
        raise ModelError(f"heads: a {info.architecture} is not computed by a runner that tells its features")
    return HeadedModel(lm, runner, head)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"dtype: must be one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]


def _device(name: str) -> torch.device:
    """The device, after a trial: a name may parse although the device is missing."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(f"device: {name!r} cannot be used here ({first_line(error)})") from error
    return device


def _config(spec: str) -> PreTrainedConfig:
    looks_local = spec.startswith(("/", ".", "~")) or spec.count("/") > 1
    if not spec or (looks_local and not Path(spec).expanduser().is_dir()):
        raise ModelError(f"model {spec!r}: there is no such directory")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(_location(spec))
    except Exception as error:  # any error that the library raises for a broken or foreign directory
        reason = first_line(error)
        named = reason if CONFIG in reason else f"{CONFIG}: {reason}"
        raise ModelError(f"model {spec!r} has no configuration that can be read: {named}") from error
    return config


def pretrained(spec: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of a local directory or hub id, by its own modules. Raises ModelError."""
    _show_progress(LAST_LINE.is_terminal)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            _location(spec),
            dtype=dtype,
            use_safetensors=True,  # the older files of weights are pickles
            output_loading_info=True,
        )
        model: PreTrainedModel = loaded[0]
        model.eval().to(device=device)
    except Exception as error:  # as above, or too little memory
        raise ModelError(f"model {spec!r} cannot be loaded as a causal model: {first_line(error)}") from error
    missing = sorted(loaded[1]["missing_keys"])
    if missing:  # the library draws them at random
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"model {spec!r} cannot be loaded as a causal model: its files lack {missing[0]}{more}")
    return model


def _show_progress(wanted: bool) -> None:
    """The libraries draw bars for downloads and weights, also into pipes unless they are told not to."""
    if wanted:
        transformers_logging.enable_progress_bar()
    else:
        transformers_logging.disable_progress_bar()


def _location(spec: str) -> str:
    path = Path(spec).expanduser()
    return str(path) if path.is_dir() else spec


def _describe(spec: str, model: PreTrainedModel, known: Outline, dtype: str, how: How) -> tuple[ModelInfo, list[int]]:
    """The model's description, and the ids of its vocabulary without a token."""
    text = known.text
    width = model.get_output_embeddings().weight.shape[0]
    tokens = text.vocabulary(width)
    vocabulary = min(max(tokens) + 1, width)
    info = ModelInfo(
        name=Path(known.location).name if Path(known.location).is_dir() else spec,
        architecture=type(model).__name__,
        vocabulary=vocabulary,
        context=known.context,
        eos_ids=_eos_ids(model),
        dtype=dtype,
        device=str(next(model.parameters()).device),
        weights_fingerprint=weights_fingerprint(model, known.config, _precision(dtype, how)),
        vocabulary_fingerprint=vocabulary_fingerprint(tokens),
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        special_tokens=text.special_tokens,
        deterministic=how.deterministic,
        quantization=how.quantization,
    )
    return info, sorted(set(range(vocabulary)) - tokens.keys())


def _precision(dtype: str, how: How) -> str:
    return dtype if how.quantization == NONE else f"{dtype} {how.quantization}"


def _eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(), "eos_token_id", None)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


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
    ranks: RankGroup | None = None,
    heads: str | None = None,
    engine: str = SPECWIRE,
    engine_options: Mapping[str, Any] | None = None,
    kv_type: str = AUTO_KV,
    gpu_layers: int = 0,
) -> LanguageModel:
    """Load a causal language model to serve `slots` texts at once.

    Args:
        spec: local directory, hub id, GGUF file, a scripted model (`specwire.lm.scripted.USAGE`), or a table of
            n-grams (`table:FILE`), which ignores most of what follows.
        dtype: float32, bfloat16, float16, or "auto": what `native_dtype` says of the device, which the model then
            tells as its own. A scripted model ignores it, and the device.
        context: positions per slot; the model's own maximum if None. Memory is set aside for slots x context.
        threads: threads that PyTorch computes with in this process; unchanged if None.
        lean: use our own decoder where the model has one; False keeps to the model's own modules.
        runtime: what computes the forwards: "torch"; "openvino" (the extra of that name, the Llama family, on cpu; its
            weights take room as float32 too while it loads); or "auto": openvino where it is installed and agrees with
            the model, else torch. A scripted model ignores it, and so does a GGUF file, which llama.cpp computes (the
            extra llamacpp) in the file's own numbers: dtype is ignored as well.
        deterministic: the logits of a position are a function of the text before it, bit for bit, whatever else is
            computed with it (`specwire.lm.runners.deterministic`; cpu and torch only). The same bits come from the same
            machine, build and number of threads. A scripted model always does so.
        quantization: "none", or "int8": linear layers' weights rounded to 8 bits (`specwire.lm.runners.linear`).
            A scripted model ignores it.
        compiled: run the Llama family as graphs of `torch.compile`, on CUDA replayed as CUDA graphs
            (`specwire.lm.runners.compiled`; torch only). Loading takes minutes longer. A scripted model ignores it.
        kv_memory: bytes for keys and values, states, and for what a head beside the model keeps of each text; `slots`
            is then as many as fit. If not one does with all states of a window, a slot has fewer, and windows are
            shorter. A scripted model ignores it.
        ranks: the ranks that the model is split over (`runners.tensor_parallel`), each of which loads it with the same
            arguments; None for one process.
        heads: directory of a head (EAGLE-3, Medusa, Hydra, MTP layers), which drafts beside the model
            (`specwire.lm.heads`); or which of its own layers draft (`specwire.lm.heads.self_speculation`), then `auto`
            is torch; of a scripted model, another one. None for none.
        engine: "specwire", or "vllm": its worker computes the forwards (`specwire.lm.runners.vllm`), and runtime and
            device are its own. A scripted model ignores it.
        engine_options: further arguments of vLLM's EngineArgs.
        kv_type: of a GGUF file's keys and values, one of KV_TYPES. gpu_layers: how many of its layers lie on a GPU.

    Raises:
        ModelError: with one sentence that names what is wrong.
    """
    _check(slots, runtime, quantization)
    if engine not in ENGINES:
        raise ModelError(f"engine: must be one of {', '.join(ENGINES)}, not {engine!r}")
    _set_threads(threads)
    if spec.startswith(PREFIX):
        return _scripted(spec, slots, context, ranks, heads)
    if spec.startswith(TABLE_PREFIX):
        if ranks is not None or heads is not None:
            raise ModelError(f"model: {spec} is a table, which drafts and is no target")
        return load_table_model(spec, slots, context)
    if dtype == AUTO:
        dtype = native_dtype(device if engine != VLLM or not torch.cuda.is_available() else "cuda")
    how = How(runtime, lean, deterministic, quantization, compiled)
    size = slots if kv_memory is None else KvMemory(kv_memory)
    if is_gguf(spec):
        _check_for_gguf(device, how, ranks, heads, engine)
        return load_gguf(spec, size, context, kv_type, gpu_layers)
    for name, value in (("runtime", runtime == LLAMACPP), ("kv-type", kv_type != AUTO_KV), ("gpu-layers", gpu_layers)):
        if value:
            raise ModelError(f"{name}: {LLAMACPP if name == 'runtime' else value} is for {GGUF} files, not for {spec}")
    with _told_by(ranks):
        if engine == VLLM:
            _check_for_vllm(how, heads)
            return load_in_vllm(spec, size, dtype, device, context, dict(engine_options or {}), ranks)
        return load_pretrained(
            spec, slots=size, dtype=dtype, device=device, context=context, how=how, ranks=ranks, heads=heads
        )


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
    if kind != CPU.type:
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


def _check(slots: int, runtime: str, quantization: str) -> None:
    if slots < 1:
        raise ModelError(f"slots: must be at least 1, not {slots}")
    if runtime not in RUNTIMES:
        raise ModelError(f"runtime: must be one of {', '.join(RUNTIMES)}, not {runtime!r}")
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"quantization: must be one of {', '.join(QUANTIZATIONS)}, not {quantization!r}")


def _scripted(spec: str, slots: int, context: int | None, ranks: RankGroup | None, heads: str | None) -> LanguageModel:
    if ranks is not None:
        raise ModelError(f"{FIELD}: a scripted model cannot be split over {ranks.size} ranks")
    if heads is None:
        return ScriptedLM.parse(spec, slots=slots, context=context)
    if not heads.startswith(PREFIX):
        lacking = "layers to skip" if is_self(heads) else "features for them"
        raise ModelError(f"heads: a scripted model has no {lacking}")
    return HeadedScript.beside(spec, heads, slots=slots, context=context)


@contextmanager
def _told_by(ranks: RankGroup | None) -> Iterator[None]:
    """Prefer the error of the rank that ended to the error of a broken connection between ranks."""
    try:
        yield
    except Exception as error:
        loss = "" if ranks is None else ranks.loss()
        if loss and str(error) not in loss:
            raise ModelError(f"{FIELD}: {loss}") from error
        raise


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if threads < 1:
        raise ModelError(f"threads: must be at least 1, not {threads}")
    torch.set_num_threads(threads)
