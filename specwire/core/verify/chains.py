"""The live chains of a session's sources, and the choice of the one that is tested."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from specwire.core.messages import MOST_SOURCES, MOST_WINDOW, Draft, Proposal, Weights
from specwire.core.policy.estimates import AcceptanceByPosition, expected_tokens
from specwire.core.text import Text


class Offer(StrEnum):
    """What became of a proposal."""

    STARTED = "started"
    EXTENDED = "extended"
    DUPLICATE = "duplicate"
    STALE = "stale"
    CONTRADICTED = "contradicted"
    WRONG_PREFIX = "wrong_prefix"
    GAP = "gap"
    OUT_OF_RANGE = "out_of_range"
    OVER_RUN_AHEAD = "over_run_ahead"
    OTHER_EPOCH = "other_epoch"
    WITHOUT_WEIGHTS = "without_weights"


@dataclass(slots=True)
class Chain:
    """Invariant: tokens at decided positions equal the text; `base` is not after the decided position.

    weights: one per token, or none at all. ends: where its chunks end, as positions.
    """

    number: int
    base: int
    tokens: list[int] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.base + len(self.tokens)

    def after(self, position: int, most: int) -> tuple[int, ...]:
        start = position - self.base
        return tuple(self.tokens[start : start + most])

    def drafts(self, position: int, most: int) -> tuple[Draft, ...]:
        start = position - self.base
        tokens = self.tokens[start : start + most]
        if not self.weights:
            return tuple(map(Draft, tokens))
        return tuple(map(Draft, tokens, self.weights[start : start + most]))


class Chains:
    """The chains of all sources of one session.

    Args:
        vocabulary: ids outside 0 .. vocabulary-1 make the proposal out of range.
        most_ahead: tokens beyond the decided position that one source may hold here (a flood is cut off). A chain that
            ends that far behind it is dropped: its drafter is gone, or begins a new one when it hears.
        weighed: take only tokens with the weights that they were drawn from, in the present `epoch`. The lowest source
            that has a token is tested, so that the choice depends on no token's value.
    """

    def __init__(self, vocabulary: int, most_ahead: int = 256, weighed: bool = False, epoch: int = 0) -> None:
        self.vocabulary = vocabulary
        self.most_ahead = most_ahead
        self.weighed = weighed
        self.epoch = epoch
        self.counts: Counter[Offer] = Counter()
        self._live: dict[int, Chain] = {}
        self._newest: dict[int, int] = {}
        self._acceptance: dict[int, AcceptanceByPosition] = {}

    def offer(self, proposal: Proposal, text: Text) -> Offer:
        """Take in a proposal against the decided `text`; returns and counts what became of it."""
        result = self._take(proposal, text)
        self.counts[result] += 1
        return result

    def _take(self, proposal: Proposal, text: Text) -> Offer:
        if len(proposal.tokens) > self.most_ahead:  # not even looked at, so that the cost of a flood stays bounded
            return Offer.OVER_RUN_AHEAD
        if not self._in_range(proposal):
            return Offer.OUT_OF_RANGE
        if self.weighed and proposal.epoch != self.epoch:
            return Offer.OTHER_EPOCH
        if self.weighed and not self._weighted(proposal):
            return Offer.WITHOUT_WEIGHTS
        newest = self._newest.get(proposal.source, -1)
        if proposal.chain < newest:
            return Offer.STALE
        if proposal.chain > newest:
            return self._start(proposal, text)
        chain = self._live.get(proposal.source)
        if chain is None:
            return Offer.STALE
        return self._extend(chain, proposal, text)

    def _in_range(self, proposal: Proposal) -> bool:
        numbers = min(proposal.chain, proposal.base, proposal.offset)
        return numbers >= 0 and all(0 <= token < self.vocabulary for token in proposal.tokens)

    def _weighted(self, proposal: Proposal) -> bool:
        if len(proposal.weights) != len(proposal.tokens):
            return False
        pairs = zip(proposal.weights, proposal.tokens, strict=True)
        return all(weights.possible(token, self.vocabulary) for weights, token in pairs)

    def _start(self, proposal: Proposal, text: Text) -> Offer:
        if proposal.offset != 0 or proposal.base > len(text):
            return Offer.GAP
        if proposal.prefix_hash != text.hash_at(proposal.base):
            return Offer.WRONG_PREFIX
        self._make_room(proposal.source)
        self._newest[proposal.source] = proposal.chain
        self._live.pop(proposal.source, None)
        return self._extend(Chain(proposal.chain, proposal.base), proposal, text, Offer.STARTED)

    def _make_room(self, source: int) -> None:
        """Forget the oldest source where there are too many: a reconnected drafter is a new source, with a higher id.

        Sources with a live chain are forgotten last.
        """
        if source not in self._newest and len(self._newest) >= MOST_SOURCES:
            self.drop(min(self._newest, key=lambda known: (known in self._live, known)))

    def _extend(self, chain: Chain, proposal: Proposal, text: Text, success: Offer = Offer.EXTENDED) -> Offer:
        if proposal.base != chain.base or proposal.offset > len(chain.tokens):
            return Offer.GAP
        fresh = proposal.tokens[len(chain.tokens) - proposal.offset :]
        if not fresh and success is Offer.EXTENDED:
            return Offer.DUPLICATE
        if chain.end + len(fresh) - len(text) > self.most_ahead:
            return Offer.OVER_RUN_AHEAD
        overlap = fresh[: max(0, len(text) - chain.end)]
        if text.common_prefix(chain.end, overlap) < len(overlap):
            self._live.pop(proposal.source, None)
            return Offer.CONTRADICTED
        chain.tokens.extend(fresh)
        chain.ends.append(chain.end)
        if self.weighed:
            chain.weights.extend(proposal.weights[len(proposal.tokens) - len(fresh) :])
        self._live[proposal.source] = chain
        return success

    def advance(self, position: int, tokens: Sequence[int]) -> list[int]:
        """Align with `tokens` decided at `position`: drop every chain that they contradict; return those sources.

        A chain that was decided to its end stays: its continuation may be under way.
        """
        if not self._live:
            return []
        dead = [
            source
            for source, chain in self._live.items()
            if any(mine != theirs for mine, theirs in zip(chain.after(position, len(tokens)), tokens, strict=False))
        ]
        for source in dead:
            del self._live[source]
        self._drop_left_behind(position + len(tokens))
        return dead

    def _drop_left_behind(self, end: int) -> None:
        for source in [source for source, chain in self._live.items() if end - chain.end >= self.most_ahead]:
            del self._live[source]

    def learn(self, position: int, tokens: Sequence[int], tested: int | None = None) -> None:
        """Compare every live chain with `tokens` decided at `position`, before `advance`.

        Only under rules whose text does not depend on proposals, where an untested chain tells as much as a tested one.

        tested: the source whose window was tested; it is counted elsewhere.
        """
        for source, chain in self._live.items():
            guessed = chain.after(position, len(tokens))
            if guessed and source != tested:
                right = next((i for i, token in enumerate(guessed) if token != tokens[i]), len(guessed))
                self.acceptance(source).observe(len(guessed), right)

    def acceptance(self, source: int) -> AcceptanceByPosition:
        """How often the source's tokens are accepted. Of sources without a test the newest are remembered."""
        known = self._acceptance.get(source)
        if known is None:
            known = self._acceptance[source] = AcceptanceByPosition()
            if len(self._acceptance) > MOST_SOURCES:
                del self._acceptance[min(self._acceptance)]
        return known

    def clear(self) -> None:
        """Drop every chain; what would extend one of them is stale."""
        self._live.clear()

    def forget(self) -> None:
        """Drop every chain: sources number theirs anew. What was learnt of them stays; a few tests overrule it."""
        self._live.clear()
        self._newest.clear()

    def drop(self, source: int) -> None:
        """Forget a source that is gone."""
        self._live.pop(source, None)
        self._newest.pop(source, None)
        self._acceptance.pop(source, None)

    def best(self, position: int) -> int | None:
        """The source whose live chain is expected to have most tokens accepted from `position` on, if any has some.

        Where nothing is known that is the longest chain; of equal ones it is the lowest source.
        """
        if not self._live:
            return None
        reach = {source: min(MOST_WINDOW, chain.end - position) for source, chain in self._live.items()}
        sources = sorted(source for source, tokens in reach.items() if tokens > 0)
        if len(sources) < 2 or self.weighed:
            return sources[0] if sources else None
        return max(sources, key=lambda source: (self._promise(source, reach[source]), self._live[source].end))

    def _promise(self, source: int, reach: int) -> float:
        return expected_tokens(self.acceptance(source).rates(reach), reach)

    def behind(self, position: int, window: Sequence[int]) -> tuple[int, Draft | None]:
        """The draft token that follows `window`, which begins at `position`, in the live chain of the lowest source.

        Returns that source, too; 0 and None where there is none.
        """
        source = self.first(position, window)
        return (0, None) if source is None else (source, self._live[source].drafts(position + len(window), 1)[0])

    def first(self, position: int, window: Sequence[int] = ()) -> int | None:
        """The lowest source whose live chain has a token behind `window`."""
        for source in sorted(self._live) if self._live else ():
            tokens = self._live[source].after(position, len(window) + 1)
            if len(tokens) > len(window) and tokens[: len(window)] == tuple(window):
                return source
        return None

    def window(self, position: int, most: int) -> tuple[int, ...]:
        """Up to `most` draft tokens from `position` on, of the best live chain."""
        source = self.best(position)
        return () if source is None else self._live[source].after(position, most)

    def drafts(self, position: int, most: int) -> tuple[Draft, ...]:
        """The same, with what they were drawn from."""
        source = self.best(position)
        return () if source is None else self._live[source].drafts(position, most)

    def whole(self, position: int, most: int) -> tuple[int, ...]:
        """The lengths, up to `most`, at which a window from `position` on ends where a chunk does."""
        source = self.best(position)
        ends = [] if source is None else self._live[source].ends
        first, last = bisect_right(ends, position), bisect_right(ends, position + most)
        return tuple(end - position for end in ends[first:last])
