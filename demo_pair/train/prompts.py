"""Cut held-out prompts: the beginnings of functions in files that the pair was not trained on; and choose the demo's.

    python -m demo_pair.train.prompts

A prompt is what an editor would send: the source before the cursor, at most CONTEXT characters of it from a line
start on, ending behind the first lines of a function's body. It ends without a newline: the tokenizer joins a newline
with the indentation behind it, so the next line's depth is the target's to choose.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice

from tokenizers import Tokenizer

from demo_pair import DEMO_PROMPTS, DEMO_SEED, DEMO_TEMPERATURES, DEMO_TOKENS, PROMPTS, TARGET, Prompt
from demo_pair.train.data import SourceFile, read_corpus
from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed
from specwire.files import write_text
from specwire.lm import LanguageModel, load_model

COUNT = 64
CONTEXT = 900
LEAST_LINES = 10
MOST_PER_FILE = 8


def function_beginnings(file: SourceFile) -> Iterator[Prompt]:
    """One prompt for each function of some length: everything up to a third of its body."""
    lines = file.text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(file.text)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        first = node.body[0].lineno
        if node.end_lineno - first < LEAST_LINES or len(node.body) < 3:
            continue
        cut = node.body[1].lineno - 1
        before = "".join(lines[:cut])
        start = max(0, len(before) - CONTEXT)
        start = before.find("\n", start) + 1 if start else 0
        yield Prompt(f"{file.path}:{node.lineno} {node.name}", before[start:].rstrip())


def shuffled(prompts: list[Prompt]) -> list[Prompt]:
    """A fixed order that depends on each prompt alone."""
    return sorted(prompts, key=lambda p: hashlib.sha256(p.text.encode()).digest())


# ----------------------------------------------------------------------------------------------------------------------
# The demo's: beginnings of held-out functions behind which the target's own text repeats little.
#
# Of a text, that part of the tokens is *repeated* which a look-up in the text could have guessed: the LOOKED_UP tokens
# before also stand earlier, in prompt or output, and somewhere there the same token followed. A prompt passes if of the
# target's plain text, DEMO_TOKENS long, at most MOST_REPEATED is repeated, at each of DEMO_TEMPERATURES. The first
# DEMO_COUNT that pass are the demo's, in the order of `shuffled`. No drafter, no head and no acceptance has a say.

LOOKED_UP = 3
MOST_REPEATED = 0.25
DEMO_COUNT = 8
# Prompts completed at once.
SLOTS = 16


def repeated(text: Sequence[int], start: int) -> float:
    """The part of text[start:] that a look-up in the text before could have guessed."""
    followed: dict[tuple[int, ...], set[int]] = {}
    guessed = 0
    for position in range(LOOKED_UP, len(text)):
        behind = followed.setdefault(tuple(text[position - LOOKED_UP : position]), set())
        guessed += position >= start and text[position] in behind
        behind.add(text[position])
    return guessed / (len(text) - start)


def plain_texts(target: LanguageModel, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
    """Each prompt with the target's own DEMO_TOKENS behind it, as specwire draws them; fewer where the text ends."""
    ends, texts, fed = target.info.eos_ids, [list(prompt) for prompt in prompts], [0] * len(prompts)
    for _ in range(DEMO_TOKENS):
        open_ones = [slot for slot, text in enumerate(texts) if text[-1] not in ends]
        if not open_ones:
            break
        rows = target.forward([Feed(slot, fed[slot], texts[slot][fed[slot] :], 1) for slot in open_ones])
        for slot, row in zip(open_ones, rows, strict=True):
            fed[slot] = len(texts[slot])
            texts[slot].append(choose(row.numpy(), fed[slot], sampling))
    return texts


def shares(target: LanguageModel, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[float, ...]]:
    """For each prompt, what is repeated at each temperature; 1 where the text ends before DEMO_TOKENS."""
    by_temperature = []
    for temperature in DEMO_TEMPERATURES:
        texts = plain_texts(target, prompts, Sampling(temperature=temperature, seed=DEMO_SEED))
        pairs = zip(texts, map(len, prompts), strict=True)
        by_temperature.append([repeated(text, at) if len(text) == at + DEMO_TOKENS else 1.0 for text, at in pairs])
    return zip(*by_temperature, strict=True)


def passing(candidates: Sequence[Prompt]) -> Iterator[tuple[Prompt, tuple[float, ...]]]:
    """Those that pass, with their shares."""
    target = load_model(str(TARGET), slots=SLOTS)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    for at in range(0, len(candidates), SLOTS):
        batch = candidates[at : at + SLOTS]
        for prompt, found in zip(batch, shares(target, [tokenizer.encode(p.text).ids for p in batch]), strict=True):
            if max(found) <= MOST_REPEATED:
                yield prompt, found


def main() -> None:
    held_out = [list(function_beginnings(file)) for file in read_corpus() if file.held_out]
    chosen = shuffled([prompt for prompts in held_out for prompt in shuffled(prompts)[:MOST_PER_FILE]])[:COUNT]
    write_text(PROMPTS, json.dumps([{"name": p.name, "text": p.text} for p in chosen], indent=1) + "\n")
    rows = []
    for prompt, found in islice(passing(shuffled([prompt for prompts in held_out for prompt in prompts])), DEMO_COUNT):
        print(f"{prompt.name}: {', '.join(f'{share:.3f}' for share in found)}", flush=True)
        rows.append({"name": prompt.name, "text": prompt.text, "repeated": found})
    write_text(DEMO_PROMPTS, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
