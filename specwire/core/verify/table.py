"""A table of n-grams: the likeliest token behind each context of a corpus, for texts that are like none before.

Made once from a corpus (`specwire table build`, files: `specwire.text.table_file`). For each context of 1 to 4 tokens
it holds the most frequent next token and its share; a context that is not there is looked for without its first token
(back-off, Katz 1987). It needs no model, and is useful only where nothing better is known: at a text's beginning.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specwire.core.invalid import InvalidParameter
from specwire.core.messages import MOST_WINDOW
from specwire.core.policy.tunables import VOTES
from specwire.core.text import MASK
from specwire.core.verify.shared_texts import HASH_BASE, HASH_SPREAD, VOTED_PRIORS, ScopeTexts, SharedIndex, share_class
from specwire.core.verify.text_sources import Found, NgramSource

LEAST_ORDER, MOST_ORDER = 2, 5
SHARE_UNITS = 255
# Its proposals are told apart by order and by the share of their first token; P(accept) before anything was seen is
# that share.
SHARE_PRIORS = tuple([(known + 0.5) / VOTES for known in range(VOTES)])
# What is less likely is no better than what a full window could test in its place.
LEAST_PATH_SHARE = 1 / MOST_WINDOW
# Contexts whose hashes begin alike, which are gone through one by one at each look: of random ones a handful do.
MOST_ALIKE = 256
# Kinds of a level's arrays.
LEVEL_KINDS = ("<u8", "<u4", "|u1", "<u4")


@dataclass(frozen=True, slots=True)
class NgramLevel:
    """Contexts of one length. keys: their hashes, in order; starts[b]: the first whose upper bits are b."""

    keys: NDArray[np.uint64]
    tokens: NDArray[np.uint32]
    shares: NDArray[np.uint8]
    starts: NDArray[np.uint32]

    @classmethod
    def of(cls, keys: NDArray[np.uint64], tokens: NDArray[np.uint32], least: int) -> NgramLevel:
        """Count next `tokens` of contexts; those seen less than `least` times are left out."""
        order = np.lexsort((tokens, keys))
        keys, tokens = keys[order], tokens[order]
        first = np.ones(len(keys), bool)
        first[1:] = (keys[1:] != keys[:-1]) | (tokens[1:] != tokens[:-1])
        at = np.flatnonzero(first)
        counts = np.diff(np.append(at, len(keys)))
        keys, tokens = keys[at], tokens[at]
        # Each context's most frequent token first; among equals the lowest id.
        order = np.lexsort((tokens, -counts, keys))
        keys, tokens, counts = keys[order], tokens[order], counts[order]
        best = np.ones(len(keys), bool)
        best[1:] = keys[1:] != keys[:-1]
        at = np.flatnonzero(best)
        totals = np.add.reduceat(counts, at) if len(at) else counts
        enough = totals >= least
        shares = np.round(SHARE_UNITS * counts[at] / totals).astype(np.uint8)
        keys, tokens, shares = keys[at][enough], tokens[at][enough], shares[enough]
        bits = max(1, len(keys).bit_length())
        bounds = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
        starts = np.append(np.searchsorted(keys, bounds), len(keys)).astype(np.uint32)
        return cls(keys, tokens, shares, starts)

    def find(self, key: int) -> tuple[int, float] | None:
        """The next token of a context and its share."""
        bucket = key >> 65 - (len(self.starts) - 1).bit_length()
        for at in range(self.starts.item(bucket), self.starts.item(bucket + 1)):
            if self.keys.item(at) == key:
                return self.tokens.item(at), self.shares.item(at) / SHARE_UNITS
        return None

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        return self.keys, self.tokens, self.shares, self.starts

    @property
    def sound(self) -> bool:
        """Whether its arrays may be looked up without a further check: sizes fit, and starts rise to the end."""
        count, starts = len(self.keys), self.starts
        buckets = len(starts) - 1
        kinds = tuple(each.dtype.str for each in self.arrays) == LEVEL_KINDS
        sizes = len(self.tokens) == len(self.shares) == count and buckets > 1 and buckets & (buckets - 1) == 0
        rising = kinds and sizes and starts[0] == 0 and starts[-1] == count and bool((starts[1:] >= starts[:-1]).all())
        return rising and int((starts[1:] - starts[:-1]).max()) <= MOST_ALIKE


@dataclass(frozen=True, slots=True)
class NgramTable:
    """levels: of contexts of 1, 2, ... tokens. tokenizer: hash of the one whose ids these are (GetModelInfo)."""

    levels: tuple[NgramLevel, ...]
    tokenizer: str

    @property
    def order(self) -> int:
        return len(self.levels) + 1

    @property
    def contexts(self) -> int:
        return sum(len(level.keys) for level in self.levels)

    @classmethod
    def built(cls, texts: Iterable[Sequence[int]], order: int, tokenizer: str) -> NgramTable:
        """From a corpus of texts. Contexts beyond one token that stand there once say little and are left out.

        Raises:
            InvalidParameter: order.
        """
        if not LEAST_ORDER <= order <= MOST_ORDER:
            raise InvalidParameter("order", f"must be from {LEAST_ORDER} to {MOST_ORDER}, not {order}")
        parts: list[list[tuple[NDArray[np.uint64], NDArray[np.uint32]]]] = [[] for _ in range(order - 1)]
        for text in texts:
            ids = np.array(text, np.uint32)
            for part, keys in zip(parts, _keys(ids, order - 1), strict=True):
                part.append((keys, ids[len(ids) - len(keys) :]))
        levels = []
        for length, part in enumerate(parts, 1):
            keys = np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in part)])
            tokens = np.concatenate([np.empty(0, np.uint32), *(tokens for _, tokens in part)])
            levels.append(NgramLevel.of(keys, tokens, 1 if length == 1 else 2))
        return cls(tuple(levels), tokenizer)

    def following(self, tail: Sequence[int], most: int) -> tuple[tuple[int, ...], int, float]:
        """The likeliest tokens behind a text, the order that knew the first one, and its share; none where none did.

        As many, up to `most`, as are together more likely than LEAST_PATH_SHARE.
        """
        ids = array("I", tail[-len(self.levels) :])
        begun, tokens, path, first = len(ids), 0, 1.0, (0, 0.0)
        while tokens < most:
            found = self._next(ids)
            if found is None:
                break
            order, token, share = found
            path *= share
            if tokens and path < LEAST_PATH_SHARE:
                break
            if not tokens:
                first = order, share
            ids.append(token)
            tokens += 1
        return tuple(ids[begun:]), *first

    def _next(self, ids: array[int]) -> tuple[int, int, float] | None:
        value, power, keys = 0, 1, []
        for token in reversed(ids[-len(self.levels) :]):
            value += (token + 1) * power
            power = power * HASH_BASE & MASK
            keys.append(value * HASH_SPREAD & MASK)
        for length in range(len(keys), 0, -1):
            found = self.levels[length - 1].find(keys[length - 1])
            if found is not None:
                return length + 1, *found
        return None


def _keys(ids: NDArray[np.uint32], most: int) -> Iterator[NDArray[np.uint64]]:
    """Hashes of all contexts of 1 to `most` tokens that a token follows."""
    tokens = ids.astype(np.uint64) + np.uint64(1)
    value, power = tokens[:-1], 1
    for length in range(1, most + 1):
        yield value * np.uint64(HASH_SPREAD)
        power = power * HASH_BASE & MASK
        value = value[1:] + tokens[: max(0, len(tokens) - 1 - length)] * np.uint64(power)


class TableIndex:
    """What a table says behind a session's text. Needs no reading, so it is always complete.

    Args:
        vocabulary: ids from it on are no token of the target.
    """

    complete = True

    def __init__(self, table: NgramTable, tokens: Sequence[int], vocabulary: int) -> None:
        self._table = table
        self._tokens = tokens
        self._vocabulary = vocabulary

    def read(self) -> None:
        """There is nothing to read."""

    def grew(self) -> None:
        """There is nothing to note."""

    def ended(self) -> None:
        """Likewise."""

    def find(self, most: int) -> Found | None:
        tokens, order, share = self._table.following(self._tokens, most)
        if not tokens or max(tokens) >= self._vocabulary:
            return None
        return Found(tokens, (order - LEAST_ORDER) * VOTES + share_class(share))


# ----------------------------------------------------------------------------------------------------------------------
# What a verifier proposes from beside its sessions' texts; all callers are proposed the same.


@dataclass(frozen=True, slots=True)
class KnownTexts:
    """references: documents; table: of n-grams; None without. vocabulary: of the target."""

    vocabulary: int
    references: ScopeTexts | None = None
    table: NgramTable | None = None

    def sources(self, text: Sequence[int]) -> list[NgramSource]:
        """For a session with this text, which grows. What it learns of them no other session is told."""
        found = []
        if self.references is not None:
            found.append(NgramSource(text, index=SharedIndex(self.references, text), priors=VOTED_PRIORS))
        if self.table is not None:
            priors = SHARE_PRIORS * (self.table.order - LEAST_ORDER + 1)
            found.append(NgramSource(text, index=TableIndex(self.table, text, self.vocabulary), priors=priors))
        return found

    def told(self) -> list[str]:
        """Lines for its operator."""
        lines = []
        if self.references is not None:
            lines.append(f"{self.references.tokens} tokens of {len(self.references)} documents to propose from")
        if self.table is not None:
            lines.append(f"a table of {self.table.contexts} contexts, order {self.table.order}, to propose from")
        return lines
