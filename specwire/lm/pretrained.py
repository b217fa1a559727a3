"""From a local directory, a hub id or a GGUF file to a `LanguageModel`: all of `load_model` behind its checks.

transformers is imported where it is called (see `model_config.CausalModel`).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from specwire.core.model import (
    AUTO,
    AUTO_KV,
    LLAMACPP,
    NONE,
    TORCH,
    VLLM,
    WEIGHTS16,
    Loading,
    ModelError,
    ModelInfo,
    ModelLost,
    is_gguf,
    out_of_memory,
    served_context,
)
from specwire.lm.gguf_file import GgufFile, read_gguf
from specwire.lm.gguf_tokenizer import made_tokenizer, text_of
from specwire.lm.gguf_weights import config_of, full_config_of, give_back_freed, given_back, model_of_file
from specwire.lm.heads.select import LoadedHead, load_head
from specwire.lm.heads.self_speculation import SkimmingModel, is_self, kept_layers
from specwire.lm.heads.slots import Head, HeadedModel
from specwire.lm.kv_cache import (
    CachedLM,
    KvMemory,
    LanguageModel,
    Runner,
    Sizes,
    SlotMemory,
    fitting_states,
    position_bytes,
    readable,
    rows_of,
    slots_of_size,
)
from specwire.lm.linear import GROUP
from specwire.lm.model_config import (
    CausalModel,
    ModelConfig,
    check_class,
    check_kind,
    check_layers,
    check_rotation,
    check_window,
    first_line,
    is_recurrent,
    quantized_by,
)
from specwire.lm.model_files import (
    CONFIG,
    ModelText,
    check_files,
    check_weights,
    file_of,
    files_fingerprint,
    read_file,
    read_text,
    stated_eos,
    weights_fingerprint,
)
from specwire.lm.plain_decoder import PlainDecoder
from specwire.lm.runners.draft_vocabulary import VOCABULARY, DraftVocabulary, DraftVocabularyRunner
from specwire.lm.runners.llama import MODEL_TYPES
from specwire.lm.runners.select import (
    DYNAMIC_TOLERANCE,
    How,
    cache_dtype,
    check_recurrent,
    own_trial,
    runner_for,
    trial_of,
)
from specwire.lm.runners.trial import Trial, held_once
from specwire.named_models import check_directory
from specwire.progress import LAST_LINE
from specwire.text.tokenizer import vocabulary_fingerprint

if TYPE_CHECKING:
    from specwire.lm.runners.llamacpp.runner import LlamaCppRunner

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
# Model types that transformers knows only by code in their folders, by the type whose layers and names theirs are.
# MiMo (arXiv 2505.07608) is Qwen2 with MTP layers, which are a head's (`specwire.lm.heads.mtp`).
READ_AS = {"mimo": "qwen2"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Outline:
    """What is known of a model before its weights are loaded.

    location: of its files. context: positions to serve. says: of a drafter that says some of its target's ids only,
    which its text is of.
    """

    location: str
    config: ModelConfig
    context: int
    text: ModelText
    says: DraftVocabulary | None = None


def outline(spec: str, context: int | None = None) -> Outline:
    """Outline of a directory, a hub id or a GGUF file. ModelError for models that can be refused without weights."""
    config, location = _config(spec), _location(spec)
    check_kind(config)
    if not is_gguf(spec):  # of those all kinds are known
        check_class(config)
    positions = served_context(getattr(config.get_text_config(), "max_position_embeddings", None), context)
    check_window(config, positions)
    check_rotation(config, positions)
    if is_gguf(spec):
        return Outline(location, config, positions, text_of(read_gguf(spec)))
    text = read_text(location)
    check_files(location, config)
    return Outline(location, config, positions, text, _says(location, config))


def _says(location: str, config: ModelConfig) -> DraftVocabulary | None:
    """None for a model that says all of its ids. Raises ModelError."""
    with file_of(location, VOCABULARY):
        held = read_file(location, VOCABULARY)
        found = DraftVocabulary.of(held) if held else None
        rows: int = config.get_text_config().vocab_size
        if found is not None and found.rows != rows:
            raise ValueError(f"ids: are {len(found.ids)}, and of {rows} rows of the embedding one is of all others")
    return found


def load_pretrained(
    spec: str,
    slots: int | KvMemory,
    dtype: str,
    asked: Loading,
) -> LanguageModel:
    """The part of `load_model` for directories, hub ids, and GGUF files that llama.cpp does not compute."""
    heads, how, target = asked.heads, How.of(asked), usable_device(asked.device)
    if how.deterministic and target.type != "cpu":
        raise ModelError(f"deterministic: is known to hold on cpu only, not on {asked.device}")
    known = outline(spec, asked.context)
    plan = ComputePlan(known.config, _dtype(dtype), target, how._replace(skims=heads is not None and is_self(heads)))
    plan.settle_runtime()
    memory = plan.slot_memory(known.context)
    memory.slots(slots)  # whoever asks for too much need not wait for weights
    model = _modules(spec, known.config, plan.kept, target, plan.rounded)
    info, unassigned = _describe(spec, model, known, dtype, plan.how)
    layers = known.config.get_text_config().num_hidden_layers
    skimmed = kept_layers(heads, layers) if heads is not None and plan.how.skims else ()
    head = load_head(heads, model, info) if heads is not None and not skimmed else None
    if head is not None:
        memory = plan.with_head(head, known.context)
    if is_recurrent(known.config):
        from specwire.lm.runners.hybrid import state_bytes  # as `model_config.CausalModel` says

        memory = plan.with_states(slots, state_bytes(model), memory)
    count = memory.slots(slots)
    rows = info.vocabulary if known.says is None else known.says.rows
    with _memory_told(count, memory), given_back(model):
        runner, used = runner_for(model, Sizes(count, known.context, rows), plan.how, info.weights_fingerprint)
        drafter = None if head is None else head.make(count, known.context, memory.dtype, used)
    info = replace(info, runtime=used, device=str(next(model.parameters()).device))
    if known.says is not None:
        runner = DraftVocabularyRunner(runner, known.says, target)
    lm = _over_slots(runner, info, count, unassigned, skimmed, drafter)
    del model
    give_back_freed()
    return lm


@dataclass(slots=True)
class ComputePlan:
    """How and where a model is computed, which is settled bit by bit: by its layers, by what drafts beside it, by room.

    dtype: of its forwards.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    how: How

    @property
    def kept(self) -> torch.dtype:
        """Of weights, but those that are `rounded`."""
        return torch.bfloat16 if self.how.quantization == WEIGHTS16 else self.dtype

    @property
    def rounded(self) -> str:
        """How those of linear layers are."""
        return NONE if self.how.quantization == WEIGHTS16 else self.how.quantization

    def settle_runtime(self) -> None:
        """ModelError for what recurrent layers are not served with, and for 8 bits that OpenVINO cannot compute."""
        if is_recurrent(self.config):
            check_recurrent(self.config, self.how)
            if self.how.runtime == AUTO:
                self.how = self.how._replace(runtime=TORCH)
        if self.how.skims and self.how.runtime == AUTO:
            if self._may_be_openvino:
                logger.warning(
                    "heads: skipped layers are computed by torch, so the runtime auto is torch beside them; without "
                    "them it is openvino, which is often the faster of the two: compare them"
                )
            self.how = self.how._replace(runtime=TORCH)
        if self.how.quantization != NONE and not self._may_be_openvino:
            raise ModelError(
                f"quantization: {self.how.quantization} is computed by openvino (pip install 'specwire[openvino]') for "
                f"{', '.join(sorted(MODEL_TYPES))} models on cpu, without compile and skipped layers"
            )

    def slot_memory(self, positions: int) -> SlotMemory:
        kept = cache_dtype(self.dtype, self.how) if self.device.type == "cpu" else self.dtype
        return SlotMemory(self.config, positions, kept)

    def with_head(self, head: LoadedHead, positions: int) -> SlotMemory:
        """Tap the layers whose states the head reads; what a slot then takes."""
        self.how = self.how._replace(taps=head.taps, fuse=head.fuse)
        memory = self.slot_memory(positions)
        kept = memory.dtype if head.fuse is None or not self._may_be_openvino else torch.float32
        return replace(memory, beside=head.slot_bytes(positions, kept))

    def with_states(self, slots: int | KvMemory, state: int, memory: SlotMemory) -> SlotMemory:
        """Keep as many states of so many bytes as a slot has room for; what it then takes. ModelError if too few."""
        if isinstance(slots, KvMemory):
            self.how = self.how._replace(states=fitting_states(slots.size, memory.size, state))
        if self.how.taps and rows_of(self.how.states) == 1:
            raise ModelError("heads: kv_memory has no room for the states of a window; give more, or no heads")
        return replace(memory, beside=memory.beside + self.how.states * state)

    @property
    def _may_be_openvino(self) -> bool:
        on_cpu = self.device.type == "cpu" and not self.how.compiled
        fits = self.how.runtime != TORCH and on_cpu and self.config.model_type in MODEL_TYPES
        return fits and find_spec("openvino") is not None


