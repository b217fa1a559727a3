"""Distil the demo pair's drafter: a 2-layer, 256-wide Llama that imitates the target, not the corpus.

    python -m demo_pair.train.draft --work DIR

Every other batch is the target's own text. The loss is the cross-entropy to the target's whole distribution (Hinton
et al. 2015), which coupled acceptance rewards, plus that to its argmax, which greedy acceptance rewards. Two layers,
because copying an identifier that stands further up takes two attention layers, and code is full of such copies.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from demo_pair.train.data import WINDOW, Stream, batches, encode, held_out_windows, read_corpus, training_stream
from demo_pair.train.target import EVALUATION_WINDOWS, held_out_loss, logits_of, pair_config, tell
from specwire.files import replaced, replaced_in, write_text
from specwire.lm.training.loop import Optimiser, Schedule
from specwire.progress import ProgressBar

ROWS = 12
SEED = 20261122
OWN_WINDOWS = 1024
ARGMAX_WEIGHT = 0.5
ROUNDS = [Schedule(4e-3, 50, 850, 450), Schedule(4e-3, 50, 850, 700)]


def imitation_loss(draft_logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Cross-entropy (nats per token) to the target's distribution plus ARGMAX_WEIGHT times that to its argmax."""
    log_q = draft_logits.flatten(0, 1).log_softmax(-1)
    target = target_logits.flatten(0, 1)
    soft = -(target.softmax(-1) * log_q).sum(-1).mean()
    return soft + ARGMAX_WEIGHT * nn.functional.nll_loss(log_q, target.argmax(-1))


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


def train(work: Path, rounds: list[Schedule]) -> None:
    """Each round starts from the weights of the one before, with a fresh optimiser (warm restarts)."""
    files = read_corpus()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(work / "target")
    target = LlamaForCausalLM.from_pretrained(work / "target", dtype=torch.float32).eval()
    own = load_own_windows(work, target, tokenizer)
    stream = training_stream(files, tokenizer)
    held_out = held_out_windows(encode([f for f in files if f.held_out], tokenizer), EVALUATION_WINDOWS)
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(pair_config(width=256, inner=512, layers=2, heads=4))
    finished = work / "draft.checkpoint"
    first = 0
    if finished.exists():
        saved = torch.load(finished, weights_only=True)
        model.load_state_dict(saved["model"])
        first = saved["rounds"]
    for index, schedule in enumerate(rounds[first:], start=first):
        imitate(
            model, target, mixed(batches(stream, ROWS, SEED + index), own_batches(own, ROWS, SEED + index)), schedule
        )
        with replaced(finished) as beside:
            torch.save({"model": model.state_dict(), "rounds": index + 1}, beside)
    loss = held_out_loss(model, held_out)
    with replaced_in(work / "draft") as folder:
        model.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    steps = sum(schedule.steps for schedule in rounds)
    report = {"tokens": steps * ROWS * WINDOW, "steps": steps, "held_out_loss": loss}
    write_text(work / "draft.json", json.dumps(report, indent=1) + "\n")
    print(f"held-out loss {loss:.4f}")


def imitate(
    model: PreTrainedModel, target: PreTrainedModel, windows_source: Iterator[torch.Tensor], schedule: Schedule
) -> None:
    """One round of distillation."""
    optimiser = Optimiser(model, schedule)
    started = time.monotonic()
    with ProgressBar("drafter", schedule.steps) as bar:
        for step, windows in zip(range(schedule.steps), windows_source, strict=False):
            with torch.no_grad():
                target_logits = logits_of(target, windows[:, :-1])
            draft_logits = logits_of(model, windows[:, :-1])
            loss = imitation_loss(draft_logits, target_logits)
            loss.backward()
            optimiser.step(step)
            bar.at(step + 1, f"loss {loss.item():.3f}")
            if (step + 1) % 20 == 0:
                agreement = (draft_logits.argmax(-1) == target_logits.argmax(-1)).float().mean().item()
                rate = (step + 1) * ROWS * WINDOW / (time.monotonic() - started)
                progress = f"step {step + 1}/{schedule.steps} loss {loss.item():.3f} agreement {agreement:.3f}"
                tell(f"{progress} {rate:.0f} tokens/s")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.work, ROUNDS)


if __name__ == "__main__":
    main()
