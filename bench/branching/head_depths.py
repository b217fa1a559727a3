"""What it gains to draft as deep as a head is sure: python -m bench.branching.head_depths --help.

The demo target writes texts by its own draws. At each place of these its head drafts MOST_HEAD_DEPTH tokens, as it
would in the engine, each behind its own guesses; kept are the probability of its likeliest token and how many of the
tokens are the text's. So any policy's steps follow: they are played with the engine's own rules, without ledger, in
virtual time. A forward of the target takes V(m) = V(1) (1 + slope (m - 1)), one of the head for one text a share of
V(1), and SHARE_OF_TEXT of that more for each further text.

First come errors of what is foretold for tokens behind accepted ones: by position as each session learns it, and by how
sure the head is, in classes that all sessions learn together. ECE is the mean gap between foretold and observed
frequency over ten bins (Naeini et al. 2015), Brier the mean squared error. Then tokens in V(1) of plain steps: at the
best fixed depth, at the depth that acceptance by position chooses, and with drafts that end, and rows that are divided,
by how sure the head is; `at random` is that with probabilities that tell nothing. What telling takes is not counted.

With 32 prompts x 128 tokens the last but one is 1.03 to 1.09 times the depth by position with one session, 1.00 to 1.05
with 4 to 32; at random it is 0.99 to 1.01. ECE is 0.009 (greedy) and 0.018 (0.8), Brier 0.072 and 0.176; by position
0.019 and 0.019, 0.117 and 0.218.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from random import Random
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from bench.branching.head_windows import sampling_of, written
from bench.harness.record import prompts_of, refused
from bench.harness.report import table
from demo_pair import HEAD, TARGET
from specwire.core.draft import DraftRow
from specwire.core.policy.estimates import AcceptanceByPosition
from specwire.core.policy.heads import HeadDepth, LearntHead
from specwire.core.policy.tunables import MOST_HEAD_DEPTH, PROBE_WINDOW
from specwire.core.policy.windows import StepCandidate, divided
from specwire.core.verify.text_sources import HeadSource
from specwire.lm.guesses import confidences, draw_among
from specwire.lm.heads import eagle3
from specwire.lm.heads.eagle3 import Eagle3, KeysValues
from specwire.rpc.process import say

# Of the cells: shares of V(1) of a further row, and of a forward of the head.
CELLS = ((0.003, 0.05), (0.02, 0.1), (0.08, 0.1))
SHARE_OF_TEXT = 0.05
SESSIONS, TEMPERATURES = (1, 4, 16, 32), (0.0, 0.8)
PLAIN_US = 1000.0
# What no ledger limits, and room enough for any window.
UNBOUNDED_US, ROOM = 1e12, 1 << 20
BINS = 10
NUMBERS = ("prompts", "tokens")


class Place(NamedTuple):
    """sure: of each drafted token the probability of the head's likeliest one. right: tokens before the first error."""

    sure: tuple[float, ...]
    right: int


class Played(NamedTuple):
    tokens: int
    time_us: float

    @property
    def rate(self) -> float:
        """Tokens in V(1)."""
        return self.tokens / self.time_us * PLAIN_US


class Times(NamedTuple):
    """slope, head: shares of V(1)."""

    slope: float
    head: float

    def step_us(self, rows: int) -> float:
        return PLAIN_US * (1 + self.slope * (rows - 1))

    def depth(self) -> HeadDepth:
        forward_us = PLAIN_US * self.head
        most = max(SESSIONS)
        return HeadDepth({1: forward_us, most: forward_us * (1 + SHARE_OF_TEXT * (most - 1))})


# ----------------------------------------------------------------------------------------------------------------------
# What the head drafts at each place


def drafted(texts: Sequence[Sequence[int]], lengths: Sequence[int], temperature: float) -> list[list[Place]]:
    """Of each text the places behind its prompt, whose lengths are given, and behind its first token."""
    target: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    embedding = target.get_input_embeddings().weight.detach()
    head = eagle3.load(HEAD, target.config.num_hidden_layers, embedding).float().eval()
    return [
        _places(target, head, text, length - 1, number, temperature)
        for number, (text, length) in enumerate(zip(texts, lengths, strict=True))
    ]


