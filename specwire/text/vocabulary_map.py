"""Drafting across vocabularies: whose tokens stand for the same bytes, and a text told in one vocabulary's ids, in the
other's.

Tokens are compared as bytes, not by their surface forms: " the" is spelt `Ġthe` by one family of tokenizers and `▁the`
by another, and the byte 0x0A `Ċ` and `<0x0A>`. The intersection of two vocabularies are the tokens with equal bytes
(token-level intersection, arXiv 2502.05202, section 3.3). Nothing here changes a text: what a drafter does with it is a
proposal.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct
from tokenizers import Encoding

from specwire.text.tokenizer import TokenBytes, TokenizerError, decoder_types, load_tokenizer, types_in

# ----------------------------------------------------------------------------------------------------------------------
# What the ids of a vocabulary stand for.


class Convention(IntEnum):
    """What a token's text depends on (the numbers are those of the wire)."""

    OTHER = 0  # on the tokens around it too, as with WordPiece; tokens are whole words; or nothing is known
    BYTES = 1  # on the token alone: byte-level and SentencePiece


# How many vocabularies of targets a drafter keeps: the oldest is forgotten, and told again by a new link.
MOST_VOCABULARIES = 8

BYTE_DECODERS = frozenset({"ByteLevel", "Metaspace", "ByteFallback", "Replace", "Fuse"})


class _Serialised(Struct):
    """Of a tokenizer's JSON the part that is read here: what is left out takes no time, and it has megabytes."""

    decoder: dict[str, Any] | None


def convention_of(tokenizer_json: bytes) -> Convention:
    """Read off the decoder alone; OTHER also where these bytes are no tokenizer."""
    try:
        decoder = msgspec.json.decode(tokenizer_json, type=_Serialised).decoder
        return _convention(types_in(decoder) if decoder else frozenset())
    except (ValueError, TypeError):
        return Convention.OTHER


def _convention(types: frozenset[str]) -> Convention:
    """types: of the tokenizer's decoder."""
    return Convention.BYTES if types & BYTE_DECODERS else Convention.OTHER


class TokenTable:
    """Of a tokenizer, the bytes of each id below `width`; empty for special tokens and ids without a token.

    ids: the other way; where several have the same bytes, a byte token comes last, then the lowest id counts.
    special: ids of special tokens, by name. eos_ids: those of the model. unwritten: the ids of both kinds. leads: a
    text is tokenised with a space before it.

    Raises:
        TokenizerError: the bytes are no tokenizer.
    """

    def __init__(self, tokenizer_json: bytes, width: int, eos_ids: Collection[int]) -> None:
        self.tokenizer = load_tokenizer(tokenizer_json)
        self.convention = _convention(decoder_types(self.tokenizer))
        self.width = width
        self.eos_ids = frozenset(token for token in eos_ids if token < width)
        added = self.tokenizer.get_added_tokens_decoder().items()
        self.special = {each.content: token for token, each in added if each.special and token < width}
        self.unwritten = self.eos_ids | set(self.special.values())
        spelt = TokenBytes(self.tokenizer)
        known = self.tokenizer.get_vocab(with_added_tokens=True)
        self.bytes = [b""] * width
        last: list[int] = []  # byte tokens
        for name, token in known.items():
            if token < width and token not in self.unwritten:
                self.bytes[token] = spelt.spelt(token, name)
                if _is_byte_token(name):
                    last.append(token)
        self.ids: dict[bytes, int] = {}
        for tokens in (set(range(width)).difference(last), last):
            for token in sorted(tokens):
                if self.bytes[token]:
                    self.ids.setdefault(self.bytes[token], token)
        self.leads = self.encode("a")[2] > 0

    def encode(self, text: str) -> tuple[list[int], list[int], int]:
        """Ids, the byte of `text` behind each, and how many bytes were put before it: a space, or none.

        Where the tokenizer rewrites text, ends are those that it tells of itself.
        """
        encoding: Encoding = self.tokenizer.encode(text, add_special_tokens=False)
        ids, data = list(encoding.ids), text.encode()
        pieces = [self.bytes[token] if token < self.width else b"" for token in ids]
        lead = sum(map(len, pieces)) - len(data)
        if lead in (0, 1) and b"".join(pieces)[lead:] == data:
            ends, end = [], -lead
            for piece in pieces:
                end += len(piece)
                ends.append(max(0, end))
            return ids, ends, lead
        return ids, _told_ends(text, encoding), 0


