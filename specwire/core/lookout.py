"""When a verifier looks for guesses of its own: looking takes each session of a batch a moment, used or not. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from specwire.core.chain import SourceKind
from specwire.core.scheduler import Share

# After so many plans in a row that took no guess, only one in so many looks for some.
IN_VAIN = 8
SELDOM = 8


class Lookout:
    """Remembers whether guesses were worth a window lately.

    Where a forward gets dear beyond one row for each session, hardly any guess pays, and 16 look-ups a step would cost
    a batch some per cent for nothing. A single session always looks: one look-up is little beside its forward. Where
    one joins, nothing is known of its text, nor of what its client predicts of it: all begin anew.
    """

    def __init__(self) -> None:
        self._in_vain = 0
        self._sessions = 0

    def looks(self, sessions: int) -> bool:
        """Whether the next plan, of so many sessions, is to be shown guesses; asked before each."""
        if sessions > self._sessions:
            self._in_vain = 0
        self._sessions = sessions
        return sessions < 2 or self._in_vain < IN_VAIN or self._in_vain % SELDOM == 0

    def planned(self, shares: Sequence[Share]) -> None:
        """A step was planned."""
        taken = any(share.window and share.kind is not SourceKind.DRAFTER for share in shares)
        self._in_vain = 0 if taken else self._in_vain + 1