@contextmanager
def _memory_told(count: int, memory: SlotMemory) -> Iterator[None]:
    """ModelError that says how much was asked for, where memory runs out."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise ModelError(
            f"slots: no memory for {count} of {memory.positions} positions ({readable(count * memory.size)}); give "
            "fewer, or a shorter context"
        ) from error


def load_in_vllm(
    spec: str,
    slots: int | KvMemory,
    dtype: str,
    asked: Loading,
) -> LanguageModel:
    """The part of `load_model` for vLLM's worker; the model's own modules are read first, to hold it to them.

    Weights that are quantised in their files only vLLM reads: such a model is held to itself, fed at once.

    Of `asked`, engine_options: further arguments of vLLM's EngineArgs; stages: into how many groups vLLM splits the
    layers; the ranks are as many times more.
    """
    from specwire.lm.runners.vllm import LeadingRunner, VllmMemory, VllmRank, VllmRunner, prepare, reason_of

    options, ranks = asked.engine_options, asked.ranks
    prepare(asked.device, options)
    known = outline(spec, asked.context)
    config, positions = known.config, known.context
    if known.says is not None:
        raise ModelError(f"engine: a drafter that says some of its target's ids only is not served with {VLLM}")
    if is_recurrent(config):
        raise ModelError(f"engine: the recurrent layers of {config.model_type} models are not served with {VLLM}")
    count = SlotMemory(config, positions, _dtype(dtype)).slots(slots)
    sizes = Sizes(count, positions, config.get_text_config().vocab_size)
    # How much of it whole blocks leave is known once vLLM has said how long they are.
    memory = VllmMemory(slots.size, position_bytes(config, _dtype(dtype))) if isinstance(slots, KvMemory) else None
    rank = None if ranks is None else VllmRank(ranks.meet(), ranks.rank, ranks.size, asked.stages)
    if rank is not None and rank.number > 0:  # what the model is, and whether it is that, rank 0 says
        follower = VllmRunner(known.location, sizes, _dtype(dtype), options, rank, memory)
        nobody = ModelInfo("", "", sizes.vocabulary, positions, (), dtype, follower.device, "", "", VLLM)
        return CachedLM(follower, nobody, follower.slots)
    info, unassigned, trial = _held_to(spec, known, dtype, sizes)
    sizes = sizes._replace(vocabulary=info.vocabulary)
    try:
        own = VllmRunner(known.location, sizes, _dtype(dtype), options, rank, memory)
        runner = own if ranks is None else LeadingRunner(own, ranks)
        off = (trial or own_trial(runner, sizes, DYNAMIC_TOLERANCE)).held(runner, own.slots)
    except (ModelError, ModelLost):
        raise
    except Exception as error:  # any error of a large library for a model, an option or a machine
        told = f"engine: {reason_of(error)}"
        if out_of_memory(error):
            told = f"slots: no memory for {count} of {positions} positions in vLLM; give fewer, or a shorter context"
        raise ModelError(told) from error
    if not off <= 1:
        told = "in pieces than at once" if trial is None else f"than this {info.architecture}"
        raise ModelError(f"engine: vLLM gives other logits {told} ({off:.1f} times the tolerance)")
    return CachedLM(runner, replace(info, runtime=VLLM, device=own.device), own.slots, unassigned)


def _held_to(spec: str, known: Outline, dtype: str, sizes: Sizes) -> tuple[ModelInfo, list[int], Trial | None]:
    """What the model is, and what its own modules say; None of weights that only vLLM reads."""
    if method := quantized_by(known.config):
        return *_describe_files(spec, known, dtype, method), None
    model = pretrained(spec, _dtype(dtype), CPU)
    info, unassigned = _describe(spec, model, known, dtype, How())
    return info, unassigned, trial_of(model, sizes._replace(vocabulary=info.vocabulary))


def load_gguf(
    spec: str,
    slots: int | KvMemory,
    asked: Loading,
) -> LanguageModel:
    """The part of `load_model` for llama.cpp, which computes GGUF files in their own numbers: there is no dtype.

    Of `asked`, kv_type: of keys and values, one of KV_TYPES; gpu_layers: how many of the layers lie on a GPU.
    """
    from specwire.lm.runners.llamacpp.deterministic import TRIAL_TAIL, TRIAL_TOKENS, DeterministicLlamaRunner
    from specwire.lm.runners.llamacpp.runner import GgufWeights, LlamaCppRunner, gguf_trial

    file = read_gguf(spec)
    if asked.deterministic and (file.turns_longer or file.has_learned_positions):
        raise ModelError(f"deterministic: is not served by llamacpp with the positions of {file.path.name}")
    # Flash attention, by which rows are equal, reads no wider keys and values.
    narrow = asked.deterministic and asked.kv_type == AUTO_KV
    positions, kept = file.context(asked.context), file.kv_type("f16" if narrow else asked.kv_type)
    text = file.text()
    # Beside llama.cpp's reading: the whole file's hash takes as long, and so does making a tokenizer of its tables.
    threads = ThreadPoolExecutor(2, thread_name_prefix="file")
    fingerprint, made = threads.submit(file.fingerprint), threads.submit(_made_tokenizer, file, text)
    threads.shutdown(wait=False)
    weights = GgufWeights(file, asked.gpu_layers)
    tokenizer, serialised = made.result()
    if tokenizer is not None and weights.agrees(tokenizer):
        text = text._replace(tokenizer_json=serialised)
    elif tokenizer is not None:
        logger.warning("%s: llama.cpp cuts texts otherwise than the tokenizer; it serves ids only", file.path.name)
    vocabulary = min(max(text.tokens) + 1, weights.width)
    kind = DeterministicLlamaRunner if asked.deterministic else LlamaCppRunner
    slot = int(kind.slot_cells(positions) * file.position_bytes(kept))
    count = slots_of_size(slots.size, slot, positions) if isinstance(slots, KvMemory) else slots
    sizes = Sizes(count, positions, vocabulary)
    file.check_rotation(count, positions)
    runner = kind(weights, file, sizes, kept, torch.get_num_threads())
    # Which GPU it is, and by which driver, nothing tells here: what it computes is tried each time.
    build = weights.library.build()
    size = file.path.stat().st_size if build and not asked.gpu_layers else 0
    text_of_trial = (TRIAL_TOKENS, TRIAL_TAIL) if asked.deterministic else ()
    trial = cache(lambda: gguf_trial(weights, file, sizes, kept, *text_of_trial))
    _hold(runner, asked.deterministic, file, trial, count, size, fingerprint.result(), sizes, kept, build)
    known = Outline(str(file.path), None, positions, text)
    info, unassigned = _described(spec, known, file.dtype, weights.width, weights.eos_ids, fingerprint.result())
    info = replace(
        info,
        architecture=file.architecture,
        eos_ids=tuple(id_ for id_ in info.eos_ids if id_ < vocabulary),
        device=f"gpu ({asked.gpu_layers} layers)" if asked.gpu_layers else "cpu",
        runtime=LLAMACPP,
    )
    return CachedLM(runner, info, count, unassigned)


def _hold(
    runner: LlamaCppRunner,
    deterministic: bool,
    file: GgufFile,
    trial: Callable[[], Trial],
    slots: int,
    size: int,
    *tried: object,
) -> None:
    """Have it keep to its trial, with the fewest rows of a forward that serve. ModelError where it does not.

    size, tried: as `held_once` takes them.
    """
    off = math.inf
    try:
        for rows in runner.row_counts:
            runner.rows = rows
            off = held_once(trial, runner, slots, size, *tried, rows)
            if off > 1 or runner.invariant:
                break
    except (MemoryError, RuntimeError) as error:
        raise ModelError(f"{file.path.name} cannot be served: {first_line(error)}") from error
    if not off <= 1:
        raise ModelError(
            f"{file.path.name} gives other logits in pieces than llama.cpp gives at once ({off:.1f} times the "
            "tolerance), so it is not served by llamacpp; --runtime torch or openvino computes it otherwise, and "
            "another build of llama.cpp may agree with itself"
        )
    if deterministic and not runner.invariant:
        raise ModelError(
            f"deterministic: this build of llama.cpp rounds a row of {file.path.name} by what it is computed with"
        )
    if deterministic:
        least, multiple = runner.rows
        logger.info("forwards have at least %d rows, and a multiple of %d, so that bits are equal", least, multiple)


def _made_tokenizer(file: GgufFile, text: ModelText) -> tuple[Tokenizer | None, bytes]:
    """One of the file's table where the text has none, and its serialisation."""
    made = None if text.tokenizer_json else made_tokenizer(file)
    return made, b"" if made is None else made.to_str().encode()


