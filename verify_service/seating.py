"""Which sessions have a slot and which wait for one; what those that leave have in theirs stays for others.

A session that may decide nothing, because its client does not read or its log does not answer, keeps its slot as long
as nobody needs it. Then whoever has had no room for longest is parked: with new credit it queues for a slot, and feeds
its text again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from specwire.core.prefixes import LEAST_SHARED, Prefix, longest
from specwire.lm import LanguageModel
from verify_service.roster import NO_SLOT, Held, Roster
from verify_service.slots import Slots
from verify_service.waiting import LongestWait, QueuePatience, WaitingRoom

# Without room for so long a session gives its slot up to one that waits for it.
PARK_AFTER_US = 5e6


class Seating:
    """Invariant: a session of the roster has a slot of its own, is in the waiting room, or is parked.

    Args:
        counts: where idle sessions that gave way are counted.
        admitted: is told of every session that gets a slot.
    """

    def __init__(
        self,
        lm: LanguageModel,
        roster: Roster,
        patience: QueuePatience,
        counts: Counter[str],
        now_us: Callable[[], float],
        admitted: Callable[[Held], None],
    ) -> None:
        self.slots = Slots(lm)
        self.waiting = WaitingRoom()
        self._longest = LongestWait()
        self._lm = lm
        self._roster = roster
        self._patience = patience
        self._counts = counts
        self._now_us = now_us
        self._admitted = admitted

    def enter(self, held: Held) -> str | None:
        """It gets a slot now or waits for one; if it may not wait, the reason."""
        self._roster.add(held)
        held.came_us = self._now_us()
        self.waiting.add(held)
        self.fill()
        if not held.waiting:
            return None
        if len(self.waiting) <= self._patience.sessions:
            held.until_us = self._now_us() + self._patience.wait_us
            return None
        self.leave(held)
        queue = f", and {self._patience.sessions} sessions wait" if self._patience.sessions else ""
        return f"all {self._lm.slots} slots of this verifier are taken{queue}"

    def fill(self, between_steps: bool = False) -> None:
        """Give those who wait a slot, each in turn, as long as there is one. Between steps somebody may be parked."""
        while self.waiting and (held := self.waiting.next(self._roster.served)) is not None:
            slot = self._slot_for(held)
            if slot is None and between_steps and self._park():
                slot = self._slot_for(held)
            if slot is None:
                return
            self.waiting.took_turn(held)
            self._waited(held)
            self._seat(held, slot)

    def _park(self) -> bool:
        """Whether a session had no room for long enough, and has given its slot up."""
        held = min(self._paused, key=_since, default=None)
        if held is None or _since(held) > self._now_us() - PARK_AFTER_US:
            return False
        self._counts["session without room gave up its slot"] += 1
        slot, held.slot, held.parked = held.slot, NO_SLOT, True
        self.slots.keep(slot, list(held.session.text.tokens), held.scope, held.session_id)
        return True

    @property
    def _paused(self) -> list[Held]:
        return [held for held in self._roster.served if held.session.ready and held.session.room == 0]

    @property
    def next_parking_us(self) -> float:
        """When somebody will have had no room for long enough, if anybody waits for that."""
        return min(map(_since, self._paused), default=math.inf) + PARK_AFTER_US if self.waiting else math.inf

    def unpark(self, held: Held) -> None:
        """It has room again, if it was parked for want of it: it waits for a slot, however long that takes."""
        if held.parked and held.session.room > 0:
            held.parked, held.came_us = False, self._now_us()
            self.waiting.add(held)
            self.fill()

    def catch_up(self) -> None:
        """Before a step: those whose prompts wait to be fed take what has been fed meanwhile of one that begins alike.

        Of several that came together with one prompt, all but the first do. Each copies once: when there is no more.
        """
        behind = [held for held in self._roster if held.scope and not held.waiting and self._is_behind(held)]
        shared = {scope: self._shared(scope) for scope in {held.scope for held in behind}}
        for held in behind:
            # Its own slot holds less than it asks for, and is not found.
            found = longest(held.session.text.tokens, shared[held.scope], self._lm.cached(held.slot) + LEAST_SHARED)
            if found is not None and (found[1] < found[0].length or found[0].whole):
                self.slots.copy(found[0].slot, held.slot, found[1])

    def _is_behind(self, held: Held) -> bool:
        return held.session.position - self._lm.cached(held.slot) > LEAST_SHARED

    def succeed(self, former: Held, held: Held) -> None:
        """Take over the slot of the session that it replaces, rolled back to what their texts share.

        At least the last token must be fed to have a next one.
        """
        self._roster.remove(former)
        tokens: Sequence[int] = held.session.text.tokens
        common = former.session.text.common_prefix(0, tokens)
        self._lm.rollback(former.slot, min(self._lm.cached(former.slot), common, len(tokens) - 1))
        self._roster.add(held)
        self._seat(held, former.slot)

    def leave(self, held: Held) -> None:
        """It is over. What its slot holds stays for others of its scope, until the slot is needed."""
        self._roster.remove(held)
        if held.waiting:
            self.waiting.remove(held)
            if not held.parked:
                self._waited(held)
        else:
            self.slots.keep(held.slot, held.session.text.tokens, held.scope, held.session_id)

    def forget(self, session_id: str) -> None:
        """The session was deleted. One that is still open leaves nothing once it is closed."""
        held = self._roster.holder(session_id)
        if held is not None:
            held.scope = b""
        self.slots.forget(session_id)

    def lend(self) -> int | None:
        """An empty slot, if need be of an idle session; None if all are in use."""
        slot = self.slots.lend()
        return self.slots.lend() if slot is None and self._dismiss_idle() else slot

    def queue_us(self) -> float:
        """The longest that a session waits for a slot, or has waited of late. For any thread."""
        now_us = self._now_us()
        waiting = [now_us - held.came_us for held in list(self._roster) if held.waiting and not held.parked]
        return max(self._longest.at(now_us), *waiting, 0.0)

    def _waited(self, held: Held) -> None:
        now_us = self._now_us()
        self._longest.note(now_us - held.came_us, now_us)

    def _seat(self, held: Held, slot: int) -> None:
        held.slot, held.until_us = slot, math.inf
        held.running.since_us = self._now_us()
        self._admitted(held)

    def _slot_for(self, held: Held) -> int | None:
        """A slot that may hold a part of the text already, if need be of an idle session; None if all are in use."""
        tokens = held.session.text.tokens
        slot = self.slots.lend_for(tokens, held.scope, self._shared(held.scope))
        if slot is None and self._dismiss_idle():
            slot = self.slots.lend_for(tokens, held.scope, self._shared(held.scope))
        return slot

    def _shared(self, scope: bytes) -> list[Prefix]:
        """What sessions of this scope have in their slots; in the middle of a step draft tokens may lie behind it."""
        sharing = [held for held in self._roster if held.scope == scope and not held.waiting] if scope else []
        texts = [(held.slot, held.session.text.tokens) for held in sharing]
        return [Prefix(slot, tokens, min(self._lm.cached(slot), len(tokens))) for slot, tokens in texts]

    def _dismiss_idle(self) -> bool:
        spare = self._roster.spare()
        if spare is not None:
            self._counts["idle session gave up its slot"] += 1
            self.leave(spare)
        return spare is not None


def _since(held: Held) -> float:
    return held.running.since_us
