"""The trees of a session's sources, and the choice of the path that is tested."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from specwire.core.messages import MOST_SOURCES, MOST_WINDOW, DraftToken, Proposal
from specwire.core.policy.estimates import AcceptanceByPosition, Agreement
from specwire.core.policy.tunables import PRIOR_RATES
from specwire.core.text import Node, Text, Tree


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
    BRANCHED = "branched"


class BestPath(NamedTuple):
    """The draft tokens that a window is taken from, and whose they are; without any, nobody's."""

    source: int | None
    nodes: Sequence[Node]

    def drafts(self, most: int) -> tuple[DraftToken, ...]:
        """Up to `most` of them, with what they were drawn from."""
        return tuple([DraftToken(node.token, node.weights) for node in self.nodes[:most]])


NO_PATH = BestPath(None, ())


class Chains:
    """The trees of all sources of one session, most of which do not branch.

    Args:
        vocabulary: ids outside 0 .. vocabulary-1 make the proposal out of range.
        most_ahead: nodes beyond the decided position that one source may hold here (a flood is cut off). A tree whose
            root lies as far behind that position is dropped: its drafter is gone, or begins a new one when it hears.
        weighed: take only chains whose tokens come with the weights that they were drawn from, in the present `epoch`.
            The lowest source that has a token is tested, so that the choice depends on no token's value; a chain that
            the text contradicts is dropped whole.
        branching: trees that branch are taken; else chains only, as under rules that look at draft tokens.
    """

    def __init__(
        self,
        vocabulary: int,
        most_ahead: int = 256,
        weighed: bool = False,
        epoch: int = 0,
        branching: bool = True,
    ) -> None:
        self.vocabulary = vocabulary
        self.most_ahead = most_ahead
        self.weighed = weighed
        self.epoch = epoch
        self.branching = branching and not weighed
        self.counts: Counter[Offer] = Counter()
        self._trees: dict[int, Tree] = {}
        self._ends: dict[int, list[int]] = {}
        self._newest: dict[int, int] = {}
        self._acceptance: dict[int, AcceptanceByPosition] = {}
        # Of sources whose trees are compared with the text, tested or not.
        self.agreements: dict[int, Agreement] = {}

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
        if proposal.parents and not self.branching:
            return Offer.BRANCHED
        if self.weighed and not self._weighted(proposal):
            return Offer.WITHOUT_WEIGHTS
        newest = self._newest.get(proposal.source, -1)
        if proposal.chain < newest:
            return Offer.STALE
        if proposal.chain > newest:
            return self._start(proposal, text)
        tree = self._trees.get(proposal.source)
        if tree is None:
            return Offer.STALE
        return self._extend(tree, proposal, text)

    def _in_range(self, proposal: Proposal) -> bool:
        """A parent is drafted before its child; -1 is the text before the base."""
        tokens, parents = proposal.tokens, proposal.parents
        sound = min(proposal.chain, proposal.base, proposal.offset, *tokens) >= 0
        if not sound or (tokens and max(tokens) >= self.vocabulary):
            return False
        if not parents:
            return True
        return len(parents) == len(tokens) and all(-1 <= at < own for own, at in enumerate(parents, proposal.offset))

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
        self._drop_tree(proposal.source)
        return self._extend(Tree(proposal.chain, proposal.base), proposal, text, Offer.STARTED)

    def _make_room(self, source: int) -> None:
        """Forget the oldest source where there are too many: a reconnected drafter is a new source, with a higher id.

        Sources with a tree are forgotten last.
        """
        if source not in self._newest and len(self._newest) >= MOST_SOURCES:
            self.drop(min(self._newest, key=lambda known: (known in self._trees, known)))

    def _extend(self, tree: Tree, proposal: Proposal, text: Text, success: Offer = Offer.EXTENDED) -> Offer:
        known = tree.size - proposal.offset
        if proposal.base != tree.base or known < 0:
            return Offer.GAP
        fresh = len(proposal.tokens) - known
        if fresh <= 0 and success is Offer.EXTENDED:
            return Offer.DUPLICATE
        if tree.position + len(tree.nodes) + fresh - len(text) > self.most_ahead:
            return Offer.OVER_RUN_AHEAD
        found = self._grow(tree, proposal, known, text)
        if found is Offer.CONTRADICTED and self.weighed:
            self._drop_tree(proposal.source)
            return found
        self._trees[proposal.source] = tree
        if self.weighed:
            self._ends.setdefault(proposal.source, []).append(tree.base + tree.size)
        return success if found is None else found

    def _grow(self, tree: Tree, proposal: Proposal, known: int, text: Text) -> Offer | None:
        """Add a piece's nodes from number `known` of it on; why nothing came of it, if so."""
        tokens, offset = proposal.tokens, proposal.offset
        parents = proposal.parents[known:] or range(tree.size - 1, offset + len(tokens) - 1)
        added = tree.extend(tokens[known:], parents, proposal.weights[known:] if self.weighed else None)
        if tree.position < len(text) and self._follow(proposal.source, tree, text):
            return Offer.CONTRADICTED
        return None if added or len(tokens) == known else Offer.STALE

    def advance(self, text: Text) -> None:
        """Move every tree along the decided `text`.

        What does not descend from it is pruned. A tree of which nothing is left stays: what goes on from its root, or
        a sibling, may be under way.
        """
        for source, tree in list(self._trees.items()):
            contradicted = self._follow(source, tree, text)
            if (contradicted and self.weighed) or len(text) - tree.position >= self.most_ahead:
                self._drop_tree(source)

    def _follow(self, source: int, tree: Tree, text: Text) -> bool:
        before, contradicted = tree.position, tree.follow(text)
        if source in self.agreements:
            self.agreements[source].observe(tree.position - before, contradicted)
        return contradicted

    def _drop_tree(self, source: int) -> None:
        self._trees.pop(source, None)
        self._ends.pop(source, None)

    def learn(self, tokens: Sequence[int], tested: int | None = None) -> None:
        """Compare every tree with `tokens` decided next, before `advance`.

        Only under rules whose text does not depend on proposals, where an untested path tells as much as a tested one.

        tested: the source whose window was tested; its path is counted elsewhere.
        """
        for source in self._trees:
            if source == tested:
                continue
            guessed = [node.token for node in self._path(source)[: len(tokens)]]
            if guessed:
                right = next((i for i, token in enumerate(guessed) if token != tokens[i]), len(guessed))
                self.acceptance(source).observe(len(guessed), right)

    def acceptance(self, source: int) -> AcceptanceByPosition:
        """How often the source's tokens are accepted. Of sources without a test the newest are remembered."""
        found = self._acceptance.get(source)
        if found is None:
            found = self._acceptance[source] = AcceptanceByPosition()
            if len(self._acceptance) > MOST_SOURCES:
                del self._acceptance[min(self._acceptance)]
        return found

    def clear(self) -> None:
        """Drop every tree; what would extend one of them is stale."""
        self._trees.clear()
        self._ends.clear()

    def forget(self) -> None:
        """Drop every tree: sources number theirs anew. What was learnt of them stays; a few tests overrule it."""
        self.clear()
        self._newest.clear()

    def drop(self, source: int) -> None:
        """Forget a source that is gone."""
        self._drop_tree(source)
        self._newest.pop(source, None)
        self._acceptance.pop(source, None)

    def _path(self, source: int, position: int | None = None) -> Sequence[Node]:
        """The source's best path; none where its tree has not followed the text to `position`."""
        tree = self._trees[source]
        if position is not None and tree.position != position:
            return ()
        return tree.path(PRIOR_RATES)

    def best(self, position: int) -> BestPath:
        """The path that is expected to have most tokens accepted from `position` on.

        Where nothing is known that is the longest path; of equal ones it is the lowest source's.
        """
        if not self._trees:
            return NO_PATH
        paths = {source: path for source in sorted(self._trees) if (path := self._path(source, position))}
        if len(paths) < 2 or self.weighed:
            return BestPath(*next(iter(paths.items()))) if paths else NO_PATH
        best = max(paths, key=lambda source: (self._promise(source, len(paths[source])), len(paths[source])))
        return BestPath(best, paths[best])

    def _promise(self, source: int, reach: int) -> float:
        return self.acceptance(source).expected(min(MOST_WINDOW, reach))

    def behind(self, position: int, window: Sequence[int], chosen: int | None = None) -> tuple[int, DraftToken | None]:
        """The draft token that follows `window`, which begins at `position`, in the tree of the lowest source.

        Returns that source, too; 0 and None where there is none. Of several it is the one that equals `chosen`.
        """
        for source in sorted(self._trees) if self._trees else ():
            tree = self._trees[source]
            node = tree.behind(window) if tree.position == position else None
            if node is not None and node.children:
                number = node.children.get(chosen) if chosen is not None else None
                child = tree.nodes[number if number is not None else next(iter(node.children.values()))]
                return source, DraftToken(child.token, child.weights)
        return 0, None

    def window(self, position: int, most: int) -> tuple[int, ...]:
        """Up to `most` draft tokens from `position` on, of the best path."""
        return tuple([node.token for node in self.best(position).nodes[:most]])

    def whole(self, position: int, most: int) -> tuple[int, ...]:
        """The lengths, up to `most`, at which a window from `position` on ends where a chunk does."""
        source = self.best(position).source
        ends = [] if source is None else self._ends.get(source, [])
        first, last = bisect_right(ends, position), bisect_right(ends, position + most)
        return tuple(end - position for end in ends[first:last])
