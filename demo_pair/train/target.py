"""Train the demo pair's target: a 6-layer, 384-wide Llama on the standard library's source.

    python -m demo_pair.train.target --work DIR

Writes DIR/target (bfloat16 safetensors with the tokenizer) and DIR/target.json (the held-out losses). A run that is
interrupted goes on from DIR/target.checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from demo_pair.train.data import (
    MANIFEST,
    VOCABULARY,
    WINDOW,
    SourceFile,
    batches,
    differences,
    encode,
    held_out_windows,
    is_test,
    read_corpus,
    train_tokenizer,
    training_stream,
)
from specwire.files import replaced, replaced_in, write_text
from specwire.lm.training.loop import Optimiser, Schedule
from specwire.progress import LAST_LINE, ProgressBar

# ----------------------------------------------------------------------------------------------------------------------
# What the two trainings share: the models' shape and loss.


def pair_config(*, width: int, inner: int, layers: int, heads: int) -> LlamaConfig:
    """The common configuration of target and drafter, without their sizes."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def tell(line: str) -> None:
    """A line of the training's record, on stdout; above the bar where there is one."""
    LAST_LINE.say(line, sys.stdout)


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """(rows, length, vocabulary) logits in float32, computed under bfloat16 autocast."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def next_token_loss(model: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats per token) of the windows' next tokens."""
    logits = logits_of(model, windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, windows: torch.Tensor, rows: int = 8) -> float:
    model.eval()
    losses = [next_token_loss(model, part).item() * len(part) for part in windows.split(rows)]
    model.train()
    return sum(losses) / len(windows)


# ----------------------------------------------------------------------------------------------------------------------
# The target.

ROWS = 12
SEED = 20261121
CHECKPOINT_EVERY = 100
EVALUATE_EVERY = 200
EVALUATION_WINDOWS = 64


def load_tokenizer(folder: Path, files: list[SourceFile]) -> PreTrainedTokenizerFast:
    """The tokenizer in `folder`, learnt from the training split's library files the first time."""
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(f.text for f in files if not f.held_out and not is_test(Path(f.path))).save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def train(work: Path, schedule: Schedule, stop_after: int) -> None:
    torch.manual_seed(SEED)
    files = read_corpus()
    changed = differences(files, json.loads(MANIFEST.read_text()))
    print(f"{len(files)} files; {len(changed)} differ from the manifest", flush=True)
    tokenizer = load_tokenizer(work / "target", files)
    held_out = held_out_windows(encode([f for f in files if f.held_out], tokenizer), EVALUATION_WINDOWS)
    model = LlamaForCausalLM(pair_config(width=384, inner=1024, layers=6, heads=6))
    optimiser = Optimiser(model, schedule)
    checkpoint, first = work / "target.checkpoint", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load(saved["optimiser"])
        first = saved["step"]
    losses: list[tuple[int, float]] = []
    started = time.monotonic()
    with ProgressBar("target", schedule.steps, done=first) as bar:
        for step, windows in enumerate(batches(training_stream(files, tokenizer), ROWS, SEED)):
            if step == min(stop_after, schedule.steps):
                break
            if step < first:
                continue
            loss = next_token_loss(model, windows)
            loss.backward()
            optimiser.step(step)
            done = step + 1
            bar.at(done, f"loss {loss.item():.3f}")
            if done % 10 == 0:
                rate = (done - first) * ROWS * WINDOW / (time.monotonic() - started)
                tell(f"step {done}/{schedule.steps} loss {loss.item():.3f} {rate:.0f} tokens/s")
            if done % EVALUATE_EVERY == 0 or done == schedule.steps:
                losses.append((done, held_out_loss(model, held_out)))
                tell(f"step {done} held-out loss {losses[-1][1]:.4f}")
            if done % CHECKPOINT_EVERY == 0:
                state = {"model": model.state_dict(), "optimiser": optimiser.state(), "step": done}
                with replaced(checkpoint) as beside:
                    torch.save(state, beside)
    with replaced_in(work / "target") as folder:
        model.bfloat16().save_pretrained(folder)
    report = {"tokens": schedule.steps * ROWS * WINDOW, "steps": schedule.steps, "held_out_loss": losses}
    write_text(work / "target.json", json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--decay", type=int, default=950)
    parser.add_argument("--peak", type=float, default=4e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stop-after", type=int, default=1 << 30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(arguments.peak, 50, arguments.steps, arguments.decay)
    train(arguments.work, schedule, arguments.stop_after)


if __name__ == "__main__":
    main()
