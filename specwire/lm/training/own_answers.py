"""A target's own answers, in batches: what it is asked it also makes up itself, and what it computes is kept.

A head that has seen what its target says, and in which words, is right far more often than one that has read other
texts. Half of the answers are the target's best tokens, half are drawn at a temperature. One forward takes a token of
each of many texts; the features that heads read of it, and the best guesses, are kept (`kept_texts`), so that no second
forward over the same texts is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from specwire.core.model import AUTO, Feed, ModelError, is_gguf
from specwire.lm.gguf_file import read_gguf
from specwire.lm.heads.layer import Apart
from specwire.lm.kv_cache import Sizes
from specwire.lm.load import native_dtype
from specwire.lm.model_files import ModelText, files_fingerprint
from specwire.lm.pretrained import CPU, DTYPES, outline, pretrained
from specwire.lm.runners.select import How, runner_for
from specwire.lm.training.kept_texts import BEST, NONE, KeptTexts, TokenRows, kept_about
from specwire.lm.training.prompts import TURN_TOKENS, Prompts, TargetPrompt, texts_of
from specwire.named_models import located
from specwire.progress import ProgressBar

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
