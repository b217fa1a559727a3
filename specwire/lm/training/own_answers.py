"""A target's own answers, in batches: what it is asked it also makes up itself, and what it computes is kept.

A head that has seen what its target says, and in which words, is right far more often than one that has read other
texts. Half of the answers are the target's best tokens, half are drawn at a temperature. One forward takes a token of
each of many texts; the features that heads read of it, and the best guesses, are kept, so that no second forward over
the same texts is needed: it costs several times what a head's training step does, and texts are learnt more than once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specwire.core.model import AUTO, Feed, ModelError, is_gguf
from specwire.lm.gguf_file import read_gguf
from specwire.lm.heads.layer import Apart
from specwire.lm.kv_cache import Sizes
from specwire.lm.load import native_dtype
from specwire.lm.model_files import ModelText, files_fingerprint
from specwire.lm.pretrained import CPU, DTYPES, outline, pretrained
from specwire.lm.runners.select import How, runner_for
from specwire.lm.training.prompts import TURN_TOKENS, Prompts, TargetPrompt, texts_of
from specwire.named_models import located
from specwire.progress import ProgressBar

# ----------------------------------------------------------------------------------------------------------------------
# Texts on disk. Files lie side by side, a row for each token, and are read through the page cache; `index.jsonl` has a
# line for each text, which is written last: what stands behind the last line's end is of a text that is not finished.
# Whoever adds texts cuts it off first; who reads them only may do so while others are added.

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


# ----------------------------------------------------------------------------------------------------------------------
# Answers.

# Texts that are computed at once, positions of each, tokens of an answer, and tokens of prompts in one forward.
TEXTS, CONTEXT, LEAST_ANSWER, ANSWER, PROMPT_ROWS = 96, 1280, 8, 192, 256
# Of answers that are not greedy, and of turns that the target makes up.
GREEDY, TEMPERATURES, TURN_TEMPERATURES = 0.5, (0.7, 0.8, 0.8, 0.9, 1.0), (0.8, 0.9, 1.0)
# An answer that says the same up to LONGEST_LOOP tokens over and over, for LOOPED tokens, has ended.
LONGEST_LOOP, LOOPED = 12, 36
SAY_EVERY_S = 20.0
SEED = 20261123
# The folder beside what is trained that keeps answers, where no other one is named; hexadecimal digits by which weights
# and tokens are known again.
ANSWERS, DIGEST = "answers", 16


def answers_of(
    target: str,
    folder: Path,
    tokens: int,
    apart: Sequence[Path],
    prompts: Sequence[Path],
    tell: Callable[[str], None],
    taps: tuple[int, ...] = (),
) -> KeptTexts:
    """The first so many tokens of a target's own answers: those that a folder keeps, and more where these are too few.

    They share no run with the texts of the files `apart`. prompts: files of what is asked first. taps: what heads read
    that learn of them; none for those of the folder, or for early, middle and late ones. Raises ModelError.
    """
    spec = located(target)
    shape: Any = outline(spec).config.get_text_config()
    stated = tuple(int(tap) for tap in kept_about(folder).get("taps", "").split() if tap.isdecimal())
    layers = shape.num_hidden_layers
    taps = taps or stated or (min(2, layers), layers // 2, layers)
    about = {"target": digest_of(spec), "taps": " ".join(map(str, taps))}
    kept = KeptTexts(folder, len(taps) * shape.hidden_size, about)
    if kept.answers < tokens:
        teacher = Teacher(spec, taps)
        measured, given = [*texts_of(apart, "apart")], [*texts_of(prompts, "prompts")]
        asked = Prompts(teacher.text, teacher.ends, measured, SEED + len(kept.texts), given)
        OwnAnswers(teacher, asked, kept, SEED).write(tokens, tell)
    kept.first(tokens)
    return kept


def digest_of(spec: str) -> str:
    """Of a target's weights, wherever they are."""
    if is_gguf(spec):
        return read_gguf(spec).fingerprint()[:DIGEST]
    return files_fingerprint(spec, outline(spec).config, "float32")[:DIGEST]