def _over_slots(
    runner: Runner,
    info: ModelInfo,
    slots: int,
    unassigned: Sequence[int],
    kept: Sequence[int],
    head: Head | None,
) -> LanguageModel:
    """kept: layers that draft, or none. head: what drafts beside the model."""
    if kept:
        if not runner.layers:
            raise ModelError(f"heads: a {info.architecture} is not computed by a runner that can leave layers out")
        return SkimmingModel(runner, info, slots, unassigned, kept)
    if head is None:
        return CachedLM(runner, info, slots, unassigned)
    if not runner.taps:
        raise ModelError(f"heads: a {info.architecture} is not computed by a runner that tells its features")
    return HeadedModel(runner, info, slots, unassigned, head)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"dtype: must be one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]


def usable_device(name: str) -> torch.device:
    """The device, after a trial: a name may parse although the device is missing. Raises ModelError."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(f"device: {name!r} cannot be used here ({first_line(error)})") from error
    return device


def _config(spec: str) -> ModelConfig:
    """Code in the model's folder is not run; without a word from us the library would ask at a terminal."""
    if is_gguf(spec):
        return config_of(read_gguf(spec))
    from transformers import AutoConfig, PreTrainedConfig

    check_directory(spec)
    location = _location(spec)
    try:
        said: dict[str, Any] = PreTrainedConfig.get_config_dict(location)[0]
        check_layers(said)
        kind = READ_AS.get(str(said.get("model_type")))
        if kind is None:
            config: ModelConfig = AutoConfig.from_pretrained(location, trust_remote_code=False)
        else:
            own = {key: value for key, value in said.items() if key not in ("model_type", "auto_map", "architectures")}
            config = AutoConfig.for_model(kind, **own)
    except Exception as error:  # any error that the library raises for a broken or foreign directory
        reason = first_line(error)
        named = reason if CONFIG in reason else f"{CONFIG}: {reason}"
        where = "" if Path(location).is_dir() else " is no directory here, and as a name of the hub"
        raise ModelError(f"model {spec!r}{where} has no configuration that can be read: {named}") from error
    return config


