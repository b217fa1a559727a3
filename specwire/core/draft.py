"""The drafter's session: a tree of guesses ahead of the decided text, pruned as the text is decided."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice, takewhile
from math import exp, log
from typing import Any, NamedTuple

from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Mask
from specwire.core.law.noise import seed_behind
from specwire.core.law.sampling import Sampling, Seen
from specwire.core.messages import NEGLIGIBLE, Pace, Proposal, Weights
from specwire.core.text import BEFORE, Text

# Nodes of a tree in one proposal, at most. A chain's chunk is as long as its pace says.
MOST_NODES = 64
# Places of pruned nodes that are kept among those to extend, beside as many as two for each live node.
MOST_STALE = 64
# Candidates that a place is asked for where the session may branch. How often they are right is learnt apart for so
# many classes of how sure the drafter is of its best one. Share of its weight that a count keeps with each new one, and
# observations that the drafter's own probabilities count for.
MOST_CANDIDATES, CLASSES = 8, 10
KEPT_SHARE, OWN_WEIGHT = 0.99, 16.0
# A probability counts for at least this, so that it has a logarithm.
LEAST_PROBABILITY = 1e-9


class Desynchronised(ValueError):
    """An advance starts behind the decided text that the drafter knows: messages were lost; open the session again."""


def fitting(pace: Pace, sampling: Sampling) -> Pace:
    """The pace as the session's rule allows it: chains, in chunks that fit a window, where draft tokens are weighed."""
    return pace if sampling.guessed else pace.of_a_chain()


class HeadRequest(NamedTuple):
    """A slot's text, all of which is decided, and how many tokens a head is to draft behind it."""

    slot: int
    tokens: Sequence[int]
    sampling: Sampling
    depth: int


class DraftingModel(ABC):
    """A target that drafts behind its own texts: by a head beside it, or by some of its layers."""

    @property
    def most_depth(self) -> int | None:
        """Tokens that are drafted behind a text at most, however many are asked for; None for any number."""
        return None

    @abstractmethod
    def unread(self, slot: int) -> int | None:
        """Positions of a text that a head has still to read before it drafts; None where it cannot draft yet."""

    @abstractmethod
    def heed(self, slots: Collection[int] | None) -> None:
        """From the next forward on keep for the head what the target makes of these slots, and of no others.

        None: of all, as it is at first. A head that needs what was not kept goes on behind it, once there is enough.
        """

    @abstractmethod
    def skip(self, slot: int, left: int) -> None:
        """Leave out what is unread but for the last `left` positions: the head begins there, and forgets the rest."""

    @abstractmethod
    def catch_up(self, requests: Sequence[HeadRequest]) -> None:
        """Read what `draft` would have to read before it drafts, as far as it is there."""

    @abstractmethod
    def stop(self) -> None:
        """Nothing will be asked any more."""

    @abstractmethod
    def draft(self, requests: Sequence[HeadRequest]) -> list[list[int]]:
        """Behind each text up to as many tokens as are asked for; what the slots hold stays as it is."""


def check_pace(pace: Pace, sampling: Sampling) -> None:
    """Refuse what the session's rule does not allow.

    Raises:
        InvalidParameter: names what.
    """
    if sampling.guessed:
        return
    if pace.branches > 1:
        message = f"must be at most 1 under {sampling.rule}, which takes chains only, not {pace.branches}"
        raise InvalidParameter("pace.branches", message)