class Told(NamedTuple):
    """Of a forward. logits: (feeds, vocabulary), of the last token of each. features: (tokens, taps x width)."""

    logits: torch.Tensor
    features: torch.Tensor


class Teacher:
    """A target that computes many texts at once and tells what heads read of it. Raises ModelError."""

    def __init__(self, spec: str, taps: Sequence[int], texts: int = TEXTS, context: int = CONTEXT) -> None:
        spec = located(spec)
        known = outline(spec)
        shape: Any = known.config.get_text_config()
        if not all(0 <= tap <= shape.num_hidden_layers for tap in taps):
            raise ModelError(f"taps: must be of layers 0 to {shape.num_hidden_layers}, not {[*taps]}")
        self.text: ModelText = known.text
        self.ends = _ends(shape)
        self.context = min(context, known.context)
        model = pretrained(spec, DTYPES[native_dtype()], CPU)
        fuse = Apart(len(taps), shape.hidden_size)
        sizes = Sizes(texts + 1, self.context, shape.vocab_size)
        runner, _ = runner_for(model, sizes, How(AUTO, taps=tuple(taps), fuse=fuse))
        if not runner.taps:
            raise ModelError(f"target: {spec} is not computed by a runner that tells what heads read")
        self._runner, runner.tapping = runner, True

    def forward(self, feeds: Sequence[Feed]) -> Told:
        logits = self._runner.run(feeds).float()
        return Told(logits, self._runner.tapped.to(torch.bfloat16))

    def copy(self, source: int, target: int, stop: int) -> None:
        self._runner.copy(source, target, stop)


def _ends(shape: Any) -> list[int]:
    stated = shape.eos_token_id
    return [stated] if isinstance(stated, int) else [*(stated or ())]


class _Growing:
    """A text that is computed. began: tokens before its turn. learnt: tokens of its prompt, 0 while that is still said.
    fed: those computed so far.
    """

    def __init__(self, request: TargetPrompt, began: int, temperatures: tuple[float, float]) -> None:
        self.ids, self.kind, self.began, self.fed = [*request.ids], request.kind, began, 0
        self.learnt = len(self.ids) if request.complete else 0
        self._answer, self._turn = temperatures
        self.features: list[torch.Tensor] = []
        self.best: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def temperature(self) -> float:
        return self._answer if self.learnt else self._turn

    @property
    def answer(self) -> list[int]:
        return self.ids[self.learnt :]

    def rows(self) -> TokenRows:
        """The last token was not fed, and has no features."""
        length = len(self.ids)
        told = torch.cat(self.features)[:length]
        best, logs = torch.zeros(length, BEST, dtype=torch.long), torch.full((length, BEST), NONE)
        for place, (ids, values) in enumerate(self.best, self.learnt):
            best[place, : len(ids)], logs[place, : len(ids)] = ids, values
        features = torch.zeros(length, told.shape[1], dtype=told.dtype)
        features[: len(told)] = told
        return TokenRows(torch.tensor(self.ids), features, best, logs)


