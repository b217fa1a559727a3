"""Texts of a target on disk, with all that a head learns of them: its features at each token, and its best guesses.

A forward of the target costs several times what a head's training step does, and texts are learnt more than once: so
what it computes is computed once, and kept. Files lie side by side, a row for each token, and are read through the
page cache; `index.jsonl` has a line for each text, which is written last: what stands behind the last line's end is of
a text that was not finished when the process ended, and is cut off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specwire.core.model import ModelError

INDEX, ABOUT = "index.jsonl", "about.json"
# Guesses of the target that are kept of each token, and what stands for none.
BEST, NONE = 32, -30.0
# Every so many-th text is held out.
HELD_OUT_EVERY = 40
# Texts that are sorted by length at once, so that those of a batch are of about one length.
SORTED = 512


@dataclass(frozen=True, slots=True)
class KeptText:
    """Where a text lies, in tokens. learnt: how many of its tokens are no answer, but what it is an answer to.

    kind: what it answers. temperature: at which it was drawn; 0 for the target's best token everywhere.
    """

    at: int
    length: int
    learnt: int
    kind: str
    temperature: float

    @property
    def answer(self) -> int:
        """Tokens of the answer."""
        return self.length - self.learnt


class TokenRows(NamedTuple):
    """What is kept, a row for each token.

    tokens: (length,). features: (length, width) bfloat16, of the target's taps side by side. best: (length, BEST) ids,
    and logs: their log-probabilities, which the target gave to stand where this token stands; NONE where it was not
    asked, as within a prompt.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    best: torch.Tensor
    logs: torch.Tensor


class TextBatch(NamedTuple):
    """Texts of about one length, filled up with zeros: `TokenRows` with a first dimension more.

    scored: (texts, length), which tokens are of answers.
    """

    rows: TokenRows
    scored: torch.Tensor