def check_tokens(tokens: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """The ids of a text; raises InvalidParameter where one is not below `vocabulary`."""
    if tokens and max(tokens) >= vocabulary:
        raise InvalidParameter("tokens", f"token id {max(tokens)} is outside 0..{vocabulary - 1}")
    return tuple(tokens)


class Drawn(NamedTuple):
    """What a drafter thinks may follow a place: different tokens, the likeliest first; a chain has one.

    Empty where the drafter cannot say: the tree ends there.

    weights: what the first was drawn from, where the rule weighs it. scores: of each token, in nats relative to the
    first: of log q, under coupled with the noise that the target will add.
    """

    tokens: tuple[int, ...]
    weights: Weights | None = None
    scores: tuple[float, ...] = (0.0,)


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What one row of a drafter's logits is for: the token at `position`.

    seen: the text before it, where penalties look at it. allowed: see
    `specwire.core.law.sampling.adjusted`. most: candidates to tell. prefix_hash: of the text before it, where the rule
    weighs what the token was drawn from, in this `epoch`; else None. vocabularies: the target's and the drafter's where
    these differ (`specwire.text.vocabulary_map.VocabularyMap`).
    """

    position: int
    sampling: Sampling
    seen: Seen | None = None
    allowed: Mask | None = None
    most: int = 1
    prefix_hash: int | None = None
    epoch: int = 0
    vocabularies: Any = None

    @property
    def weighed(self) -> bool:
        return self.prefix_hash is not None

    @property
    def seed(self) -> int:
        """The seed that a weighed token is drawn with, which depends on all text before it."""
        assert self.prefix_hash is not None
        return seed_behind(self.sampling.seed, self.epoch, self.prefix_hash)

    @property
    def plain(self) -> bool:
        return self.sampling.temperature == 0.0

    @property
    def adjusted(self) -> bool:
        return self.seen is not None or self.allowed is not None or bool(self.sampling.logit_bias)

    @property
    def banned(self) -> tuple[int, ...]:
        """None: only the verifier knows which ids may not end the text yet."""
        return ()


class DraftNode:
    """A draft token at `position`, behind `parent`.

    chance: log of the probability that its path is decided, from the tree's beginning. number: in its tree; None until
    it is sent. drawn: what may follow it, of likelihoods `chances`; None until a forward has extended it. children:
    those of them that are nodes. live: it descends from the decided text. decided: it is part of it.
    row: where its owner's cache holds it; -1 for nowhere.
    """

    __slots__ = (
        "bin",
        "chance",
        "chances",
        "children",
        "decided",
        "drawn",
        "live",
        "number",
        "parent",
        "position",
        "row",
        "token",
        "weights",
    )

    def __init__(self, parent: DraftNode | None, token: int, position: int, chance: float) -> None:
        self.parent = parent
        self.token = token
        self.position = position
        self.chance = chance
        self.number: int | None = None
        self.drawn: Drawn | None = None
        self.chances: Sequence[float] = ()
        self.bin = 0
        self.children: dict[int, DraftNode] = {}
        self.live = True
        self.decided = False
        self.weights: Weights | None = None
        self.row = -1


class CandidateRates:
    """P(a drafter's candidate is the decided token), by its rank and by how sure the drafter is of its best one."""

    def __init__(self) -> None:
        self._seen = [0.0] * CLASSES
        self._right = [[0.0] * MOST_CANDIDATES for _ in range(CLASSES)]

    def chances(self, scores: Sequence[float]) -> tuple[int, list[float]]:
        """The class of these scores, which fall from 0 (nats), and the log of each candidate's probability."""
        shares = [exp(score) for score in scores]
        whole = sum(shares)
        known = min(CLASSES - 1, int(CLASSES / whole))
        seen, right = self._seen[known] + OWN_WEIGHT, self._right[known]
        own = OWN_WEIGHT / whole
        rates = [(times + own * share) / seen for share, times in zip(shares, right, strict=False)]
        for rank in reversed(range(len(rates) - 1)):
            # A worse rank that was right more often, by chance, is not put first: the better one counts as likely.
            rates[rank] = max(rates[rank], rates[rank + 1])
        chances = [log(min(1.0, max(rate, LEAST_PROBABILITY))) for rate in rates]
        return known, chances

    def observe(self, known: int, rank: int | None) -> None:
        """Note which candidate of a place of class `known` was decided; None: another token."""
        right = self._right[known]
        self._seen[known] = KEPT_SHARE * self._seen[known] + 1.0
        for at in range(len(right)):
            right[at] = KEPT_SHARE * right[at] + (at == rank)


class DraftSession:
    """The tree of one session. The likeliest token behind a place becomes a node at once; the others are candidates,
    and become nodes when they are chosen to be extended, or are decided. Nodes are numbered in the order in which they
    are sent. A decided token moves the root to the child that equals it, and prunes the rest. Where it is no child and
    no candidate, or was never sent, a new tree begins there.

    A pace with one branch makes a chain: one token is drawn behind each place.

    Invariant: a node's parent is the root or live; a sent node's parent was sent before it, or is the root;
    when a node was added, in_flight was at most what the pace of that moment allowed.

    unsent: nodes that no proposal has carried yet, in the order in which they will be numbered.

    Args:
        chain: number of the first tree; above those of a session that this one replaces.
        context: most tokens that the drafter's model can hold; a text that has reached it is not drafted for.
        weighed: its rule weighs draft tokens by what they were drawn from. Then no stop may depend on them: a chunk's
        length is fixed before its first token is drawn. epoch: names the randomness to
        draw with; a new one voids what is not decided.
        branching: it may branch: its rule and its model allow it.
        rates: what is known of the drafter's candidates; sessions share it.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        pace: Pace,
        chain: int = 0,
        context: int | None = None,
        weighed: bool = False,
        epoch: int = 0,
        branching: bool = False,
        rates: CandidateRates | None = None,
    ) -> None:
        self.text = Text(tokens)
        self.pace = pace
        self.context = context
        self.weighed = weighed
        self.epoch = epoch
        self._branching = branching and not weighed
        self._rates = rates or CandidateRates()
        self._chunk = pace.chunk
        self._order = count()
        self.chain = chain - 1
        self.root = DraftNode(None, -1, -1, 0.0)
        self._begin()

    def _begin(self) -> None:
        """Begin a new tree behind the decided text."""
        self._prune(list(self.root.children.values()))
        self.root.live = False
        self.root = DraftNode(None, -1, self.decided - 1, 0.0)
        self._frontier: list[tuple[float, int, DraftNode, int]] = []
        self.in_flight = self._taken = self._forwards = 0
        self.unsent: list[DraftNode] = []
        self._number_anew()

    def _number_anew(self) -> None:
        self.chain += 1
        self.base = self.decided
        self.root.number = BEFORE
        self._size = 0

    @property
    def decided(self) -> int:
        """Where the decided text ends."""
        return len(self.text)

    @property
    def branches(self) -> int:
        """How many nodes a forward may extend."""
        return self.pace.branches if self._branching else 1

    @property
    def allowed(self) -> int:
        """Most nodes that may descend from the decided text."""
        return self.pace.nodes if self._branching else self.pace.run_ahead

    @property
    def line(self) -> list[int]:
        """The decided text and its likeliest continuation, as far as it is drafted: all of a chain."""
        return [*self.text.tokens, *(node.token for node in self._continuation())]

    def _continuation(self) -> Iterator[DraftNode]:
        """The likeliest continuation of the decided text, as far as it is drafted; of a chain that is all."""
        node = self.root
        while node.children:
            node = next(iter(node.children.values()))
            yield node

    def lateness(self, end: int) -> tuple[int, int]:
        """Of the positions that an advance to `end` decides: how many the run-ahead had allowed to draft, and how many
        of these lie beyond the likeliest continuation that was sent.
        """
        due = max(0, min(end - self.decided, self.pace.run_ahead))
        sent = sum(1 for _ in takewhile(lambda node: node.number is not None, islice(self._continuation(), due)))
        return due, due - sent

    # What to draft

    @property
    def _least(self) -> float:
        """The probability of a path below which it is not extended; a chain's are not known."""
        return NEGLIGIBLE if self.branches > 1 else 0.0

    @property
    def wants_token(self) -> bool:
        probability = self.probability
        if probability is None or probability < self._least:
            return False
        ahead = self.in_flight + self._taken + self._is_candidate
        return ahead < self.allowed and (self.context is None or self.decided + ahead < self.context)

    @property
    def _is_candidate(self) -> bool:
        """Whether what is to be extended next is a candidate, no node yet: it becomes one when it is taken."""
        if self.root.drawn is None:
            return False
        _, _, parent, rank = self._frontier[0]
        assert parent.drawn is not None
        return parent.drawn.tokens[rank] not in parent.children

    @property
    def probability(self) -> float | None:
        """Probability that the path to what is extended next is decided; None while nothing is."""
        if self.root.drawn is None:
            return None if self._taken else 1.0
        self._skip_stale()
        return exp(-self._frontier[0][0] - self.root.chance) if self._frontier else None

    def _skip_stale(self) -> None:
        while self._frontier and not self._extensible(*self._frontier[0][2:]):
            heappop(self._frontier)

    @staticmethod
    def _extensible(parent: DraftNode, rank: int) -> bool:
        assert parent.drawn is not None
        child = parent.children.get(parent.drawn.tokens[rank])
        return parent.live and (child is None or child.drawn is None)

    def take(self) -> DraftNode:
        """The node to extend next, which `extend` must follow for; only where a token is wanted."""
        self._taken += 1
        if self.root.drawn is None:
            return self.root
        self._skip_stale()
        _, _, parent, rank = heappop(self._frontier)
        if self.branches > 1:
            self._push(parent, rank + 1)
        return self._child(parent, rank)

    def _push(self, parent: DraftNode, rank: int) -> None:
        if rank < len(parent.chances):
            heappush(self._frontier, (-parent.chance - parent.chances[rank], next(self._order), parent, rank))

    def _child(self, parent: DraftNode, rank: int) -> DraftNode:
        """The node of a candidate, which becomes one if it is none."""
        assert parent.drawn is not None
        token = parent.drawn.tokens[rank]
        child = parent.children.get(token)
        if child is None:
            chance = parent.chance + parent.chances[rank]
            child = parent.children[token] = DraftNode(parent, token, parent.position + 1, chance)
            self.in_flight += 1
            self.unsent.append(child)
        return child

    def path(self, node: DraftNode) -> tuple[int, ...]:
        """The draft tokens behind the decided text that lead to a node, its own included."""
        tokens = []
        while node is not self.root:
            tokens.append(node.token)
            assert node.parent is not None
            node = node.parent
        return tuple(reversed(tokens))

    def extend(self, node: DraftNode, drawn: Drawn) -> None:
        """Take in what may follow a node that was taken."""
        if not self.unsent:
            self._chunk = self.pace.chunk
        self._taken -= 1
        node.drawn = drawn
        if not drawn.tokens:
            return
        if len(drawn.tokens) > 1 or self.branches > 1:
            node.bin, node.chances = self._rates.chances(drawn.scores)
        else:
            node.chances = (0.0,)
        self._child(node, 0).weights = drawn.weights
        self._push(node, 0)

    def drafted(self, token: int, weights: Weights | None = None) -> None:
        """Extend what is to be extended next by one token, as a chain is."""
        self.extend(self.take(), Drawn((token,), weights))
        self.forward_ended()

    def forward_ended(self) -> None:
        """Note that a forward has extended nodes."""
        self._forwards += 1

    # What is decided

    def advance(self, position: int, tokens: Sequence[int], pace: Pace, epoch: int = 0) -> int:
        """Take in decided tokens; returns the position up to which the text equals what was held before.

        That is decided text, then nodes. Where all that was decided had been drafted it is the end of the `line`.

        Raises:
            Desynchronised: `position` lies behind the decided text known here.
        """
        if position > self.decided:
            raise Desynchronised(f"advance at {position}, but only {self.decided} positions are known as decided")
        narrowed, self.pace = self.branches > 1 and pace.branches == 1, pace
        end = position + len(tokens)
        agreed = position + self.text.common_prefix(position, tokens)
        same_epoch, self.epoch = epoch == self.epoch, epoch
        if agreed < min(end, self.decided) or end < self.decided:
            self.text.truncate(min(agreed, end))
            self.text.extend(tokens[agreed - position :])
            self._begin()
            return min(agreed, end)
        fresh = tokens[self.decided - position :]
        kept = self.decided + self._follow(fresh)
        self.text.extend(fresh)
        if kept < end or not same_epoch:
            self._begin()
            return kept
        if fresh:
            self.unsent = [node for node in self.unsent if node.live and not node.decided]
            if len(self._frontier) > MOST_STALE + 2 * self.in_flight:
                self._frontier = [entry for entry in self._frontier if self._extensible(*entry[2:])]
                heapify(self._frontier)
            if self.root.number is None:
                # Nothing of what is left was sent, and decided tokens need not be.
                self._number_anew()
        if narrowed:
            self._narrow()
        if not self.unsent:
            self._forwards = 0
        return self.decided + sum(1 for _ in self._continuation())

    def _narrow(self) -> None:
        """Make a chain of the tree: its likeliest continuation. Where a runner-up is decided a new tree begins."""
        line = (self.root, *self._continuation())
        for node in line[:-1]:
            first, *siblings = node.children.values()
            self._prune(siblings)
            assert node.drawn is not None
            node.drawn = node.drawn._replace(tokens=node.drawn.tokens[:1], scores=node.drawn.scores[:1])
            node.chances, node.children = node.chances[:1], {first.token: first}
        self.unsent = [node for node in self.unsent if node.live]
        self._frontier = []
        if len(line) > 1:
            self._push(line[-2], 0)

    def _follow(self, tokens: Sequence[int]) -> int:
        """Move the root along decided tokens; returns how many it found."""
        for followed, token in enumerate(tokens):
            root, child = self.root, self._decided_child(token)
            if child is None:
                return followed
            del root.children[token]
            self._prune(list(root.children.values()))
            root.live, child.decided, child.parent = False, True, None
            self.root = child
            self.in_flight -= 1
        return len(tokens)

    def _decided_child(self, token: int) -> DraftNode | None:
        drawn = self.root.drawn
        if drawn is None:
            return None
        rank = drawn.tokens.index(token) if token in drawn.tokens else None
        if self.branches > 1:
            self._rates.observe(self.root.bin, rank)
        return None if rank is None else self._child(self.root, rank)

    def _prune(self, nodes: list[DraftNode]) -> None:
        while nodes:
            node = nodes.pop()
            node.live = False
            self.in_flight -= 1
            nodes.extend(node.children.values())

    # What to send

    def take_proposal(self) -> Proposal | None:
        """The next piece if one is due: full, or all that the run-ahead allows."""
        taken = self._due_nodes()
        if not taken:
            return None
        offset = self._size
        parents = tuple(self._numbered(node) for node in taken)
        line = all(parent == number - 1 for number, parent in enumerate(parents, offset))
        return Proposal(
            source=0,
            chain=self.chain,
            base=self.base,
            offset=offset,
            tokens=tuple(node.token for node in taken),
            prefix_hash=self.text.hash_at(self.base) if offset == 0 else None,
            weights=tuple(node.weights for node in taken if node.weights is not None),
            epoch=self.epoch,
            parents=() if line else parents,
        )

    def _due_nodes(self) -> list[DraftNode]:
        if self.branches > 1:
            chunk, ready = MOST_NODES, self._forwards >= self.pace.chunk
        else:
            chunk = self._chunk if self.weighed else self.pace.chunk
            ready = len(self.unsent) >= chunk
        if not self.unsent or (not ready and self.wants_token):
            return []
        taken, self.unsent = self.unsent[:chunk], self.unsent[chunk:]
        if not self.unsent:
            self._forwards = 0
        return taken

    def _numbered(self, node: DraftNode) -> int:
        """Give a node its number; returns its parent's."""
        node.number, self._size = self._size, self._size + 1
        assert node.parent is not None
        assert node.parent.number is not None
        return node.parent.number