class OwnAnswers:
    """Has a teacher answer until so many tokens of answers are kept."""

    def __init__(self, teacher: Teacher, prompts: Prompts, kept: KeptTexts, seed: int, texts: int = TEXTS) -> None:
        """seed: of what is asked and drawn; what is kept already makes it another one."""
        self._teacher, self._prompts, self._kept = teacher, prompts, kept
        seed += len(kept.texts)
        self._random, self._generator = Random(seed), torch.Generator().manual_seed(seed)
        self._shared, self._header = texts, torch.empty(0)  # the slot that holds what stands before every turn
        for text in kept.texts:
            prompts.new(kept.rows(text).tokens[: text.learnt].tolist(), text.kind)
        before = prompts.frame.before[:-1]
        if before:
            self._header = teacher.forward([Feed(self._shared, 0, before, 1)]).features.clone()
        self._texts = [self._begun(slot) for slot in range(texts)]

    def write(self, tokens: int, tell: Callable[[str], None]) -> None:
        """Until answers of so many tokens are kept."""
        began, first, said = time.monotonic(), self._kept.answers, time.monotonic()
        with ProgressBar("answers", tokens, done=first) as bar:
            while self._kept.answers < tokens:
                self._step()
                bar.at(min(tokens, self._kept.answers), "")
                now = time.monotonic()
                if now - said > SAY_EVERY_S:
                    said, done = now, self._kept.answers
                    tell(f"{done} of {tokens} tokens answered, {(done - first) / (now - began):.0f} tokens/s")

    def _begun(self, slot: int) -> _Growing:
        request, before = self._prompts.next(), self._prompts.frame.before
        answer = 0.0 if self._random.random() < GREEDY else self._random.choice(TEMPERATURES)
        temperatures = answer, self._random.choice(TURN_TEMPERATURES)
        text = _Growing(request, len(before), temperatures)
        shared = len(self._header)
        if shared and tuple(text.ids[: len(before)]) == before:
            self._teacher.copy(self._shared, slot, shared)
            text.fed, text.features = shared, [self._header]
        return text

    def _step(self) -> None:
        """One forward: the next token of each text, and as many prompts as there is room for."""
        room, live, feeds = PROMPT_ROWS, list[int](), list[Feed]()
        for slot, text in enumerate(self._texts):
            left = text.ids[text.fed :]
            if len(left) > 1 and len(left) > room and room < PROMPT_ROWS:
                continue  # a prompt that is longer than all room is fed alone
            room -= len(left) if len(left) > 1 else 0
            live.append(slot)
            feeds.append(Feed(slot, text.fed, left, 1))
        logits, features = self._teacher.forward(feeds)
        logs, best = logits.topk(min(BEST, logits.shape[1]), dim=-1)
        tokens = self._drawn(logits, best[:, 0], [self._texts[slot].temperature for slot in live])
        logs = logs - logits.logsumexp(-1, keepdim=True)
        parts = features.split([len(feed.tokens) for feed in feeds])
        for row, slot in enumerate(live):
            text = self._texts[slot]
            text.features.append(parts[row].clone())
            text.fed = feeds[row].stop
            if self._took(text, tokens[row], (best[row], logs[row])):
                self._texts[slot] = self._begun(slot)

    def _drawn(self, logits: torch.Tensor, best: torch.Tensor, temperatures: list[float]) -> list[int]:
        warm = torch.tensor(temperatures)
        scaled = (logits - logits.amax(-1, keepdim=True)) / warm.clamp(min=1e-3)[:, None]
        drawn = torch.multinomial(scaled.exp_(), 1, generator=self._generator)[:, 0]
        found: list[int] = torch.where(warm > 0, drawn, best).tolist()
        return found

    def _took(self, text: _Growing, token: int, best: tuple[torch.Tensor, torch.Tensor]) -> bool:
        """Append a token; whether the text is over, and kept if it is to be."""
        text.ids.append(token)
        frame = self._prompts.frame
        if not text.learnt:
            turn = text.ids[text.began : -1]
            if token not in frame.ends:
                return len(turn) >= TURN_TOKENS.stop
            if token != frame.behind[0] or not self._prompts.sane(turn):
                return True
            text.ids += frame.behind[1:]
            text.learnt = len(text.ids)
            return False
        text.best.append(best)
        answer = text.answer
        whole = len(text.ids) >= self._teacher.context - 1 or len(answer) >= ANSWER
        if not (whole or token in frame.ends or loops(answer)):
            return False
        if len(answer) >= LEAST_ANSWER and self._prompts.is_apart(text.ids):
            self._kept.add(text.rows(), text.learnt, text.kind, text.temperature)
        return True


def loops(tokens: Sequence[int]) -> bool:
    """Whether it ends in the same few tokens over and over."""
    if len(tokens) < LOOPED + LONGEST_LOOP:
        return False
    end = [*tokens[-LOOPED - LONGEST_LOOP :]]
    return any(end[LONGEST_LOOP:] == end[LONGEST_LOOP - loop : -loop] for loop in range(1, LONGEST_LOOP + 1))
