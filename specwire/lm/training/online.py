"""What was decided is learnt, a few steps at a time; a version is used only where it is better.

Online speculative decoding (Liu et al. 2023, arXiv 2310.07177). Only outputs are learnt; prompts are their context.
Steps on new texts are mixed with steps on older ones. On texts that are never learnt (`specwire.lm.training.texts`) the
version in use, the one before it and the candidate are compared. What learns is a drafter or a head
(`specwire.lm.training.students`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from specwire.core.model import ModelError
from specwire.lm.pretrained import usable_device
from specwire.lm.training.students import DraftStudent, HeadStudent, State, Student
from specwire.lm.training.texts import (
    LEAST_HELD_OUT,
    DecidedText,
    TextMemory,
    TrainingWindow,
    session_hash,
    windows_of,
)
from specwire.versions import Current, HistoryEntry, VersionFolder

# Windows of a step; of them older ones, where there are any.
ROWS, REPLAYED = 8, 2
# How often a round sees each new window.
PASSES = 4
# Steps in which the rate rises from nothing, whenever a candidate begins: Adam's first ones go by the signs of a few
# texts' gradients, and made a drafter worse than it could then become better.
WARM_UP = 30
# By how many margins a candidate must be worse for it to begin anew. Below that it goes on: what is new is learnt over
# several rounds, and the texts held out are not all new at once.
HOPELESS = 5
# Windows of a measurement's forward.
MEASURED_ROWS = 16
# Steps whose mean loss is told, at a round's beginning and end.
SHOWN_STEPS = 5
SEED = 20261126


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """What learns, whose texts, and how.

    draft: the model that it begins with; where `target` is named, the folder of a head beside that model. out: the
    versions' folder. tenants: those that agreed. margin: by which acceptance must rise, or have fallen, for another
    version to be used. rate: of learning. steps: of a round, at most. memory: tokens of texts that are kept. threads:
    None for PyTorch's own. forgotten: ids of sessions; versions that saw one of them are removed first.
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
    target: str = ""


class LearningStopped(Exception):
    """The learner was asked to stop while it learnt."""


