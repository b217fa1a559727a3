"""Which models an absolute-position cache can serve. Others are refused with a reason, before they load."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from specwire.core.model import MOST_LAYERS, ModelError

# transformers' PreTrainedModel and PreTrainedConfig, or what `specwire.lm.plain_decoder` has in their place. The names
# are not imported: with them come seconds and a hundred megabytes, which most GGUF files have no use for.
CausalModel = Any
ModelConfig = Any

# ----------------------------------------------------------------------------------------------------------------------
# Sliding windows: layers that see the latest positions only.
#
# The slot cache keeps every position of the context, also those that a window has slid past; the mask makes the window.
# So a rollback stays an integer, at the price of the memory of full attention.

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
CHUNKED_ATTENTION = "chunked_attention"
ATTENTION = frozenset({FULL_ATTENTION, SLIDING_ATTENTION, CHUNKED_ATTENTION})

# Model types whose windows are tested to be as `AttentionWindow` says (tests/lm/families.py).
WINDOWED = frozenset(
    {
        "gemma2",
        "gemma3_text",
        "gpt_neo",
        "gpt_oss",
        "llama4_text",
        "mistral",
        "mixtral",
        "phi3",
        "qwen2",
        "qwen3",
    }
)


class AttentionWindow(NamedTuple):
    """What layers of a kind see: sliding, position p sees (p - size, p]; chunked, it sees [p - p % size, p].

    mixed: other layers see everything.
    """

    size: int
    mixed: bool
    kind: str = SLIDING_ATTENTION


def window_of(config: ModelConfig, context: int) -> AttentionWindow | None:
    """The model's window, None if every layer sees the whole context."""
    text = config.get_text_config()
    types = getattr(text, "layer_types", None) or ()
    kind = CHUNKED_ATTENTION if CHUNKED_ATTENTION in types else SLIDING_ATTENTION
    size = _size(text, kind)
    if size is None or size >= context:
        return None
    return AttentionWindow(size, FULL_ATTENTION in types, kind)


def _size(config: Any, kind: str) -> int | None:
    local, types = "local" in getattr(config, "attention_layers", ()), getattr(config, "layer_types", None)
    if kind == CHUNKED_ATTENTION:
        size, slides = getattr(config, "attention_chunk_size", None), True
    else:
        size = getattr(config, "window_size" if local else "sliding_window", None)
        slides = local or (SLIDING_ATTENTION in types if types else getattr(config, "use_sliding_window", True))
    return size if isinstance(size, int) and slides else None


def takes_own_positions(config: ModelConfig, context: int) -> bool:
    """Whether a layer goes by what the cache holds, not by the positions that it is given.

    So do GPT-Neo's windows, and Llama 4's queries, which grow from position `floor_scale` on: both beyond a trial of
    few tokens.
    """
    text: Any = config.get_text_config()
    if text.model_type == "llama4_text":
        return bool(text.attn_temperature_tuning) and context >= text.floor_scale
    return text.model_type == "gpt_neo" and window_of(config, context) is not None


# Model types with recurrent layers that `specwire.lm.runners.hybrid` is tested with, and their kinds of layers: those
# that keep a state, with keys and values (hybrid) or without, and those that keep nothing.
RECURRENT = frozenset(
    {
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "zamba2",
    }
)
HYBRID = "hybrid"
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", HYBRID, "moe", "mlp"})


def quantized_by(config: ModelConfig) -> str:
    """The method, such as compressed-tensors, by which the model's files say that they are quantised; "" if none."""
    said = getattr(config, "quantization_config", None)
    method = said.get("quant_method") if isinstance(said, dict) else getattr(said, "quant_method", None)
    return "" if said is None else str(getattr(method, "value", method) or "quantized")


def is_recurrent(config: ModelConfig) -> bool:
    """Whether layers keep a state, which is served."""
    return config.get_text_config().model_type in RECURRENT


def check_kind(config: ModelConfig) -> None:
    """ModelError unless every layer keeps keys and values by position, or a state of a kind that is served."""
    kind, text = config.model_type, config.get_text_config()
    served = ATTENTION | RECURRENT_LAYERS if is_recurrent(config) else ATTENTION
    if config.is_encoder_decoder:
        raise ModelError(f"{kind} models have an encoder; a causal, decoder-only model is needed")
    if not (is_recurrent(config) or hasattr(text, "num_attention_heads")):
        raise ModelError(
            f"this {kind} model names no attention heads; what else it keeps cannot be rolled back to a position"
        )
    for layer in sorted(set(getattr(text, "layer_types", None) or ())):
        if layer not in served:
            raise ModelError(f"this {kind} model has {layer} layers, whose state cannot be rolled back to a position")