def _is_byte_token(name: str) -> bool:
    return len(name) == 6 and name.startswith("<0x")


def _told_ends(text: str, encoding: Encoding) -> list[int]:
    """From offsets in characters."""
    before = [0]
    for character in text:
        before.append(before[-1] + len(character.encode()))
    ends, end = [], 0
    for _, stop in encoding.offsets:
        end = max(end, before[stop])
        ends.append(end)
    return ends


# ----------------------------------------------------------------------------------------------------------------------
# The intersection of two vocabularies.


class VocabularyMap:
    """From a target's ids to a drafter's.

    own_of: for each id of the target the drafter's id for the same bytes, or -1. Special tokens of one name are the
    same, and so are ends of sequence. share: of a text's tokens, by the target's order of ids: a tokenizer numbers
    tokens as it found them, the most frequent first, and frequencies fall about as 1 / rank (Zipf). Single bytes are
    left out: every tokenizer has them, and few texts need them.

    Raises:
        TokenizerError: the tokens of one of them are no bytes.
    """

    def __init__(self, target: TokenTable, own: TokenTable) -> None:
        if target.convention is not Convention.BYTES:
            raise TokenizerError("tokenizer_json: its tokens do not stand for bytes, so no other vocabulary fits it")
        if own.convention is not Convention.BYTES:
            raise TokenizerError("this drafter's tokens do not stand for bytes, so it fits no other vocabulary")
        self.target = target
        self.own = own
        self.own_of = [own.ids.get(each, -1) if each else -1 for each in target.bytes]
        self.named = {token: own.special[name] for name, token in target.special.items() if name in own.special}
        if own.eos_ids:
            self.named |= {token: min(own.eos_ids) for token in target.eos_ids - self.named.keys()}
        for token, mine in self.named.items():
            self.own_of[token] = mine
        ranked = [token for each, token in sorted(target.ids.items(), key=lambda pair: pair[1]) if len(each) > 1]
        weights = [(1.0 / rank, self.own_of[token] >= 0) for rank, token in enumerate(ranked, 1)]
        self.shared = sum(has for _, has in weights)
        self.of = len(weights)
        self.share = sum(weight for weight, has in weights if has) / max(sum(weight for weight, _ in weights), 1e-9)

    def __str__(self) -> str:
        """For people."""
        return (
            f"{self.shared} of the target's {self.of} tokens are shared ({self.share:.0%} of a text); "
            "it drafts in these"
        )


# ----------------------------------------------------------------------------------------------------------------------
# A text in a drafter's own tokens.

# Bytes before a change that are tokenised again: no tokenizer joins what is further apart, save in runs of blanks.
CONTEXT = 64


