"""A random walk over a headed model's slots: windows, rollbacks, copies, other texts, and drafts that are compared."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from specwire.core.draft import HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed
from specwire.lm.heads.slots import HeadedModel
from tests.lm import models


def walk(lm: HeadedModel, expected: Callable[[list[int], int], list[int]], steps: int, seed: int = 5) -> None:
    """expected: what is drafted behind a text, so many tokens."""
    random, texts, drafted = Random(seed), dict[int, list[int]](), list[tuple[int, ...]]()

    def some(count: int) -> list[int]:
        return [random.randrange(3, models.VOCABULARY) for _ in range(count)]

    for _ in range(steps):
        slot = random.randrange(lm.slots)
        text = texts.get(slot)
        if text is None or len(text) > 24 or random.random() < 0.1:
            lm.discard(slot)
            texts[slot] = text = some(random.randint(2, 7))
        if random.random() < 0.15 and (others := [other for other in texts if other != slot]):
            source = random.choice(others)
            shared = random.randint(1, lm.cached(source)) if lm.cached(source) else 0
            if shared:
                lm.copy(source, slot, shared)
                texts[slot] = text = [*texts[source][:shared], *some(random.randint(1, 3))]
        window = some(random.randint(0, 3))
        start = lm.cached(slot)
        lm.forward([Feed(slot, start, [*text[start:], *window], 1 + len(window))])
        text += [*window[: random.randint(0, len(window))], *some(1)]
        lm.rollback(slot, len(text) - 1)
        assert lm.cached(slot) == len(text) - 1, "what was decided is computed again"
        if random.random() < 0.7:
            depth = random.randint(1, 4)
            (found,) = lm.draft([HeadRequest(slot, text, Sampling(), depth)])
            assert found == expected(text, depth)
            drafted.append(tuple(found))
    assert len(drafted) > steps / 2
    assert len(set(drafted)) > steps / 6, "a head that always says the same would show nothing"
