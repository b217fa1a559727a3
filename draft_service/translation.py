"""A drafter's model as a session of another vocabulary sees it: told the target's ids, fed its own.

Two ways, chosen for a pair of vocabularies (`specwire.text.vocabulary_map`):

    by token  The model's logits are those of the tokens that both have (`specwire.lm.guesses`). A draft token is fed
              as the drafter's own id for the same bytes.
    by text   The model drafts own tokens, greedily. Their text is read in the target's tokens.

Either way a text that was decided otherwise than drafted is tokenised anew at its end, and the cache goes back to the
first difference.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from draft_service.commands import LearnVocabulary
from draft_service.sessions import Computed, DraftModel
from specwire.core.draft import DraftRow, Drawn
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed, SlotModel
from specwire.core.policy.tunables import LEAST_SHARED
from specwire.lm.guesses import draw
from specwire.rpc.process import say
from specwire.text.tokenizer import TokenizerError
from specwire.text.vocabulary_map import (
    CONTEXT,
    MOST_VOCABULARIES,
    Convention,
    OwnText,
    TokenTable,
    VocabularyMap,
    common_length,
    continuation,
    whole_characters,
)

log = logging.getLogger(__name__)

# Own tokens that are drafted for one of the target's, at most.
MOST_FOR_ONE = 16
# Tokens that are decoded with a new one, where its text depends on them.
NEIGHBOURS = 8
# The drafter cannot say what follows.
NOTHING = Drawn(())
GREEDILY = Sampling()


class ForeignSlot:
    """A slot of a session whose target has another vocabulary.

    told: the text in the target's ids, as far as the slot holds it. line: the same in own ids, then what is drafted;
    the model's slot holds a prefix of it, all but the last token while one is drafted by text.

    Invariant: `_text` holds the first `_agreed` tokens of `told`; line begins with `_text.own` unless `told` went back.
    """

    def __init__(self, slot: int, vocabularies: VocabularyMap) -> None:
        self.slot = slot
        self.map = vocabularies
        self.told: list[int] = []
        self.line: list[int] = []
        self._text = OwnText(vocabularies)
        self._agreed = 0
        self._back = False  # `told` went back since the last feed
        # By text: what is drafted behind `told`, the target's tokens that it begins with, and whether it ends there.
        self._ahead = b""
        self._next: deque[int] = deque()
        self._ended = False
        self._tail = b""
        self._tries = 0
        self._confidence = 1.0

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
        if follows and (self._follow(feed.tokens) if self.map.by_text else self._append(feed.tokens)):
            return len(self.line)
        self._ahead, self._ended, self._tries = b"", False, 0
        self._next.clear()
        stayed = self._text.retell(self._agreed, self.told[self._agreed :])
        self._agreed = len(self.told)
        self._tail = self._text.tail().encode()
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

    def _follow(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens are the beginning of what was drafted."""
        for token in tokens:
            spelt = self.map.target.bytes[token]
            if not spelt or not self._ahead.startswith(spelt):
                return False
            self._ahead = self._ahead[len(spelt) :]
            self._tail = (self._tail + spelt)[-CONTEXT:]
            if self._next and self._next.popleft() != token:
                self._next.clear()
        return True

    @property
    def speechless(self) -> bool:
        """The text cannot be told in own tokens, so nothing is drafted behind it."""
        return not self.line or not self._text.complete

    # By text

    @property
    def knows(self) -> bool:
        """What may follow is known without a further forward."""
        return self.map.by_text and (bool(self._next) or self._ended)

    def answer(self) -> Drawn:
        """What may follow; only where that is known."""
        if not self._next:
            return NOTHING
        drawn, self._confidence, self._tries = Drawn((self._next[0],), self._confidence), 1.0, 0
        return drawn

    def end(self) -> None:
        """Nothing more can be drafted."""
        self._ended = True

    def draft(self, token: int, confidence: float) -> None:
        """Go on with an own token."""
        own, target = self.map.own, self.map.target
        self._confidence *= confidence
        self._tries += 1
        self._ended = token in own.unwritten or self._tries >= MOST_FOR_ONE
        if token not in own.unwritten:
            self._ahead += self._spelt(token)
            self.line.append(token)
        ahead, broken = _read(self._ahead)
        self._ended |= broken
        self._next = deque(continuation(self.map, self._tail.decode(errors="ignore"), ahead, self._ended))
        if token in own.eos_ids and target.eos_ids:
            self._next.append(min(target.eos_ids))

    def _spelt(self, token: int) -> bytes:
        own = self.map.own
        if own.convention is Convention.BYTES:
            return own.bytes[token]
        before = self.line[-NEIGHBOURS:]
        return str(own.tokenizer.decode([*before, token])[len(own.tokenizer.decode(before)) :]).encode()


def _read(data: bytes) -> tuple[str, bool]:
    """The characters that bytes begin with, and whether they are followed by what can be none."""
    whole = data[: whole_characters(data)]
    try:
        return whole.decode(), False
    except UnicodeDecodeError as error:
        return whole[: error.start].decode(), True


