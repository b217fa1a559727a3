"""A tiny target with a chat template, and answers that are short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from specwire.lm.training import own_answers
from specwire.lm.training.own_answers import BEST, NONE, KeptTexts, TokenRows
from tests.lm import models

WORDS = {word: index for index, word in enumerate(["?", "user", "<end>", "answer", *(f"w{n}" for n in range(46))])}
TEMPLATE = "user {{ messages[0]['content'] }} <end> answer"
TAPS, WIDTH = (0, 1, 2), 96


def save_target(folder: Path, kind: str = "llama") -> str:
    where = models.save(models.build(models.config(kind), seed=4), folder, WORDS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return where


def answer_shortly(patch: pytest.MonkeyPatch) -> None:
    """Short answers, in float32, and turns of which hardly any is refused."""
    patch.setattr(own_answers, "ANSWER", 12)
    patch.setattr(own_answers, "LEAST_ANSWER", 1)
    patch.setattr("specwire.lm.training.prompts.TURN_TOKENS", range(1, 20))
    patch.setattr("specwire.lm.training.own_answers.TURN_TOKENS", range(1, 20))
    patch.setattr("specwire.lm.training.prompts.DIFFERENT", 0.0)
    patch.setattr("specwire.lm.training.prompts.LETTERS", 0.0)
    patch.setattr("specwire.lm.training.prompts.PROMPT", range(2, 24))
    patch.setattr(own_answers, "native_dtype", lambda: "float32")


@torch.no_grad()
def keep_answers(target: str, folder: Path, texts: int, seed: int = 6) -> None:
    """What the target says behind five words by chance, every second time greedily; features are zeros."""
    model, generator = LlamaForCausalLM.from_pretrained(target).eval(), torch.Generator().manual_seed(seed)
    told, warm = torch.randint(4, len(WORDS), (texts, 5), generator=generator), torch.arange(texts) % 2
    best, logs = [torch.zeros(texts, 5, BEST, dtype=torch.long)], [torch.full((texts, 5, BEST), NONE)]
    for _ in range(24):
        rows = model(told).logits[:, -1].log_softmax(-1)
        top = rows.topk(BEST)
        best.append(top.indices[:, None])
        logs.append(top.values[:, None])
        drawn = torch.multinomial(rows.exp(), 1, generator=generator)
        told = torch.cat([told, torch.where(warm[:, None] > 0, drawn, top.indices[:, :1])], 1)
    kept = KeptTexts(folder, WIDTH, {"target": own_answers.digest_of(target), "taps": " ".join(map(str, TAPS))})
    for text, ids, values, temperature in zip(told, torch.cat(best, 1), torch.cat(logs, 1), warm.tolist(), strict=True):
        kept.add(TokenRows(text, torch.zeros(len(text), WIDTH), ids, values), 5, "turn", float(temperature))
