"""Texts of a target on disk, with all that a head learns of them: its features at each token, and its best guesses.

A forward of the target costs several times what a head's training step does, and texts are learnt more than once: so
what it computes is computed once, and kept. Files lie side by side, a row for each token, and are read through the
page cache; `index.jsonl` has a line for each text, which is written last: what stands behind the last line's end is of
a text that is not finished. Whoever adds texts cuts it off first; who reads them only may do so while others are added.
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
        self.about = dict(about)
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
        self._clean = False  # nothing stands behind the last text
        for name, size in self._sizes().items():
            path = folder / name
            if size and (found := path.stat().st_size if path.exists() else 0) < size:
                raise ModelError(f"{path}: has {found} bytes, and {INDEX} tells of {size}")
        self._mapped: dict[str, npt.NDArray[Any]] = {}

    def first(self, tokens: int) -> None:
        """Leave out texts behind those with the first so many tokens of answers; they stay on disk."""
        count = 0
        for number, text in enumerate(self.texts):
            if count >= tokens:
                del self.texts[number:]
                return
            count += text.answer

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
        if not self._clean:
            self._cut_off()
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

    def rows(self, text: KeptText, *, features: bool = True) -> TokenRows:
        """features: read them, too; else they have no width."""
        part = slice(text.at, text.at + text.length)
        told = np.array(self._map("features")[part]) if features else np.zeros((text.length, 0), np.int16)
        tokens, best, logs = (np.array(self._map(name)[part]) for name in ("tokens", "best", "logs"))
        return TokenRows(
            torch.from_numpy(tokens[:, 0].astype(np.int64)),
            torch.from_numpy(told).view(torch.bfloat16),
            torch.from_numpy(best.astype(np.int64)),
            torch.from_numpy(logs.astype(np.float32)),
        )

    def batch(self, texts: Sequence[KeptText], *, features: bool = True) -> TextBatch:
        """features: see `rows`."""
        longest = max(text.length for text in texts)
        size = (len(texts), longest)
        tokens, scored = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.bool)
        told = torch.zeros(*size, self._width if features else 0, dtype=torch.bfloat16)
        best, logs = torch.zeros(*size, BEST, dtype=torch.long), torch.full((*size, BEST), NONE)
        for row, text in enumerate(texts):
            end = text.length
            tokens[row, :end], told[row, :end], best[row, :end], logs[row, :end] = self.rows(text, features=features)
            scored[row, text.learnt : end] = True
        return TextBatch(TokenRows(tokens, told, best, logs), scored)

    def counts(self, vocabulary: int) -> torch.Tensor:
        """How often each id stands in the answers to learn from."""
        found = torch.zeros(vocabulary, dtype=torch.long)
        for text in self.learnt:
            answer = self._map("tokens")[text.at + text.learnt : text.at + text.length, 0]
            found += torch.bincount(torch.from_numpy(answer.astype(np.int64)), minlength=vocabulary)
        return found

    def _check(self, about: Mapping[str, str]) -> None:
        path, was = self._folder / ABOUT, kept_about(self._folder)
        if not path.exists():
            path.write_text(json.dumps(about, indent=1) + "\n")
            return
        for key, given in about.items():
            if was.get(key) != given:
                raise ModelError(
                    f"{path}: {key}: is {was.get(key)}, not {given}; keep them in another folder, or remove it"
                )

    def _read_index(self) -> list[KeptText]:
        path = self._folder / INDEX
        if not path.exists():
            return []
        whole = path.read_text()
        lines = whole[: whole.rfind("\n") + 1]  # the last line is not finished otherwise
        try:
            return [KeptText(**json.loads(line)) for line in lines.splitlines()]
        except (ValueError, TypeError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error

    def _sizes(self) -> dict[str, int]:
        """Bytes of all texts in each file."""
        return {name: self._end * np.dtype(kind).itemsize * count for name, (kind, count) in self._kinds.items()}

    def _cut_off(self) -> None:
        """Drop what is of texts that were not finished."""
        for name, size in self._sizes().items():
            path = self._folder / name
            path.touch()
            os.truncate(path, size)
        path = self._folder / INDEX
        path.touch()
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._clean = True

    def _map(self, name: str) -> npt.NDArray[Any]:
        if name not in self._mapped:
            kind, count = self._kinds[name]
            self._mapped[name] = np.memmap(self._folder / name, kind, mode="r", shape=(self._end, count))
        return self._mapped[name]


def kept_about(folder: Path) -> dict[str, str]:
    """What the texts of a folder are of; empty where there are none. Raises ModelError."""
    path = folder / ABOUT
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    return {key: str(value) for key, value in found.items()} if isinstance(found, dict) else {}


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
