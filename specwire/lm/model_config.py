"""Which models an absolute-position cache can serve. Others are refused with a reason, before they load."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from specwire.core.model import ModelError

# ----------------------------------------------------------------------------------------------------------------------
# Sliding windows: layers that see the latest positions only.
#
# The slot cache keeps every position of the context, also those that a window has slid past; the mask makes the window.
# So a rollback stays an integer, at the price of the memory of full attention.

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

# Model types whose windows are tested to be (p - window, p], and to take a mask of ours (tests/lm/families.py).
WINDOWED = frozenset({"gemma2", "gemma3_text", "mistral", "mixtral", "phi3", "qwen2", "qwen3"})


class SlidingWindow(NamedTuple):
    """The window of a model's sliding layers: the position p sees (p - size, p]."""

    size: int
    mixed: bool  # whether other layers see everything


def window_of(config: PreTrainedConfig, context: int) -> SlidingWindow | None:
    """The model's window, None if every layer sees the whole context."""
    text = config.get_text_config()
    size = _size(text)
    if size is None or size >= context:
        return None
    return SlidingWindow(size, FULL_ATTENTION in (getattr(text, "layer_types", None) or ()))


def _size(config: Any) -> int | None:
    local = "local" in getattr(config, "attention_layers", ())
    size = getattr(config, "window_size" if local else "sliding_window", None)
    types = getattr(config, "layer_types", None)
    slides = local or (SLIDING_ATTENTION in types if types else getattr(config, "use_sliding_window", True))
    return size if isinstance(size, int) and slides else None


def context_of(config: PreTrainedConfig, wanted: int | None) -> int:
    """Positions to serve: as many as asked for, at most the model's own maximum; ModelError if that is none."""
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        if limit is None:
            raise ModelError("context: the model states no maximum length, so one must be given")
        return limit
    if wanted < 2:
        raise ModelError(f"context: must be at least 2 positions, not {wanted}")
    if limit is not None and wanted > limit:
        raise ModelError(f"context: the model was made for {limit} positions, not {wanted}")
    return wanted


# Model types with recurrent layers that `specwire.lm.runners.hybrid` is tested with, and their kinds of layers: those
# that keep a state, with keys and values (hybrid) or without, and those that keep nothing.
RECURRENT = frozenset(
    {
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "lfm2",
        "mamba",
        "mamba2",
        "nemotron_h",
        "qwen3_next",
    }
)
HYBRID = "hybrid"
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", HYBRID, "moe", "mlp"})


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Whether layers keep a state, which is served."""
    return config.model_type in RECURRENT


def check_kind(config: PreTrainedConfig) -> None:
    """ModelError unless every layer keeps keys and values by position, or a state of a kind that is served."""
    kind = config.model_type
    served = {FULL_ATTENTION, SLIDING_ATTENTION}
    if is_recurrent(config):
        served = {FULL_ATTENTION, *RECURRENT_LAYERS}
    if config.is_encoder_decoder:
        raise ModelError(f"{kind} models have an encoder; a causal, decoder-only model is needed")
    for layer in sorted(set(getattr(config.get_text_config(), "layer_types", None) or ())):
        if layer not in served:
            raise ModelError(f"this {kind} model has {layer} layers, whose state cannot be rolled back to a position")


def check_window(config: PreTrainedConfig, context: int) -> None:
    """ModelError if a layer forgets positions of the context in a way other than the tested windows (WINDOWED)."""
    window = window_of(config, context)
    if window is not None and config.get_text_config().model_type not in WINDOWED:
        raise ModelError(
            f"this {config.model_type} model attends to a sliding window of {window.size} positions, shorter than the "
            f"context of {context}, and its window is not one that can be rolled back here; "
            f"give a context of at most {window.size}"
        )


def check_rotation(config: PreTrainedConfig, context: int) -> None:
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
    return kinds or [{"original_max_position_embeddings": _original(config), **parameters}]


def _original(config: Any) -> int | None:
    limit: int | None = getattr(config, "original_max_position_embeddings", None)
    return limit


def first_line(error: BaseException) -> str:
    """The first line of a library's error, for a sentence of ours."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def check_class(config: PreTrainedConfig) -> None:
    """ModelError unless it is a causal model, without recurrence or with one that is served."""
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if known is None:
        raise ModelError(f"{config.model_type} models are no causal models that transformers can make")
    if getattr(known, "_is_stateful", False) and not is_recurrent(config):
        raise ModelError(f"{known.__name__} is recurrent: its state cannot be rolled back to a position")
