"""A drafter's model as a session of another vocabulary sees it: told the target's ids, fed its own.

The model's logits are those of the tokens that both have (`specwire.lm.guesses`), as `specwire.text.vocabulary_map`
says. A draft token is fed as the drafter's own id for the same bytes. A text that was decided otherwise than drafted is
tokenised anew at its end, and the cache goes back to the first difference.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence

from draft_service.sessions import Computed, LearnVocabulary
from specwire.core.draft import Drawn
from specwire.core.model import Feed, SlotModel
from specwire.rpc.process import say
from specwire.text.tokenizer import TokenizerError
from specwire.text.vocabulary_map import (
    MOST_VOCABULARIES,
    OwnText,
    TokenTable,
    VocabularyMap,
    common_length,
)

log = logging.getLogger(__name__)

# The drafter cannot say what follows.
NOTHING = Drawn(())
# Bytes of a tokenizer's JSON, at most: twice those of the largest.
MOST_JSON_BYTES = 64 << 20


def unpacked(tokenizer_zlib: bytes) -> bytes:
    """Raises TokenizerError where it is no zlib stream, or one of more than MOST_JSON_BYTES."""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(tokenizer_zlib, MOST_JSON_BYTES)
    except zlib.error as error:
        raise TokenizerError(f"tokenizer_zlib: {error}") from error
    if not stream.eof:
        raise TokenizerError(f"tokenizer_zlib: is cut off, or has more than {MOST_JSON_BYTES} bytes")
    return text


class ForeignSlot:
    """A slot of a session whose target has another vocabulary.

    told: the text in the target's ids, as far as the slot holds it. line: the same in own ids, then what is drafted;
    the model's slot holds a prefix of it.

    Invariant: `_text` holds the first `_agreed` tokens of `told`; line begins with `_text.own` unless `told` went back.
    """

    def __init__(self, vocabularies: VocabularyMap) -> None:
        self.map = vocabularies
        self.told: list[int] = []
        self.line: list[int] = []
        self._text = OwnText(vocabularies)
        self._agreed = 0
        self._back = False  # `told` went back since the last feed

    def go_back(self, length: int) -> None:
        """Hold the first `length` tokens of the text."""
        del self.told[length:]
        self._agreed, self._back = min(self._agreed, length), True

    def tell(self, feed: Feed) -> int:
        """Take in the tokens of a feed; returns how much of `line` is as it was before."""
        follows = not self._back and feed.start == len(self.told)
        if not follows:
            self.go_back(feed.start)
        self.told += feed.tokens
        self._back = False
        if follows and self._append(feed.tokens):
            return len(self.line)
        stayed = self._text.retell(self._agreed, self.told[self._agreed :])
        self._agreed = len(self.told)
        same = stayed + common_length(self.line, self._text.own[stayed:], stayed)
        self.line[stayed:] = self._text.own[stayed:]
        return same

    def _append(self, tokens: Sequence[int]) -> bool:
        """Feed a draft token as the same token of the drafter; False where the text is to be tokenised instead."""
        own = self.map.own_of[tokens[0]] if len(tokens) == 1 and not self.speechless else -1
        if own < 0:
            return False
        self.line.append(own)
        return True

    @property
    def speechless(self) -> bool:
        """The text cannot be told in own tokens, so nothing is drafted behind it."""
        return not self.line or not self._text.complete


class TranslatingModel:
    """A model some of whose slots hold texts in another vocabulary's ids. Positions and lengths are those of the ids.

    Slots that were not given a vocabulary are the model's own, and so are trees. As `specwire.core.model.SlotModel`,
    but for `forward`.
    """

    def __init__(self, model: SlotModel) -> None:
        self.failed: frozenset[int] = frozenset()
        self.slots = model.slots
        self.branches = model.branches
        self.keep = model.keep
        self._model = model
        self._context = model.info.context
        self._own_tokens: TokenTable | None = None
        # What became of each vocabulary that was told, by its digest.
        self._known: dict[str, VocabularyMap | TokenizerError] = {}
        self._foreign: dict[int, ForeignSlot] = {}

    def learn(self, told: LearnVocabulary) -> None:
        """Compare it with the drafter's own. It is not trusted: whatever is wrong with it is told to who needs it."""
        if told.digest in self._known:
            self._known[told.digest] = self._known.pop(told.digest)
            return
        try:
            self._known[told.digest] = found = self._map(told)
            say(f"specwire draft: a target of another vocabulary: {found}")
        except TokenizerError as error:
            self._known[told.digest] = error
        except Exception as error:  # a tokenizer that loads may still be one that nothing can be done with
            log.exception("a vocabulary that was told could not be compared")
            self._known[told.digest] = TokenizerError(f"tokenizer_json: {type(error).__name__}")
        if len(self._known) > MOST_VOCABULARIES:
            del self._known[next(iter(self._known))]

    def _map(self, told: LearnVocabulary) -> VocabularyMap:
        info = self._model.info
        if self._own_tokens is None:
            self._own_tokens = TokenTable(info.tokenizer_json, info.vocabulary, info.eos_ids)
        target = TokenTable(unpacked(told.tokenizer_zlib), told.width, told.eos_ids)
        return VocabularyMap(target, self._own_tokens)

    def vocabularies_of(self, digest: str) -> VocabularyMap:
        """Raises TokenizerError, which says why it cannot be drafted for."""
        found = self._known.get(digest, TokenizerError("was told too long ago"))
        if isinstance(found, TokenizerError):
            raise found
        return found

    def translate(self, slot: int, vocabularies: VocabularyMap) -> None:
        """The empty slot is to hold a text in the target's ids."""
        self._foreign[slot] = ForeignSlot(vocabularies)

    def cached(self, slot: int) -> int:
        foreign = self._foreign.get(slot)
        return self._model.cached(slot) if foreign is None else len(foreign.told)

    def rollback(self, slot: int, length: int) -> None:
        foreign = self._foreign.get(slot)
        if foreign is None:
            self._model.rollback(slot, length)
        else:
            foreign.go_back(length)

    def discard(self, slot: int) -> None:
        self._foreign.pop(slot, None)
        self._model.discard(slot)

    def forward(self, feeds: Sequence[Feed]) -> Computed:
        fed: list[Feed] = []
        at: list[int] = []
        answers: dict[int, Drawn] = {}
        rows = 0
        for feed in feeds:
            own = self._own(feed)
            if own is not None:
                at += range(rows, rows + own.wanted)
                rows += own.wanted
                fed.append(own)
            elif feed.wanted:
                answers[len(at)] = NOTHING
                at.append(-1)
        computed = self._model.forward(fed) if fed else None
        self.failed = self._model.failed if fed else frozenset()
        return Computed(computed, at, answers)

    def _own(self, feed: Feed) -> Feed | None:
        """The feed in own ids; None where none is needed, or nothing can be said behind it."""
        foreign = self._foreign.get(feed.slot)
        if foreign is None:
            return feed
        start = min(foreign.tell(feed), self._model.cached(feed.slot))
        if start < self._model.cached(feed.slot):
            self._model.rollback(feed.slot, start)
        if len(foreign.line) > self._context or (feed.wanted and foreign.speechless):
            return None
        line = foreign.line
        if feed.wanted:
            start = min(start, len(line) - 1)  # the last one again, where the slot lacks none
        return Feed(feed.slot, start, line[start:], feed.wanted) if start < len(line) else None