def pretrained(spec: str, dtype: torch.dtype, device: torch.device) -> CausalModel:
    """The model of a local directory, hub id or GGUF file, by transformers' modules. Raises ModelError."""
    return _modules(spec, full_config_of(read_gguf(spec)) if is_gguf(spec) else _config(spec), dtype, device)


def _modules(
    spec: str, config: ModelConfig, dtype: torch.dtype, device: torch.device, quantization: str = NONE
) -> CausalModel:
    """The model, with a configuration of it. Raises ModelError.

    quantization: of a GGUF file's layers already while they are read.
    """
    if is_gguf(spec):
        return model_of_file(read_gguf(spec), config, dtype, quantization).to(device)
    from transformers import AutoModelForCausalLM

    _show_progress(LAST_LINE.is_terminal)
    location = _location(spec)
    check_weights(location, config)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            location,
            config=config,
            trust_remote_code=False,
            dtype=dtype,
            use_safetensors=True,  # the older files of weights are pickles
            output_loading_info=True,
        )
        model: CausalModel = loaded[0]
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
    from transformers.utils import logging as transformers_logging

    if wanted:
        transformers_logging.enable_progress_bar()
    else:
        transformers_logging.disable_progress_bar()


def _location(spec: str) -> str:
    path = Path(spec).expanduser()
    return str(path) if path.is_dir() or is_gguf(spec) else spec


