"""Memory is set aside as asked for, and what a model says that it has set aside is what its tensors take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specwire.lm import ModelError, load_model
from specwire.lm.kv_cache import MOST_SLOTS, position_bytes, readable, slots_within
from tests.lm.models import CONTEXT, build, config, save


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gpt2"])
def test_a_position_takes_what_is_computed(kind: str, lean: bool, tmp_path: Path) -> None:
    lm = load_model(save(build(config(kind)), tmp_path), slots=3, lean=lean)
    assert lm.kv_bytes == 3 * CONTEXT * position_bytes(config(kind), torch.float32)


def test_as_many_slots_as_fit(tmp_path: Path) -> None:
    slot = CONTEXT * position_bytes(config("llama"), torch.float32)
    lm = load_model(save(build(config("llama")), tmp_path), slots=16, kv_memory=3 * slot - 1)
    assert (lm.slots, lm.kv_bytes) == (2, 2 * slot)
    assert slots_within(slot * 10**6, config("llama"), CONTEXT, torch.float32) == MOST_SLOTS
    assert slots_within(slot, config("llama"), CONTEXT, torch.bfloat16) == 2


def test_too_little_for_one_text_is_an_error_that_says_how_much_it_takes(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"kv_memory: 1000 bytes are less than the 12 KiB that one text of 48 positions"
    ):
        load_model(save(build(config("llama")), tmp_path), slots=1, kv_memory=1000)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")]
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert readable(size) == text
