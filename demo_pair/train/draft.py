"""Distil the demo pair's drafter: a 2-layer, 256-wide Llama that imitates the target, not the corpus.

Every other batch is the target's own text. The loss is the cross-entropy to the target's whole distribution (Hinton
et al. 2015), which coupled acceptance rewards, plus that to its argmax, which greedy acceptance rewards. Two layers,
because copying an identifier that stands further up takes two attention layers, and code is full of such copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from demo_pair.train.data import WINDOW, Stream, batches, encode, held_out_windows, read_corpus, training_stream
from demo_pair.train.target import EVALUATION_WINDOWS, logits_of, pair_config, taught
from specwire.files import replaced, replaced_in
from specwire.lm.training.loop import Schedule

ROWS = 12
SEED = 20261122
OWN_WINDOWS = 1024
ARGMAX_WEIGHT = 0.5
ROUNDS = [Schedule(4e-3, 50, 850, 450), Schedule(4e-3, 50, 850, 700)]


def imitation_loss(draft: PreTrainedModel, target: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    """Cross-entropy (nats per token) to the target's distribution plus ARGMAX_WEIGHT times that to its argmax."""
    with torch.no_grad():
        wanted = logits_of(target, windows[:, :-1]).flatten(0, 1)
    log_q = logits_of(draft, windows[:, :-1]).flatten(0, 1).log_softmax(-1)
    soft = -(wanted.softmax(-1) * log_q).sum(-1).mean()
    return soft + ARGMAX_WEIGHT * nn.functional.nll_loss(log_q, wanted.argmax(-1))


def mixed(corpus: Iterator[torch.Tensor], own: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        yield next(corpus)
        yield next(own)


def own_batches(windows: torch.Tensor, rows: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless shuffled batches of the target's own windows."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(windows), generator=generator)
        yield from (windows[part] for part in order.split(rows) if len(part) == rows)


def load_own_windows(work: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """The target's own text, generated the first time."""
    path = work / "own_windows.pt"
    if not path.exists():
        stream = training_stream(read_corpus(), tokenizer)
        with replaced(path) as beside:
            torch.save(own_windows(target, stream, OWN_WINDOWS, SEED).to(torch.int32), beside)
    windows: torch.Tensor = torch.load(path, weights_only=True)
    return windows.long()


def train_draft(work: Path) -> None:
    """Into `work` / draft. Each round starts from the weights of the one before, with a fresh optimiser."""
    files = read_corpus()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(work / "target")
    target = LlamaForCausalLM.from_pretrained(work / "target", dtype=torch.float32).eval()
    own = load_own_windows(work, target, tokenizer)
    stream = training_stream(files, tokenizer)
    held_out = held_out_windows(encode([f for f in files if f.held_out], tokenizer), EVALUATION_WINDOWS)
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(pair_config(width=256, inner=512, layers=2, heads=4))
    for index, schedule in enumerate(ROUNDS):
        order = mixed(batches(stream, ROWS, SEED + index), own_batches(own, ROWS, SEED + index))
        folder = work / f"draft.training-{index}"
        taught(model, order, lambda windows: imitation_loss(model, target, windows), held_out, schedule, folder)
    with replaced_in(work / "draft") as folder:
        model.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)


# ----------------------------------------------------------------------------------------------------------------------
# The target's own continuations of training files: what a drafter must learn to foresee.

PREFIX = 160
CONTINUED_ROWS = 64
SAMPLED_TEMPERATURE = 0.8


def own_windows(target: PreTrainedModel, stream: Stream, count: int, seed: int) -> torch.Tensor:
    """(count, WINDOW + 1) windows: PREFIX tokens of the corpus, then the target's text, half greedy, half sampled."""
    generator = np.random.default_rng(seed)
    starts = generator.integers(0, len(stream) - PREFIX, size=count)
    prefixes = torch.from_numpy(np.stack([stream[s : s + PREFIX] for s in starts]).astype(np.int64))
    torch.manual_seed(seed)
    parts = [
        continued(target, rows, sampled=index % 2 == 1, done=index * CONTINUED_ROWS, count=count)
        for index, rows in enumerate(prefixes.split(CONTINUED_ROWS))
    ]
    return torch.cat(parts)


@torch.inference_mode()
def continued(target: PreTrainedModel, prefixes: torch.Tensor, sampled: bool, done: int, count: int) -> torch.Tensor:
    options = {"do_sample": True, "temperature": SAMPLED_TEMPERATURE, "top_k": 0} if sampled else {"do_sample": False}
    length = WINDOW + 1 - PREFIX
    with torch.autocast("cpu", torch.bfloat16):
        text = target.generate(  # type: ignore[operator]  # a mixin that mypy takes for a tensor
            prefixes,
            attention_mask=torch.ones_like(prefixes),
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=0,
            **options,
        )
    print(f"own text {done + len(prefixes)}/{count}", flush=True)
    return torch.as_tensor(text)
