"""A random walk of feeds and rollbacks over the slots of a model, held against the model's own cache-less forward."""

from __future__ import annotations

import random

import torch
from transformers import PreTrainedModel

from specwire.lm import Feed, LanguageModel
from tests.lm.models import CONTEXT, TOLERANCE, VOCABULARY, plain


class Texts:
    """What each slot should hold, and a random walk of feeds and rollbacks over it."""

    def __init__(
        self, model: PreTrainedModel, lm: LanguageModel, seed: int, tolerance: float = TOLERANCE, copies: bool = True
    ) -> None:
        """copies: from slot to slot, too."""
        self.model, self.lm, self.tolerance, self.copies = model, lm, tolerance, copies
        self.random = random.Random(seed)
        self.held: list[list[int]] = [[] for _ in range(lm.slots)]

    def roll_back(self, slot: int) -> None:
        length = self.random.randint(0, len(self.held[slot]))
        self.lm.rollback(slot, length)
        self.lm.rollback(slot, length)  # idempotent
        del self.held[slot][length:]

    def copy(self) -> None:
        source, target = self.random.sample(range(self.lm.slots), 2)
        length = self.random.randint(0, len(self.held[source]))
        self.lm.copy(source, target, length)
        self.held[target] = self.held[source][:length]

    def feed(self, slot: int) -> Feed:
        start = self.random.randint(max(0, len(self.held[slot]) - 4), min(len(self.held[slot]), CONTEXT - 1))
        count = self.random.randint(1, min(7, CONTEXT - start))
        tokens = [self.random.randrange(VOCABULARY) for _ in range(count)]
        self.held[slot][start:] = tokens
        return Feed(slot, start, tokens, self.random.randint(0, count))

    def step(self) -> None:
        if self.random.random() < 0.3:
            self.roll_back(self.random.randrange(self.lm.slots))
        if self.copies and self.lm.slots > 1 and self.random.random() < 0.2:
            self.copy()
        chosen = self.random.sample(range(self.lm.slots), self.random.randint(1, self.lm.slots))
        feeds = [self.feed(slot) for slot in chosen]
        logits = self.lm.forward(feeds)
        expected = [plain(self.model, self.held[feed.slot])[feed.stop - feed.wanted :] for feed in feeds]
        torch.testing.assert_close(logits, torch.cat(expected), atol=self.tolerance, rtol=self.tolerance)
        assert [self.lm.cached(slot) for slot in range(self.lm.slots)] == [len(text) for text in self.held]
        assert self.lm.failed == frozenset()
