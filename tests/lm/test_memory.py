"""An allocator's failure is told apart from any other."""

from __future__ import annotations

import pytest
import torch

from specwire.core.model import out_of_memory


def test_what_pytorch_raises_where_nothing_of_that_size_can_be_had() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("Exception from src/inference: std::bad_alloc"),
    ],
)
def test_what_others_raise(error: Exception) -> None:
    assert out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory"), OSError("x")])
def test_what_is_something_else(error: Exception) -> None:
    assert not out_of_memory(error)
