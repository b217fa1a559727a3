"""What ended sessions said, as an orchestrator tells it from its log: taken in between steps, as far as there is room.

A verifier that starts knows no texts. What it is told of them costs its sessions little: few tokens are taken in before
a step, and no text that is kept has to leave for them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

from specwire.core.policy.tunables import READ_AT_ONCE
from specwire.core.verify.shared_texts import TOKENS_A_TEXT, SharedIndex, SharedTexts
from verify_service.engine.messages import EarlierText

# Tokens that are taken in before a step of sessions that decide; others have time.
BESIDE_A_STEP = 256
# Tokens that wait to be taken in. What comes beyond them is left out.
MOST_WAITING = 1 << 20
# Sessions that were deleted: a text from the log may cross the message that says so.
REMEMBERED_DELETED = 4096


class EarlierTexts:
    """Texts that wait to be among `texts`. `waiting`: whether there is something to take in.

    Args:
        held: whether a session is held here, and so adds its text itself.
        counts: where those that are left out are counted.
    """

    def __init__(self, texts: SharedTexts, held: Callable[[str], bool], counts: Counter[str]) -> None:
        self._texts = texts
        self._held = held
        self._counts = counts
        self._waiting: deque[EarlierText] = deque()
        self._waiting_tokens = 0
        self._reading: SharedIndex | None = None
        self._deleted: OrderedDict[str, None] = OrderedDict()
        self.waiting = False

    def add(self, texts: Sequence[EarlierText]) -> None:
        for text in texts:
            if self._waiting_tokens + len(text.tokens) > MOST_WAITING:
                self._leave_out()
            else:
                self._waiting.append(text)
                self._waiting_tokens += len(text.tokens)
                self.waiting = True

    def forget(self, session_id: str) -> None:
        """The session was deleted: its text is not taken in any more, also if it comes later."""
        self._deleted[session_id] = None
        if len(self._deleted) > REMEMBERED_DELETED:
            self._deleted.popitem(last=False)

    def read(self, busy: bool) -> None:
        """Take in some tokens. busy: sessions decide meanwhile."""
        left = BESIDE_A_STEP if busy else READ_AT_ONCE
        while left > 0 and self.waiting:
            if self._reading is None:
                left -= TOKENS_A_TEXT  # what beginning one takes
                self._reading = self._begun(self._waiting.popleft())
            if self._reading is not None:
                before = self._reading.done
                self._reading.read(max(left, TOKENS_A_TEXT))
                left -= self._reading.done - before
                if self._reading.complete:
                    self._reading = None
            self.waiting = self._reading is not None or bool(self._waiting)

    def _begun(self, text: EarlierText) -> SharedIndex | None:
        """The index that takes a text in, which is to be read from at once; None where it is left out."""
        self._waiting_tokens -= len(text.tokens)
        known = text.session_id in self._deleted or self._held(text.session_id)
        if not known and self._texts.fits(text.scope, text.session_id, len(text.tokens)):
            scope = self._texts.of(text.scope)
            if scope is not None:
                return SharedIndex(scope, text.tokens, text.session_id, grows=False)
        self._leave_out()
        return None

    def _leave_out(self) -> None:
        self._counts["text of an ended session: known, deleted, or without room"] += 1