def check_window(config: ModelConfig, context: int) -> None:
    """ModelError if a layer forgets positions of the context in a way other than the tested windows (WINDOWED)."""
    window = window_of(config, context)
    if window is not None and config.get_text_config().model_type not in WINDOWED:
        raise ModelError(
            f"this {config.model_type} model attends to a sliding window of {window.size} positions, shorter than the "
            f"context of {context}, and its window is not one that can be rolled back here; "
            f"give a context of at most {window.size}"
        )


def check_rotation(config: ModelConfig, context: int) -> None:
    """ModelError if what is cached depends on how long the text becomes (the frequencies of longrope)."""
    for parameters in _rotations(config.get_text_config()):
        limit = parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "longrope" and isinstance(limit, int) and context > limit:
            raise ModelError(
                f"this {config.model_type} model turns every position otherwise once a text is longer than {limit} "
                f"positions (longrope), so no cache outlives that; give a context of at most {limit}"
            )


def _rotations(config: Any) -> list[dict[str, Any]]:
    """Rope parameters: of all layers, or of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in parameters.values() if isinstance(value, dict) and "rope_type" in value]
    limit = getattr(config, "original_max_position_embeddings", None)
    return kinds or [{"original_max_position_embeddings": limit, **parameters}]


# ----------------------------------------------------------------------------------------------------------------------
# Sizes that a configuration states, before anything is made of them.

LAYERS_KEY = re.compile(r"(^|_)(layers?|blocks?)$")
# Of what weights are shaped by; neither ids nor positions nor factors.
SIZE_KEY = re.compile(r"(^|_)(size|dim|rank|heads|experts|groups|inner|inter|hidden|embd|model|ff|ffn)$")
NO_SIZE_KEY = re.compile(r"window|chunk|block|position|ctx|context")
# Weights in a byte of a file, at most.
WEIGHTS_A_BYTE = 8


def check_layers(said: Mapping[str, Any]) -> None:
    """ValueError for a config.json that states more layers than any model has: a list with a place for each is made."""
    for key, value in _numbers_in(said):
        if LAYERS_KEY.search(key) and not 0 <= value <= MOST_LAYERS:
            raise ValueError(f"{key}: must be from 0 to {MOST_LAYERS}, not {value:.6g}")


def check_sizes(config: ModelConfig, stored: int, tensors: int) -> None:
    """ValueError for a configuration of which larger weights, or more of them, would be made than its files can hold.

    stored: bytes of these files; tensors: in them.
    """
    text: Any = config.get_text_config()
    most = WEIGHTS_A_BYTE * stored

    def size(name: str, default: int = 1) -> int:
        value = getattr(text, name, None)
        return value if isinstance(value, int) else max(value, default=default) if isinstance(value, list) else default

    layers, hidden = size("num_hidden_layers", 0), size("hidden_size")
    if layers > tensors:
        raise ValueError(f"num_hidden_layers: is {layers}, and the files hold {tensors} tensors")
    for name, shape in {
        "vocab_size": (size("vocab_size"), hidden),
        "intermediate_size": (layers, hidden, size("intermediate_size")),
        "num_attention_heads": (layers, hidden, size("num_attention_heads"), size("head_dim")),
    }.items():
        if prod(shape) > most:
            raise ValueError(f"{name}: makes {' x '.join(map(str, shape))} weights, and the files have {stored} bytes")
    for key, value in _numbers_in(config.to_dict()):
        if SIZE_KEY.search(key) and not NO_SIZE_KEY.search(key) and value > most:
            raise ValueError(f"{key}: is {value:.6g}, and the files have {stored} bytes")


def _numbers_in(said: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The whole numbers of an object and of the objects in it, with their keys."""
    objects = [said]
    while objects:
        for key, value in objects.pop().items():
            if isinstance(value, dict):
                objects.append(value)
            elif type(value) is int:
                yield str(key), value


def first_line(error: BaseException) -> str:
    """The first line of a library's error, for a sentence of ours."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def check_class(config: ModelConfig) -> None:
    """ModelError unless it is a causal model, without recurrence or with one that is served."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # see CausalModel

    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if known is None:
        raise ModelError(f"{config.model_type} models are no causal models that transformers can make")
    if getattr(known, "_is_stateful", False) and not is_recurrent(config):
        raise ModelError(f"{known.__name__} is recurrent: its state cannot be rolled back to a position")
