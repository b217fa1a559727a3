"""Where the demo pair's drafter is right: recorded traces, thinned or boosted to a stated acceptance.

    python -m bench.wan.traces        record them again, into bench/wan/traces.json

A trace says, for every output token, what the drafter thinks of the place given the target's own text before it: the
scores of its eight likeliest ids, and which of them is the target's token, if any. Recorded on the held-out prompts,
greedily and under coupled noise at temperature 0.8, where a score is log q + the target's own noise. Since what a
drafter guesses at a place of the right text is fixed, and nothing else is ever accepted, a trace decides a whole
session of a chain, whatever the discipline. Of greedy traces those of the first guess alone are zeros and ones.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer

from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.core.law.acceptance import RowSampling
from specwire.core.law.noise import gumbel
from specwire.core.law.sampling import Sampling
from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.law.sampler import choose
from specwire.options import cores
from specwire.rpc.process import say

FILE = Path(__file__).resolve().parent / "traces.json"
PROMPTS = 32
TOKENS = 256
DTYPE = "bfloat16"
SAY_EVERY = 64
# Rows of a prompt fed at once.
PREFILL_ROWS = 512
# Ids of which scores are kept; scores are kept in units of natural logarithm below the best, up to 255 units.
RANKS = 8
UNIT = 0.05
TEMPERATURE, SEED = 0.8, 1
GREEDY, COUPLED = "greedy", "coupled"
NONE = "-"


@dataclass(frozen=True, slots=True)
class Ranked:
    """A trace with ranks. right[i]: rank of the target's token i among the drafter's best, None where it is not there.

    scores[i]: of the drafter's RANKS best ids there, falling from 0: what they are more than the best one, in nats.
    """

    right: tuple[int | None, ...]
    scores: tuple[tuple[float, ...], ...]

    def written(self) -> dict[str, str]:
        gaps = np.array([[round(-score / UNIT) for score in scores[1:]] for scores in self.scores]).clip(0, 255)
        ranks = "".join(NONE if rank is None else str(rank) for rank in self.right)
        return {"right": ranks, "scores": base64.b85encode(gaps.astype(np.uint8).tobytes()).decode()}

    @classmethod
    def read(cls, written: dict[str, str]) -> Ranked:
        gaps = np.frombuffer(base64.b85decode(written["scores"]), np.uint8).reshape(-1, RANKS - 1)
        scores = tuple((0.0, *(-UNIT * int(gap) for gap in row)) for row in gaps)
        return cls(tuple(None if mark == NONE else int(mark) for mark in written["right"]), scores)

    def played(self, prompt: int) -> str:
        """As a scripted drafter reads it (`specwire.lm.scripted.ScriptedRanks`), behind a prompt of this length."""
        return json.dumps({"prompt": prompt, "right": self.right, "scores": self.scores})

    @property
    def bits(self) -> str:
        """The trace of the first guess alone."""
        return "".join(str(int(rank == 0)) for rank in self.right)


def recorded(path: Path = FILE) -> list[str]:
    """The greedy traces of the first guess alone: a string of zeros and ones each."""
    return [trace.bits for trace in ranked(GREEDY, path)]


def acceptance(trace: str) -> float:
    """The share of ones."""
    return trace.count("1") / len(trace)


def with_acceptance(trace: str, wanted: float, seed: int = 0) -> str:
    """The trace with as few bits turned as it takes to have a share `wanted` of ones; which ones, `seed` decides.

    Thinned (ones turned) or boosted (zeros turned), evenly over its length, so what it has of runs is kept in part.
    """
    ones = round(wanted * len(trace))
    turned = "1" if trace.count("1") > ones else "0"
    places = [at for at, bit in enumerate(trace) if bit == turned]
    chosen = set(Random(seed).sample(places, abs(trace.count("1") - ones)))
    return "".join(("1" if bit == "0" else "0") if at in chosen else bit for at, bit in enumerate(trace))


def with_ranks(trace: Ranked, wanted: float, seed: int = 0) -> Ranked:
    """The same with ranks: its first guesses are those of `with_acceptance`.

    A place that is turned gets what the trace says of another one: a miss that of a miss, so that ranks are spread over
    misses as they were recorded.
    """
    places = list(zip(trace.right, trace.scores, strict=True))
    kinds = {bit: [place for place in places if str(int(place[0] == 0)) == bit] for bit in "01"}
    random, made = Random(seed), list(places)
    for at, (old, new) in enumerate(zip(trace.bits, with_acceptance(trace.bits, wanted, seed), strict=True)):
        if old != new:
            made[at] = random.choice(kinds[new])
    return Ranked(tuple(rank for rank, _ in made), tuple(scores for _, scores in made))


def nearest(rule: str, wanted: float) -> list[Ranked]:
    """All traces of a rule with an acceptance, those first in which the least is turned."""
    found = sorted(ranked(rule), key=lambda trace: abs(acceptance(trace.bits) - wanted))
    return [with_ranks(trace, wanted) for trace in found]


def from_position(trace: str, position: int) -> str:
    """The trace turned round so that its first bit belongs to absolute `position`, as a scripted drafter reads it."""
    start = -position % len(trace)
    return trace[start:] + trace[:start]


def ranked(rule: str, path: Path = FILE) -> list[Ranked]:
    """The traces with ranks, of `greedy` or `coupled`."""
    return [Ranked.read(each) for each in json.loads(path.read_text())[rule]]


def record(temperature: float) -> list[Ranked]:
    """Traces of the demo pair on the first held-out prompts."""
    texts = [prompt.text for prompt in held_out_prompts()[:PROMPTS]]
    target = load_model(str(TARGET), slots=PROMPTS, dtype=DTYPE, threads=cores())
    tokenizer = Tokenizer.from_str(target.info.tokenizer_json.decode())
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    sampling = Sampling(temperature=temperature, seed=SEED)
    outputs = decode(target, prompts, TOKENS, sampling)
    drafter = load_model(str(DRAFT), slots=1, dtype=DTYPE, threads=cores())
    return [compare(drafter, prompt, output, sampling) for prompt, output in zip(prompts, outputs, strict=True)]


def decode(target: LanguageModel, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling) -> list[list[int]]:
    """What the target says, end-of-text included, all prompts in one batch."""
    texts = [list(prompt) for prompt in prompts]
    for slot, text in enumerate(texts):
        for start in range(0, len(text) - 1, PREFILL_ROWS):
            target.forward([Feed(slot, start, text[start : min(start + PREFILL_ROWS, len(text) - 1)], 0)])
    for done in range(1, tokens + 1):
        feeds = [Feed(slot, len(text) - 1, text[-1:], 1) for slot, text in enumerate(texts)]
        rows = [RowSampling(len(text), sampling) for text in texts]
        for text, token in zip(texts, choose(target.forward(feeds), rows), strict=True):
            text.append(token)
        if done % SAY_EVERY == 0:
            say(f"traces: {done} of {tokens} tokens")
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def compare(drafter: LanguageModel, prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> Ranked:
    """One text's trace: the drafter is shown the target's text and asked at every token."""
    drafter.discard(0)
    text = [*prompt, *output]
    best: list[tuple[list[int], list[float]]] = []
    for start in range(0, len(text), PREFILL_ROWS):
        piece = text[start : start + PREFILL_ROWS]
        logits = drafter.forward([Feed(0, start, piece, len(piece))]).double()
        best += [_best(row, position, sampling) for position, row in enumerate(logits, start + 1)]
    places = [best[at - 1] for at in range(len(prompt), len(text))]
    right = [ids.index(token) if token in ids else None for (ids, _), token in zip(places, output, strict=True)]
    return Ranked(tuple(right), tuple(tuple(scores) for _, scores in places))


def _best(logits: torch.Tensor, position: int, sampling: Sampling) -> tuple[list[int], list[float]]:
    """The best ids for `position`, and their scores below the best one's."""
    scores = logits
    if sampling.temperature:
        noise = gumbel(sampling.seed, sampling.choice, position, np.arange(len(logits)))
        scores = logits / sampling.temperature + torch.from_numpy(noise)
    found, ids = scores.topk(RANKS)
    return ids.tolist(), (found - found[0]).tolist()


def write(traces: Mapping[str, Iterable[Ranked]], path: Path = FILE) -> None:
    parts = [
        f'"{rule}": [\n  ' + ",\n  ".join(json.dumps(each.written()) for each in found) + "\n ]"
        for rule, found in traces.items()
    ]
    head = f'"pair": "demo_pair", "dtype": "{DTYPE}", "temperature": {TEMPERATURE:g}, "unit": {UNIT:g}'
    path.write_text(f"{{\n {head},\n " + ",\n ".join(parts) + "\n}\n")


def main() -> int:
    traces = {rule: record(temperature) for rule, temperature in ((GREEDY, 0.0), (COUPLED, TEMPERATURE))}
    write(traces)
    for rule, found in traces.items():
        ranks = [rank for trace in found for rank in trace.right]
        tops = [sum(rank is not None and rank < most for rank in ranks) / len(ranks) for most in (1, 2, 4, 8)]
        shown = ", ".join(f"{top:.3f}" for top in tops)
        say(f"traces: {rule}: {len(found)} of {TOKENS} tokens, right in 1, 2, 4, 8: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
