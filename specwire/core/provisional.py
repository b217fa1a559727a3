"""Provisional text: how a session's text may go on, by the proposals that its orchestrator has seen pass.

It is shown marked and outside every invariant, so nothing here feeds back into the session.
"""

from __future__ import annotations

from dataclasses import dataclass

from specwire.core.messages import Proposal
from specwire.core.session import PeekingScanner, Session
from specwire.core.text import Ending, Text
from specwire.core.verify.chains import Chains


@dataclass(frozen=True, slots=True)
class ProvisionalDraft:
    """What may follow the emitted tokens, which end at `position`; `text` goes on where their released text ends."""

    position: int
    tokens: tuple[int, ...]
    text: str

    def replaces(self, shown: ProvisionalDraft) -> bool:
        """Whether a reader that was shown `shown` must be shown this."""
        return self != shown and bool(self.tokens or shown.tokens)


class ProvisionalChains:
    """The draft tokens of one session, by the rules of `Chains`: what does not descend from the decided text is pruned.

    The best path of a tree is shown. Where a token beside that path is decided, what stands behind that token is shown.

    Invariant: they agree with the text as it was at the last call, whose length and hash are kept.
    """

    def __init__(self, vocabulary: int, text: Text) -> None:
        self._chains = Chains(vocabulary)
        self._remember(text)

    def offer(self, proposal: Proposal, text: Text) -> None:
        """Take in a proposal; a bad one changes nothing."""
        self.follow(text)
        self._chains.offer(proposal, text)

    def follow(self, text: Text) -> None:
        """Align with the decided text. Where it went back, the chains behind it are void."""
        if len(text) < self._decided or text.hash_at(self._decided) != self._hash:
            self._chains.clear()
        elif len(text) > self._decided:
            self._chains.learn(text.tokens[self._decided :])
            self._chains.advance(text)
        self._remember(text)

    def tail(self) -> tuple[int, ...]:
        """The draft tokens behind the decided text."""
        return self._chains.window(self._decided, self._chains.most_ahead)

    def _remember(self, text: Text) -> None:
        self._decided, self._hash = len(text), text.hash_at(len(text))


@dataclass(frozen=True, slots=True)
class Ahead:
    """Tokens that may follow the emitted ones, which end at `position`; none lies beyond the end of the text.

    appending: carried by the append in flight. others: decided behind those, then proposed.
    """

    position: int
    appending: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    @classmethod
    def of(cls, session: Session, tail: tuple[int, ...], ending: Ending) -> Ahead:
        """tail: what was proposed behind the decided text. Decided tokens that are in no append yet come before it."""
        if session.in_flight is None:
            appending: tuple[int, ...] = ()
        elif session.in_flight.end is not None:
            return cls(session.emitted, session.in_flight.append.tokens)
        else:
            appending = session.in_flight.append.tokens
        seen = session.emitted + len(appending)
        others = (*session.text.tokens[seen:], *tail)
        return cls(session.emitted, appending, others[: ending.cut(seen, others)[0]])


def provisional(ahead: Ahead, session: Session, scanner: PeekingScanner) -> ProvisionalDraft:
    """As text. `scanner` is the session's: it has seen what the append in flight carries, and no more."""
    in_flight = session.in_flight
    known = in_flight.emit.text if in_flight is not None and in_flight.emit is not None else ""
    if in_flight is not None and in_flight.end is not None:
        return ProvisionalDraft(ahead.position, ahead.appending, known + in_flight.end.text)
    release = scanner.peek(ahead.others)
    return ProvisionalDraft(ahead.position, ahead.appending + ahead.others[: release.kept], known + release.text)
