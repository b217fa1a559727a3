"""A drafter under a virtual clock: the real sessions; a pass gives each session that wants one a token.

Commands are applied between two passes, as by `draft_service.sessions.Sessions.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_service.commands import Command, Dropped, Replies, Reply
from draft_service.sessions import Expansion, Sessions
from specwire.core.draft import Drawn
from specwire.core.model import Feed
from specwire.sim.clock import Clock, Machine
from specwire.sim.guesses import Guesses
from specwire.sim.verifier import SimModel

# Sessions of one drafter.
SLOTS = 1 << 12


@dataclass(frozen=True, slots=True, eq=False)
class SimLink:
    """A session's connection: what is guessed for it, and who hears the replies."""

    guesses: Guesses
    hear: Callable[[Reply], None]

    def send(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, Dropped):
                raise AssertionError(reply.message)
            self.hear(reply)


class SimDrafter:
    """Args:
    draft_us: a pass for one session.
    session_slope: share of it that each further session of the pass adds.
    """

    def __init__(self, clock: Clock, machine: Machine, draft_us: float, session_slope: float = 0.0) -> None:
        self._clock = clock
        self._machine = machine
        self._draft_us = draft_us
        self._session_slope = session_slope
        self._sessions = Sessions(SimModel(SLOTS, self._computed), _guessed, _deliver, self._now_ns)
        self._began_us: float | None = None
        self._inbox: list[Command] = []
        self._busy = False

    def send(self, command: Command) -> None:
        """A message arrives."""
        self._inbox.append(command)
        if not self._busy:
            self._busy = True
            self._clock.after(0.0, self._step)

    # Passes

    def _step(self) -> None:
        inbox, self._inbox = self._inbox, []
        for command in inbox:
            self._sessions.apply(command)
        self._sessions.deliver()
        wanting = self._sessions.wanting
        self._busy = wanting > 0
        if wanting:
            self._began_us = self._clock.now_us
            self._machine.use(self._draft_us * (1.0 + self._session_slope * (wanting - 1)), self._pass_ended)

    def _pass_ended(self) -> None:
        """The sessions compute it in this instant; by their clock it began when it did."""
        self._sessions.step()
        self._sessions.deliver()
        self._step()

    def _computed(self, _: Sequence[Feed]) -> float:
        self._began_us = None
        return 0.0

    def _now_ns(self) -> int:
        return round((self._clock.now_us if self._began_us is None else self._began_us) * 1000)


def _deliver(replies: Replies) -> None:
    for link, own in replies.items():
        link.send(own)


def _guessed(_computed: object, _rows: Sequence[int], drawing: Sequence[Expansion]) -> list[Drawn]:
    return [_guess(place) for place in drawing]


def _guess(place: Expansion) -> Drawn:
    drafting = place.drafting
    if not isinstance(drafting.link, SimLink):
        raise TypeError(f"not a simulated link: {drafting.link!r}")
    guesses, position = drafting.link.guesses, place.position
    confidence = guesses.confidence_at(position) if drafting.session.pace.confidence_floor else 1.0
    return Drawn((guesses.token(position),), confidence)
