"""What `make statistics-vllm` judges by: it accepts texts of the law, and refuses those of another model."""

from __future__ import annotations

import torch

from bench.laws.pair import PROMPT, SEEDS, model
from bench.laws.run import ALPHA
from bench.laws.vllm import Law

COUNT, LENGTH = 1500, 8


@torch.inference_mode()
def drawn(seed: int) -> list[tuple[int, ...]]:
    """Texts of the model's own law."""
    random, target = torch.Generator().manual_seed(3), model(seed)
    texts = torch.tensor([PROMPT]).repeat(COUNT, 1)
    for _ in range(LENGTH):
        shares = target(texts).logits[:, -1].softmax(dim=1)
        texts = torch.cat((texts, torch.multinomial(shares, 1, generator=random)), dim=1)
    return [tuple(text) for text in texts[:, len(PROMPT) :].tolist()]


def test_a_law_is_told_from_another() -> None:
    of_target, of_other = map(drawn, SEEDS)
    law = Law(SEEDS[0])
    assert min(law.p_of_firsts(of_target), law.p_of_later(of_target)) > 1e-3
    assert law.p_of_firsts(of_other) < ALPHA
    assert law.p_of_later(of_other) < ALPHA


def test_later_tokens_alone_are_told() -> None:
    """The first ones are right, and what follows is another text's."""
    texts = drawn(SEEDS[0])
    mixed = [(*first[:3], *other[3:]) for first, other in zip(texts, drawn(SEEDS[1]), strict=True)]
    law = Law(SEEDS[0])
    assert law.p_of_firsts(mixed) > 1e-3
    assert law.p_of_later(mixed) < ALPHA