class KeptTexts:
    """A folder of kept texts. about: what they are of; a folder of something else is refused.

    Raises:
        ModelError: names the file, and what is wrong with it.
    """

    def __init__(self, folder: Path, width: int, about: Mapping[str, str]) -> None:
        self._folder, self._width = folder, width
        folder.mkdir(parents=True, exist_ok=True)
        self._check(dict(about) | {"width": str(width)})
        self._kinds: dict[str, tuple[npt.DTypeLike, int]] = {
            "tokens": (np.uint32, 1),
            "features": (np.int16, width),
            "best": (np.uint32, BEST),
            "logs": (np.float16, BEST),
        }
        self.texts = self._read_index()
        self._end = self.texts[-1].at + self.texts[-1].length if self.texts else 0
        for name, (kind, count) in self._kinds.items():
            self._cut(folder / name, self._end * np.dtype(kind).itemsize * count)
        self._mapped: dict[str, npt.NDArray[Any]] = {}

    @property
    def answers(self) -> int:
        """Tokens of all answers."""
        return sum(text.answer for text in self.texts)

    @property
    def digest(self) -> str:
        """By which these texts are known again."""
        return hashlib.sha256(repr([astuple(text) for text in self.texts]).encode()).hexdigest()[:16]

    @property
    def learnt(self) -> list[KeptText]:
        return [text for index, text in enumerate(self.texts) if index % HELD_OUT_EVERY]

    @property
    def held_out(self) -> list[KeptText]:
        return self.texts[::HELD_OUT_EVERY]

    def add(self, rows: TokenRows, learnt: int, kind: str, temperature: float) -> None:
        """Keep a text; see `KeptText`."""
        written: tuple[npt.NDArray[Any], ...] = (
            rows.tokens.numpy().astype(np.uint32),
            rows.features.to(torch.bfloat16).contiguous().view(torch.int16).numpy(),
            rows.best.numpy().astype(np.uint32),
            rows.logs.clamp(min=NONE).numpy().astype(np.float16),
        )
        for name, values in zip(self._kinds, written, strict=True):
            with (self._folder / name).open("ab") as file:
                values.tofile(file)
        text = KeptText(self._end, len(rows.tokens), learnt, kind, temperature)
        with (self._folder / INDEX).open("a") as file:
            file.write(json.dumps(asdict(text)) + "\n")
        self.texts.append(text)
        self._end += text.length
        self._mapped.clear()

    def rows(self, text: KeptText) -> TokenRows:
        part = slice(text.at, text.at + text.length)
        tokens, features, best, logs = (np.array(self._map(name)[part]) for name in self._kinds)
        return TokenRows(
            torch.from_numpy(tokens[:, 0].astype(np.int64)),
            torch.from_numpy(features).view(torch.bfloat16),
            torch.from_numpy(best.astype(np.int64)),
            torch.from_numpy(logs.astype(np.float32)),
        )

    def batch(self, texts: Sequence[KeptText]) -> TextBatch:
        longest = max(text.length for text in texts)
        size = (len(texts), longest)
        tokens, scored = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.bool)
        features = torch.zeros(*size, self._width, dtype=torch.bfloat16)
        best, logs = torch.zeros(*size, BEST, dtype=torch.long), torch.full((*size, BEST), NONE)
        for row, text in enumerate(texts):
            end = text.length
            tokens[row, :end], features[row, :end], best[row, :end], logs[row, :end] = self.rows(text)
            scored[row, text.learnt : end] = True
        return TextBatch(TokenRows(tokens, features, best, logs), scored)

    def counts(self, vocabulary: int) -> torch.Tensor:
        """How often each id stands in the answers to learn from."""
        found = torch.zeros(vocabulary, dtype=torch.long)
        for text in self.learnt:
            answer = self._map("tokens")[text.at + text.learnt : text.at + text.length, 0]
            found += torch.bincount(torch.from_numpy(answer.astype(np.int64)), minlength=vocabulary)
        return found

    def _check(self, about: Mapping[str, str]) -> None:
        path = self._folder / ABOUT
        if not path.exists():
            path.write_text(json.dumps(about, indent=1) + "\n")
            return
        try:
            was = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        for key, given in about.items():
            if not isinstance(was, dict) or was.get(key) != given:
                told = was.get(key) if isinstance(was, dict) else was
                raise ModelError(f"{path}: {key}: is {told}, not {given}; keep them in another folder, or remove it")

    def _read_index(self) -> list[KeptText]:
        path = self._folder / INDEX
        if not path.exists():
            return []
        whole = path.read_text()
        lines = whole[: whole.rfind("\n") + 1]
        if lines != whole:  # the last line was not finished
            path.write_text(lines)
        try:
            return [KeptText(**json.loads(line)) for line in lines.splitlines()]
        except (ValueError, TypeError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error

    def _cut(self, path: Path, size: int) -> None:
        path.touch()
        if path.stat().st_size < size:
            raise ModelError(f"{path}: has {path.stat().st_size} bytes, and {INDEX} tells of {size}")
        os.truncate(path, size)

    def _map(self, name: str) -> npt.NDArray[Any]:
        if name not in self._mapped:
            kind, count = self._kinds[name]
            self._mapped[name] = np.memmap(self._folder / name, kind, mode="r", shape=(self._end, count))
        return self._mapped[name]


def batches(texts: Sequence[KeptText], tokens: int, seed: int) -> Iterator[list[KeptText]]:
    """Endless, in an order that is the same every time: texts of about one length, that take so many tokens at most.

    A text that is longer is a batch of its own.
    """
    random = Random(seed)
    while True:
        order, whole = list(texts), list[list[KeptText]]()
        random.shuffle(order)
        for first in range(0, len(order), SORTED):
            part = parted(sorted(order[first : first + SORTED], key=lambda text: text.length), tokens)
            random.shuffle(part)
            whole += part
        yield from whole


def parted(texts: Sequence[KeptText], tokens: int) -> list[list[KeptText]]:
    """Texts in order of their lengths, as batches of so many tokens at most with what fills them up."""
    found: list[list[KeptText]] = [[]]
    for text in texts:
        if found[-1] and (len(found[-1]) + 1) * text.length > tokens:
            found.append([])
        found[-1].append(text)
    return [batch for batch in found if batch]
