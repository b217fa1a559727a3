"""Where the demo pair's drafter is right: recorded traces, thinned or boosted to a stated acceptance.

    python -m bench.wan.traces        record them again, into bench/wan/traces.json

A trace is a line of zeros and ones: bit i says whether the drafter, given the target's own text before output token i,
guesses that token. Recorded greedily on the held-out prompts. Since what a drafter guesses at a position of the right
text is fixed, and nothing else is ever accepted, a trace decides a whole session, whatever the discipline.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from demo_pair import DRAFT, TARGET, held_out_prompts
from deploy.stack.options import cores
from specwire.lm import Feed, LanguageModel, load_model
from specwire.rpc.process import say

FILE = Path(__file__).resolve().parent / "traces.json"
PROMPTS = 32
TOKENS = 256
DTYPE = "bfloat16"
SAY_EVERY = 64
# Rows of a prompt fed at once.
PREFILL_ROWS = 512


def recorded(path: Path = FILE) -> list[str]:
    """The traces as recorded: a string of zeros and ones each."""
    traces: list[str] = json.loads(path.read_text())["traces"]
    return traces


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


def from_position(trace: str, position: int) -> str:
    """The trace turned round so that its first bit belongs to absolute `position`, as a scripted drafter reads it."""
    start = -position % len(trace)
    return trace[start:] + trace[:start]


def record() -> list[str]:
    """Traces of the demo pair on the first held-out prompts."""
    texts = [prompt.text for prompt in held_out_prompts()[:PROMPTS]]
    target = load_model(str(TARGET), slots=PROMPTS, dtype=DTYPE, threads=cores())
    tokenizer = Tokenizer.from_str(target.info.tokenizer_json.decode())
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    outputs = decode(target, prompts, TOKENS)
    drafter = load_model(str(DRAFT), slots=1, dtype=DTYPE, threads=cores())
    return [compare(drafter, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def decode(target: LanguageModel, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """What the target says greedily, end-of-text included, all prompts in one batch."""
    texts = [list(prompt) for prompt in prompts]
    for slot, text in enumerate(texts):
        for start in range(0, len(text) - 1, PREFILL_ROWS):
            target.forward([Feed(slot, start, text[start : min(start + PREFILL_ROWS, len(text) - 1)], 0)])
    for done in range(1, tokens + 1):
        feeds = [Feed(slot, len(text) - 1, text[-1:], 1) for slot, text in enumerate(texts)]
        for text, token in zip(texts, target.forward(feeds).argmax(1).tolist(), strict=True):
            text.append(token)
        if done % SAY_EVERY == 0:
            say(f"traces: {done} of {tokens} tokens")
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def compare(drafter: LanguageModel, prompt: Sequence[int], output: Sequence[int]) -> str:
    """Bits of one text: the drafter is shown the target's text and asked at every token."""
    drafter.discard(0)
    text = [*prompt, *output]
    guesses: list[int] = []
    for start in range(0, len(text), PREFILL_ROWS):
        piece = text[start : start + PREFILL_ROWS]
        guesses += torch.argmax(drafter.forward([Feed(0, start, piece, len(piece))]), 1).tolist()
    return "".join(str(int(guesses[at - 1] == text[at])) for at in range(len(prompt), len(text)))


def write(traces: Iterable[str], path: Path = FILE) -> None:
    lines = ",\n  ".join(json.dumps(trace) for trace in traces)
    head = f'"pair": "demo_pair", "dtype": "{DTYPE}", "temperature": 0'
    path.write_text(f'{{\n {head},\n "traces": [\n  {lines}\n ]\n}}\n')


def main() -> int:
    traces = record()
    write(traces)
    say(f"traces: {len(traces)} of {TOKENS} tokens, acceptance {acceptance(''.join(traces)):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
