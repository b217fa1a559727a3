"""A drafter under a virtual clock: the core's draft sessions; a pass gives each session that wants one a token.

The order of things is that of `draft_service/sessions.py`: commands are applied between two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from specwire.core.draft import DraftSession
from specwire.core.messages import Pace, Proposal
from specwire.sim.clock import Action, Clock, Machine
from specwire.sim.guesses import Guesses

# A chunk, and the microseconds that drafting it took.
Deliver = Callable[[Proposal, float], None]


@dataclass(slots=True, eq=False)
class SimDraftSession:
    """One session: `spent_us` counts since its last proposal. `session` is None before its opening arrives."""

    guesses: Guesses
    deliver: Deliver
    session: DraftSession | None = None
    spent_us: float = 0.0


class SimDrafter:
    """Args:
    draft_us: a pass for one session.
    session_slope: share of it that each further session of the pass adds.
    """

    def __init__(self, clock: Clock, machine: Machine, draft_us: float, session_slope: float = 0.0) -> None:
        self.drafted = 0
        self._clock = clock
        self._machine = machine
        self._draft_us = draft_us
        self._session_slope = session_slope
        self._open: list[SimDraftSession] = []
        self._inbox: list[Action] = []
        self._busy = False

    def __len__(self) -> int:
        return len(self._open)

    def attach(self, guesses: Guesses, deliver: Deliver) -> SimDraftSession:
        """A place for a session, before its opening arrives."""
        return SimDraftSession(guesses, deliver)

    def open(self, drafting: SimDraftSession, tokens: Sequence[int], pace: Pace) -> None:
        self._command(partial(self._start, drafting, tokens, pace))

    def advance(self, drafting: SimDraftSession, position: int, tokens: Sequence[int], pace: Pace) -> None:
        self._command(partial(self._advance, drafting, position, tokens, pace))

    def close(self, drafting: SimDraftSession) -> None:
        self._command(partial(self._end, drafting))

    def _command(self, action: Action) -> None:
        self._inbox.append(action)
        if not self._busy:
            self._busy = True
            self._clock.after(0.0, self._step)

    def _start(self, drafting: SimDraftSession, tokens: Sequence[int], pace: Pace) -> None:
        chain = drafting.session.chain + 1 if drafting.session else 0
        drafting.session = DraftSession(tokens, pace, chain)
        if drafting not in self._open:
            self._open.append(drafting)

    def _advance(self, drafting: SimDraftSession, position: int, tokens: Sequence[int], pace: Pace) -> None:
        if drafting.session is not None:
            drafting.session.advance(position, tokens, pace)
            self._propose(drafting)

    def _end(self, drafting: SimDraftSession) -> None:
        if drafting in self._open:
            self._open.remove(drafting)

    # Passes

    def _step(self) -> None:
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            action()
        batch = [each for each in self._open if each.session is not None and each.session.wants_token]
        self._busy = bool(batch)
        if batch:
            began_us = self._clock.now_us
            duration_us = self._draft_us * (1.0 + self._session_slope * (len(batch) - 1))
            self._machine.use(duration_us, partial(self._pass_ended, batch, began_us))

    def _pass_ended(self, batch: Sequence[SimDraftSession], began_us: float) -> None:
        spent_us = self._clock.now_us - began_us
        self.drafted += len(batch)
        for drafting in batch:
            drafting.spent_us += spent_us
            if drafting.session is not None:
                self._draft(drafting.session, drafting.guesses)
            self._propose(drafting)
        self._step()

    def _draft(self, session: DraftSession, guesses: Guesses) -> None:
        position = len(session.text)
        confidence = guesses.confidence_at(position) if session.pace.confidence_floor else 1.0
        session.drafted(guesses.token(position), confidence)

    def _propose(self, drafting: SimDraftSession) -> None:
        """Send every chunk that is due."""
        while drafting.session is not None and (proposal := drafting.session.take_proposal()) is not None:
            drafting.deliver(proposal, drafting.spent_us)
            drafting.spent_us = 0.0
