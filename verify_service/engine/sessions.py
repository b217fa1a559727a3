"""The sessions that the engine holds, with their slots and links."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from specwire.core.policy.scheduler import Lookout
from specwire.core.verify.session import RunningSession, VerifySession
from verify_service.engine.messages import Opening

REMEMBERED_GENERATIONS = 4096
# The slot of a session that waits for one.
NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Held:
    """A session in its slot, or one that waits for a slot.

    attached: its link is there. until_us: when it is dropped although nobody closes it; set while it is idle or waits.
    scope, priority: see Open in verify.proto. came_us: when it asked for a slot. told: its link was told that it is
    open. parked: it gave its slot up because it had no credit, and does not wait for one until it has some. lookout:
    how often it is searched for guesses; looked: it was for the last plan. tenant: see Opening. most_length: of its
    text. seated_us: when it got its slot. served: the last step that it took part in, where tenants share steps.
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
    lookout: Lookout = field(default_factory=Lookout)
    looked: bool = False
    tenant: str = ""
    most_length: int = 0
    seated_us: float = 0.0
    served: int = -1

    def looks(self, alone: bool) -> bool:
        """Whether the next plan gets a guess of this session."""
        self.looked = self.lookout.looks(alone)
        return self.looked

    @property
    def waiting(self) -> bool:
        """It has no slot."""
        return self.slot == NO_SLOT

    @property
    def session(self) -> VerifySession:
        return self.running.session

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
