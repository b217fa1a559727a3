"""What each cache slot of the model holds: slots of ended sessions are kept for others to start from."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from specwire.core.model import SlotModel

# ----------------------------------------------------------------------------------------------------------------------
# The longest common prefix with other texts: it decides whose keys and values a new session starts from.
#
# Tokens are compared, not hashes of blocks, and no tree is kept: there are only as many texts as slots, equal stretches
# are compared in one operation, and a text that cannot win is dismissed by one token. So no index must follow
# evictions, a prefix may end anywhere, and no collision can be forged.

# A shorter prefix is not worth a copy: so many rows hardly change what a forward costs.
LEAST_PREFIX = 8
STRETCH = 16


@dataclass(frozen=True, slots=True)
class Prefix:
    """A slot that holds the first `length` positions of `tokens`."""

    slot: int
    tokens: list[int]
    length: int

    @property
    def whole(self) -> bool:
        """Whether all tokens are there but the last one, which is fed when the next is wanted."""
        return self.length >= len(self.tokens) - 1


def common(text: list[int], other: list[int]) -> int:
    """Length of the common prefix. It compares stretches that double while they are equal, then halve."""
    position, stretch, growing = 0, STRETCH, True
    while position < min(len(text), len(other)):
        if text[position : position + stretch] == other[position : position + stretch]:
            position += stretch
            stretch *= 2 if growing else 1
        elif stretch == 1:
            return position
        else:
            growing, stretch = False, stretch // 2
    return min(position, len(text), len(other))


def longest(text: list[int], prefixes: Iterable[Prefix], least: int = LEAST_PREFIX) -> tuple[Prefix, int] | None:
    """The slot that saves most positions of `text`, and how many; None below `least`.

    The text's last two tokens never count: the last is fed to get the next one, and a token that is fed alone is
    computed as a step's, not as a prompt's, whose last bits may differ.
    """
    best, saved = None, least - 1
    for prefix in prefixes:
        most = min(prefix.length, len(text) - 2)
        if most <= saved or prefix.tokens[saved] != text[saved]:
            continue
        shared = min(most, common(text, prefix.tokens))
        if shared > saved:
            best, saved = prefix, shared
    return None if best is None else (best, saved)


def by_next_tokens(prefixes: Iterable[Prefix], start: int) -> dict[tuple[int, ...], list[Prefix]]:
    """By the tokens that follow the first `start` ones: those that hold enough of them to save `LEAST_PREFIX` more."""
    found: defaultdict[tuple[int, ...], list[Prefix]] = defaultdict(list)
    for prefix in prefixes:
        if prefix.length >= start + LEAST_PREFIX:
            found[tuple(prefix.tokens[start : start + LEAST_PREFIX])].append(prefix)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# What each cache slot of the model holds, and which one a new session gets.
#
# When a session is over, its keys and values stay in their slot until it is needed; the least recently used slot goes
# first. A session of the same scope with the same beginning starts from them.


@dataclass(frozen=True, slots=True)
class Kept:
    """A slot with the keys and values of an ended session."""

    session_id: str
    scope: bytes
    prefix: Prefix


class Slots:
    """Invariant: every slot is free (empty, and zero wherever it was written), kept, or lent to exactly one.

    `counts`: prefixes that were taken over, copied and given up for others.
    """

    def __init__(self, lm: SlotModel) -> None:
        self.counts: Counter[str] = Counter()
        self._lm = lm
        self._free = list(range(lm.slots - 1, -1, -1))
        self._kept: OrderedDict[int, Kept] = OrderedDict()

    @property
    def kept(self) -> int:
        """How many slots hold ended sessions; losing one costs time only."""
        return len(self._kept)

    @property
    def all_lent(self) -> bool:
        return not (self._free or self._kept)

    def lend(self) -> int | None:
        """An empty slot; None if all are lent."""
        if not self._free and self._kept:
            self._give_up(next(iter(self._kept)))
        return self._free.pop() if self._free else None

    def lend_for(self, tokens: list[int], scope: bytes, running: Iterable[Prefix]) -> int | None:
        """A slot for a session that begins with `tokens`, filled with their longest available prefix.

        running: what the slots of running sessions hold and may share.
        """
        found = longest(tokens, [*self._of(scope), *running])
        if found is None:
            return self.lend()
        source, shared = found
        if source.slot in self._kept and (shared == source.length or not self._has_another):
            return self._take_over(source.slot, shared)
        self._touch(source.slot)
        slot = self.lend()
        if slot is not None:
            self.copy(source.slot, slot, shared)
        return slot

    def copy(self, source: int, target: int, length: int) -> None:
        self._lm.copy(source, target, length)
        self.counts["prefix copied"] += 1

    def give_back(self, slot: int) -> None:
        """Free a slot whose contents are gone."""
        self._lm.discard(slot)
        self._free.append(slot)

    def keep(self, slot: int, tokens: list[int], scope: bytes, session_id: str) -> None:
        """Keep an ended session's slot. Behind its text may lie draft tokens that were never decided."""
        length = min(self._lm.cached(slot), len(tokens))
        if not scope or length < LEAST_PREFIX:
            self.give_back(slot)
            return
        self._lm.rollback(slot, length)
        self._kept[slot] = Kept(session_id, scope, Prefix(slot, tokens, length))

    def forget(self, session_id: str) -> None:
        """Zero what a deleted session left."""
        for slot in [slot for slot, kept in self._kept.items() if kept.session_id == session_id]:
            self._give_up(slot)

    def _of(self, scope: bytes) -> list[Prefix]:
        return [kept.prefix for kept in self._kept.values() if scope and kept.scope == scope]

    @property
    def _has_another(self) -> bool:
        """Whether there is a slot to copy to beside a kept one."""
        return bool(self._free) or len(self._kept) > 1

    def _take_over(self, slot: int, length: int) -> int:
        del self._kept[slot]
        self._lm.rollback(slot, length)
        self.counts["prefix taken over"] += 1
        return slot

    def _touch(self, slot: int) -> None:
        if slot in self._kept:
            self._kept.move_to_end(slot)

    def _give_up(self, slot: int) -> None:
        del self._kept[slot]
        self.counts["prefix given up"] += 1
        self.give_back(slot)
