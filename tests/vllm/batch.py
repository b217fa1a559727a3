"""vLLM's side, emulated: rows without names, texts in one array, windows tested as its greedy test does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specwire.lm.scripted import Script
from specwire.vllm.drafting import VllmRow, VllmTarget

Propose = Callable[[Sequence[Sequence[int]], npt.NDArray[np.int32], npt.NDArray[np.int32]], list[list[int]]]


@dataclass(eq=False)
class Text:
    """A request: its prompt and output. window: what the next step tests. tested, accepted: draft tokens so far."""

    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    tested: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]


class Batch:
    """Rows of texts that one step decides.

    most: draft tokens that a step tests of a row, whatever was proposed.
    steps: so many were run.
    """

    def __init__(self, script: Script, engine: VllmTarget, propose: Propose, most: int | None = None) -> None:
        self.rows: list[Text | None] = []
        self.steps = 0
        self._script = script
        self._engine = engine
        self._propose = propose
        self._most = engine.most if most is None else most

    def add(self, prompt: Sequence[int]) -> Text:
        text = Text(tuple(prompt))
        self.rows.append(text)
        return text

    def choice(self, tokens: Sequence[int]) -> int:
        """The target's greedy token behind these."""
        prefix = 0
        for token in tokens:
            prefix = self._script.extend(prefix, token)
        return int(np.argmax(self._script.logits(prefix, len(tokens))))

    def plain(self, prompt: Sequence[int], length: int) -> list[int]:
        text = list(prompt)
        for _ in range(length):
            text.append(self.choice(text))
        return text[len(prompt) :]

    def step(self) -> None:
        """Decide tokens of every row, and take what is proposed next. A row of None is a prompt that is being fed."""
        self.steps += 1
        decided = [[] if text is None else self._decide(text) for text in self.rows]
        lengths = np.zeros(len(self.rows), np.int32)
        ids = np.zeros((len(self.rows), self._engine.context), np.int32)
        for at, text in enumerate(self.rows):
            if text is not None:
                lengths[at] = len(text.tokens)
                ids[at, : lengths[at]] = text.tokens
        proposed = self._propose(decided, lengths, ids)
        assert len(proposed) == len(self.rows)
        for text, window in zip(self.rows, proposed, strict=True):
            if text is None:
                assert window == []
            else:
                assert len(window) <= self._engine.most
                assert not window or len(text.tokens) + len(window) < self._engine.context
                text.window = window[: self._most]

    def _decide(self, text: Text) -> list[int]:
        decided: list[int] = []
        for guess in [*text.window, -1]:
            decided.append(self.choice([*text.tokens, *decided]))
            if decided[-1] != guess:
                break
        text.tested += len(text.window)
        text.accepted += len(decided) - 1
        text.output += decided
        return decided


def rows_of(
    decided: Sequence[Sequence[int]], lengths: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]
) -> list[VllmRow]:
    return [VllmRow(ids[at], int(lengths[at]), tuple(each)) for at, each in enumerate(decided)]