class OwnText:
    """A text that is told in the target's ids, as the drafter's tokenizer has it: `own`.

    A change costs what lies behind it, and CONTEXT. Of special tokens those that the drafter has too are kept; the
    others stand for nothing. complete: the text ends with a whole character, or with one whose bytes the drafter has
    tokens for.

    Invariant: `_ends[i]` is where own[i] ends, in bytes of `_data`; in it a special token takes one.
    """

    def __init__(self, vocabularies: VocabularyMap) -> None:
        self._map = vocabularies
        self.own: list[int] = []
        self.complete = True
        self._ends: list[int] = []
        self._data = bytearray()
        self._offsets: list[int] = []  # where each target token ends
        self._marks: list[int] = []  # where special tokens end

    def __len__(self) -> int:
        """Target tokens."""
        return len(self._offsets)

    @property
    def _segment(self) -> int:
        """Where the last special token ends."""
        return self._marks[-1] if self._marks else 0

    def retell(self, length: int, tokens: Iterable[int]) -> int:
        """The text goes on with `tokens` behind its first `length` ones; returns how many own tokens surely stayed."""
        del self._offsets[length:]
        del self._data[self._offsets[-1] if self._offsets else 0 :]
        del self._marks[bisect_right(self._marks, len(self._data)) :]
        # A broken character is told anew: it may become a token of its own.
        agreed = whole_characters(self._data, self._segment)
        stayed = self._cut(agreed)
        for token in tokens:
            if token in self._map.target.unwritten:
                stayed = min(stayed, self._tokenise(agreed))
                self._mark(token)
                agreed = len(self._data)
            else:
                self._data += self._map.target.bytes[token]
            self._offsets.append(len(self._data))
        return min(stayed, self._tokenise(agreed))

    def _mark(self, token: int) -> None:
        self._data += b"\xff"
        self._marks.append(len(self._data))
        if token in self._map.named:
            self.own.append(self._map.named[token])
            self._ends.append(len(self._data))

    def _cut(self, length: int) -> int:
        """Drop own tokens that end behind byte `length`; returns how many are left."""
        kept = bisect_right(self._ends, length)
        del self.own[kept:], self._ends[kept:]
        return kept

    def _tokenise(self, agreed: int) -> int:
        """Tokenise what was added behind byte `agreed`; returns how many own tokens stayed."""
        segment = self._segment
        end = whole_characters(self._data, segment)
        start = self._anchor(segment, agreed)
        if start > segment:
            ids, ends, lead = self._encoded(start, end)
            join = self._join(start, agreed, ends, lead)
            if join >= 0:
                # of several tokens that end there, all are old ones
                skipped = bisect_right(ends, join) if join > start else 0
                return self._replace(bisect_right(self._ends, join), ids[skipped:], ends[skipped:], end)
        # the space that the target's tokenizer puts before a text is none of the text
        written = segment + (self._map.target.leads and self._data[segment : segment + 1] == b" ")
        ids, ends, _ = self._encoded(written, end)
        return self._replace(self._first_of(segment), ids, ends, end)

    def _encoded(self, start: int, end: int) -> tuple[list[int], list[int], int]:
        text = self._data[start:end].decode(errors="replace")
        ids, ends, lead = self._map.own.encode(text) if text else ([], [], 0)
        return ids, [start + each for each in ends], lead

    def _first_of(self, segment: int) -> int:
        """How many own tokens stand before a segment: of those that end where it begins, the special one only."""
        before = bisect_left(self._ends, segment)
        special = bool(self._marks) and before < len(self.own) and self._ends[before] == segment
        return before + (special and self.own[before] in self._map.named.values())

    def _anchor(self, segment: int, agreed: int) -> int:
        """Where to tokenise again from: an own token's end, CONTEXT before the change, at a character."""
        at = bisect_right(self._ends, agreed - CONTEXT) - 1
        while at >= 0 and self._ends[at] > segment:
            end = self._ends[at]
            if end < len(self._data) and self._data[end] & 0xC0 != 0x80:
                return end
            at -= 1
        return segment

    def _join(self, start: int, agreed: int, ends: Sequence[int], lead: int) -> int:
        """The last byte, up to the change, at which a token ends both before and now; -1 if there is none."""
        now = {each for each in ends if start < each <= agreed}
        at = bisect_right(self._ends, agreed) - 1
        while at >= 0 and self._ends[at] > start:
            if self._ends[at] in now:
                return self._ends[at]
            at -= 1
        return -1 if lead else start

    def _replace(self, kept: int, ids: Sequence[int], ends: Sequence[int], end: int) -> int:
        """Put these behind the first `kept` own tokens, and the bytes of a broken character behind byte `end`."""
        rest = self._data[end:]
        own = [self._map.own.ids.get(bytes([byte]), -1) for byte in rest]
        self.complete = -1 not in own
        ids, ends = [*ids, *(own if self.complete else ())], [*ends, *range(end + 1, len(self._data) + 1)]
        stayed = kept + common_length(self.own, ids, kept)
        self.own[kept:], self._ends[kept:] = ids, ends[: len(ids)]
        return stayed


def common_length(tokens: Sequence[int], others: Sequence[int], start: int = 0) -> int:
    """How many of `others` equal tokens[start], tokens[start + 1], ..."""
    pairs = zip(islice(tokens, start, None), others, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(tokens) - start, len(others)))


def whole_characters(data: bytes | bytearray, start: int = 0) -> int:
    """Where the last whole character behind `start` ends; broken ones in the middle are taken as they are."""
    for back in range(1, min(3, len(data) - start) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            needed = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4 if byte >> 3 == 0b11110 else 1
            return len(data) - back if needed > back else len(data)
    return len(data)
