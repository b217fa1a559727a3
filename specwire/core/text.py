"""A text: its tokens by position, a 64-bit hash of every prefix, when it ends; and trees of draft tokens behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass

from specwire.core.invalid import InvalidParameter
from specwire.core.messages import FinishReason, Weights

MASK = (1 << 64) - 1
EMPTY_HASH = 0x243F6A8885A308D3
STEP = 0x9E3779B97F4A7C15


def extend_hash(value: int, token: int) -> int:
    """Hash of a prefix longer by `token`: splitmix64's finaliser over a running sum.

    It tells apart texts that differ by accident (a late proposal, a lost message). It is no defence against forgery and
    needs none: under the exact rules a forged chain can only be refused.
    """
    mixed = (value ^ (token + 1)) + STEP & MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & MASK
    return mixed ^ (mixed >> 31)


def hash_of(tokens: Iterable[int]) -> int:
    value = EMPTY_HASH
    for token in tokens:
        value = extend_hash(value, token)
    return value


class Text:
    """Tokens 0 .. len-1 of prompt + output. Hashes are computed when they are asked for; many texts never need them.

    Invariant: 1 <= len(_hashes) <= len(tokens) + 1, and _hashes[p] is the hash of tokens[:p].
    """

    __slots__ = ("_hashes", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = list(tokens)
        self._hashes = [EMPTY_HASH]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens.extend(tokens)

    def truncate(self, length: int) -> None:
        """Drop the tokens at positions >= length; a no-op where the text is not longer."""
        del self.tokens[length:]
        del self._hashes[length + 1 :]

    def hash_at(self, position: int) -> int:
        """Hash of the text before `position`."""
        hashes = self._hashes
        for token in self.tokens[len(hashes) - 1 : position]:
            hashes.append(extend_hash(hashes[-1], token))
        return hashes[position]

    def common_prefix(self, position: int, tokens: Sequence[int]) -> int:
        """How many of `tokens`, laid at `position`, equal what the text holds there."""
        for index, token in enumerate(tokens):
            if position + index >= len(self.tokens) or self.tokens[position + index] != token:
                return index
        return len(tokens)


# ----------------------------------------------------------------------------------------------------------------------
# When a text ends: what a request asks for, and what follows from it with the prompt and the model.

MOST_STOP_IDS = 1024


def check_stop_ids(stop_ids: Sized) -> None:
    """How many they are. Raises InvalidParameter."""
    if len(stop_ids) > MOST_STOP_IDS:
        raise InvalidParameter("stop_ids", f"at most {MOST_STOP_IDS} are allowed, not {len(stop_ids)}")


@dataclass(frozen=True, slots=True)
class Stopping:
    """max_tokens and min_tokens count the tokens decided after the prompt.

    Before min_tokens no id that would end the text is drawn, and no stop string counts that is completed by then.
    """

    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens >= 1 << 32:
            raise InvalidParameter("max_tokens", f"must be a number of 32 bits, not {self.max_tokens}")
        if self.max_tokens < 1:
            raise InvalidParameter("max_tokens", f"must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"must be from 0 to max_tokens, which is {self.max_tokens}, not {self.min_tokens}"
            )
        check_stop_ids(self.stop_ids)
        for token in self.stop_ids:
            if not 0 <= token < 1 << 32:
                raise InvalidParameter("stop_ids", f"must be ids from 0 to {(1 << 32) - 1}, not {token}")


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a session's text ends: `end` is its greatest length in tokens, prompt included.

    Before `least`, likewise a length, no id that would end it is drawn.
    """

    end: int
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    least: int = 0

    @classmethod
    def of(cls, stopping: Stopping, prompt_length: int, eos_ids: frozenset[int], context: int) -> Ending:
        end = min(prompt_length + stopping.max_tokens, context)
        least = prompt_length + stopping.min_tokens if stopping.min_tokens else 0
        return cls(end, frozenset() if stopping.ignore_eos else eos_ids, stopping.stop_ids, least)

    def banned(self, position: int) -> tuple[int, ...]:
        """Ids that may not be drawn at `position`."""
        return tuple(self.eos_ids | self.stop_ids) if position < self.least else ()

    def cut(self, position: int, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of `tokens`, decided at `position`, belong to the text, and why it ends there if it does."""
        for index, token in enumerate(tokens):
            if token in self.eos_ids:
                return index + 1, FinishReason.EOS
            if token in self.stop_ids:
                return index + 1, FinishReason.STOP_ID
            if position + index + 1 >= self.end:
                return index + 1, FinishReason.LENGTH
        return len(tokens), None


def check_min_tokens(stopping: Stopping, eos_ids: frozenset[int], vocabulary: int) -> None:
    """Refuse min_tokens where every id would end the text, so that none could be drawn."""
    ending = stopping.stop_ids if stopping.ignore_eos else stopping.stop_ids | eos_ids
    if stopping.min_tokens and len(ending) >= vocabulary:
        raise InvalidParameter("min_tokens", f"{stopping.min_tokens}: each of the {vocabulary} ids ends the text")


# ----------------------------------------------------------------------------------------------------------------------
# A source's draft tokens behind the decided text: a tree. A chain is the case in which nothing branches.

# The parent of a tree's first nodes: the decided text before its base.
BEFORE = -1


@dataclass(slots=True, eq=False)
class Node:
    """A draft token at `position`, behind node `parent`.

    children: their numbers by token, in the order drafted: the likeliest first. weights: what the token was drawn from,
    where the rule weighs it.
    """

    number: int
    parent: int
    token: int
    position: int
    children: dict[int, int]
    weights: Weights | None = None


class Tree:
    """Draft tokens that descend from the decided text, numbered 0, 1, ... in the order drafted.

    A decided token moves the root to the child that equals it, and all that does not descend from there is pruned.
    Numbers of pruned nodes are not used again, and what is drafted behind them is dropped. Where no child equals the
    decided token, none is left: a sibling that was drafted before its source heard of it may still come.

    number: rises with each new tree of a source. base: where its first nodes stand. size: nodes drafted, pruned ones
    too. root: the last decided node, or BEFORE. nodes: those that descend from it, by number.

    Invariants: a node's parent is the root or there, and its number is lower; siblings differ; the decided text holds
    the root's path; `_path`, where it is known, is what `_best_path` found by the rates of that time.
    """

    __slots__ = ("_path", "_root", "base", "nodes", "number", "size")

    def __init__(self, number: int, base: int) -> None:
        self.number = number
        self.base = base
        self.size = 0
        self.nodes: dict[int, Node] = {}
        self._root = Node(BEFORE, BEFORE, -1, base - 1, {})
        self._path: list[Node] | None = []

    @property
    def root(self) -> int:
        return self._root.number

    @property
    def position(self) -> int:
        """Where the root's children stand."""
        return self._root.position + 1

    def node(self, number: int) -> Node | None:
        """The root or a node behind it; None of others."""
        return self._root if number == self._root.number else self.nodes.get(number)

    def extend(
        self, tokens: Sequence[int], parents: Sequence[int], weights: Sequence[Weights | None] | None = None
    ) -> bool:
        """Add the next nodes; returns whether any was taken: one is not whose parent is pruned, or has such a child."""
        nodes, root, path, last = self.nodes, self._root, self._path, self._root
        if path:
            last = path[-1]
        added = None
        for number, (token, parent) in enumerate(zip(tokens, parents, strict=True), self.size):
            above = root if parent == root.number else nodes.get(parent)
            if above is None or token in above.children:
                continue
            above.children[token] = number
            added = nodes[number] = Node(number, parent, token, above.position + 1, {})
            if weights is not None:
                added.weights = weights[number - self.size]
            if path is not None and above is last:
                path.append(added)
                last = added
            else:
                path = self._path = None
        self.size += len(tokens)
        return added is not None

    def follow(self, text: Text) -> bool:
        """Move down along the decided text as far as there are nodes.

        Returns whether it ends where there are children, all of which differ from the text.
        """
        for token in text.tokens[self.position :]:
            children = len(self._root.children)
            if not self.step(token):
                return children > 0
        return False

    def step(self, token: int) -> bool:
        """Move the root to the child that equals the decided token; False where none does, and all are pruned."""
        children = self._root.children
        kept = children.get(token)
        if kept is None:
            self._root.children, self._path = {}, []
            self.nodes.clear()
            return False
        if len(children) > 1:
            self._prune([child for child in children.values() if child != kept])
        self._root = self.nodes.pop(kept)
        if self._path and self._path[0] is self._root:
            del self._path[0]
        else:
            self._path = None
        return True

    def _prune(self, numbers: list[int]) -> None:
        while numbers:
            numbers.extend(self.nodes.pop(numbers.pop()).children.values())

    def behind(self, tokens: Sequence[int]) -> Node | None:
        """The node to which `tokens` lead from the root; None where they lead nowhere."""
        node = self._root
        for token in tokens:
            number = node.children.get(token)
            if number is None:
                return None
            node = self.nodes[number]
        return node

    def path(self, rates: Sequence[float]) -> list[Node]:
        """The path from the root on which most tokens are expected to be decided.

        rates: by rank among siblings, how likely a child is the decided token where its parent is.
        """
        if self._path is None:
            self._path = self._best_path(rates)
        return self._path

    def _best_path(self, rates: Sequence[float]) -> list[Node]:
        """Children have higher numbers than their parents, so one pass from the last to the first sees them before."""
        best: dict[int, tuple[float, Node]] = {}
        for node in (*reversed(self.nodes.values()), self._root):
            for rank, number in enumerate(node.children.values()):
                rate = rates[min(rank, len(rates) - 1)]
                expected = rate * (1.0 + (best[number][0] if number in best else 0.0))
                if node.number not in best or expected > best[node.number][0]:
                    best[node.number] = expected, self.nodes[number]
        path, at = [], self._root.number
        while at in best:
            node = best[at][1]
            path.append(node)
            at = node.number
        return path
