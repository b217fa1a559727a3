"""What each cache slot of the model holds, and which one a new session gets.

When a session is over, its keys and values stay where they are until the slot is needed: the least recently used go
first. A session of the same scope that begins alike starts from them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from specwire.core.prefixes import LEAST_SHARED, Prefix, longest
from specwire.lm import LanguageModel


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of a session that is over."""

    session_id: str
    scope: bytes
    prefix: Prefix


class Slots:
    """Invariant: every slot is free (empty, and zero wherever it was written), kept, or lent to exactly one.

    `counts`: prefixes that were taken over, copied and given up for others.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.counts: Counter[str] = Counter()
        self._lm = lm
        self._free = list(range(lm.slots - 1, -1, -1))
        self._kept: OrderedDict[int, Kept] = OrderedDict()

    @property
    def kept(self) -> int:
        """How many slots could be had for nobody's loss but time."""
        return len(self._kept)

    def lend(self) -> int | None:
        """An empty slot; None if all are lent."""
        if not self._free and self._kept:
            self._give_up(next(iter(self._kept)))
        return self._free.pop() if self._free else None

    def lend_for(self, tokens: list[int], scope: bytes, running: Iterable[Prefix]) -> int | None:
        """A slot for a session that begins with `tokens`; as much as can be had of that is in it already.

        running: what the slots of sessions that may be shared from hold.
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
        """What was in it is gone."""
        self._lm.discard(slot)
        self._free.append(slot)

    def keep(self, slot: int, tokens: list[int], scope: bytes, session_id: str) -> None:
        """A session is over. Behind its text may lie draft tokens that nobody decided."""
        length = min(self._lm.cached(slot), len(tokens))
        if not scope or length < LEAST_SHARED:
            self.give_back(slot)
            return
        self._lm.rollback(slot, length)
        self._kept[slot] = Kept(session_id, scope, Prefix(slot, tokens, length))

    def forget(self, session_id: str) -> None:
        """Somebody had the session deleted."""
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
