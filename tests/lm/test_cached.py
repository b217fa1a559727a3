"""CachedLM gives the logits of the model's own cache-less forward, whatever was fed and rolled back before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.kv_cache import CachedLM
from specwire.lm.runners.decoder import MOST_COLUMNS, MOST_WASTE, leading
from specwire.lm.runners.hugging_face import MOST_TOGETHER, HuggingFaceRunner, PaddedBatch
from specwire.lm.runners.llama import LlamaRunner
from tests.lm.models import TOLERANCE, VOCABULARY, build, config, plain, poison, save
from tests.lm.walk import Texts

SLOTS = 3
# By our decoder, by the model's own modules, and by OpenVINO.
COMPUTED = [("llama", "torch"), ("olmo", "torch"), ("llama", "openvino")]
PATHS = ["llama", "llama-biased-tied", "mistral", "qwen2", "qwen3", "olmo", "gpt2"]
# Slots of which many share one attention.
MANY = 7


def _load(kind: str, folder: Path) -> tuple[PreTrainedModel, LanguageModel]:
    model = build(config(kind))
    return model, load_model(save(model, folder), slots=SLOTS)


@pytest.mark.parametrize(("kind", "slots"), [*((kind, SLOTS) for kind in PATHS), ("llama", MANY), ("qwen3", MANY)])
def test_any_interleaving_of_extend_and_rollback_gives_the_plain_forward(kind: str, slots: int, tmp_path: Path) -> None:
    model = build(config(kind))
    lm = load_model(save(model, tmp_path), slots=slots)
    assert isinstance(lm, CachedLM)
    assert isinstance(lm.runner, HuggingFaceRunner if kind in ("olmo", "gpt2") else LlamaRunner)
    texts = Texts(model, lm, seed=len(kind))
    for _ in range(60):
        texts.step()


def test_the_lean_decoder_runs_compiled_and_gives_what_it_gives_uncompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch no longer compiles it, the same code runs as it stands."""
    model, compiled = _load("qwen3", tmp_path / "compiled")
    monkeypatch.setattr(torch.jit, "script", _refuse)
    uncompiled = load_model(save(model, tmp_path / "uncompiled"), slots=2)
    feeds = [Feed(0, 0, [1, 3, 9, 4], 2), Feed(1, 0, [5], 1)]
    assert isinstance(compiled, CachedLM)
    assert isinstance(compiled.runner, LlamaRunner)
    assert compiled.runner.compiled
    assert isinstance(uncompiled, CachedLM)
    assert isinstance(uncompiled.runner, LlamaRunner)
    assert not uncompiled.runner.compiled
    assert torch.equal(compiled.forward(feeds), uncompiled.forward(feeds))


def _refuse(*_: object) -> None:
    raise RuntimeError("gone")