def _describe(spec: str, model: CausalModel, known: Outline, dtype: str, how: How) -> tuple[ModelInfo, list[int]]:
    """The model's description, and the ids of its vocabulary without a token."""
    width = model.get_output_embeddings().out_features
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    precision = _precision(dtype, how.quantization)
    if is_gguf(spec):
        fingerprint = hashlib.sha256(f"{precision} {read_gguf(spec).fingerprint()}".encode()).hexdigest()
    else:
        fingerprint = weights_fingerprint(model, known.config, precision)
    info, unassigned = _described(spec, known, dtype, width, eos, fingerprint)
    info = replace(
        info,
        architecture=model.architecture if isinstance(model, PlainDecoder) else type(model).__name__,
        device=str(next(model.parameters()).device),
        quantization=how.quantization,
    )
    return info, unassigned


def _describe_files(spec: str, known: Outline, dtype: str, method: str) -> tuple[ModelInfo, list[int]]:
    """As `_describe`, of a model that is not loaded: what its files say of it. method: how they are quantised."""
    width = int(known.config.get_text_config().vocab_size)
    fingerprint = files_fingerprint(known.location, known.config, _precision(dtype, method))
    info, unassigned = _described(spec, known, dtype, width, stated_eos(known.location), fingerprint)
    (architecture, *_) = known.config.architectures or [known.config.model_type]
    return replace(info, architecture=architecture, quantization=method), unassigned


