"""Sliding windows: layers that see the latest positions only.

The slot cache keeps every position of the context, those that a window has slid past too; the window is a matter of the
mask. So a rollback stays an integer, at the price of the memory of full attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedConfig

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
