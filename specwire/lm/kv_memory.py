"""How much memory keys and values take, and how many slots fit into what may be used."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from specwire.lm.interface import ModelError

MOST_SLOTS = 1024
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class KvMemory(NamedTuple):
    """What slots may take in all, in place of how many there are."""

    size: int


def position_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of one position of one slot: keys and values of every layer. Models that share more need less."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * text.num_hidden_layers * kv_heads * size * dtype.itemsize)


def slots_of(asked: int | KvMemory, config: PreTrainedConfig, context: int, dtype: torch.dtype) -> int:
    return slots_within(asked.size, config, context, dtype) if isinstance(asked, KvMemory) else asked


def slots_within(memory: int, config: PreTrainedConfig, context: int, dtype: torch.dtype) -> int:
    """Slots of `context` positions that fit into `memory` bytes; ModelError if not one does."""
    slot = context * position_bytes(config, dtype)
    if slot > memory:
        raise ModelError(
            f"kv_memory: {readable(memory)} are less than the {readable(slot)} that one text of {context} positions "
            f"takes; give more, or a shorter context"
        )
    return min(memory // slot, MOST_SLOTS)


def readable(size: int) -> str:
    """Such as 1.5 GiB."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {UNITS[unit]}"
