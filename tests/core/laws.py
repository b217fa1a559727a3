"""Exact laws of decided texts: every outcome of every draw and coin, over fractions.

A *world* is one outcome of all randomness. `law` runs a deployment in every world and adds up the probabilities, so an
equality is a proof for its tables, not a test of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import pairwise, product

from specwire.core.messages import Number, Weights

Text = tuple[int, ...]
Row = tuple[Fraction, ...]
Table = Callable[[Text], Row]
# Draws that are made, by what they depend on.
Draws = frozenset[tuple[object, int]]
# A text, and those draws of drafter and target that what follows may depend on.
State = tuple[Text, Draws, Draws]


class Explorer:
    """Visits every sequence of choices once: each run changes the last choice that still can change."""

    def __init__(self) -> None:
        self._path: list[int] = []
        self._left: list[list[int]] = []
        self._depth = 0
        self.probability = Fraction(1)

    def choose(self, weights: Sequence[Number]) -> int:
        """An index, with a probability in proportion to its weight."""
        total = sum(weights)
        if self._depth == len(self._path):
            possible = [index for index, weight in enumerate(weights) if weight > 0]
            self._path.append(possible[0])
            self._left.append(possible[1:])
        index = self._path[self._depth]
        self._depth += 1
        self.probability *= Fraction(weights[index]) / Fraction(total)
        return index

    def next(self) -> bool:
        """Go to the next world; False after the last."""
        while self._left and not self._left[-1]:
            self._left.pop()
            self._path.pop()
        self._depth, self.probability = 0, Fraction(1)
        if not self._left:
            return False
        self._path[-1] = self._left[-1].pop(0)
        return True


@cache
def joint(p: Row, q: Row) -> tuple[Row, ...]:
    """P(argmax(log p + G) = a, argmax(log q + G) = b), the same Gumbel noise G in both.

    As a race: E_i exponential, a the least E_i / p_i, b the least E_i / q_i. With s = E_a / p_a, t = E_b / q_b and
    r = t / s the integral over s leaves that of 1 / f(r)^2, f(r) = sum over i of max(p_i, q_i r), times p_a q_b, over
    the r between p_b / q_b and p_a / q_a; f is linear between the ratios p_i / q_i.
    """
    ids = range(len(p))
    table = [[Fraction(0)] * len(p) for _ in ids]
    for a, b in product(ids, ids):
        if p[a] == 0 or q[b] == 0:
            continue
        if a == b:
            table[a][a] = 1 / sum((max(p[i] / p[a], q[i] / q[a]) for i in ids), start=Fraction(0))
        else:
            table[a][b] = p[a] * q[b] * _integral(p, q, a, b)
    return tuple(map(tuple, table))


def _integral(p: Row, q: Row, a: int, b: int) -> Fraction:
    low = p[b] / q[b]
    high = p[a] / q[a] if q[a] else None
    knots = sorted({p[i] / q[i] for i in range(len(p)) if q[i]})
    inner = [knot for knot in knots if knot > low and (high is None or knot < high)]
    ends: list[Fraction | None] = [low, *inner, high]
    if high is not None and high <= low:
        return Fraction(0)
    return sum((_piece(p, q, start, stop) for start, stop in pairwise(ends)), start=Fraction(0))


def _piece(p: Row, q: Row, start: Fraction | None, stop: Fraction | None) -> Fraction:
    """The integral of 1 / (c + d r)^2 where max(p_i, q_i r) takes the same side throughout."""
    assert start is not None
    middle = start + 1 if stop is None else (start + stop) / 2
    c = sum((pi for pi, qi in zip(p, q, strict=True) if pi > qi * middle), start=Fraction(0))
    d = sum((qi for pi, qi in zip(p, q, strict=True) if pi <= qi * middle), start=Fraction(0))
    if d == 0:
        assert stop is not None
        return (stop - start) / c**2
    until = Fraction(0) if stop is None else 1 / (d * (c + d * stop))
    return 1 / (d * (c + d * start)) - until


@dataclass
class World:
    """The target p, a drafter q, and their draws: each is made once for every text, when it is first asked for.

    What is shared between the two draws behind a text is the noise (`joint`), unless they are `independent`.
    key: what of a text its randomness depends on.
    """

    explorer: Explorer
    p: Table
    q: Table
    independent: bool = False
    key: Callable[[Text], object] = field(default=lambda text: text)
    _drafts: dict[object, int] = field(default_factory=dict)
    _owns: dict[object, int] = field(default_factory=dict)

    def draft(self, text: Text) -> int:
        key = self.key(text)
        if key not in self._drafts:
            self._drafts[key] = self.explorer.choose(self._given(text, self._owns.get(key), own=False))
        return self._drafts[key]

    def own(self, text: Text) -> int:
        key = self.key(text)
        if key not in self._owns:
            self._owns[key] = self.explorer.choose(self._given(text, self._drafts.get(key), own=True))
        return self._owns[key]

    def _given(self, text: Text, other: int | None, own: bool) -> Sequence[Fraction]:
        """The law of one draw, given the other where that has been made."""
        p, q = self.p(text), self.q(text)
        if other is None or self.independent:
            return p if own else q
        table = joint(p, q)
        return [row[other] for row in table] if own else table[other]

    def recall(self, state: State) -> None:
        """Go on where another world of the same tables has come to."""
        _, drafts, owns = state
        self._drafts.update(drafts)
        self._owns.update(owns)

    def state(self, text: Text) -> State:
        """The state of a world that has come to `text`: the draws behind it."""
        return text, _behind(text, self._drafts), _behind(text, self._owns)

    def toss(self, chance: Number) -> bool:
        return self.explorer.choose([chance, 1 - chance]) == 0

    def weights(self, text: Text) -> Weights:
        """The integers that stand for q, over its ids; those of probability 0 are left out."""
        row = self.q(text)
        kept = [token for token, share in enumerate(row) if share]
        common = 1
        for share in row:
            common *= share.denominator
        return Weights(tuple(kept), tuple(int(row[token] * common) for token in kept))


def _behind(text: Text, draws: Mapping[object, int]) -> Draws:
    """Those for places that a text which goes on from `text` can still come to."""

    def ahead(place: object) -> bool:
        return place >= len(text) if isinstance(place, int) else isinstance(place, tuple) and place[: len(text)] == text

    return frozenset((place, token) for place, token in draws.items() if ahead(place))


class Rows:
    """A `TargetWeights` behind a text and a window, in a world. Nothing is drawn at `end` or later."""

    def __init__(self, world: World, text: Text, window: Text, end: int) -> None:
        self._world = world
        self._end = end
        self._texts = [(*text, *window[:index]) for index in range(len(window) + 1)]

    def probabilities(self, row: int, ids: Sequence[int]) -> Sequence[Number]:
        p = self._world.p(self._texts[row])
        return [p[token] for token in ids]

    def entropy(self, row: int) -> float:
        raise AssertionError("no exact rule asks for it")

    def coin(self, row: int, chance: Number) -> bool:
        return self._world.toss(chance)

    def own(self, row: int) -> int:
        return self._world.own(self._texts[row]) if len(self._texts[row]) < self._end else 0

    def residual(self, row: int, scale: Number, weights: Weights) -> int:
        p = self._world.p(self._texts[row])
        rest = [max(scale * p[token] - Fraction(weights.of(token), weights.total), 0) for token in range(len(p))]
        return self._world.explorer.choose(rest)


def law(run: Callable[[World], Text], world: Callable[[Explorer], World]) -> dict[Text, Fraction]:
    """The law of the text that `run` decides in a `world`."""
    explorer = Explorer()
    texts: dict[Text, Fraction] = {}
    while True:
        text = run(world(explorer))
        texts[text] = texts.get(text, Fraction(0)) + explorer.probability
        if not explorer.next():
            return texts


def after(
    states: Mapping[State, Fraction], step: Callable[[World, Text], Text], world: Callable[[Explorer], World]
) -> dict[State, Fraction]:
    """The law of the state after one more step, from the law before it.

    Worlds in the same state go on alike, so each state is continued once.
    """
    found: dict[State, Fraction] = {}
    for state, mass in states.items():
        explorer = Explorer()
        while True:
            here = world(explorer)
            here.recall(state)
            reached = here.state(step(here, state[0]))
            found[reached] = found.get(reached, Fraction(0)) + mass * explorer.probability
            if not explorer.next():
                break
    return found


BEGINNING: Mapping[State, Fraction] = {((), frozenset(), frozenset()): Fraction(1)}


def of_texts(states: Mapping[State, Fraction]) -> dict[Text, Fraction]:
    texts: dict[Text, Fraction] = {}
    for (text, _, _), mass in states.items():
        texts[text] = texts.get(text, Fraction(0)) + mass
    return texts


def plain(p: Table, vocabulary: int, length: int) -> dict[Text, Fraction]:
    """The target's own law of its first `length` tokens."""
    texts: dict[Text, Fraction] = {(): Fraction(1)}
    for _ in range(length):
        texts = {(*text, token): mass * p(text)[token] for text, mass in texts.items() for token in range(vocabulary)}
    return {text: mass for text, mass in texts.items() if mass}
