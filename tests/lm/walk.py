"""Random walks over the slots of a model, held against the model's own cache-less forward: of texts, and of trees."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from specwire.core.model import TreeFeed
from specwire.lm import Feed, LanguageModel
from tests.lm.models import CONTEXT, TOLERANCE, VOCABULARY, plain

# Most draft rows of a slot, most tokens of a feed, and the room that a text leaves for them.
MOST_NODES, MOST_FED, ROOM = 14, 5, 20


class Texts:
    """What each slot should hold, and a random walk of feeds and rollbacks over it."""

    def __init__(
        self, model: PreTrainedModel, lm: LanguageModel, seed: int, tolerance: float = TOLERANCE, copies: bool = True
    ) -> None:
        """copies: from slot to slot, too."""
        self.model, self.lm, self.tolerance, self.copies = model, lm, tolerance, copies
        self.random = random.Random(seed)
        self.held: list[list[int]] = [[] for _ in range(lm.slots)]

    def roll_back(self, slot: int) -> None:
        length = self.random.randint(0, len(self.held[slot]))
        self.lm.rollback(slot, length)
        self.lm.rollback(slot, length)  # idempotent
        del self.held[slot][length:]

    def copy(self) -> None:
        source, target = self.random.sample(range(self.lm.slots), 2)
        length = self.random.randint(0, len(self.held[source]))
        self.lm.copy(source, target, length)
        self.held[target] = self.held[source][:length]

    def feed(self, slot: int) -> Feed:
        start = self.random.randint(max(0, len(self.held[slot]) - 4), min(len(self.held[slot]), CONTEXT - 1))
        count = self.random.randint(1, min(7, CONTEXT - start))
        tokens = [self.random.randrange(VOCABULARY) for _ in range(count)]
        self.held[slot][start:] = tokens
        return Feed(slot, start, tokens, self.random.randint(0, count))

    def step(self) -> None:
        if self.random.random() < 0.3:
            self.roll_back(self.random.randrange(self.lm.slots))
        if self.copies and self.lm.slots > 1 and self.random.random() < 0.2:
            self.copy()
        chosen = self.random.sample(range(self.lm.slots), self.random.randint(1, self.lm.slots))
        feeds = [self.feed(slot) for slot in chosen]
        logits = self.lm.forward(feeds).cpu()
        expected = [plain(self.model, self.held[feed.slot])[feed.stop - feed.wanted :] for feed in feeds]
        torch.testing.assert_close(logits, torch.cat(expected), atol=self.tolerance, rtol=self.tolerance)
        assert [self.lm.cached(slot) for slot in range(self.lm.slots)] == [len(text) for text in self.held]
        assert self.lm.failed == frozenset()


class Node(NamedTuple):
    """ancestors: its rows. line: tokens from the text to this one."""

    ancestors: tuple[int, ...]
    line: tuple[int, ...]


class Tree:
    """What one slot should hold: a text, and behind it nodes in the order of their rows."""

    def __init__(self, chance: random.Random, text: Sequence[int] = (), nodes: Sequence[Node] = ()) -> None:
        self.random, self.text, self.nodes = chance, list(text), list(nodes)

    @property
    def rows(self) -> int:
        return len(self.text) + len(self.nodes)

    def copied(self, length: int) -> Tree:
        return Tree(self.random, self.text[:length], self.nodes[: max(0, length - len(self.text))])

    def rolled_back(self, length: int) -> None:
        """Nodes that are left see what they saw only while the text is whole."""
        self.nodes = self.nodes[: max(0, length - len(self.text))]
        del self.text[length:]

    def line(self, slot: int) -> tuple[Feed, list[list[int]]]:
        """A feed that goes on with the text, and the text behind which each wanted row stands."""
        start = self.random.randint(max(0, len(self.text) - 3), len(self.text))
        tokens = self._tokens(self.random.randint(1, MOST_FED))
        self.text[start:], self.nodes = tokens, []
        wanted = self.random.randint(0, len(tokens))
        ends = range(len(self.text) - wanted, len(self.text))
        return Feed(slot, start, tokens, wanted), [self.text[: end + 1] for end in ends]

    def growth(self, slot: int) -> tuple[Feed, list[list[int]]]:
        """Likewise of nodes behind the text, behind earlier nodes, and behind each other."""
        trunk, start, tokens = len(self.text), self.rows, self._tokens(self.random.randint(1, MOST_FED))
        for token in tokens:
            parent = max(self.random.randrange(-1, len(self.nodes)) for _ in range(2))
            above = Node((), ()) if parent < 0 else self.nodes[parent]
            ancestors = above.ancestors if parent < 0 else (*above.ancestors, trunk + parent)
            self.nodes.append(Node(ancestors, (*above.line, token)))
        fed = self.nodes[-len(tokens) :]
        wanted = self.random.randint(0, len(tokens))
        tree = TreeFeed(trunk, tuple(node.ancestors for node in fed))
        return Feed(slot, start, tokens, wanted, tree), [[*self.text, *node.line] for node in fed[len(fed) - wanted :]]

    def pruned(self) -> tuple[int, list[int]]:
        """Decide a node, or none, and drop what does not descend from it, and some leaves: what is to be kept."""
        trunk = len(self.text)
        decided = self.random.choice([None, *range(min(3, len(self.nodes)))])
        root = Node((), ()) if decided is None else self.nodes[decided]
        path = () if decided is None else (*root.ancestors, trunk + decided)
        below = [trunk + at for at, node in enumerate(self.nodes) if node.ancestors[: len(path)] == path]
        dropped: set[int] = set()
        for row in below:
            if self.random.random() < 0.1 or dropped & {*self.nodes[row - trunk].ancestors}:
                dropped.add(row)
        rows = [*path, *(row for row in below if row not in dropped)]
        place = {row: trunk + at for at, row in enumerate(rows)}
        left = [self.nodes[row - trunk] for row in rows[len(path) :]]
        self.text += root.line
        self.nodes = [
            Node(tuple(place[row] for row in node.ancestors[len(path) :]), node.line[len(path) :]) for node in left
        ]
        return trunk, rows

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]


class Trees:
    """Random trees in all slots of a model, held against the model's own cache-less forward of each node's line."""

    def __init__(
        self,
        model: PreTrainedModel,
        lm: LanguageModel,
        seed: int,
        tolerance: float = TOLERANCE,
        spoil: Callable[[LanguageModel, int, range], None] = lambda _, __, ___: None,
    ) -> None:
        """spoil: what is done to rows of a slot that hold nothing any more."""
        self.model, self.lm, self.tolerance, self.spoil = model, lm, tolerance, spoil
        self.random = random.Random(seed)
        self.trees = [Tree(self.random) for _ in range(lm.slots)]
        # Nodes whose row was no position, and nodes that survived a move of their rows: the walk was worth it.
        self.aside = self.moved = 0

    def step(self) -> None:
        for slot, tree in enumerate(self.trees):
            self._change(slot, tree)
        self._check()
        chosen = self.random.sample(range(self.lm.slots), self.random.randint(1, self.lm.slots))
        fed = [self._feed(slot, self.trees[slot]) for slot in chosen]
        feeds = [feed for feed, _ in fed]
        logits = self.lm.forward(feeds).cpu()
        self.aside += sum(position != row for feed in feeds for row, position in enumerate(feed.positions, feed.start))
        assert self.lm.failed == frozenset()
        self._check()
        lines = [line for _, behind in fed for line in behind]
        if lines:
            expected = last_rows(self.model, lines)
            torch.testing.assert_close(logits, expected, atol=self.tolerance, rtol=self.tolerance)

    def _feed(self, slot: int, tree: Tree) -> tuple[Feed, list[list[int]]]:
        if not tree.text or (self.random.random() < 0.1 and len(tree.text) < CONTEXT - ROOM - MOST_FED):
            return tree.line(slot)
        if len(tree.nodes) > MOST_NODES:
            self.lm.rollback(slot, len(tree.text))
            tree.nodes = []
        return tree.growth(slot)

    def _change(self, slot: int, tree: Tree) -> None:
        kind = self.random.random()
        if kind < 0.4:
            start, rows = tree.pruned()
            self.lm.keep(slot, start, rows)
            self.moved += len(tree.nodes) if rows and rows[-1] >= start + len(rows) else 0
        elif kind < 0.45:
            tree.rolled_back(length := self.random.randint(len(tree.text), tree.rows))
            self.lm.rollback(slot, length)
        elif kind < 0.5:
            source = self.random.choice([at for at in range(self.lm.slots) if at != slot])
            length = self.random.randint(len(self.trees[source].text), self.trees[source].rows)
            self.lm.copy(source, slot, length)
            self.trees[slot] = self.trees[source].copied(length)
        if len(self.trees[slot].text) > CONTEXT - ROOM:
            self.trees[slot].rolled_back(length := 3)
            self.lm.rollback(slot, length)
        self.spoil(self.lm, slot, range(self.lm.cached(slot), CONTEXT))

    def _check(self) -> None:
        assert [self.lm.cached(slot) for slot in range(self.lm.slots)] == [tree.rows for tree in self.trees]


@torch.inference_mode()
def last_rows(model: PreTrainedModel, lines: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of the last token of each line, by one cache-less forward of the model itself; nobody sees the padding."""
    longest = max(map(len, lines))
    padded = torch.tensor([[*line, *[0] * (longest - len(line))] for line in lines])
    logits: torch.Tensor = model(input_ids=padded, use_cache=False).logits
    return torch.stack([row[len(line) - 1] for row, line in zip(logits, lines, strict=True)]).float()
