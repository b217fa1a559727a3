"""Short feeds share one attention: each gets what it gets alone, wherever its slot lies, whatever the others are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.runners.decoder import MOST_COLUMNS, MOST_WASTE, leading
from tests.lm.models import CONTEXT, TOLERANCE, VOCABULARY, build, config, plain, save
from tests.lm.walk import Texts

SLOTS = 7


def feed(slot: int, start: int, count: int = 1) -> Feed:
    return Feed(slot, start, [1] * count, count)


@pytest.mark.parametrize(
    ("feeds", "together"),
    [
        ([feed(3, 9)], 0),
        ([feed(3, 9), feed(2, 4, 5)], 2),
        ([feed(0, 9), feed(1, 9, MOST_COLUMNS)], 2),
        ([feed(0, 9), feed(1, 9, MOST_COLUMNS + 1), feed(2, 9)], 0),
        ([feed(0, 9), feed(2, 9), feed(1, 9, MOST_COLUMNS + 1), feed(3, 9)], 2),
        ([feed(0, 99), feed(2 * MOST_WASTE - 1, 99)], 2),
        ([feed(0, 99), feed(2 * MOST_WASTE, 99)], 0),
        ([feed(0, 999), *(feed(slot, 9) for slot in range(1, 10))], 0),
    ],
)
def test_those_are_taken_together_that_read_little_more_than_they_need(feeds: list[Feed], together: int) -> None:
    assert leading(feeds) == together


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_any_walk_over_many_slots_gives_the_plain_forward(kind: str, tmp_path: Path) -> None:
    model = build(config(kind))
    texts = Texts(model, load_model(save(model, tmp_path), slots=SLOTS), seed=1)
    for _ in range(40):
        texts.step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_together_and_one_by_one_are_the_same(dtype: str, tmp_path: Path) -> None:
    """Slots out of order with gaps between them, texts and windows of all lengths, one of them a prompt's chunk."""
    model = build(config("llama"))
    folder = save(model, tmp_path)
    one, many = (load_model(folder, slots=SLOTS, dtype=dtype) for _ in range(2))
    chance = random.Random(3)
    lengths = {5: 12, 1: 3, 2: 30, 6: 7}
    for lm in (one, many):
        for slot, length in lengths.items():
            lm.forward([Feed(slot, 0, tokens(slot, 0, length), 0)])
    feeds = [Feed(slot, length, tokens(slot, length, chance.randint(1, 6)), 1) for slot, length in lengths.items()]
    feeds.append(Feed(3, 0, tokens(3, 0, MOST_COLUMNS + 4), 2))
    assert leading(feeds) == len(lengths)
    together = many.forward(feeds)
    alone = torch.cat([one.forward([each]) for each in feeds])
    loose = TOLERANCE if dtype == "float32" else float(alone.abs().max()) / 16
    torch.testing.assert_close(together, alone, atol=loose, rtol=0.0)
    check_goes_on(many, model.to(getattr(torch, dtype)), feeds, loose)


def tokens(slot: int, start: int, count: int) -> list[int]:
    return [(slot + 5 * position) % VOCABULARY for position in range(start, start + count)]


def check_goes_on(lm: LanguageModel, model: PreTrainedModel, feeds: list[Feed], loose: float) -> None:
    """What was filed is right, too."""
    for each in feeds:
        assert each.stop < CONTEXT
        text = tokens(each.slot, 0, each.stop + 1)
        got = lm.forward([Feed(each.slot, each.stop, text[each.stop :], 1)])
        torch.testing.assert_close(got[0], plain(model, text)[-1], atol=loose, rtol=0.0)
