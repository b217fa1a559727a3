"""Sessions alone, and in random mixes over several verifiers: the engine itself, without network, in virtual time.

A seed draws which sessions share a forward, how wide their windows are, what is proposed, and when a session moves to
the other verifier, which prefills what the first one had decided.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from specwire.core.law.sampling import Sampling
from specwire.core.messages import Proposal, SourceKind
from specwire.core.policy.costs import StepCosts
from specwire.core.policy.estimates import ForwardTimes
from specwire.core.text import Stopping, hash_of
from specwire.core.verify.session import Allowance
from specwire.lm import LanguageModel
from specwire.lm.law.sampler import LogitsSampler
from verify_service.engine.engine import Engine
from verify_service.engine.messages import Opening, Reports, Tick

# A mix: so many steps at most; credit that no session uses up.
MOST_STEPS, FAR = 100_000, 1 << 20
# Chances of each session at each step: of a proposal, and of a move if another place has room.
PROPOSED, MOVED = 0.5, 0.05
# Slots of each place that are kept for sessions that move.
SPARE = 1
MOST_RIGHT, MOST_WRONG = 6, 2

Text = list[int]


@dataclass(frozen=True, slots=True)
class Case:
    """A session: what is asked for."""

    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: int


class BatchPlace:
    """A verifier's engine, and what it has decided. Every look at the clock takes a microsecond."""

    def __init__(self, lm: LanguageModel, row_us: float, ngram: bool) -> None:
        """row_us: what a row more costs a forward, by which windows are chosen."""
        costs = StepCosts(ForwardTimes({1: 1000.0, 32: 1000.0 + 31 * row_us}))
        self.slots, self._lm = lm.slots, lm
        self.texts: dict[int, Text] = {}
        self.finished: set[int] = set()
        self._now_us = 0.0
        self._engine = Engine(lm, LogitsSampler(), costs, self._take, self._clock, ngram=ngram)

    @property
    def accepted(self) -> int:
        """Draft tokens that were proposed to it and accepted; what it found in the text itself is not counted."""
        return self._engine.tally.drafts[SourceKind.DRAFTER].accepted

    def open(self, handle: int, case: Case, decided: Text) -> None:
        self.texts[handle] = list(decided)
        opening = Opening(
            handle=handle,
            session_id=f"session-{handle}",
            fence=1,
            attach=1,
            tokens=(*case.prompt, *decided),
            prompt_length=len(case.prompt),
            sampling=case.sampling,
            stopping=Stopping(case.tokens, frozenset()),
            allowance=Allowance(0, FAR),
        )
        self._engine.inbox.put(Tick(0, self._now_us, opens=(opening,)))

    def propose(self, handle: int, chain: int, text: Sequence[int], tokens: Sequence[int]) -> None:
        proposal = Proposal(0, chain, len(text), 0, tuple(tokens), hash_of(text))
        self._engine.inbox.put(Tick(0, self._now_us, proposals=((handle, proposal),)))

    def close(self, handle: int) -> Text:
        self._engine.inbox.put(Tick(0, self._now_us, closes=(handle,)))
        return self.texts.pop(handle)

    def step(self) -> None:
        rest = self._engine.step()
        self._engine.tell()
        if rest is not None and rest.waiting:
            self._now_us = max(self._now_us, rest.until_us)

    def empty(self) -> None:
        """Leave the model as it was found."""
        for slot in range(self.slots):
            self._lm.discard(slot)

    def _clock(self) -> float:
        self._now_us += 1.0
        return self._now_us

    def _take(self, reports: Reports) -> None:
        for report in reports.values():
            for refusal in report.refused:
                raise RuntimeError(f"a session was refused: {refusal.message}")
            for decided in report.decided:
                if decided.handle in self.texts:
                    self.texts[decided.handle] += decided.verdict.tokens
                    if decided.verdict.finish is not None:
                        self.finished.add(decided.handle)


def alone(lm: LanguageModel, cases: Sequence[Case]) -> list[Text]:
    """Each session's text when nobody else is there and nothing is proposed."""
    place, texts = BatchPlace(lm, 1000.0, ngram=False), []
    for handle, case in enumerate(cases, 1):
        place.open(handle, case, [])
        for _ in range(MOST_STEPS):
            if handle in place.finished:
                break
            place.step()
        texts.append(place.close(handle))
    place.step()
    place.empty()
    return texts


