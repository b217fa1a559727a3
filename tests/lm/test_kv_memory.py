"""Memory is set aside as asked for, and what a model says that it has set aside is what its tensors take."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from specwire.core.draft import HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import out_of_memory
from specwire.core.policy.tunables import PREFILL_ROWS
from specwire.lm import Feed, ModelError, load_model
from specwire.lm.heads.slots import HeadedModel
from specwire.lm.kv_cache import MOST_SLOTS, KvMemory, SlotMemory, forget, position_bytes, readable, unused
from tests.lm.heads import test_mtp, test_slots
from tests.lm.heads.medusa_by_hand import FORMATS, written
from tests.lm.models import CONTEXT, build, config, save


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "olmo", "gpt2"])
def test_a_position_takes_what_is_computed(kind: str, tmp_path: Path) -> None:
    lm = load_model(save(build(config(kind)), tmp_path), slots=3)
    assert lm.kv_bytes == 3 * CONTEXT * position_bytes(config(kind), torch.float32)


def test_as_many_slots_as_fit(tmp_path: Path) -> None:
    slot = CONTEXT * position_bytes(config("llama"), torch.float32)
    lm = load_model(save(build(config("llama")), tmp_path), slots=16, kv_memory=3 * slot - 1)
    assert (lm.slots, lm.kv_bytes) == (2, 2 * slot)
    assert SlotMemory(config("llama"), CONTEXT, torch.float32).slots(KvMemory(slot * 10**6)) == MOST_SLOTS
    assert SlotMemory(config("llama"), CONTEXT, torch.bfloat16).slots(KvMemory(slot)) == 2


def test_too_little_for_one_text_is_an_error_that_says_how_much_it_takes(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"kv_memory: 1000 bytes are less than the 12 KiB that one text of 48 positions"
    ):
        load_model(save(build(config("llama")), tmp_path), slots=1, kv_memory=1000)


def beside(kind: str, folder: Path) -> tuple[str, str, int]:
    """A target, what stands beside it, and how wide its features are."""
    if kind == "eagle3":
        _, _, where, heads = test_slots.built(folder)
        return where, heads, 3 * 32
    if kind == "mtp":
        _, _, where = test_mtp.built(test_mtp.LLAMA, folder)
        return where, where, 32
    where = save(build(config("llama")), folder / "target")
    if kind == "self":
        return where, "self:skip=1", 0
    written(folder / "head", *FORMATS[kind]())
    return where, str(folder / "head"), 32


# Positions whose features may wait, as docs/MODELS.md has it.
WAITING = 1025


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa", "hydra", "self"])
def test_what_a_head_keeps_is_counted_as_well(kind: str, tmp_path: Path) -> None:
    where, heads, width = beside(kind, tmp_path)
    own = load_model(where, slots=3, heads=heads).kv_bytes - load_model(where, slots=3).kv_bytes
    assert (own > 0) == (kind in ("eagle3", "mtp"))
    slot = CONTEXT * position_bytes(config("llama"), torch.float32) + own // 3 + WAITING * width * 4
    for memory, slots in ((3 * slot - 1, 2), (3 * slot, 3)):
        lm = load_model(where, slots=16, kv_memory=memory, heads=heads)
        assert lm.slots == slots
        assert lm.kv_bytes + slots * WAITING * width * 4 <= memory


def test_too_little_for_one_text_and_its_head_is_an_error_that_says_so(tmp_path: Path) -> None:
    where, heads, _ = beside("eagle3", tmp_path)
    with pytest.raises(
        ModelError,
        match=r"kv_memory: 20 KiB are less than the 402\.4 KiB .* takes, 390\.4 KiB of them for its head; give",
    ):
        load_model(where, slots=1, kv_memory=20 << 10, heads=heads)


def test_features_take_no_more_than_is_counted_for_them(tmp_path: Path) -> None:
    """However much of a prompt waits: what is beyond that is not kept."""
    made = config("llama")
    made.max_position_embeddings = 2500
    where, (_, heads, width) = save(build(made), tmp_path / "long"), beside("eagle3", tmp_path)
    lm = load_model(where, slots=1, heads=heads)
    assert isinstance(lm, HeadedModel)
    text, most = [3 + index % 40 for index in range(2400)], 0
    for start in range(0, 2400 - PREFILL_ROWS, PREFILL_ROWS):
        lm.forward([Feed(0, start, text[start : start + PREFILL_ROWS], 1)])
        if start == 0:
            lm.catch_up([HeadRequest(0, text, Sampling(), 1)])
        most = max(most, lm._slots[0].features.nbytes)
    assert lm.unread(0) == PREFILL_ROWS, "it began anew with the last part"
    assert 0.9 * WAITING * width * 4 < most <= WAITING * width * 4


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")]
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert readable(size) == text


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell what is resident")
def test_memory_is_taken_as_it_is_written_and_given_back_when_it_is_forgotten() -> None:
    size = 256 << 20
    before = resident()
    memory = unused([size], torch.uint8, torch.device("cpu"))
    assert resident() - before < size // 8
    memory.fill_(7)
    assert resident() - before > size * 7 // 8
    forget(memory[1000:-1000])
    assert resident() - before < size // 8
    assert [int(memory[at]) for at in (0, 999, 1000, size // 2, size - 1001, size - 1000, size - 1)] == [
        *(7, 7, 0, 0, 0, 7, 7)
    ]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell what is resident")
@pytest.mark.parametrize("runtime", ["torch", "auto"])
def test_slots_take_memory_as_their_texts_grow(runtime: str, tmp_path: Path) -> None:
    made = config("llama")
    made.max_position_embeddings = 100_000
    folder = save(build(made), tmp_path)
    load_model(folder, slots=1, context=64, runtime=runtime)
    before = resident()
    lm = load_model(folder, slots=32, runtime=runtime)
    assert lm.kv_bytes > 800_000_000
    assert resident() - before < lm.kv_bytes // 8


@pytest.mark.parametrize(
    ("error", "of_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("Exception from src/inference: std::bad_alloc"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
        (OSError("x"), False),
    ],
)
def test_an_allocator_s_failure_is_told_apart_from_any_other(error: Exception, of_memory: bool) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(raised.value)
    assert out_of_memory(error) is of_memory