@torch.inference_mode()
def _places(target: Any, head: Eagle3, text: Sequence[int], first: int, number: int, temperature: float) -> list[Place]:
    """Place t of the head is of the target's features at t and the token at t + 1, and says what stands at t + 2."""
    count = len(text) - MOST_HEAD_DEPTH - 1
    if count <= first:
        return []
    tokens, sampling = torch.tensor([text]), sampling_of(number, temperature)
    states = target(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    features = head.fuse(torch.cat([states[tap] for tap in head.config.taps], -1)[:, :count])
    ids = head.target_ids(torch.arange(head.config.draft_vocabulary))
    fed = tokens[:, 1 : 1 + count]
    before: list[KeysValues] = []
    sure: list[list[float]] = []
    hits: list[list[bool]] = []
    for depth in range(MOST_HEAD_DEPTH):
        features, own = head.step(features, fed, torch.arange(depth, depth + count), before)
        before.append(own)
        logits = head.logits(features)[0]
        rows = [DraftRow(place + 2 + depth, sampling, rate=False) for place in range(count)]
        said = draw_among(ids, logits, rows, head.config.vocabulary)
        sure.append(confidences(logits, rows)[first:])
        hits.append([said[place] == text[place + 2 + depth] for place in range(first, count)])
        fed = torch.tensor([said])
    return [
        Place(told, _right(right)) for told, right in zip(zip(*sure, strict=True), zip(*hits, strict=True), strict=True)
    ]


def _right(hits: Sequence[bool]) -> int:
    return hits.index(False) if False in hits else len(hits)


# ----------------------------------------------------------------------------------------------------------------------
# Errors of what is foretold


def errors(texts: Iterable[Sequence[Place]]) -> list[tuple[str, float, float]]:
    """(what foretells, ECE, Brier), of steps that test whole drafts of one session after the other."""
    learnt, told = LearntHead(), list[tuple[float, float, float]]()
    for places in texts:
        known, at = learnt.by_position.faded(16.0), 0
        while at < len(places):
            place = places[at]
            rates = known.rates(MOST_HEAD_DEPTH)
            for index in range(min(place.right + 1, MOST_HEAD_DEPTH)):
                chance = learnt.by_confidence.chance(place.sure[index])
                told.append((rates[index], chance, float(index < place.right)))
            _learn(learnt, known, place, MOST_HEAD_DEPTH)
            at += place.right + 1
    named = (("position", 0), ("how sure the head is", 1))
    return [(name, *_off([(each[of], each[2]) for each in told])) for name, of in named]


def _off(told: Sequence[tuple[float, float]]) -> tuple[float, float]:
    bins: list[list[tuple[float, float]]] = [[] for _ in range(BINS)]
    for chance, right in told:
        bins[min(BINS - 1, int(BINS * chance))].append((chance, right))
    gaps = (abs(sum(chance - right for chance, right in each)) for each in bins)
    return sum(gaps) / len(told), sum((chance - right) ** 2 for chance, right in told) / len(told)


def _learn(learnt: LearntHead, own: AcceptanceByPosition, place: Place, depth: int) -> None:
    right = min(place.right, depth)
    learnt.by_confidence.observe(place.sure[:depth], own.rates(depth), depth, right)
    own.observe(depth, right)
    learnt.by_position.observe(depth, right)


# ----------------------------------------------------------------------------------------------------------------------
# Policies


def plain(sessions: int, times: Times) -> float:
    return sessions * PLAIN_US / times.step_us(sessions)


def fixed(texts: Sequence[Sequence[Place]], sessions: int, times: Times, depth: int) -> float:
    """Every step tests drafts of one depth whole."""
    step_us = times.step_us(sessions * (1 + depth)) + times.depth().drafting_us(sessions, depth)
    tokens = steps = 0
    for group in _groups(texts, sessions):
        at = [0] * sessions
        while all(place < len(places) for place, places in zip(at, group, strict=True)):
            decided = [min(depth, places[place].right) + 1 for place, places in zip(at, group, strict=True)]
            at, tokens, steps = [a + b for a, b in zip(at, decided, strict=True)], tokens + sum(decided), steps + 1
    return Played(tokens, steps * step_us).rate


def chosen(
    texts: Sequence[Sequence[Place]], sessions: int, times: Times, sure: Callable[[Place], Sequence[float]]
) -> float:
    """As the engine chooses. sure: what the head says of a place; nothing for acceptance by position."""
    learnt, head, now_us, tokens = LearntHead(), times.depth(), 0.0, 0
    for group in _groups(texts, sessions):
        sources = [HeadSource([0], learnt) for _ in group]
        at = [0] * sessions
        while all(place < len(places) for place, places in zip(at, group, strict=True)):
            places = [each[place] for each, place in zip(group, at, strict=True)]
            said = [Place(tuple(sure(place)), place.right) for place in places]
            depth, rates = 0, [source.acceptance.rates(MOST_HEAD_DEPTH) for source in sources]
            most = head.choose(rates, sessions, times.step_us) or PROBE_WINDOW * head.due(now_us)
            if most:
                known = [source.confidence for source in sources]
                depth = _depth(head, [each[:most] for each in rates], known, said, times)
            widths = _widths(sources, said, depth, times) if depth else [0] * sessions
            took_us = head.drafting_us(sessions, depth) if depth else 0.0
            now_us += times.step_us(sessions + sum(widths)) + took_us
            if depth:
                head.observe(sessions, depth, took_us, now_us)
                for source, place in zip(sources, said, strict=True):
                    _learn(learnt, source.acceptance, place, depth)
            decided = [min(width, place.right) + 1 for width, place in zip(widths, said, strict=True)]
            at, tokens = [a + b for a, b in zip(at, decided, strict=True)], tokens + sum(decided)
    return Played(tokens, now_us).rate


def _depth(head: HeadDepth, rates: Any, known: Any, said: Sequence[Place], times: Times) -> int:
    deepening = head.deepening(rates, known, len(said), times.step_us)
    most = len(rates[0])
    for depth in range(1, most):
        if said[0].sure and not deepening.goes_on(range(len(said)), [place.sure[depth - 1] for place in said]):
            return depth
    return most


def _widths(sources: Sequence[HeadSource], said: Sequence[Place], depth: int, times: Times) -> list[int]:
    candidates = []
    for slot, (source, place) in enumerate(zip(sources, said, strict=True)):
        source.propose([0] * depth, place.sure)
        guess = source.look()
        candidates.append(StepCandidate(slot, ROOM, 1, 0, UNBOUNDED_US, source.acceptance, guess=guess))
    windows = divided(candidates, times.step_us)
    return [windows.of(slot).width for slot in range(len(said))]


def _groups(texts: Sequence[Sequence[Place]], sessions: int) -> list[Sequence[Sequence[Place]]]:
    return [texts[first : first + sessions] for first in range(0, len(texts) - sessions + 1, sessions)]


def gain_line(texts: Sequence[Sequence[Place]], sessions: int, times: Times) -> tuple[str, ...]:
    random, none = Random(1), plain(sessions, times)
    best = max(fixed(texts, sessions, times, depth) for depth in range(1, MOST_HEAD_DEPTH + 1))
    position = chosen(texts, sessions, times, lambda _place: ())
    sure = chosen(texts, sessions, times, lambda place: place.sure)
    idle = chosen(texts, sessions, times, lambda place: [random.random() for _ in place.sure])
    found = (best / none, position / none, sure / none, sure / position, idle / position)
    return tuple(f"{each:.3f}" for each in found)


def main(argv: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(
        prog="python -m bench.branching.head_depths",
        description="What it gains to draft as deep as the demo pair's head is sure, in virtual time (three minutes).",
    )
    line.add_argument("--prompts", type=int, default=32, metavar="N", help="held-out prompts (default: 32)")
    line.add_argument("--tokens", type=int, default=128, metavar="N", help="new tokens for each (default: 128)")
    args = line.parse_args(argv)
    if refused(args, NUMBERS):
        return 2
    prompts = prompts_of(TARGET)[: args.prompts]
    off: list[tuple[str, ...]] = []
    gains: list[tuple[str, ...]] = []
    for temperature in TEMPERATURES:
        texts = drafted(written(prompts, args.tokens, temperature), [*map(len, prompts)], temperature)
        texts = [places for places in texts if places]
        if not texts:
            say(f"bench: error: tokens: must be more than {MOST_HEAD_DEPTH}, not {args.tokens}, or texts end before")
            return 2
        off += [(f"{temperature:g}", name, f"{ece:.3f}", f"{brier:.3f}") for name, ece, brier in errors(texts)]
        for times, sessions in product((Times(*each) for each in CELLS), SESSIONS):
            if sessions <= len(texts):
                cell = (f"{temperature:g}", f"{times.slope:g}, {times.head:g}", str(sessions))
                gains.append((*cell, *gain_line(texts, sessions, times)))
    named = (
        "temperature",
        "slope, head",
        "sessions",
        "best fixed depth",
        "by position",
        "by how sure",
        "x",
        "at random, x",
    )
    print("\n".join([*table(("temperature", "foretold by", "ECE", "Brier"), off), "", *table(named, gains)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
