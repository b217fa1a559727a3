"""When a session of a batch is looked through for guesses: looking takes each a moment, used or not. Pure."""

from __future__ import annotations

from specwire.core.chain import SourceKind
from specwire.core.scheduler import Share

# After so many plans in a row that took no guess of the session's, only one in so many looks for some.
IN_VAIN = 8
SELDOM = 4


class Lookout:
    """Remembers whether a session's guesses were worth a window lately.

    Where its text repeats little, or a forward gets dear beyond one row for each session, hardly any guess pays, and 16
    look-ups a step would cost a batch some per cent for nothing. A session alone always looks: one look-up is little
    beside its forward.
    """

    def __init__(self) -> None:
        self._in_vain = 0

    def looks(self, alone: bool) -> bool:
        """Whether the next plan is to be shown a guess of this session's."""
        return alone or self._in_vain < IN_VAIN or self._in_vain % SELDOM == 0

    def planned(self, share: Share) -> None:
        """A step was planned, and this is the session's part. A prompt's chunks take no guess, however good."""
        if not share.decides:
            return
        taken = share.window and share.kind is not SourceKind.DRAFTER
        self._in_vain = 0 if taken else self._in_vain + 1
