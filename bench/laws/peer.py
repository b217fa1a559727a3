"""The same test on transformers' assisted generation: `python -m bench.laws.peer`.

A target and an assistant of a few ids, with random weights from fixed seeds, so that the exact law of the first tokens
can be computed from the target's logits. Plain sampling is the control: what refuses it too is wrong with the test.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any, cast

import torch
from scipy.stats import chi2
from transformers import LlamaConfig, LlamaForCausalLM

from bench.laws.exact import chi_square

VOCABULARY = 4
FIRSTS = 3
PROMPT = (1, 2)
ALPHA = 1e-5
# Of the random weights: enough for tokens of unequal probability.
SCALE = 0.6
Text = tuple[int, ...]


def model(seed: int) -> LlamaForCausalLM:
    """A Llama of one small layer; no id ends its texts."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=SCALE,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    llama: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return llama


@torch.inference_mode()
def joint(target: LlamaForCausalLM, length: int) -> dict[Text, float]:
    """The exact law of the first `length` tokens at temperature 1."""
    law: dict[Text, float] = {}
    for text in product(range(VOCABULARY), repeat=length):
        logits = target(torch.tensor([[*PROMPT, *text]])).logits[0].double().log_softmax(dim=1)
        at = range(len(PROMPT) - 1, len(PROMPT) + length - 1)
        law[text] = float(torch.stack([logits[row, token] for row, token in zip(at, text, strict=True)]).sum().exp())
    return law


def texts(target: LlamaForCausalLM, assistant: LlamaForCausalLM | None, count: int) -> Counter[Text]:
    """The first tokens of so many texts, from the library's own generator."""
    prompt = torch.tensor([PROMPT])
    generate = cast(Callable[..., torch.Tensor], cast(Any, target).generate)
    found: Counter[Text] = Counter()
    for _ in range(count):
        answer = generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=assistant,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=2 * FIRSTS,
        )
        found[tuple(answer[0, len(PROMPT) : len(PROMPT) + FIRSTS].tolist())] += 1
    return found


def main() -> int:
    """Print the p-values; fails only where the control is refused: what the peer does is for the reader."""
    parser = argparse.ArgumentParser(prog="bench.laws.peer", description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the generator (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target, assistant = model(1), model(2)
    law = joint(target, FIRSTS)
    verdicts = {}
    for name, helper in (("plain sampling", None), ("assisted generation", assistant)):
        torch.manual_seed(args.seed)
        statistic, freedom = chi_square(texts(target, helper, args.sessions), law, args.sessions)
        verdicts[name] = float(chi2.sf(statistic, freedom))
        refused = "refused" if verdicts[name] < ALPHA else "accepted"
        print(f"transformers, {name}: {args.sessions} texts, p of {FIRSTS} tokens {verdicts[name]:.2g}, {refused}")
    return 1 if verdicts["plain sampling"] < ALPHA else 0


if __name__ == "__main__":
    sys.exit(main())
