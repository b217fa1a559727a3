"""The world's own record of facts, and the invariants of PROTOCOL.md section 14 over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specwire.core import messages
from specwire.core.draft import DraftSession
from specwire.core.messages import FinishReason, Outcome, SourceKind
from specwire.core.session import Session, State
from specwire.core.text import Ending
from specwire.core.verify.session import VerifySession
from tests.core.branching import Heard, Sent
from tests.core.script import LETTERS, Oracle, Script


class Violation(AssertionError):
    """An invariant does not hold."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


def is_prefix(part: Sequence[int] | str, whole: Sequence[int] | str) -> bool:
    return len(part) <= len(whole) and whole[: len(part)] == part


@dataclass(slots=True)
class Seat:
    """Where a drafter sits: its link, in order towards it, and itself.

    advised: what the session has told it; decided: the part of it that has arrived. cache: the text that its model has.
    branched: it has drafted more than a chain. sent: all that it has sent.
    """

    script: Script
    number: int
    source: int = 0
    up: bool = False
    to_drafter: deque[messages.OpenDrafter | messages.AdvanceDrafter | messages.CloseDrafter] = field(
        default_factory=deque
    )
    drafter: DraftSession | None = None
    advised: list[int] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    cache: list[int] = field(default_factory=list)
    branched: bool = False
    sent: Sent = field(default_factory=Sent)

    def emptied(self) -> Seat:
        return Seat(self.script, self.number)


class Facts:
    """The log, what the client was told, the parties' states, and the oracle that they are compared with.

    log: the acknowledged tokens. pending: the append under way. told_*: what was emitted. seats: of the drafters.
    kept: a verifier's session without a link.
    """

    session: Session
    verifier: VerifySession | None = None
    kept: VerifySession | None = None
    forward: tuple[VerifySession, tuple[int, ...], SourceKind] | None = None
    seats: list[Seat]

    def __init__(
        self, script: Script, prompt: Sequence[int], ending: Ending, stops: Sequence[str], buffer: int
    ) -> None:
        self.script = script
        self.prompt = list(prompt)
        self.ending = ending
        self.stops = stops
        self.buffer = buffer
        self.oracle = Oracle.of(script, self.prompt, ending, stops)
        self.log = list(self.prompt)
        self.pending: messages.Append | None = None
        self.end: messages.End | None = None
        self.told_tokens = list(self.prompt)
        self.told_text = ""
        self.outcomes: list[Outcome] = []
        self.cancelled = False
        self.heard = Heard()

    @property
    def over(self) -> bool:
        return self.end is not None

    @property
    def append_under_way(self) -> bool:
        return self.pending is not None

    def whole_text(self) -> str:
        """The log's uncut text: what a cancelled session has shown, also where a stop string had begun."""
        return "".join(LETTERS[token] for token in self.log[len(self.prompt) :])

    # The invariants

    def check(self) -> None:
        self._check_order()
        self._check_texts()
        for verifier in (self.verifier, self.kept):
            if verifier is not None:
                self._check_verifier(verifier)
        for seat in self.seats:
            self._check_drafter(seat)
        if self.end is not None:
            self.check_end()

    def _check_order(self) -> None:
        session = self.session
        if session.state is State.FENCED:
            return
        require(session.emitted == len(self.told_tokens), "the session is wrong about what was emitted")
        require(session.durable == len(self.log), "the session is wrong about what is durable")
        require(session.emitted <= session.durable <= len(session.text) <= session.credit, "order of the counters")
        require(session.credit <= min(session.durable, session.taken) + self.buffer, "credit beyond flow control")
        require((session.in_flight is not None) == (self.pending is not None), "wrong about the append in flight")

    def _check_texts(self) -> None:
        require(is_prefix(self.session.text.tokens, list(self.oracle.raw)), "decided text differs from the oracle's")
        require(is_prefix(self.log, list(self.oracle.tokens)), "the log differs from the oracle or goes beyond its end")
        require(is_prefix(self.told_tokens, self.log), "emitted tokens are not the log's")
        ended_early = self.end is not None and self.end.reason is FinishReason.CANCELLED
        text = self.whole_text() if ended_early else self.oracle.text
        require(is_prefix(self.told_text, text), f"text {self.told_text!r}, not {text!r}")

    def _check_verifier(self, verifier: VerifySession) -> None:
        text = verifier.text.tokens
        require(is_prefix(text, list(self.oracle.raw)), "the verifier's text differs from the oracle's")
        require(len(text) <= self.session.credit, "a verifier went beyond the credit that it was given")
        self.heard.check(verifier.chains, verifier.text)

    def _check_drafter(self, seat: Seat) -> None:
        session = self.session
        if seat.up:
            require(session.state in (State.WAITING, State.OPENING, State.RUNNING), "a drafter was not closed")
            require(seat.source in session.drafters, "a drafter that is there was given up")
        advised = session.drafters.get(seat.source)
        if seat.up and advised is not None and not session._over and advised.pace.run_ahead:
            told = [] if advised.unopened else session.text.tokens
            require(seat.advised == told, "a drafter is not told what is decided, or before its epoch")
        if seat.drafter is not None:
            decided = seat.drafter.text.tokens[: seat.drafter.decided]
            require(decided == seat.decided, "a drafter holds another text for decided")

    def check_end(self) -> None:
        assert self.end is not None
        if self.end.reason is FinishReason.CANCELLED:
            require(self.cancelled, "cancelled by nobody")
            require(self.told_tokens == self.log, "cancelled without emitting what is durable")
            require(self.told_text == self.whole_text(), "cancelled without the text of what was emitted")
            return
        require(self.end.reason is self.oracle.reason, f"ended by {self.end}, not {self.oracle.reason}")
        require(tuple(self.told_tokens) == self.oracle.tokens, "the tokens are not the oracle's")
        require(self.told_text == self.oracle.text, f"text {self.told_text!r}, not {self.oracle.text!r}")