class MeasuredAcceptance(NamedTuple):
    """On held-out texts, greedily.

    first: how often the best token is the decided one. chain: how many tokens of a chain agree, on average. tokens:
    that were compared.
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

    The student holds the candidate. `_used`, `_former`: weights of the version in use and of the one before it, as they
    were written; on the CPU, in float32. `_saw`: hashes of the sessions that the candidate learnt from beyond `_since`,
    the version that it began from.

    Raises:
        ModelError: the model cannot be learnt with.
        VersionError: the folder is somebody else's, or cannot be read.
    """

    def __init__(self, options: LearnerOptions, tell: Callable[[str], None]) -> None:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self._options, self._tell = options, tell
        self._stopped = False
        self._folder = VersionFolder(options.out)
        self.memory = TextMemory(options.memory)
        self._student = _student(options)
        self._generator = torch.Generator().manual_seed(SEED)
        self._folder.claim(options.tenants, self._student.fingerprint, "heads or target" if options.target else "draft")
        try:
            for session_id in options.forgotten:
                gone = self._folder.forget(session_hash(session_id))
                tell(f"session {session_id[:8]}: {f'versions {gone} are removed' if gone else 'no version saw it'}")
            self._begin()
        except BaseException:
            self._folder.release()
            raise

    @property
    def vocabulary(self) -> int:
        """Ids of texts are below that."""
        return self._student.vocabulary

    @property
    def vocabulary_fingerprint(self) -> str:
        return self._student.vocabulary_fingerprint

    def stop(self) -> None:
        """Have a round that is under way raise LearningStopped soon; for another thread."""
        self._stopped = True

    def close(self) -> None:
        """Give the folder up. Idempotent."""
        self._folder.release()

    def encode(self, text: str) -> list[int]:
        """Raises ModelError where the model has no tokenizer."""
        student = self._student
        if not student.tokenizer:
            raise ModelError(f"{student.option}: {student.location} has no tokenizer: give texts as token ids")
        encoded = Tokenizer.from_str(student.tokenizer.decode()).encode(text, add_special_tokens=False)
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
                self._folder.add(self._student.write, HistoryEntry(0, 0, 0, (), written=time.time()))
            self._folder.use(self._as_current(0, "begun"))
        else:
            self.version = self._since = current.version
            self._student.load(self._read(current.version))
        self._used = self._student.rounded()
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

    def _as_current(
        self,
        number: int,
        why: str,
        before: float | None = None,
        after: float | None = None,
        loss_before: float | None = None,
        loss_after: float | None = None,
    ) -> Current:
        tenants = tuple(sorted(set(self._options.tenants)))
        told = (why, before, after, self._student.kind, loss_before, loss_after)
        return Current(number, self._options.draft, tenants, *told)

    def _read(self, number: int) -> State:
        return self._student.read(self._folder.version(number))

    def _begin_again(self, number: int, state: State) -> None:
        """Let the candidate be this version, and forget what it had learnt."""
        self._student.load(state)
        self._since, self._saw = number, set()
        self._start_optimiser()

    def _start_optimiser(self) -> None:
        """One that knows nothing yet, and so begins with small steps."""
        rate, learning = self._options.rate, self._learning
        self._optimiser = torch.optim.AdamW(learning, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._warming_up = LinearLR(self._optimiser, 1 / WARM_UP, total_iters=WARM_UP)

    @property
    def _learning(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._student.model.parameters() if parameter.requires_grad]

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
        fresh = [window for text in self.memory.fresh for window in windows_of(text, self._student.window)]
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
        windows = list(windows_of(text, self._student.window))
        return windows[self._below(len(windows))]

    def _below(self, limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=self._generator))

    def _step(self, batch: Sequence[TrainingWindow]) -> float:
        loss = self._student.loss(batch)
        if loss is None:
            return 0.0
        loss.backward()
        nn.utils.clip_grad_norm_(self._learning, 1.0)
        self._optimiser.step()
        self._warming_up.step()
        self._optimiser.zero_grad(set_to_none=True)
        return loss.item()

    def measure(self) -> MeasuredAcceptance:
        """The candidate's acceptance on the held-out texts."""
        windows = [window for text in self.memory.held_out for window in windows_of(text, self._student.window)]
        windows.sort(key=lambda window: len(window.tokens))
        parts = [windows[at : at + MEASURED_ROWS] for at in range(0, len(windows), MEASURED_ROWS)]
        tested = [self._student.test(part) for part in parts]
        tokens, right, chained = (sum(each[at] for each in tested) for at in range(3))
        return MeasuredAcceptance(right / max(1, tokens), chained / max(1, tokens), tokens)

    @contextmanager
    def _holding(self, state: State) -> Iterator[None]:
        """The model has other weights meanwhile."""
        own = self._student.state()
        self._student.load(state)
        try:
            yield
        finally:
            self._student.load(own)

    def _measured(self, state: State) -> MeasuredAcceptance:
        with self._holding(state):
            return self.measure()

    def _judge(self, steps: int, loss_before: float, loss_after: float) -> LearningRound:
        """Whose texts are accepted most, the candidate's, those of the version in use or of the one before it."""
        learnt, margin = self._student.rounded(), self._options.margin
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
        self._folder.add(self._student.write, entry)
        self._folder.use(self._as_current(number, "learnt", before.first, after.first, loss_before, loss_after))
        self._folder.prune([number, self.version])
        self._former, self._used = self._used, learnt
        self.version = self._since = number
        self._saw = set()


def _student(options: LearnerOptions) -> Student:
    """Raises ModelError."""
    device = usable_device(options.device)
    return HeadStudent(options.draft, options.target, device) if options.target else DraftStudent(options.draft, device)
