"""How much a drafter may send: what it was asked for, and no more."""

from __future__ import annotations

# Of one session's draft tokens so many are relayed in a burst. What is asked for adds up while answers are under way:
# 32 advances of the longest run-ahead (core.plan.MOST_RUN_AHEAD).
MOST_RELAYED = 4096
# A line that stalls for as long as a connection outlives may hold back more than that, and no peer is at fault.
MOST_OWED = 64 * MOST_RELAYED


class Quota:
    """Draft tokens that a session's drafter still owes.

    An open or an advance asks for at most `run_ahead` tokens, and a drafter that keeps to PROTOCOL.md section 5 sends
    no more for it. Whoever does floods us and, through us, the verifier. At most `most` are owed.
    """

    def __init__(self, most: int = MOST_OWED) -> None:
        self.owed = 0
        self._most = most

    def ask(self, run_ahead: int) -> None:
        """An open or an advance goes out."""
        self.owed = min(self._most, self.owed + run_ahead)

    def take(self, tokens: int) -> bool:
        """Whether a proposal of `tokens` was asked for; if so it is charged, an empty one as one token."""
        cost = max(1, tokens)
        if cost > self.owed:
            return False
        self.owed -= cost
        return True
