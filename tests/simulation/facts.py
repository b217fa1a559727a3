"""What the checks know, by books of their own, and what they have found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from orchestrator.store import SessionRecord
from specwire.core.limits import FinishReason
from tests.simulation.expected import Expected, Wish, expected, is_prefix
from tests.simulation.loop import SimLoop
from tests.simulation.services import Model, Play
from tests.simulation.store import Books

# Seconds within which a session ends after its deadline or its cancellation: a lease, and some.
ENDS_WITHIN = 6.0


class Facts:
    """found: what does not hold, with the time. credits: the most that any owner has allowed, by session.

    durable: the output that the log has held, by session; what it lost with its store may be decided again. ended: it,
    the reason and the text's length, once the log has them. texts: the longest that any verifier has had, by session.
    ending: sessions that somebody has cancelled or deleted. deleted: those whose deletion was acknowledged. cancelled:
    those whose cancellation was, and when. delay: seconds by which what has happened may hold up an end.
    """

    def __init__(self, loop: SimLoop, play: Play, books: Books, delay: float) -> None:
        self.found: list[str] = []
        self.records: dict[str, SessionRecord] = {}
        self.credits: dict[str, int] = {}
        self.durable: dict[str, tuple[int, ...]] = {}
        self.ended: dict[str, tuple[tuple[int, ...], FinishReason, int]] = {}
        self.texts: dict[str, tuple[int, ...]] = {}
        self.ending: set[str] = set()
        self.deleted: set[str] = set()
        # Cancelled because nobody read them for as long as readers may be away.
        self.unread: set[str] = set()
        self.cancelled: dict[str, float] = {}
        self.checked = self.resumed = self.shared = self.queued = self.orphans = 0
        self.loop = loop
        self.books = books
        self._delay = delay
        self.script = play.target
        self.tokenizer = Model(self.script, 1, 1.0).tokenizer
        self.seen: dict[Any, Any] = {}
        self._expected: dict[Wish, Expected] = {}

    def report(self, message: str) -> None:
        self.found.append(f"{self.loop.time():.4f} s, {self.loop.running}: {message}")

    def require(self, condition: bool, message: str, *details: object) -> None:
        """The details are shown behind the message."""
        if not condition:
            self.report(" ".join([message, *map(repr, details)]))

    def new(self, key: Any, *state: Any) -> bool:
        """Whether this state was not seen at the last look."""
        if self.seen.get(key) == state:
            return False
        self.seen[key] = state
        self.checked += 1
        return True

    def of(self, wish: Wish) -> Expected:
        known = self._expected.get(wish)
        if known is None:
            known = self._expected[wish] = expected(wish, self.script, self.tokenizer)
        return known

    def of_record(self, record: SessionRecord) -> Expected:
        self.records.setdefault(record.session_id, record)
        return self.of(Wish(record.prompt, record.sampling, record.stopping, record.stop))

    def of_session(self, session_id: str) -> Expected | None:
        record = self.records.get(session_id)
        return None if record is None else self.of_record(record)

    @property
    def reached(self) -> Counter[str]:
        """How often what is rare was met."""
        own = {"resumed": self.resumed, "shared": self.shared, "queued": self.queued, "orphans": self.orphans}
        return Counter({"claims": self.books.claims, "restored": self.books.restored, **own})

    def is_late(self, since: float) -> bool:
        """Whether what was due then should have happened, whatever has gone wrong."""
        return self.loop.time() > since + ENDS_WITHIN + self._delay

    def decoded(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens))

    def is_durable(self, session_id: str, tokens: Sequence[int]) -> bool:
        """Whether the log has held this output. After it was lost, other tokens may stand where nobody had seen any."""
        return self.books.losses > 0 or is_prefix(tokens, self.durable.get(session_id, ()))

    def told_cancelled(self, session_id: str) -> None:
        """A cancellation was acknowledged. By an owner that dies afterwards it may be forgotten."""
        self.cancelled[session_id] = self.loop.time()

    def end(self, session_id: str) -> None:
        """Somebody asks for the session's end."""
        self.ending.add(session_id)

    def may_share(self, session_id: str, cached: int, again: bool) -> bool:
        """Whether a session of the same tenant begins alike for so many tokens. again: it may be this one itself."""
        record = self.records[session_id]
        wanted = record.prompt[:cached]
        others = (known for known in self.records if again or known != session_id)
        same = (known for known in others if self.records[known].tenant == record.tenant)
        return any(is_prefix(wanted, self.texts.get(each, ())) for each in same)
