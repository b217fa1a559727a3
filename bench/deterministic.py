"""Measure what --deterministic keeps equal and costs: python -m bench.deterministic --help.

Texts: sessions alone, then in random mixes over two verifiers, with and without it. The engine itself is driven,
without network and in virtual time. A seed draws which sessions share a forward, how wide their windows are, what is
proposed, and when a session moves to the other verifier, which prefills what the first one had decided. Times: steps of
the target with and without it, by turns in one process.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, record
from bench.harness.interleave import tracked
from bench.harness.interval import Estimate, estimate
from bench.harness.report import at_most, table
from demo_pair import TARGET
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Proposal, SourceKind
from specwire.core.policy.costs import StepCosts
from specwire.core.policy.estimates import ForwardTimes
from specwire.core.text import Stopping, hash_of
from specwire.core.verify.session import Allowance
from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.law.sampler import LogitsSampler
from specwire.rpc.process import say
from specwire.rpc.server_options import DTYPES
from verify_service.engine.engine import Engine
from verify_service.engine.messages import Opening, Reports, Tick

# Arguments that must be positive, and say what was measured.
NUMBERS = ("sessions", "tokens", "mixes", "repeats", "threads")
OUT = RESULTS / "deterministic.json"
SLOTS, CONTEXT, VERIFIERS = 16, 512, 2
WAYS = {False: "as usual", True: "deterministic"}
# (sessions, positions of each) of the steps that are timed, behind texts of BEHIND positions.
SHAPES = ((1, 1), (1, 5), (1, 16), (8, 1), (16, 1), (8, 5))
BEHIND = 64
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
        self._engine = Engine(lm, LogitsSampler(lm.info.deterministic), costs, self._take, self._clock, ngram=ngram)

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
            allowance=Allowance(0, FAR, False),
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


def texts(args: argparse.Namespace, dtype: str, deterministic: bool) -> dict[str, Any]:
    """How many tokens differ between the sessions alone and in the mixes; takeovers and accepted drafts in them."""
    models = [_load(args, dtype, deterministic) for _ in range(VERIFIERS)]
    cases = _cases(args)
    say(f"bench: {dtype}, {WAYS[deterministic]}: {len(cases)} sessions alone")
    known = alone(models[0], cases)
    flips = compared = moves = accepted = 0
    for seed in tracked(range(args.mixes), args.mixes, "mixes"):
        say(f"bench: {dtype}, {WAYS[deterministic]}: mix {seed + 1} of {args.mixes}")
        mixed = together(models, cases, known, seed)
        found = differing(known, mixed.texts)
        flips, compared = flips + found[0], compared + found[1]
        moves, accepted = moves + mixed.moves, accepted + mixed.accepted
    counts = {"differing": flips, "compared": compared, "moves": moves, "accepted": accepted}
    return {"dtype": dtype, "way": WAYS[deterministic], **counts}


def times(args: argparse.Namespace, dtype: str) -> Iterator[dict[str, Any]]:
    """Milliseconds of each shape of step, either way, and their ratio."""
    usual, deterministic = (_load(args, dtype, way) for way in (False, True))
    say(f"bench: {dtype}: times")
    for sessions, window in tracked(SHAPES, len(SHAPES), "times"):
        pairs = [(_step(usual, sessions, window), _step(deterministic, sessions, window)) for _ in range(args.repeats)]
        yield {
            "dtype": dtype,
            "sessions": sessions,
            "window": window,
            "usual_ms": asdict(estimate([1000 * first for first, _ in pairs])),
            "deterministic_ms": asdict(estimate([1000 * second for _, second in pairs])),
            "ratio": asdict(estimate([second / first for first, second in pairs])),
        }


def _step(lm: LanguageModel, sessions: int, window: int) -> float:
    """Seconds of a forward; the second of two, so that neither pays for the change of shape."""
    for slot in range(sessions):
        if lm.cached(slot) < BEHIND:
            lm.forward([Feed(slot, 0, list(range(1, BEHIND + 1)), 0)])
    feeds = [Feed(slot, BEHIND, list(range(1, window + 1)), window) for slot in range(sessions)]
    lm.forward(feeds)
    began = time.perf_counter()
    lm.forward(feeds)
    return time.perf_counter() - began


def _load(args: argparse.Namespace, dtype: str, deterministic: bool) -> LanguageModel:
    return load_model(
        str(args.target), slots=SLOTS, context=CONTEXT, dtype=dtype, threads=args.threads, deterministic=deterministic
    )


def _cases(args: argparse.Namespace) -> list[Case]:
    prompts = record.prompts_of(args.target)
    most = CONTEXT - args.tokens - 1
    chosen = [tuple(prompts[index % len(prompts)][:most]) for index in range(args.sessions)]
    return [
        Case(prompt, sampling, args.tokens) for prompt, sampling in zip(chosen, samplings(len(chosen)), strict=True)
    ]


def report(found: dict[str, Any]) -> str:
    rate = [[row["dtype"], row["way"], *(str(row[name]) for name in COUNTS)] for row in found["texts"]]
    cost = [
        [row["dtype"], str(row["sessions"]), str(row["window"])]
        + [f"{row[name]['value']:.2f} ({row[name]['low']:.2f} to {row[name]['high']:.2f})" for name in RATIOS]
        for row in found["times"]
    ]
    return "\n".join(
        (
            *table(["dtype", "way", "tokens that differ", "of", "takeovers", "draft tokens accepted"], rate),
            "",
            *table(["dtype", "sessions", "positions", "usual, ms", "deterministic, ms", "ratio"], cost),
        )
    )


COUNTS = ("differing", "compared", "moves", "accepted")
RATIOS = ("usual_ms", "deterministic_ms", "ratio")


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.deterministic", description=(__doc__ or "").partition(":")[0])
    line.add_argument("--target", type=Path, default=TARGET, metavar="DIR", help="with its tokenizer.json")
    line.add_argument("--sessions", type=int, default=64, metavar="N", help="(default: %(default)s)")
    line.add_argument("--tokens", type=int, default=64, metavar="N", help="of each text (default: %(default)s)")
    line.add_argument("--mixes", type=int, default=3, metavar="N", help="(default: %(default)s)")
    line.add_argument("--repeats", type=int, default=21, metavar="N", help="of each step (default: %(default)s)")
    line.add_argument("--threads", type=int, default=1, metavar="N", help="(default: %(default)s)")
    line.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="(default: all)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if record.refused(args, NUMBERS):
        return 2
    rows = [texts(args, dtype, way) for dtype in args.dtypes for way in WAYS]
    wrong = sum(row["differing"] for row in rows if row["way"] == WAYS[True])
    found: dict[str, Any] = {
        "bars": [asdict(at_most("deterministic: tokens that differ", Estimate(wrong, wrong, wrong, 1.0), 0))],
        "texts": rows,
        "times": [row for dtype in args.dtypes for row in times(args, dtype)],
    }
    record.write(args.out, found, args, NUMBERS)
    print(report(found))
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
