"""The sessions that the engine holds: their links, which have a slot, and which wait for one."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from specwire.core.model import SlotModel
from specwire.core.placement import Waiting, next_in_turn
from specwire.core.policy.tunables import SHORT_CHAIN
from specwire.core.verify.session import RunningSession, VerifySession
from verify_service.engine.messages import Opening, QueuePatience
from verify_service.engine.shares import TenantShares
from verify_service.engine.slots import LEAST_PREFIX, Prefix, Slots, by_next_tokens, longest

REMEMBERED_GENERATIONS = 4096
# The slot of a session that waits for one.
NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Held:
    """A session in its slot, or one that waits for a slot.

    attached: its link is there. until_us: when it is dropped although nobody closes it; set while it is idle or waits.
    scope, priority: see Open in verify.proto. came_us: when it asked for a slot. told: its link was told that it is
    open. parked: it gave its slot up because it had no credit, and does not wait for one until it has some. looked:
    its text was searched for a guess for the last plan; looks_in_vain: the last ones, in a row, whose guesses were in
    no window; unsearched_us: time of steps since.
    tenant: see Opening. most_length: of its text. seated_us: when it got its slot. served: the last step
    that it took part in, where tenants share steps.
    """

    link: int
    handle: int
    fence: int
    attach: int
    session_id: str
    slot: int
    prompt_length: int
    running: RunningSession
    deadline_us: float | None = None
    attached: bool = True
    until_us: float = math.inf
    scope: bytes = b""
    priority: int = 0
    came_us: float = 0.0
    told: bool = False
    parked: bool = False
    looked: bool = False
    looks_in_vain: int = 0
    unsearched_us: float = 0.0
    tenant: str = ""
    most_length: int = 0
    seated_us: float = 0.0
    served: int = -1
    session: VerifySession = field(init=False)

    def __post_init__(self) -> None:
        self.session = self.running.session

    def looks(self, rest_us: float) -> bool:
        """Whether its text is searched for a guess: one of its last ones was used, or the last one is still right, or
        so long ago it was searched. By its own past: a tenant's texts must not show in how soon another's are searched.

        A look takes time, whether its guess is used or not, and where a text repeats little, or rows are dear, hardly
        any guess pays.
        """
        ngram = self.session.ngram
        return ngram is not None and (
            self.looks_in_vain < SHORT_CHAIN or ngram.right_since >= SHORT_CHAIN or self.unsearched_us >= rest_us
        )

    @property
    def waiting(self) -> bool:
        """It has no slot."""
        return self.slot == NO_SLOT

    @property
    def expires_us(self) -> float:
        """When its deadline passes, or its time of being kept. An ended session has no deadline."""
        passing = self.deadline_us is not None and self.session.finish is None
        return min(self.until_us, self.deadline_us if passing and self.deadline_us is not None else math.inf)


class Roster:
    """Invariant: no two sessions have the same slot; a session id is held at most once.

    A session is *idle* when its link is lost (it goes on deciding) or when it has its end: perhaps nobody will ask for
    it again. It gives its slot up to one that needs it.
    """

    def __init__(self) -> None:
        self._by_handle: dict[tuple[int, int], Held] = {}
        self._by_id: dict[str, Held] = {}
        self._idle: dict[str, Held] = {}
        self._newest: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def __iter__(self) -> Iterator[Held]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        """Sessions that are served now. Idle ones give way and do not count."""
        return len(self._by_id) - len(self._idle)

    @property
    def served(self) -> list[Held]:
        """Sessions that have a slot and give way to nobody."""
        return [held for held in self if not (held.waiting or held.session_id in self._idle)]

    def get(self, link: int, handle: int) -> Held | None:
        return self._by_handle.get((link, handle))

    def holder(self, session_id: str) -> Held | None:
        return self._by_id.get(session_id)

    def on(self, link: int) -> list[Held]:
        return [held for held in self._by_handle.values() if held.link == link]

    def contains(self, held: Held) -> bool:
        return self._by_id.get(held.session_id) is held

    def newest(self, session_id: str) -> tuple[int, int]:
        """The newest (fence, attach) seen; (0, 0) for an id that is neither held nor remembered."""
        held = self._by_id.get(session_id)
        return max(self._newest.get(session_id, (0, 0)), (held.fence, held.attach) if held is not None else (0, 0))

    def remember(self, opening: Opening) -> None:
        self._newest[opening.session_id] = opening.generation
        self._newest.move_to_end(opening.session_id)
        if len(self._newest) > REMEMBERED_GENERATIONS:
            self._newest.popitem(last=False)

    def add(self, held: Held) -> None:
        self._by_handle[held.link, held.handle] = held
        self._by_id[held.session_id] = held

    def remove(self, held: Held) -> None:
        """Remove it; the caller takes its slot, if it has one."""
        if held.attached:
            del self._by_handle[held.link, held.handle]
        del self._by_id[held.session_id]
        self._idle.pop(held.session_id, None)

    # Without a link

    def detach(self, held: Held, until_us: float) -> None:
        del self._by_handle[held.link, held.handle]
        held.attached = False
        self.rest(held, until_us)

    def rest(self, held: Held, until_us: float) -> None:
        """Make it idle; one that is idle already keeps its time."""
        if held.session_id not in self._idle:
            held.until_us = until_us
            self._idle[held.session_id] = held

    def attach(self, held: Held, link: int, opening: Opening) -> None:
        """Move it to another connection; the former one forgets it."""
        self.remove(held)
        held.link, held.handle = link, opening.handle
        held.fence, held.attach = opening.generation
        held.attached, held.until_us = True, math.inf
        self.add(held)

    def spare(self) -> Held | None:
        """The idle session to give up first: one whose link was told its end, else the one that is idle longest."""
        told = next((held for held in self._idle.values() if held.attached), None)
        return told or next(iter(self._idle.values()), None)


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


class SlotQueue:
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
        # Hundreds that come at once have as much of their prompts as each other, and do not look at all of the others.
        alike: dict[tuple[bytes, int], Mapping[tuple[int, ...], list[Prefix]]] = {}
        for held in behind:
            text, cached = held.session.text.tokens, self._lm.cached(held.slot)
            if (held.scope, cached) not in alike:
                alike[held.scope, cached] = by_next_tokens(shared[held.scope], cached)
            least = cached + LEAST_PREFIX
            # Its own slot holds less than it asks for, and so is not found.
            found = longest(text, alike[held.scope, cached].get(tuple(text[cached:least]), ()), least)
            if found is not None and (found[1] < found[0].length or found[0].whole):
                self.slots.copy(found[0].slot, held.slot, found[1])

    def _is_behind(self, held: Held) -> bool:
        return held.session.position - self._lm.cached(held.slot) > LEAST_PREFIX

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
        """An empty slot, taken from an idle session if need be; None if all are in use, or a session waits for it."""
        self.fill()
        if self.waiting.next(self._roster.served) is not None:
            return None
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
        slot = None if self.slots.all_lent else self._lend_for(held.scope, tokens)
        return self._lend_for(held.scope, tokens) if slot is None and self._dismiss_idle() else slot

    def _lend_for(self, scope: bytes, tokens: list[int]) -> int | None:
        return self.slots.lend_for(tokens, scope, self._shared(scope, tokens[:LEAST_PREFIX]))

    def _shared(self, scope: bytes, beginning: Sequence[int] = ()) -> list[Prefix]:
        """What running sessions of this scope have in their slots, without draft tokens of a step under way.

        beginning: only of those whose texts begin so.
        """
        sharing = [held for held in self._roster if held.scope == scope and not held.waiting] if scope else []
        texts = [(held.slot, held.session.text.tokens) for held in sharing]
        begun = [each for each in texts if each[1][: len(beginning)] == beginning] if beginning else texts
        return [Prefix(slot, tokens, min(self._lm.cached(slot), len(tokens))) for slot, tokens in begun]

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