@dataclass(frozen=True, slots=True)
class Mixed:
    """What a mix wrote. moves: texts that another place took over. accepted: draft tokens, as in `BatchPlace`."""

    texts: list[Text]
    moves: int
    accepted: int


@dataclass(slots=True)
class Mix:
    """One random mix: sessions come, share steps, are drafted for, move between places, and go.

    moves: of texts that had begun, from one place to another.
    """

    places: Sequence[BatchPlace]
    cases: Sequence[Case]
    known: Sequence[Text]
    choice: random.Random
    texts: dict[int, Text] = field(default_factory=dict)
    # Of the sessions that run: index -> where, and its handle there.
    at: dict[int, tuple[BatchPlace, int]] = field(default_factory=dict)
    handles: int = 0
    moves: int = 0

    def run(self) -> list[Text]:
        coming = list(range(len(self.cases)))
        self.choice.shuffle(coming)
        for _ in range(MOST_STEPS):
            while coming and self.choice.random() < 0.5 and self._free(SPARE):
                self._open(coming.pop(), [], self._free(SPARE))
            for index in list(self.at):
                self._trouble(index)
            for place in self.places:
                place.step()
            if not coming and not self.at:
                break
        return [self.texts[index] for index in range(len(self.cases))]

    def _free(self, spare: int = 0) -> list[BatchPlace]:
        held = [place for place, _ in self.at.values()]
        return [place for place in self.places if held.count(place) < place.slots - spare]

    def _open(self, index: int, decided: Text, free: Sequence[BatchPlace]) -> None:
        self.handles += 1
        place = self.choice.choice(free)
        self.at[index] = place, self.handles
        place.open(self.handles, self.cases[index], decided)

    def _trouble(self, index: int) -> None:
        """End, move or propose for one session, or leave it alone."""
        case, (place, handle) = self.cases[index], self.at[index]
        decided = place.texts[handle]
        if handle in place.finished:
            del self.at[index]
            self.texts[index] = place.close(handle)
        elif self.choice.random() < MOVED:
            self._move(index)
        elif self.choice.random() < PROPOSED:
            right = self.known[index][len(decided) : len(decided) + self.choice.randint(0, MOST_RIGHT)]
            wrong = [self.choice.randrange(1, 64) for _ in range(self.choice.randint(0, MOST_WRONG))]
            if right or wrong:
                place.propose(handle, len(decided) + 1, [*case.prompt, *decided], [*right, *wrong])

    def _move(self, index: int) -> None:
        """Have another place go on with a text, if one has room."""
        place, handle = self.at[index]
        others = [each for each in self._free() if each is not place]
        if others:
            decided = place.close(handle)
            self.moves += bool(decided)
            self._open(index, decided, others)


def together(lms: Sequence[LanguageModel], cases: Sequence[Case], known: Sequence[Text], seed: int) -> Mixed:
    """Each session's text in a random mix over these models, of which `known` texts are proposed, right and wrong."""
    choice = random.Random(seed)
    places = [BatchPlace(lm, choice.choice((0.0, 30.0, 200.0)), ngram=choice.random() < 0.5) for lm in lms]
    mix = Mix(places, cases, known, choice)
    texts = mix.run()
    for place in places:
        place.empty()
    return Mixed(texts, mix.moves, sum(place.accepted for place in places))


def differing(one: Sequence[Text], other: Sequence[Text]) -> tuple[int, int]:
    """Tokens that differ, and tokens compared: of each pair of texts up to the first that differs."""
    flips, compared = 0, 0
    for first, second in zip(one, other, strict=True):
        at = next((i for i, (a, b) in enumerate(zip_longest(first, second)) if a != b), None)
        flips += at is not None
        compared += len(first) if at is None else at + 1
    return flips, compared


def samplings(count: int) -> list[Sampling]:
    """Greedy, and coupled with and without filters, by turns."""
    kinds = [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.95}, {"temperature": 0.7, "top_k": 20}]
    return [Sampling(**kinds[index % len(kinds)], seed=index) for index in range(count)]  # type: ignore[arg-type]  # by name
