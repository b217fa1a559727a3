"""A request's own references: documents that its session is proposed from, and no other one.

They may be many times a context long, so they come in parts behind the session's opening, and are taken in between
steps: the session begins at once, and is proposed what is there by then. Each document is a text of its own in an index
as of sessions' texts (`shared_texts`), so no guess runs from the end of one into the next.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specwire.core.invalid import MOST_REFERENCE_TOKENS, MOST_REFERENCES, InvalidParameter
from specwire.core.messages import SourceKind
from specwire.core.policy.tunables import READ_AT_ONCE
from specwire.core.verify.shared_texts import FIRST_TOKENS, TOKEN_BYTES, VOTED_PRIORS, ScopeTexts, SharedIndex
from specwire.core.verify.text_sources import NgramSource

# See READ_AT_ONCE.
BESIDE_A_STEP = READ_AT_ONCE // 2


def check_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Check the lengths of a request's references, in tokens. Raises InvalidParameter."""
    if len(lengths) > MOST_REFERENCES:
        raise InvalidParameter("references", f"at most {MOST_REFERENCES} are allowed, not {len(lengths)}")
    for number, length in enumerate(lengths):
        if not length:
            raise InvalidParameter(f"references[{number}]", "must not be empty")
    if sum(lengths) > MOST_REFERENCE_TOKENS:
        message = f"at most {MOST_REFERENCE_TOKENS} tokens together are allowed, not {sum(lengths)}"
        raise InvalidParameter("references", message)
    return tuple(lengths)


def checked_ids(ids: Iterable[int], vocabulary: int) -> array[int]:
    """Token ids of a reference, or of a part of one, packed. Raises InvalidParameter."""
    values: NDArray[np.uint32] = np.array(ids, np.uint32)
    if len(values) and values.max() >= vocabulary:
        raise InvalidParameter("references", f"token id {values.max()} is outside 0..{vocabulary - 1}")
    packed = array("I")
    packed.frombytes(values.tobytes())
    return packed


class References:
    """The references of one session. `capacity`: tokens that its memory has room for, of TOKEN_BYTES each.

    Args:
        lengths: of the documents, in tokens; see `check_lengths`.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self.capacity = capacity_of(lengths)
        self._texts = ScopeTexts(lambda _: False, self.capacity)
        self._awaited = deque(lengths)
        self._document = array("I")
        self._known = 0
        self._unread: deque[SharedIndex] = deque()
        self._begun = 0

    @property
    def tokens(self) -> int:
        """How many can be proposed from by now."""
        return self._texts.tokens

    @property
    def unread(self) -> bool:
        """Whether a document is there that is not taken in yet."""
        return bool(self._unread)

    def add(self, part: array[int]) -> None:
        """The tokens that come next, of one document or several. What was there before comes anew after a `restart`."""
        known = min(self._known, len(part))
        self._known -= known
        at = known
        while at < len(part) and self._awaited:
            taken = part[at : at + self._awaited[0]]
            at += len(taken)
            self._document.extend(taken)
            self._awaited[0] -= len(taken)
            if not self._awaited[0]:
                self._awaited.popleft()
                self._unread.append(SharedIndex(self._texts, self._document, str(self._begun), grows=False))
                self._begun += 1
                self._document = array("I")

    def restart(self, lengths: Sequence[int]) -> None:
        """They come anew from the first token on; others than before are ignored."""
        self._known = sum(self.lengths) - sum(self._awaited)
        if self.lengths != tuple(lengths):
            self._awaited.clear()

    def read(self, most: int) -> int:
        """Take in up to `most` tokens; how many it were."""
        if not self._unread:
            return 0
        reading, before = self._unread[0], self._unread[0].done
        reading.read(most)
        if reading.complete:
            self._unread.popleft()
        return reading.done - before

    def drop(self) -> None:
        """Nothing of them is proposed or kept from now on."""
        self._texts.clear()
        self._awaited.clear()
        self._unread.clear()
        self._document = array("I")
        self.capacity = 0

    def source(self, text: Sequence[int]) -> NgramSource:
        """Of guesses behind a text, which grows."""
        index = SharedIndex(self._texts, text)
        return NgramSource(text, index=index, priors=VOTED_PRIORS, kind=SourceKind.PREDICTION)


def capacity_of(lengths: Sequence[int]) -> int:
    """Tokens that an index of such documents has room for: a power of two."""
    return max(FIRST_TOKENS, 1 << (sum(lengths) - 1).bit_length())


class ReferenceRoom:
    """The references of all sessions of a verifier: together in `most_bytes` of memory, and read in turn.

    `waiting`: whether there may be something to take in.

    Args:
        held: those of the sessions that are held now; a session that leaves gives its memory back.
    """

    def __init__(self, most_bytes: int, held: Callable[[], Iterable[References]]) -> None:
        self._most = most_bytes // TOKEN_BYTES
        self._held = held
        self._turn = 0
        self.waiting = False

    @property
    def capacity(self) -> int:
        """Tokens that there is room for now, of all sessions."""
        return sum(references.capacity for references in self._held())

    @property
    def size(self) -> int:
        """Bytes of memory in use, at most."""
        return self.capacity * TOKEN_BYTES

    def begin(self, lengths: Sequence[int]) -> References | None:
        """The references of a new session; None where there is no room for them."""
        return References(lengths) if self.capacity + capacity_of(lengths) <= self._most else None

    def add(self, references: References, part: array[int]) -> None:
        """See `References.add`."""
        references.add(part)
        self.waiting = True

    def read(self, busy: bool) -> None:
        """Take in some tokens. busy: sessions decide meanwhile.

        Each time another session's, however many have some: what a step waits for does not grow with them.
        """
        unread = [references for references in self._held() if references.unread]
        if not unread:
            self.waiting = False
            return
        self._turn += 1
        references = unread[self._turn % len(unread)]
        references.read(BESIDE_A_STEP if busy else READ_AT_ONCE)
        self.waiting = len(unread) > 1 or references.unread
