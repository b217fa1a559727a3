"""The checks' own record of facts, and their findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from orchestrator.store import SessionRecord
from specwire.core.draft import DraftSession
from specwire.core.messages import FinishReason
from tests.core.branching import Heard, Sent
from tests.simulation.expected import Expected, Wish, expected, is_prefix
from tests.simulation.loop import SimLoop
from tests.simulation.services import Model, Play, TargetConfig
from tests.simulation.store import SimStore

# Seconds within which a session ends after its deadline or its cancellation: a lease, and some.
ENDS_WITHIN = 6.0


class Facts:
    """found: what does not hold, with the time. credits: the most that any owner has allowed, by session.

    durable: the output that the log has held, by session; what it lost with its store may be decided again. ended: it,
    the reason and the text's length, once the log has them. texts: those that any verifier has had, by session, as
    far as none goes on from another: what was not durable may be decided again, and otherwise.
    ending: sessions that somebody has cancelled or deleted. deleted, cancelled: those whose deletion or
    cancellation was acknowledged, and when. delay: seconds by which what has happened may hold up an end, without
    outages of the log. skew: by which clocks may be apart. heard: what verifiers have taken in of drafters' trees.
    sent: what each drafter's session has sent. headed: sessions that a head has drafted for, passed_on: those
    that were then held by a verifier without a head; switched_off: heads that failed. branched: pieces of trees that
    branch which verifiers have taken in.
    """

    def __init__(self, loop: SimLoop, play: Play, store: SimStore, delay: float, skew: float) -> None:
        self.found: list[str] = []
        self.records: dict[str, SessionRecord] = {}
        self.credits: dict[str, int] = {}
        self.durable: dict[str, tuple[int, ...]] = {}
        self.ended: dict[str, tuple[tuple[int, ...], FinishReason, int]] = {}
        self.texts: dict[str, list[tuple[int, ...]]] = {}
        self.ending: set[str] = set()
        self.deleted: dict[str, float] = {}
        # Cancelled because nobody read them for as long as readers may be away.
        self.unread: set[str] = set()
        self.cancelled: dict[str, float] = {}
        self.checked = self.resumed = self.shared = self.queued = self.orphans = 0
        self.loop = loop
        self.store = store
        self.books = store.books
        self.skew = skew
        self._delay = delay
        self.script = play.target
        self.seen: dict[Any, Any] = {}
        self.heard = Heard()
        self.sent: dict[int, tuple[DraftSession, Sent]] = {}
        self.branched = self.switched_off = 0
        self.headed: set[str] = set()
        self.passed_on: set[str] = set()
        self._expected: dict[Wish, Expected] = {}

    def report(self, message: str) -> None:
        self.found.append(f"{self.loop.time():.4f} s, {self.loop.running}: {message}")

    def require(self, condition: bool, message: str, *details: object) -> None:
        """The details are shown behind the message."""
        if not condition:
            self.report(" ".join([message, *map(repr, details)]))

    def hold(self, check: Callable[..., None], *args: object) -> None:
        """A check that raises AssertionError where something does not hold."""
        try:
            check(*args)
        except AssertionError as error:
            self.report(str(error))

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
            tokenizer = tokenizer_of(self.script.vocab, wish.config)
            known = self._expected[wish] = expected(wish, self.script, tokenizer)
        return known

    def of_record(self, record: SessionRecord) -> Expected:
        """Of a session: it keeps what it began with, whatever its record says later."""
        first = self.records.setdefault(record.session_id, record)
        config = TargetConfig.of(first, self.script.vocab)
        return self.of(Wish(first.prompt, first.sampling, first.stopping, first.stop, config))

    def of_session(self, session_id: str) -> Expected | None:
        record = self.records.get(session_id)
        return None if record is None else self.of_record(record)

    @property
    def reached(self) -> Counter[str]:
        """How often what is rare was met."""
        own = {"resumed": self.resumed, "shared": self.shared, "queued": self.queued, "orphans": self.orphans}
        log = {"claims": self.books.claims, "restored": self.books.restored}
        heads = {"headed": len(self.headed), "passed_on": len(self.passed_on), "switched_off": self.switched_off}
        return Counter({"branched": self.branched, **heads, **log, **own})

    def is_late(self, since: float) -> bool:
        """Whether what was due then should have happened, whatever has gone wrong."""
        return self.loop.time() - self.store.down_for(since) > since + ENDS_WITHIN + self._delay

    def is_durable(self, session_id: str, tokens: Sequence[int]) -> bool:
        """Whether the log has held this output. After it was lost, other tokens may stand where nobody had seen any."""
        return self.books.losses > 0 or is_prefix(tokens, self.durable.get(session_id, ()))

    def told_cancelled(self, session_id: str) -> None:
        """A cancellation was acknowledged."""
        self.cancelled.setdefault(session_id, self.loop.time())

    def told_deleted(self, session_id: str) -> None:
        """A deletion was acknowledged."""
        self.deleted.setdefault(session_id, self.loop.time())

    def end(self, session_id: str) -> None:
        """Somebody asks for the session's end."""
        self.ending.add(session_id)

    def may_share(self, session_id: str, cached: int, again: bool) -> bool:
        """Whether a session of the same tenant begins alike for so many tokens. again: it may be this one itself."""
        record = self.records[session_id]
        wanted = record.prompt[:cached]
        others = (known for known in self.records if again or known != session_id)
        same = (known for known in others if self.records[known].tenant == record.tenant)
        return any(is_prefix(wanted, text) for each in same for text in self.texts.get(each, ()))

    def note_text(self, session_id: str, text: tuple[int, ...]) -> None:
        """A verifier has it."""
        known = self.texts.setdefault(session_id, [])
        if not any(is_prefix(text, each) for each in known):
            known[:] = [*(each for each in known if not is_prefix(each, text)), text]


@lru_cache(maxsize=8)
def tokenizer_of(vocabulary: int, config: TargetConfig) -> Tokenizer:
    return Model(Play(0, vocabulary=vocabulary).target, 1, 1.0, config).tokenizer