def test_nobody_is_padded_to_the_width_of_another_s_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of sessions that decode costs no more rows for a chunk of a prompt beside them than the chunk has."""
    model, lm = _load("olmo", tmp_path)
    assert isinstance(lm, CachedLM)
    assert isinstance(lm.runner, HuggingFaceRunner)
    prompt, text = [(7 * index + 2) % VOCABULARY for index in range(MOST_TOGETHER + 1)], [1, 3, 9, 4]
    lm.forward([Feed(0, 0, text[:2], 0)])
    computed: list[tuple[int, ...]] = []
    batch_of = PaddedBatch.of

    def watched(feeds: Sequence[Feed], device: torch.device) -> PaddedBatch:
        batch = batch_of(feeds, device)
        computed.append(tuple(batch.tokens.shape))
        return batch

    monkeypatch.setattr(PaddedBatch, "of", watched)
    logits = lm.forward([Feed(1, 0, prompt, 2), Feed(0, 2, text[2:], 2)])
    assert sorted(computed) == [(1, 2), (1, MOST_TOGETHER + 1)]
    torch.testing.assert_close(logits[:2], plain(model, prompt)[-2:], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(logits[2:], plain(model, text)[2:], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "olmo"])
def test_bfloat16_stays_within_its_tolerance_of_float32(kind: str, tmp_path: Path) -> None:
    model = build(config(kind))
    lm = load_model(save(model, tmp_path), slots=1, dtype="bfloat16")
    text = [(5 * index + 1) % VOCABULARY for index in range(20)]
    lm.forward([Feed(0, 0, text[:11], 0)])
    logits = lm.forward([Feed(0, 11, text[11:], 9)])
    expected = plain(model.bfloat16(), text)[11:]
    assert float((logits - expected).abs().max()) <= float(expected.abs().max()) / 16
    assert logits.dtype == torch.float32


@pytest.mark.parametrize(("kind", "runtime"), COMPUTED)
def test_logits_that_are_not_finite_cost_their_own_slot_only(kind: str, runtime: str, tmp_path: Path) -> None:
    model = build(config(kind))
    poison(model, 7, float("nan"))
    lm = load_model(save(model, tmp_path), slots=2, runtime=runtime)
    text = [1, 3, 9, 4, 8]
    lm.forward([Feed(0, 0, text, 1), Feed(1, 0, text, 1)])
    logits = lm.forward([Feed(0, 5, [7, 3], 1), Feed(1, 5, [6, 3], 1)])
    assert lm.failed == {0}
    assert lm.cached(0) == 0
    torch.testing.assert_close(logits[1], plain(model, [*text, 6, 3])[-1], atol=TOLERANCE, rtol=TOLERANCE)

    again = lm.forward([Feed(0, 0, text, 5), Feed(1, 7, [5], 1)])
    assert lm.failed == frozenset()
    torch.testing.assert_close(again[:5], plain(model, text), atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(again[5], plain(model, [*text, 6, 3, 5])[-1], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("kind", "runtime"), COMPUTED)
def test_a_feed_that_wants_no_logits_is_watched_too(kind: str, runtime: str, tmp_path: Path) -> None:
    model = build(config(kind))
    poison(model, 7, float("inf"))
    lm = load_model(save(model, tmp_path), slots=1, runtime=runtime)
    assert lm.forward([Feed(0, 0, [1, 7, 2], 0)]).shape == (0, VOCABULARY)
    assert lm.failed == {0}
    assert lm.cached(0) == 0


# ----------------------------------------------------------------------------------------------------------------------
# Short feeds share one attention: each gets what it gets alone, wherever its slot lies, whatever the others are.


def fed(slot: int, start: int, count: int = 1) -> Feed:
    return Feed(slot, start, [1] * count, count)


@pytest.mark.parametrize(
    ("feeds", "together"),
    [
        ([fed(3, 9)], 0),
        ([fed(3, 9), fed(2, 4, 5)], 2),
        ([fed(0, 9), fed(1, 9, MOST_COLUMNS)], 2),
        ([fed(0, 9), fed(1, 9, MOST_COLUMNS + 1), fed(2, 9)], 0),
        ([fed(0, 9), fed(2, 9), fed(1, 9, MOST_COLUMNS + 1), fed(3, 9)], 2),
        ([fed(0, 99), fed(2 * MOST_WASTE - 1, 99)], 2),
        ([fed(0, 99), fed(2 * MOST_WASTE, 99)], 0),
        ([fed(0, 999), *(fed(slot, 9) for slot in range(1, 10))], 0),
    ],
)
def test_those_are_taken_together_that_read_little_more_than_they_need(feeds: list[Feed], together: int) -> None:
    assert leading(feeds) == together


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_together_and_one_by_one_are_the_same(dtype: str, tmp_path: Path) -> None:
    """Slots out of order with gaps between them, texts and windows of all lengths, one of them a prompt's chunk."""
    model = build(config("llama"))
    folder = save(model, tmp_path)
    one, many = (load_model(folder, slots=MANY, dtype=dtype) for _ in range(2))
    chance = random.Random(3)
    lengths = {5: 12, 1: 3, 2: 30, 6: 7}
    for lm in (one, many):
        for slot, length in lengths.items():
            lm.forward([Feed(slot, 0, tokens_of(slot, 0, length), 0)])
    feeds = [Feed(slot, length, tokens_of(slot, length, chance.randint(1, 6)), 1) for slot, length in lengths.items()]
    feeds.append(Feed(3, 0, tokens_of(3, 0, MOST_COLUMNS + 4), 2))
    assert leading(feeds) == len(lengths)
    together = many.forward(feeds)
    alone = torch.cat([one.forward([each]) for each in feeds])
    loose = TOLERANCE if dtype == "float32" else float(alone.abs().max()) / 16
    torch.testing.assert_close(together, alone, atol=loose, rtol=0.0)
    for each in feeds:  # what was filed is right, too
        text = tokens_of(each.slot, 0, each.stop + 1)
        got = many.forward([Feed(each.slot, each.stop, text[each.stop :], 1)])
        torch.testing.assert_close(got[0], plain(model.to(getattr(torch, dtype)), text)[-1], atol=loose, rtol=0.0)


def tokens_of(slot: int, start: int, count: int) -> list[int]:
    return [(slot + 5 * position) % VOCABULARY for position in range(start, start + count)]
