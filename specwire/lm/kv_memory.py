"""How much memory keys, values and recurrent states take, and how many slots fit into a given amount."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specwire.core.messages import MOST_WINDOW
from specwire.core.model import ModelError
from specwire.lm.model_config import ATTENTION, HYBRID, ModelConfig, is_recurrent

MOST_SLOTS = 1024
# Of recurrent layers: rows of a feed whose states are kept, which are a window and the token before it. States of a
# slot: those, the one that the feed began with, and a few of the text before.
ROWS, SPREAD = MOST_WINDOW + 1, 6
STATES = ROWS + 1 + SPREAD
# Of include/uapi/asm-generic/mman.h; Python's mmap names it from 3.13 on. Bytes that are worth a call to give back.
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
WORTH_GIVING = 1 << 20
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class KvMemory(NamedTuple):
    """Bytes that all slots may take, in place of their number."""

    size: int


def position_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one position of one slot: keys and values of every layer that keeps them. Those that share need less."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    layers = text.num_hidden_layers
    if kinds is not None:
        layers = sum(kind in ATTENTION or kind == HYBRID for kind in kinds)
    if not layers:
        return 0
    if latent := getattr(text, "kv_lora_rank", None):  # what is kept is compressed (arXiv 2405.04434, section 2.1)
        return int(layers * (latent + text.qk_rope_head_dim) * dtype.itemsize)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * layers * kv_heads * size * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """What one slot takes: keys and values of so many `positions` in `dtype`; `beside`: bytes of a head, of states."""

    config: ModelConfig
    positions: int
    dtype: torch.dtype
    beside: int = 0

    @property
    def size(self) -> int:
        """Bytes of all that."""
        return self.positions * position_bytes(self.config, self.dtype) + self.beside

    def slots(self, asked: int | KvMemory) -> int:
        """As many as were asked for, or as fit into the memory; ModelError if not one does."""
        if not isinstance(asked, KvMemory):
            return asked
        whose = "recurrent layers" if is_recurrent(self.config) else "head"
        return slots_of_size(asked.size, self.size, self.positions, self.beside, whose)


def rows_of(states: int) -> int:
    """Rows of a feed whose states are kept, where a slot has so many."""
    return max(1, min(ROWS, states - 1))


def fitting_states(memory: int, keys: int, state: int) -> int:
    """States of a slot: as many as `memory` has room for beside `keys` bytes of keys and values; at least one."""
    return max(1, min(STATES, (memory - keys) // max(1, state)))


def slots_of_size(memory: int, slot: int, context: int, beside: int = 0, whose: str = "head") -> int:
    """Slots of so many bytes each that fit into `memory` bytes; ModelError if not one does.

    context: positions of each. beside: bytes of it that are for `whose`.
    """
    if slot > memory:
        of_head = f", {readable(beside)} of them for its {whose}" if beside else ""
        raise ModelError(
            f"kv_memory: {readable(memory)} are less than the {readable(slot)} that one text of {context} positions "
            f"takes{of_head}; give more, or a shorter context"
        )
    return min(memory // max(1, slot), MOST_SLOTS)


def unused(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory as they are written, where the system can tell; MemoryError if there is no such room."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"no {readable(size)} can be had: {error}") from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)


def forget(memory: torch.Tensor) -> None:
    """Zero part of an `unused`, which lies in one piece; a large one gives its memory back."""
    flat = memory.view(torch.uint8).view(-1)
    begin = -flat.data_ptr() % mmap.PAGESIZE
    inner = (len(flat) - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if inner < WORTH_GIVING or not hasattr(mmap, "MADV_DONTNEED"):
        flat.zero_()
        return
    address, length = ctypes.c_void_p(flat.data_ptr() + begin), ctypes.c_size_t(inner)
    if ctypes.CDLL(None).madvise(address, length, mmap.MADV_DONTNEED) == 0:
        flat[:begin].zero_()
        flat[begin + inner :].zero_()
    else:
        flat.zero_()


def readable(size: int) -> str:
    """A size for people, such as 1.5 GiB."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {UNITS[unit]}"
