"""When a session of a batch is looked through for guesses: looking takes each a moment, used or not. Pure."""

from __future__ import annotations

from specwire.core.chain import SourceKind
from specwire.core.shares import Share

# Plans without a look behind one that was in vain: none at first, then twice as many each time, up to so many.
MOST_REST = 8


class Lookout:
    """Remembers whether a session's guesses were worth a window lately.

    Where its text repeats little, or a forward gets dear beyond one row for each session, hardly any guess pays, and 16
    look-ups a step would cost a batch some per cent for nothing. A session alone always looks: one look-up is little
    beside its forward.
    """

    def __init__(self) -> None:
        self._in_vain = self._rest = 0

    def looks(self, alone: bool) -> bool:
        """Whether the next plan is to be shown a guess of this session's; to be asked once a plan."""
        if self._rest == 0 or alone:
            return True
        self._rest -= 1
        return False

    def planned(self, share: Share, looked: bool) -> None:
        """A step was planned, and this is the session's part. A prompt's chunks take no guess, however good."""
        if not (share.decides and looked):
            return
        if share.window and share.kind is not SourceKind.DRAFTER:
            self._in_vain = self._rest = 0
            return
        self._in_vain = min(self._in_vain + 1, MOST_REST)
        self._rest = min(MOST_REST, (1 << self._in_vain) // 4)