class TranslatingModel(DraftModel):
    """A model some of whose slots hold texts in another vocabulary's ids. Positions and lengths are those of the ids.

    Slots that were not given a vocabulary are the model's own, and so are trees.
    """

    def __init__(self, model: SlotModel) -> None:
        super().__init__(model)
        self._context = model.info.context
        self._vocabularies = Vocabularies(model, LEAST_SHARED)
        self._foreign: dict[int, ForeignSlot] = {}

    def learn(self, told: LearnVocabulary) -> None:
        self._vocabularies.learn(told)

    def vocabularies_of(self, digest: str) -> VocabularyMap:
        """See `DraftModel`; the ValueError is a TokenizerError."""
        return self._vocabularies.of(digest)

    def translate(self, slot: int, vocabularies: VocabularyMap) -> None:
        self._foreign[slot] = ForeignSlot(slot, vocabularies)

    def cached(self, slot: int) -> int:
        foreign = self._foreign.get(slot)
        return super().cached(slot) if foreign is None else len(foreign.told)

    def rollback(self, slot: int, length: int) -> None:
        foreign = self._foreign.get(slot)
        if foreign is None:
            super().rollback(slot, length)
        else:
            foreign.go_back(length)

    def discard(self, slot: int) -> None:
        self._foreign.pop(slot, None)
        super().discard(slot)

    def forward(self, feeds: Sequence[Feed]) -> Computed:
        if not self._foreign:
            return super().forward(feeds)
        fed: list[Feed] = []
        at: list[int] = []
        answers: dict[int, Drawn] = {}
        by_text: dict[int, ForeignSlot] = {}
        rows = 0
        for feed in feeds:
            own, answer = self._own(feed)
            if own is not None:
                foreign = self._foreign.get(feed.slot)
                if own.wanted and foreign is not None and foreign.map.by_text:
                    by_text[len(at)] = foreign
                at += range(rows, rows + own.wanted)
                rows += own.wanted
                fed.append(own)
            elif feed.wanted:
                answers[len(at)] = answer
                at.append(-1)
        computed = self._model.forward(fed) if fed else None
        self.failed = self._model.failed if fed else frozenset()
        if by_text and computed is not None:
            computed = computed.clone()  # the next forward may overwrite it
            self._draft_on(computed, {at[row]: foreign.slot for row, foreign in by_text.items()})
        return Computed(computed, at, answers | {row: foreign.answer() for row, foreign in by_text.items()})

    def _own(self, feed: Feed) -> tuple[Feed | None, Drawn]:
        """The feed in own ids; where none is needed, what may follow."""
        foreign = self._foreign.get(feed.slot)
        if foreign is None:
            return feed, NOTHING
        start = min(foreign.tell(feed), self._model.cached(feed.slot))
        if start < self._model.cached(feed.slot):
            self._model.rollback(feed.slot, start)
        if len(foreign.line) > self._context or (feed.wanted and foreign.speechless):
            return None, NOTHING
        if feed.wanted and foreign.knows:
            return None, foreign.answer()
        return self._rest(feed.slot, start, feed.wanted), NOTHING

    def _rest(self, slot: int, start: int, wanted: int) -> Feed | None:
        """What the slot lacks of its line; its last token again where logits are wanted and it lacks none."""
        line = self._foreign[slot].line
        start = min(start, len(line) - 1) if wanted else start
        return Feed(slot, start, line[start:], wanted) if start < len(line) else None

    def _draft_on(self, computed: Any, slots: dict[int, int]) -> None:
        """Draft by text until each of these slots knows a token of its target; they are named by rows of `computed`."""
        while slots := {row: slot for row, slot in slots.items() if slot not in self.failed}:
            drawn = draw(computed[list(slots)], [DraftRow(0, GREEDILY, True)] * len(slots))
            for slot, (token, confidence) in zip(slots.values(), drawn, strict=True):
                self._foreign[slot].draft(token, confidence)
            feeds = [feed for slot in slots.values() if (feed := self._further(slot)) is not None]
            slots = {row: feed.slot for row, feed in enumerate(feeds)}
            if feeds:
                computed = self._model.forward(feeds)
                self.failed |= self._model.failed

    def _further(self, slot: int) -> Feed | None:
        """The next own token to feed, while none of the target's is known."""
        foreign = self._foreign[slot]
        if len(foreign.line) > self._context:
            foreign.end()
        return None if foreign.knows else self._rest(slot, self._model.cached(slot), 1)


# ----------------------------------------------------------------------------------------------------------------------
# The vocabularies that a drafter was told.

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


class Vocabularies:
    """What became of each vocabulary that was told, by its digest.

    Args:
        least_share: see `specwire.text.vocabulary_map.VocabularyMap`.
    """

    def __init__(self, model: SlotModel, least_share: float) -> None:
        self._model = model
        self._least_share = least_share
        self._own: TokenTable | None = None
        self._known: dict[str, VocabularyMap | TokenizerError] = {}

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
        if self._own is None:
            self._own = TokenTable(info.tokenizer_json, info.vocabulary, info.eos_ids)
        target = TokenTable(unpacked(told.tokenizer_zlib), told.width, told.eos_ids)
        return VocabularyMap(target, self._own, self._least_share)

    def of(self, digest: str) -> VocabularyMap:
        """Raises TokenizerError, which says why it cannot be drafted for."""
        found = self._known.get(digest, TokenizerError("was told too long ago"))
        if isinstance(found, TokenizerError):
            raise found
        return found
