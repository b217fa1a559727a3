"""A random walk over a headed model's slots: windows, rollbacks, copies, other texts, and drafts that are compared."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from specwire.core.draft import HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed
from specwire.lm.heads.slots import HeadedModel
from tests.lm import models


def walk(
    lm: HeadedModel,
    expected: Callable[[list[int], int, int], list[int]],
    steps: int,
    seed: int = 5,
    heeding: bool = False,
    check: Callable[[int, list[int]], None] = lambda _slot, _text: None,
) -> int:
    """expected: what is drafted behind a text, so many tokens, by a head that knows it from a position on.

    heeding: texts may take no head for a while. check: what else holds behind a draft. Returns how many drafts were by
    a head that had begun anew.
    """
    random, texts, drafted, anew = Random(seed), dict[int, list[int]](), list[tuple[int, ...]](), 0

    def some(least: int, most: int) -> list[int]:
        return [random.randrange(3, models.VOCABULARY) for _ in range(random.randint(least, most))]

    for _ in range(steps):
        slot = random.randrange(lm.slots)
        if slot not in texts or len(texts[slot]) > 24 or random.random() < 0.1:
            lm.discard(slot)
            texts[slot] = some(2, 7)
        held = {other: lm.cached(other) for other in texts if lm.cached(other)}
        if slot in held and random.random() < 0.2:
            length = random.randint(0, held[slot])
            lm.rollback(slot, length)
            texts[slot] = [*texts[slot][:length], *some(1, 3)]
        elif (others := sorted(held.keys() - {slot})) and random.random() < 0.2:
            source = random.choice(others)
            length = random.randint(1, held[source])
            lm.copy(source, slot, length)
            texts[slot] = [*texts[source][:length], *some(1, 3)]
        if random.random() < 0.1:
            continue
        if heeding:
            lm.heed(random.choices([None, [slot], ()], [12, 4, 1])[0])
        text, start, window = texts[slot], lm.cached(slot), some(0, 3)
        lm.forward([Feed(slot, start, [*text[start:], *window], 1 + len(window))])
        text += [*window[: random.randint(0, len(window))], *some(1, 1)]
        lm.rollback(slot, len(text) - 1)
        assert lm.cached(slot) == len(text) - 1, "what was decided is computed again"
        if len(text) > 1 and lm.unread(slot) is not None and random.random() < 0.7:
            origin, depth = lm._slots[slot].origin, random.randint(1, 4)
            (found,) = lm.draft([HeadRequest(slot, text, Sampling(), depth)])
            assert found == expected(text, depth, origin)
            check(slot, text)
            drafted.append(tuple(found))
            anew += origin > 0
    assert len(drafted) > steps / 3
    assert len(set(drafted)) > steps / 8, "a head that always says the same would show nothing"
    return anew