def _described(
    spec: str, known: Outline, dtype: str, width: int, eos: object, fingerprint: str
) -> tuple[ModelInfo, list[int]]:
    """width: number of the output layer's ids. eos: what the model generates by says of its ends; None: nothing."""
    text, says, ends = known.text, known.says, _eos_ids(eos, known.config)
    width = width if says is None else says.size
    tokens = text.vocabulary(width)
    vocabulary = min(max(tokens) + 1, width)
    unassigned = set(range(vocabulary)) - tokens.keys()
    if says is not None:
        ends = tuple(says.ids[row] for row in ends if row != says.others)
        unassigned |= {id_ for id_ in says.unsaid() if id_ < vocabulary}
    path = Path(known.location)
    info = ModelInfo(
        name=path.stem if is_gguf(spec) else path.name if path.is_dir() else spec,
        architecture="",
        vocabulary=vocabulary,
        context=known.context,
        eos_ids=ends,
        dtype=dtype,
        device="",
        weights_fingerprint=fingerprint,
        vocabulary_fingerprint=vocabulary_fingerprint(tokens),
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        special_tokens=text.special_tokens,
    )
    return info, sorted(unassigned)


def _precision(dtype: str, quantization: str) -> str:
    grouped = f" by {GROUP}" if quantization != WEIGHTS16 else ""
    return dtype if quantization == NONE else f"{dtype} {quantization}{grouped}"


def _eos_ids(found: Any, config: ModelConfig) -> tuple[int, ...]:
    if found is None:
        found = getattr(config.get_text_config(), "eos_token_id", None)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)
