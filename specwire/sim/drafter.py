"""A drafter under a virtual clock: the real sessions; a pass gives each session that wants one a token.

Commands are applied between two passes, as by `draft_service.sessions.Sessions.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from draft_service.sessions import Command, DraftForward, Dropped, Expansion, Replies, Reply, Sessions
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
    session_slope: share of it that each further session of the pass adds. row_slope: each further row of a session.
    branching: the model takes feeds that branch.
    """

    def __init__(
        self,
        clock: Clock,
        machine: Machine,
        draft_us: float,
        session_slope: float = 0.0,
        row_slope: float = 0.0,
        branching: bool = True,
    ) -> None:
        self._clock = clock
        self._machine = machine
        self._draft_us = draft_us
        self._session_slope = session_slope
        self._row_slope = row_slope
        model = SimModel(SLOTS, self._takes, branching)
        self._sessions = Sessions(model, _guessed, _deliver, self._now_ns)
        self._inbox: list[Command] = []
        self._busy = False

    @property
    def extended(self) -> float:
        """Tokens that a forward extended, on average; 0 before the first."""
        tally = self._sessions.tally
        passes = sum(tally.rows.counts)
        return tally.drafted / passes if passes else 0.0

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
        forward = self._sessions.begin()
        self._busy = forward is not None
        if forward is not None:
            self._machine.use(self._takes(forward.feeds), partial(self._ended, forward))

    def _ended(self, forward: DraftForward) -> None:
        self._sessions.end(forward)
        self._sessions.deliver()
        self._step()

    def _takes(self, feeds: Sequence[Feed]) -> float:
        further = sum(len(feed.tokens) - 1 for feed in feeds)
        return self._draft_us * (1.0 + self._session_slope * (len(feeds) - 1) + self._row_slope * further)

    def _now_ns(self) -> int:
        return round(self._clock.now_us * 1000)


def _deliver(replies: Replies) -> None:
    for link, own in replies.items():
        link.send(own)


def _guessed(_computed: object, _rows: Sequence[int], drawing: Sequence[Expansion]) -> list[Drawn]:
    return [_guess(place) for place in drawing]


def _guess(place: Expansion) -> Drawn:
    session = place.drafting.session
    if not isinstance(place.drafting.link, SimLink):
        raise TypeError(f"not a simulated link: {place.drafting.link!r}")
    guesses = place.drafting.link.guesses
    tokens, scores = guesses.behind(session.decided, place.path, place.most)
    return Drawn(tokens, scores=scores)
