"""A drafter learns from what its target decided, a few steps at a time; a version is used only where it is better.

Online speculative decoding (Liu et al. 2023, arXiv 2310.07177), with the decided tokens as labels: where a text was
sampled they are draws from the target's distribution, so that their cross-entropy teaches that distribution. Only
outputs are learnt; prompts are their context. Steps on new texts are mixed with steps on older ones. A fifth of the
texts is never learnt: on the latest of them the version in use, the one before it and the candidate are compared. Only
the latest, because what is asked for changes: a version that knows the new is worse on the old.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from specwire.core.model import GGUF, ModelError, is_gguf
from specwire.lm.load import check_directory
from specwire.lm.model_files import CONFIG, GENERATION, copy_beside, weights_fingerprint
from specwire.lm.pretrained import outline, pretrained, usable_device
from specwire.lm.scripted import PREFIX
from specwire.text.tokenizer import vocabulary_fingerprint
from specwire.versions import Current, HistoryEntry, VersionFolder

# Windows of a step, and of how many tokens each; of them older ones, where there are any.
ROWS, WINDOW, REPLAYED = 8, 256, 2
# How often a round sees each new window.
PASSES = 4
# Steps in which the rate rises from nothing, whenever a candidate begins: Adam's first ones go by the signs of a few
# texts' gradients, and made a drafter worse than it could then become better.
WARM_UP = 30
# Of every so many prompts one is held out. Held-out texts of so many rounds are kept, at most MOST_HELD_OUT output
# tokens; older ones where those have fewer than HELD_OUT_TOKENS. Below LEAST_HELD_OUT nothing is judged.
HELD_OUT_EVERY, RECENT_ROUNDS = 5, 2
LEAST_HELD_OUT, HELD_OUT_TOKENS, MOST_HELD_OUT = 256, 1024, 16_384
# By how many margins a candidate must be worse for it to begin anew. Below that it goes on: what is new is learnt over
# several rounds, and the texts held out are not all new at once.
HOPELESS = 5
# The longest chain that counts. Windows of a measurement's forward.
CHAIN = 8
MEASURED_ROWS = 16
# Steps whose mean loss is told, at a round's beginning and end.
SHOWN_STEPS = 5
IGNORED = -100
SEED = 20261126

State = dict[str, torch.Tensor]


# ----------------------------------------------------------------------------------------------------------------------
# Texts, and the memory of them.


@dataclass(frozen=True, slots=True)
class DecidedText:
    """What a target decided behind a prompt, in tokens. session: hash of its id (`session_hash`)."""

    session: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def held_out(self) -> bool:
        """By its prompt: were it by the session, one that was asked twice would be learnt and measured."""
        digest = hashlib.sha256(repr(self.prompt or self.output).encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_EVERY == 0


def session_hash(session_id: str) -> str:
    """By which a folder's history knows a session: an id cannot be told from it."""
    return hashlib.sha256(session_id.encode()).hexdigest()[:16]


