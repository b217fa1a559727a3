"""A constraint that tests can see through: an automaton over token ids, in place of a grammar over text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from specwire.core.law.constraint import Constraint, ConstraintKind, Mask

# What a request would say; the automaton stands for it.
ASKED = Constraint(ConstraintKind.GRAMMAR, ("start: /automaton/",))


@dataclass(frozen=True)
class Automaton:
    """steps[state][token] is the next state; a text may end in the `accepting` ones. It begins in state 0."""

    steps: Sequence[Mapping[int, int]]
    accepting: frozenset[int]
    vocabulary: int
    end: int

    def mask(self, state: int) -> Mask:
        mask = np.zeros(self.vocabulary, dtype=np.bool_)
        mask[[token for token in self.steps[state] if token != self.end]] = True
        mask[self.end] = state in self.accepting
        return mask

    def state(self, output: Sequence[int]) -> int | None:
        """Behind an output that has not ended; None where it does not allow that."""
        state: int | None = 0
        for token in output:
            state = None if state is None or token == self.end else self.steps[state].get(token)
        return state


class Walk:
    """Implements `specwire.core.law.constraint.Matcher`."""

    trouble = ""
    broken = False

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._states = [0]
        self._ended = False

    @property
    def length(self) -> int:
        return len(self._states) - 1 + self._ended

    def take(self, tokens: Sequence[int]) -> int:
        for taken, token in enumerate(tokens):
            if self._ended or not self._automaton.mask(self._states[-1])[token]:
                return taken
            if token == self._automaton.end:
                self._ended = True
            else:
                self._states.append(self._automaton.steps[self._states[-1]][token])
        return len(tokens)

    def rollback(self, length: int) -> None:
        if length < self.length:
            self._ended = False
            del self._states[length + 1 :]

    def ask(self, window: Sequence[int]) -> None:
        """Nothing takes time here."""

    def heard(self, limit_s: float) -> bool:
        return True

    @property
    def known(self) -> tuple[int, ...] | None:
        return None

    def masks(self, window: Sequence[int]) -> list[Mask | None]:
        start = self.length
        masks: list[Mask | None] = [None] * (len(window) + 1)
        for index in range(len(masks)):
            if self._ended:
                break
            masks[index] = self._automaton.mask(self._states[-1])
            if not self.take(window[index : index + 1]):
                break
        self.rollback(start)
        return masks


class Late(Walk):
    """One that has not always answered by the time that it is looked at; `late` says when, over and over."""

    def __init__(self, automaton: Automaton, late: Sequence[bool]) -> None:
        super().__init__(automaton)
        self._late = cycle(late)
        self._asked: tuple[int, tuple[int, ...]] | None = None
        self._answered: tuple[int, tuple[int, ...]] | None = None

    def ask(self, window: Sequence[int]) -> None:
        known = self.known
        if self._asked is None and (known is None or known[: len(window)] != tuple(window)):
            self._asked = (self.length, tuple(window))

    def heard(self, limit_s: float) -> bool:
        if self._asked is not None and not next(self._late):
            self._asked, self._answered = None, self._asked
        return self._asked is None

    @property
    def known(self) -> tuple[int, ...] | None:
        return self._answered[1] if self._answered is not None and self._answered[0] == self.length else None
