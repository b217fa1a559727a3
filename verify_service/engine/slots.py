"""Which sessions have a slot and which wait for one. Slots of ended sessions are kept for others to start from."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from specwire.core.model import SlotModel
from specwire.core.placement import Waiting, next_in_turn
from specwire.core.policy.shares import TenantShares
from verify_service.engine.messages import QueuePatience
from verify_service.engine.sessions import NO_SLOT, Held, Roster

# ----------------------------------------------------------------------------------------------------------------------
# The longest common prefix with other texts: it decides whose keys and values a new session starts from.
#
# Tokens are compared, not hashes of blocks, and no tree is kept: there are only as many texts as slots, equal stretches
# are compared in one operation, and a text that cannot win is dismissed by one token. So no index must follow
# evictions, a prefix may end anywhere, and no collision can be forged.

# A shorter prefix is not worth a copy: so many rows hardly change what a forward costs.
LEAST_SHARED = 8
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


def longest(text: list[int], prefixes: Iterable[Prefix], least: int = LEAST_SHARED) -> tuple[Prefix, int] | None:
    """The slot that saves most positions of `text`, and how many; None below `least`.

    The text's last token never counts: it is fed to get the next one.
    """
    best, saved = None, least - 1
    for prefix in prefixes:
        most = min(prefix.length, len(text) - 1)
        if most <= saved or prefix.tokens[saved] != text[saved]:
            continue
        shared = min(most, common(text, prefix.tokens))
        if shared > saved:
            best, saved = prefix, shared
    return None if best is None else (best, saved)


# ----------------------------------------------------------------------------------------------------------------------
# Sessions that wait because all slots are in use.

K = TypeVar("K")
# Tenants whose latest turn is remembered.
REMEMBERED_TENANTS = 1024


# The longest wait is remembered for at least this long, at most for twice as long.
WAITS_KEPT_US = 2.5e6


class LongestWait:
    """The longest wait in the present stretch of time and the one before. Written by one thread, read by any."""

    def __init__(self) -> None:
        self._stretch = 0
        self._longest_us = (0.0, 0.0)

    def note(self, waited_us: float, now_us: float) -> None:
        """Note a wait that is over."""
        stretch = int(now_us // WAITS_KEPT_US)
        before, present = self._as_of(stretch)
        self._stretch, self._longest_us = stretch, (before, max(present, waited_us))

    def at(self, now_us: float) -> float:
        return max(self._as_of(int(now_us // WAITS_KEPT_US)))

    def _as_of(self, stretch: int) -> tuple[float, float]:
        """The longest waits in the stretch before `stretch`, and in `stretch`."""
        passed = stretch - self._stretch
        before, present = self._longest_us
        return (before, present) if passed <= 0 else (present, 0.0) if passed == 1 else (0.0, 0.0)


class WaitingRoom:
    """Invariant: holds the sessions without a slot, except parked ones, which ask for none until they have room."""

    def __init__(self, shares: TenantShares | None = None) -> None:
        self._numbers = count()
        self._held: dict[Waiting, Held] = {}
        self._latest: OrderedDict[bytes, int] = OrderedDict()
        self._shares = shares
        self._latest_of: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: Held) -> None:
        self._held[Waiting(held.scope, held.priority, next(self._numbers))] = held

    def remove(self, held: Held) -> None:
        self._held = {turn: each for turn, each in self._held.items() if each is not held}

    def next(self, served: Iterable[Held]) -> Held | None:
        """The session whose turn it is, given the sessions that are served now."""
        if not self._held:
            return None
        waiting, served = self._held, list(served)
        if self._shares is not None:
            places = Counter(each.tenant for each in served)
            tenants = {each.tenant for each in waiting.values()}
            tenant = self._shares.next_tenant(tenants, places, self._latest_of)
            waiting = {turn: each for turn, each in waiting.items() if each.tenant == tenant}
        turn = next_in_turn(waiting, Counter(each.scope for each in served), self._latest)
        return None if turn is None else waiting[turn]

    def has_room(self, held: Held, most: int) -> bool:
        """Whether a waiting session may wait: at most `most` do, or its tenant has no more than its share of these."""
        if self._shares is None or len(self) <= most:
            return len(self) <= most
        own = sum(each.tenant == held.tenant for each in self._held.values())
        whole = sum(map(self._shares.weight, {each.tenant for each in self._held.values()}))
        return own <= most * self._shares.weight(held.tenant) / whole

    def took_turn(self, held: Held) -> None:
        """Remove a session that has a slot now."""
        self.remove(held)
        number = next(self._numbers)
        _note_turn(self._latest, held.scope, number)
        _note_turn(self._latest_of, held.tenant, number)


def _note_turn(latest: OrderedDict[K, int], whose: K, number: int) -> None:
    latest[whose] = number
    latest.move_to_end(whose)
    if len(latest) > REMEMBERED_TENANTS:
        latest.popitem(last=False)


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
        if not scope or length < LEAST_SHARED:
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


# ----------------------------------------------------------------------------------------------------------------------
# Which sessions have a slot and which wait for one.
#
# A session without credit, because its client does not read or its log does not answer, keeps its slot until another
# session needs it. Then the session that has had no credit for longest is parked: with new credit it queues for a slot
# and feeds its text again.

# Where tenants share the verifier, one that has more than its share of slots gives one up to a tenant that waits and
# has less: that of the session that got its slot last, and has had it for a while. It queues for another one.

# Microseconds without credit after which a session gives its slot up to one that waits. Where its tenant has more than
# its share, they count from when it got the slot.
PARK_AFTER_US = 5e6


class SlotScheduler:
    """Invariant: a session of the roster has a slot of its own, is in the waiting room, or is parked.

    Args:
        counts: where idle sessions that gave way are counted.
        admitted: is told of every session that gets a slot. shares: of tenants; None where there are none.
    """

    def __init__(
        self,
        lm: SlotModel,
        roster: Roster,
        patience: QueuePatience,
        counts: Counter[str],
        now_us: Callable[[], float],
        admitted: Callable[[Held], None],
        shares: TenantShares | None = None,
    ) -> None:
        self.slots = Slots(lm)
        self.waiting = WaitingRoom(shares)
        self._shares = shares
        self._longest = LongestWait()
        self._lm = lm
        self._roster = roster
        self._patience = patience
        self._counts = counts
        self._now_us = now_us
        self._admitted = admitted

    def enter(self, held: Held) -> str | None:
        """Give a session a slot now, or let it wait for one; returns the reason if it may not wait."""
        self._roster.add(held)
        held.came_us = self._now_us()
        self.waiting.add(held)
        self.fill()
        if not held.waiting:
            return None
        if self.waiting.has_room(held, self._patience.sessions):
            held.until_us = self._now_us() + self._patience.wait_us
            return None
        self.leave(held)
        queue = f", and {self._patience.sessions} sessions wait" if self._patience.sessions else ""
        return f"all {self._lm.slots} slots of this verifier are taken{queue}"

    def fill(self, between_steps: bool = False) -> None:
        """Give waiting sessions slots in turn, while there are any. Between steps one may be parked for that."""
        while self.waiting and (held := self.waiting.next(self._roster.served)) is not None:
            slot = self._slot_for(held)
            if slot is None and between_steps and (self._park() or self._make_way(held)):
                slot = self._slot_for(held)
            if slot is None:
                return
            self.waiting.took_turn(held)
            self._waited(held)
            self._seat(held, slot)

    def _park(self) -> bool:
        """Park a session that has had no credit for long enough; returns whether there was one."""
        held = min(self._paused, key=_since, default=None)
        if held is None or _since(held) > self._now_us() - PARK_AFTER_US:
            return False
        self._counts["session without room gave up its slot"] += 1
        slot, held.slot, held.parked = held.slot, NO_SLOT, True
        self.slots.keep(slot, list(held.session.text.tokens), held.scope, held.session_id)
        return True

    def _make_way(self, held: Held) -> bool:
        """Take a slot from the tenant that has too many beside that of `held`; returns whether there was one."""
        leaving = self._in_the_way(held.tenant)
        if leaving is None or leaving.seated_us > self._now_us() - PARK_AFTER_US:
            return False
        self._counts["session of a tenant above its share gave up its slot"] += 1
        slot, leaving.slot, leaving.came_us = leaving.slot, NO_SLOT, self._now_us()
        self.slots.keep(slot, list(leaving.session.text.tokens), leaving.scope, leaving.session_id)
        self.waiting.add(leaving)
        return True

    def _in_the_way(self, tenant: str) -> Held | None:
        """The session that makes way for one of the tenant; None if it has its share."""
        if self._shares is None:
            return None
        served = [held for held in self._roster.served if held.session.ready]
        other = self._shares.gives_way(tenant, Counter(held.tenant for held in served))
        theirs = (held for held in served if held.tenant == other and held.session.finish is None)
        return None if other is None else max(theirs, key=_seated_us, default=None)

    @property
    def _paused(self) -> list[Held]:
        return [held for held in self._roster.served if held.session.ready and held.session.room == 0]

    @property
    def next_parking_us(self) -> float:
        """When a session may be parked next, if any session waits for a slot."""
        if not self.waiting:
            return math.inf
        next_up = self.waiting.next(self._roster.served) if self._shares is not None else None
        leaving = None if next_up is None else self._in_the_way(next_up.tenant)
        making_way_us = math.inf if leaving is None else leaving.seated_us
        return min(making_way_us, *map(_since, self._paused), math.inf) + PARK_AFTER_US

    def unpark(self, held: Held) -> None:
        """Let a parked session that has credit again wait for a slot, without a time limit."""
        if held.parked and held.session.room > 0:
            held.parked, held.came_us = False, self._now_us()
            self.waiting.add(held)
            self.fill()

    def catch_up(self) -> None:
        """Before a step, let waiting prompts copy what has been fed of a prompt with the same beginning.

        Of several sessions with one prompt, all but the first do. Each copies once, when all of it is fed.
        """
        behind = [held for held in self._roster if held.scope and not held.waiting and self._is_behind(held)]
        shared = {scope: self._shared(scope) for scope in {held.scope for held in behind}}
        for held in behind:
            # Its own slot holds less than it asks for, and so is not found.
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
        """Release an ended session's slot. Its contents stay for others of its scope until the slot is needed."""
        self._roster.remove(held)
        if held.waiting:
            self.waiting.remove(held)
            if not held.parked:
                self._waited(held)
        else:
            self.slots.keep(held.slot, held.session.text.tokens, held.scope, held.session_id)

    def forget(self, session_id: str) -> None:
        """Forget a deleted session. One that is still open leaves nothing once it is closed."""
        held = self._roster.holder(session_id)
        if held is not None:
            held.scope = b""
        self.slots.forget(session_id)

    def lend(self) -> int | None:
        """An empty slot, taken from an idle session if need be; None if all are in use."""
        slot = self.slots.lend()
        return self.slots.lend() if slot is None and self._dismiss_idle() else slot

    def queue_us(self) -> float:
        """The longest that a session waits for a slot, or has waited recently. For any thread."""
        now_us = self._now_us()
        waiting = [now_us - held.came_us for held in list(self._roster) if held.waiting and not held.parked]
        return max(self._longest.at(now_us), *waiting, 0.0)

    def _waited(self, held: Held) -> None:
        now_us = self._now_us()
        self._longest.note(now_us - held.came_us, now_us)

    def _seat(self, held: Held, slot: int) -> None:
        held.slot, held.until_us = slot, math.inf
        held.seated_us = self._now_us()
        held.running.since_us = self._now_us()
        self._admitted(held)

    def _slot_for(self, held: Held) -> int | None:
        """A slot that may hold a part of the text, taken from an idle session if need be; None if all are in use."""
        tokens = held.session.text.tokens
        slot = self.slots.lend_for(tokens, held.scope, self._shared(held.scope))
        if slot is None and self._dismiss_idle():
            slot = self.slots.lend_for(tokens, held.scope, self._shared(held.scope))
        return slot

    def _shared(self, scope: bytes) -> list[Prefix]:
        """What running sessions of this scope have in their slots, without draft tokens of a step under way."""
        sharing = [held for held in self._roster if held.scope == scope and not held.waiting] if scope else []
        texts = [(held.slot, held.session.text.tokens) for held in sharing]
        return [Prefix(slot, tokens, min(self._lm.cached(slot), len(tokens))) for slot, tokens in texts]

    def _dismiss_idle(self) -> bool:
        spare = self._roster.spare()
        if spare is not None:
            self._counts["idle session gave up its slot"] += 1
            self.leave(spare)
        return spare is not None


def _seated_us(held: Held) -> float:
    return held.seated_us


def _since(held: Held) -> float:
    return held.running.since_us
