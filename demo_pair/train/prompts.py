"""Cut held-out prompts: the beginnings of functions in files that the pair was not trained on.

    python -m demo_pair.train.prompts

A prompt is what an editor would send: the source before the cursor, at most CONTEXT characters of it from a line
start on, ending behind the first lines of a function's body. It ends without a newline: the tokenizer joins a newline
with the indentation behind it, so the next line's depth is the target's to choose.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator

from demo_pair import PROMPTS, Prompt
from demo_pair.train.data import SourceFile, read_corpus
from specwire.files import write_text

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


def main() -> None:
    chosen: list[Prompt] = []
    for file in read_corpus():
        if file.held_out:
            chosen += shuffled(list(function_beginnings(file)))[:MOST_PER_FILE]
    rows = [{"name": p.name, "text": p.text} for p in shuffled(chosen)[:COUNT]]
    write_text(PROMPTS, json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows)} prompts from {len({row['name'].split(':')[0] for row in rows})} files")


if __name__ == "__main__":
    main()
