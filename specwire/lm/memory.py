"""Memory that is short: told apart from other failures."""

from __future__ import annotations

import torch

# PyTorch on CPUs and OpenVINO raise a RuntimeError that says it in words only.
WORDS = ("out of memory", "not enough memory", "allocate memory", "bad_alloc", "bad allocation")


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocator failed: the same may succeed with less at once."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)