class TextMemory:
    """Texts to learn from, and those held out; the oldest go first. most_tokens: of the former."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._counts: deque[int] = deque([0])
        self.fresh: deque[DecidedText] = deque()
        self.older: deque[DecidedText] = deque()
        self.held_out: deque[DecidedText] = deque()

    def add(self, texts: Sequence[DecidedText]) -> None:
        for text in texts:
            if len(text.output) == 0 or text.size < 2:
                continue  # nothing of it stands behind anything
            (self.held_out if text.held_out else self.fresh).append(text)
            self._counts[-1] += text.held_out
        self._bound_held_out()
        self._bound()

    def _bound_held_out(self) -> None:
        """`_counts`: how many held-out texts each of the latest rounds brought."""
        while len(self._counts) > RECENT_ROUNDS:
            self._counts.popleft()
        tokens = sum(len(text.output) for text in self.held_out)
        while len(self.held_out) > 1:
            old, size = len(self.held_out) > sum(self._counts), len(self.held_out[0].output)
            if tokens <= MOST_HELD_OUT and not (old and tokens - size >= HELD_OUT_TOKENS):
                return
            self.held_out.popleft()
            tokens -= size

    def _bound(self) -> None:
        tokens = sum(text.size for text in (*self.fresh, *self.older))
        while tokens > self._most and len(self.fresh) + len(self.older) > 1:
            tokens -= (self.older or self.fresh).popleft().size

    def settle(self) -> None:
        """What was fresh has been learnt: a round is over."""
        self.older.extend(self.fresh)
        self.fresh.clear()
        self._counts.append(0)

    def drop(self, sessions: Collection[str]) -> int:
        """Forget texts by the hashes of their sessions; returns how many there were."""
        gone = 0
        for texts in (self.fresh, self.older, self.held_out):
            kept = [text for text in texts if text.session not in sessions]
            gone += len(texts) - len(kept)
            texts.clear()
            texts.extend(kept)
        return gone


class TrainingWindow(NamedTuple):
    """A part of a text. learnt: the index of the first token that is no context."""

    tokens: tuple[int, ...]
    learnt: int


def windows_of(text: DecidedText, size: int) -> Iterator[TrainingWindow]:
    """Each token of the output is learnt in one window, behind at least half a window of context if there is so much.

    A text's very first token stands behind nothing, and is not learnt.
    """
    whole, half = (*text.prompt, *text.output), max(1, size // 2)
    for start in range(max(1, len(text.prompt)), len(whole), half):
        end = min(len(whole), start + half)
        first = max(0, end - size)
        yield TrainingWindow(whole[first:end], start - first)


# ----------------------------------------------------------------------------------------------------------------------
# The learner.


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """What learns, whose texts, and how.

    draft: the model that it begins with. out: the versions' folder. tenants: those that agreed. margin: by which
    acceptance must rise, or have fallen, for another version to be used. rate: of learning. steps: of a round, at most.
    memory: tokens of texts that are kept. threads: None for PyTorch's own. forgotten: ids of sessions; versions that
    saw one of them are removed first.
    """

    draft: str
    out: Path
    tenants: tuple[str, ...]
    margin: float = 0.01
    rate: float = 3e-4
    steps: int = 400
    memory: int = 2_000_000
    device: str = "cpu"
    threads: int | None = None
    forgotten: tuple[str, ...] = ()


class LearningStopped(Exception):
    """The learner was asked to stop while it learnt."""


class MeasuredAcceptance(NamedTuple):
    """On held-out texts, greedily.

    first: how often the best token is the decided one. chain: how many tokens of a chain of CHAIN agree, on average.
    tokens: that were compared.
    """

    first: float
    chain: float
    tokens: int


@dataclass(frozen=True, slots=True)
class LearningRound:
    """What a round did. What was not measured is None.

    before: of the version in use until then. former: of the one before that. candidate: of what was learnt by then.
    why: in words, what became of it. version: in use from now on.
    """

    steps: int
    loss_before: float | None
    loss_after: float | None
    before: MeasuredAcceptance | None
    former: MeasuredAcceptance | None
    candidate: MeasuredAcceptance | None
    version: int
    why: str


class Learner:
    """Owns the folder until `close`. `version`: in use. Everything happens in the caller's thread.

    The model holds the candidate. `_used`, `_former`: weights of the version in use and of the one before it, as they
    were written; on the CPU, in float32. `_saw`: hashes of the sessions that the candidate learnt from beyond `_since`,
    the version that it began from.

    Raises:
        ModelError: the model cannot be learnt with.
        VersionError: the folder is somebody else's, or cannot be read.
    """

    def __init__(self, options: LearnerOptions, tell: Callable[[str], None]) -> None:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        if options.draft.startswith(PREFIX) or is_gguf(options.draft):
            raise ModelError(f"draft: {options.draft}: a scripted model or {GGUF} file cannot learn")
        self._options, self._tell = options, tell
        self._stopped = False
        self._folder = VersionFolder(options.out)
        self.memory = TextMemory(options.memory)
        check_directory(options.draft)
        known = outline(options.draft)
        self._device = usable_device(options.device)
        self._model = pretrained(options.draft, torch.float32, self._device)
        self._dtype = _dtype_of(known.config)
        self._window = min(WINDOW, known.context)
        tokens = known.text.vocabulary(self._model.get_output_embeddings().weight.shape[0])
        self.vocabulary, self.vocabulary_fingerprint = max(tokens) + 1, vocabulary_fingerprint(tokens)
        self._tokenizer = known.text.tokenizer_json
        self._generator = torch.Generator().manual_seed(SEED)
        self._folder.claim(options.tenants, weights_fingerprint(self._model, known.config, "float32"))
        try:
            for session_id in options.forgotten:
                gone = self._folder.forget(session_hash(session_id))
                tell(f"session {session_id[:8]}: {f'versions {gone} are removed' if gone else 'no version saw it'}")
            self._begin()
        except BaseException:
            self._folder.release()
            raise

    def stop(self) -> None:
        """Have a round that is under way raise LearningStopped soon; for another thread."""
        self._stopped = True

    def close(self) -> None:
        """Give the folder up. Idempotent."""
        self._folder.release()

    def encode(self, text: str) -> list[int]:
        """Raises ModelError where the model has no tokenizer."""
        if not self._tokenizer:
            raise ModelError(f"draft: {self._options.draft} has no tokenizer: give texts as token ids")
        encoded = Tokenizer.from_str(self._tokenizer.decode()).encode(text, add_special_tokens=False)
        return list(encoded.ids)

    def forget(self, sessions: Collection[str]) -> None:
        """Forget texts that are still remembered, by the hashes of their sessions."""
        gone = self.memory.drop(sessions)
        if gone:
            self._tell(f"{gone} deleted texts are forgotten")

    # Versions

    def _begin(self) -> None:
        """Go on from the version in use, or make the model itself the first one."""
        current = self._folder.current()
        if current is None:
            self.version = self._since = 0
            if not self._folder.has(0):
                self._folder.add(self._write, HistoryEntry(0, 0, 0, (), written=time.time()))
            self._folder.use(self._as_current(0, "begun", None, None))
        else:
            self.version = self._since = current.version
            self._load(self._read(current.version))
        self._used = self._rounded()
        before = self._before(self.version)
        self._former = None if before is None else self._read(before)
        self._saw: set[str] = set()
        self._start_optimiser()
        self._tell(f"version {self.version} is in use")

    def _before(self, number: int) -> int | None:
        """Which version was in use before this one; None where there was none, or its weights are gone."""
        entry = next((each for each in self._folder.history() if each.version == number), None)
        if entry is None or entry.before == number or not self._folder.has(entry.before):
            return None
        return entry.before

    def _as_current(self, number: int, why: str, before: float | None, after: float | None) -> Current:
        return Current(number, self._options.draft, tuple(sorted(set(self._options.tenants))), why, before, after)

    def _read(self, number: int) -> State:
        model = pretrained(str(self._folder.version(number)), torch.float32, torch.device("cpu"))
        return dict(model.state_dict())

    def _write(self, folder: Path) -> None:
        """The candidate as a model's folder; everything but the weights as it was."""
        whole = copy.deepcopy(self._model)
        nn.Module.to(whole, device="cpu", dtype=self._dtype)
        whole.save_pretrained(folder)
        for made in (CONFIG, GENERATION):
            (folder / made).unlink(missing_ok=True)
        copy_beside(self._options.draft, folder)

    def _state(self) -> State:
        return {name: tensor.detach().cpu().clone() for name, tensor in self._model.state_dict().items()}

    def _rounded(self) -> State:
        """The candidate as it would be written."""
        return {
            name: tensor.to(self._dtype).float() if tensor.is_floating_point() else tensor
            for name, tensor in self._state().items()
        }

    def _load(self, state: State) -> None:
        self._model.load_state_dict(state)

    def _begin_again(self, number: int, state: State) -> None:
        """Let the candidate be this version, and forget what it had learnt."""
        self._load(state)
        self._since, self._saw = number, set()
        self._start_optimiser()

    def _start_optimiser(self) -> None:
        """One that knows nothing yet, and so begins with small steps."""
        rate = self._options.rate
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._warming_up = LinearLR(self._optimiser, 1 / WARM_UP, total_iters=WARM_UP)

    # A round

    def round(self, texts: Sequence[DecidedText]) -> LearningRound:
        """Learn from new texts, measure, and use another version if it is better. Raises LearningStopped."""
        self.memory.add(texts)
        if not self.memory.fresh:
            return LearningRound(0, None, None, None, None, None, self.version, "no new texts")
        losses = self._train()
        first, last = losses[:SHOWN_STEPS], losses[-SHOWN_STEPS:]
        return self._judge(len(losses), sum(first) / len(first), sum(last) / len(last))

    def _train(self) -> list[float]:
        """Returns the loss of each step."""
        fresh = [window for text in self.memory.fresh for window in windows_of(text, self._window)]
        replayed = REPLAYED if self.memory.older else 0
        own = min(ROWS - replayed, len(fresh))  # so few in a short round, which then has no fewer passes
        steps = min(self._options.steps, math.ceil(PASSES * len(fresh) / own))
        order = self._endless(len(fresh))
        losses = []
        for _ in range(steps):
            if self._stopped:
                raise LearningStopped
            batch = [fresh[at] for at in islice(order, own)]
            batch += [self._older_window() for _ in range(replayed)]
            losses.append(self._step(batch))
        self._saw.update(text.session for text in self.memory.fresh)
        self.memory.settle()
        return losses

    def _endless(self, count: int) -> Iterator[int]:
        """Each index once before any comes again, in an order of its own each time."""
        while True:
            yield from torch.randperm(count, generator=self._generator).tolist()

    def _older_window(self) -> TrainingWindow:
        text = self.memory.older[self._below(len(self.memory.older))]
        windows = list(windows_of(text, self._window))
        return windows[self._below(len(windows))]

    def _below(self, limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=self._generator))

    def _step(self, batch: Sequence[TrainingWindow]) -> float:
        ids, labels = self._padded(batch)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type != "cpu"):
            logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimiser.step()
        self._warming_up.step()
        self._optimiser.zero_grad(set_to_none=True)
        return loss.item()

    def _padded(self, batch: Sequence[TrainingWindow]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels (windows, the longest one); what stands behind a window's end is seen by nothing before it."""
        longest = max(len(window.tokens) for window in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        labels = torch.full_like(ids, IGNORED)
        for row, (tokens, learnt) in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, learnt : len(tokens)] = ids[row, learnt : len(tokens)]
        return ids.to(self._device), labels.to(self._device)

    @torch.no_grad()
    def measure(self) -> MeasuredAcceptance:
        """The candidate's acceptance on the held-out texts."""
        windows = [window for text in self.memory.held_out for window in windows_of(text, self._window)]
        windows.sort(key=lambda window: len(window.tokens))
        tested = right = chained = 0
        for at in range(0, len(windows), MEASURED_ROWS):
            ids, labels = self._padded(windows[at : at + MEASURED_ROWS])
            best = self._model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
            same = best == labels[:, 1:]
            tested += int((labels[:, 1:] != IGNORED).sum())
            right += int(same.sum())
            alive = same
            for further in range(1, CHAIN + 1):
                chained += int(alive.sum())
                alive = alive[:, :-1] & same[:, further:]
        return MeasuredAcceptance(right / max(1, tested), chained / max(1, tested), tested)

    @contextmanager
    def _holding(self, state: State) -> Iterator[None]:
        """The model has other weights meanwhile."""
        own = self._state()
        self._load(state)
        try:
            yield
        finally:
            self._load(own)

    def _measured(self, state: State) -> MeasuredAcceptance:
        with self._holding(state):
            return self.measure()

    def _judge(self, steps: int, loss_before: float, loss_after: float) -> LearningRound:
        """Whose texts are accepted most, the candidate's, those of the version in use or of the one before it."""
        learnt, margin = self._rounded(), self._options.margin
        candidate = self._measured(learnt)
        if candidate.tokens < LEAST_HELD_OUT:
            why = f"not judged: {candidate.tokens} held-out tokens, {LEAST_HELD_OUT} are needed"
            return LearningRound(steps, loss_before, loss_after, None, None, candidate, self.version, why)
        before, best = self._measured(self._used), self.version
        former = None if self._former is None else self._measured(self._former)
        why, bar = "not better", before
        if former is not None and former.first >= before.first + margin:
            self._fall_back(before, former)
            why, bar = f"version {best} is worse than the one before it by now", former
        if candidate.first >= bar.first + margin:
            self._publish(learnt, bar, candidate, loss_before, loss_after)
            why = "better"
        elif candidate.first < bar.first - HOPELESS * margin or bar is not before:
            self._begin_again(self.version, self._used)
            why += ", and begun anew"
        return LearningRound(steps, loss_before, loss_after, before, former, candidate, self.version, why)

    def _fall_back(self, before: MeasuredAcceptance, former: MeasuredAcceptance) -> None:
        number = self._before(self.version)
        if number is None or self._former is None:
            raise AssertionError("there is no version to fall back to")
        self._folder.use(self._as_current(number, "fell back", before.first, former.first))
        self.version, self._used = number, self._former
        earlier = self._before(number)
        self._former = None if earlier is None else self._read(earlier)

    def _publish(
        self,
        learnt: State,
        before: MeasuredAcceptance,
        after: MeasuredAcceptance,
        loss_before: float,
        loss_after: float,
    ) -> None:
        number = self._folder.next_number()
        entry = HistoryEntry(
            number,
            self._since,
            self.version,
            tuple(sorted(self._saw)),
            before.first,
            after.first,
            loss_before,
            loss_after,
            time.time(),
        )
        self._folder.add(self._write, entry)
        self._folder.use(self._as_current(number, "learnt", before.first, after.first))
        self._folder.prune([number, self.version])
        self._former, self._used = self._used, learnt
        self.version = self._since = number
        self._saw = set()


def _dtype_of(config: Any) -> torch.dtype:
    """Of the weights' files."""
    found = getattr(config, "dtype", None)
    known = getattr(torch, found) if isinstance(found, str) else found
    return known if isinstance(known, torch.dtype) else torch.float32
