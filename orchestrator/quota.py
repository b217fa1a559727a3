"""How much a drafter may send: what it was asked for, and no more."""

from __future__ import annotations

# What is asked for adds up while answers are under way: 128 advances of the longest run-ahead.
MOST_OWED = 4096


class Quota:
    """Draft tokens that a session's drafter still owes.

    An open or an advance asks for at most `run_ahead` tokens, and a drafter that keeps to PROTOCOL.md section 5 sends
    no more for it. Whoever does floods us and, through us, the verifier. At most `most` are owed.
    """

    def __init__(self, most: int = MOST_OWED) -> None:
        self._owed = 0
        self._most = most

    def ask(self, run_ahead: int) -> None:
        """An open or an advance goes out."""
        self._owed = min(self._most, self._owed + run_ahead)

    def take(self, tokens: int) -> bool:
        """Whether a proposal of `tokens` was asked for; an empty one counts as one token."""
        self._owed -= max(1, tokens)
        return self._owed >= 0
