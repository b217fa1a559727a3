"""Measure a trained pair on held-out files: losses, acceptance, and how many completions parse.

python -m demo_pair.train.evaluate [--target DIR] [--draft DIR]
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from demo_pair import DRAFT, TARGET, Prompt, held_out_prompts
from demo_pair.train.data import encode, held_out_windows, read_corpus
from demo_pair.train.target import EVALUATION_WINDOWS, held_out_loss
from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import Sampling

NEW_TOKENS = 120
TEMPERATURE = 0.8


@torch.inference_mode()
def completion(target: PreTrainedModel, prompt: list[int], sampling: Sampling) -> list[int]:
    """The target's own text, drawn as specwire draws it (greedy, or coupled noise)."""
    text, cache = list(prompt), None
    fed = torch.tensor([prompt])
    for position in range(len(prompt), len(prompt) + NEW_TOKENS):
        out = target(input_ids=fed, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        text.append(choose(out.logits[0, -1].float().numpy(), position, sampling))
        if text[-1] == 0:
            break
        fed = torch.tensor([[text[-1]]])
    return text


@torch.inference_mode()
def agreement(draft: PreTrainedModel, text: list[int], prompt_length: int, sampling: Sampling) -> list[bool]:
    """For each output position, whether the drafter's first proposal there, given the text before, is the token."""
    logits = draft(input_ids=torch.tensor([text])).logits[0].float().numpy()
    return [choose(logits[p - 1], p, sampling) == text[p] for p in range(prompt_length, len(text))]


def last_full_statement(source: str) -> str:
    """`source` up to the end of its last complete logical line that opens no block."""
    ends: list[tuple[int, bool]] = []
    previous = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NEWLINE:
                ends.append((token.start[0], previous == ":"))
            elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
                previous = token.string
    except (tokenize.TokenError, IndentationError, SyntaxError):
        pass
    while ends and ends[-1][1]:
        ends.pop()
    lines = source.splitlines(keepends=True)
    return "".join(lines[: ends[-1][0]]) if ends else ""


def parses(before: str, continuation: str) -> bool:
    """Whether the whole file so far with the completion, cut at the last full statement, is Python.

    The completion must contribute at least one statement. Its last line is dropped first: the token limit cut it.
    """
    whole_lines = continuation[: continuation.rfind("\n") + 1]
    cut = last_full_statement(before + whole_lines)
    if len(cut) <= len(before):
        return False
    try:
        ast.parse(cut)
    except (SyntaxError, ValueError):
        return False
    return True


def text_before(prompt: Prompt, sources: dict[str, str]) -> str:
    """The file from its first line to the prompt's end: a prompt starts in the middle of its file."""
    whole = sources[prompt.name.split(":")[0]]
    return whole[: whole.index(prompt.text) + len(prompt.text)]


def evaluate(target_path: Path, draft_path: Path) -> dict[str, object]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target_path)
    target = LlamaForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    draft = LlamaForCausalLM.from_pretrained(draft_path, dtype=torch.float32).eval()
    files = read_corpus()
    windows = held_out_windows(encode([f for f in files if f.held_out], tokenizer), EVALUATION_WINDOWS)
    sources = {f.path: f.text for f in files if f.held_out}
    agreed: dict[float, list[bool]] = {0.0: [], TEMPERATURE: []}
    parsed = []
    prompts = held_out_prompts()
    for index, prompt in enumerate(prompts):
        ids = tokenizer(prompt.text).input_ids
        for temperature, found in agreed.items():
            sampling = Sampling(temperature=temperature, seed=index)
            text = completion(target, ids, sampling)
            found += agreement(draft, text, len(ids), sampling)
            if temperature == 0.0:
                continuation = tokenizer.decode(text[len(ids) :], skip_special_tokens=True)
                parsed.append(parses(text_before(prompt, sources), continuation))
        print(f"prompt {index + 1}/{len(prompts)}", flush=True)
    return {
        "held_out_loss": {"target": held_out_loss(target, windows), "draft": held_out_loss(draft, windows)},
        "acceptance_first": {str(t): float(np.mean(found)) for t, found in agreed.items()},
        "parses": float(np.mean(parsed)),
        "prompts": len(prompts),
        "new_tokens": NEW_TOKENS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--draft", type=Path, default=DRAFT)
    arguments = parser.parse_args()
    print(json.dumps(evaluate(arguments.target, arguments.draft), indent=1))


if __name__ == "__main__":
    main()
