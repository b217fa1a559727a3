"""The sessions that the engine holds, and which cache slot each of them has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from specwire.core.running import Running
from specwire.core.verification import VerifySession
from verify_service.commands import Opening

REMEMBERED_GENERATIONS = 4096


@dataclass(slots=True, eq=False)
class Held:
    """A session in its slot."""

    link: int
    handle: int
    attach: int
    session_id: str
    slot: int
    running: Running
    deadline_us: float | None = None

    @property
    def session(self) -> VerifySession:
        return self.running.session


class Roster:
    """Invariant: every slot is free or has exactly one session; a session id is held at most once."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._held: dict[tuple[int, int], Held] = {}
        self._by_id: dict[str, Held] = {}
        self._newest: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def get(self, link: int, handle: int) -> Held | None:
        return self._held.get((link, handle))

    def holder(self, session_id: str) -> Held | None:
        return self._by_id.get(session_id)

    def on(self, link: int) -> list[Held]:
        return [held for held in self if held.link == link]

    def contains(self, held: Held) -> bool:
        return self._held.get((held.link, held.handle)) is held

    def newest(self, session_id: str) -> tuple[int, int]:
        """The newest (fence, attach) seen; (0, 0) for an id that is not remembered."""
        return self._newest.get(session_id, (0, 0))

    def remember(self, opening: Opening) -> None:
        self._newest[opening.session_id] = opening.generation
        self._newest.move_to_end(opening.session_id)
        if len(self._newest) > REMEMBERED_GENERATIONS:
            self._newest.popitem(last=False)

    def take_slot(self) -> int | None:
        return self._free.pop() if self._free else None

    def free_slot(self, slot: int) -> None:
        self._free.append(slot)

    def add(self, held: Held) -> None:
        self._held[held.link, held.handle] = held
        self._by_id[held.session_id] = held

    def remove(self, held: Held) -> None:
        del self._held[held.link, held.handle]
        del self._by_id[held.session_id]
        self.free_slot(held.slot)
