"""Train the demo pair's target: a 6-layer, 384-wide Llama on the standard library's source."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from demo_pair.train.data import (
    MANIFEST,
    VOCABULARY,
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
from specwire.files import replaced_in
from specwire.lm.training.loop import Learnt, Schedule, repeat
from specwire.progress import LAST_LINE

# ----------------------------------------------------------------------------------------------------------------------
# What the two trainings share: the models' shape, their loss, and the steps.


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


def taught(
    model: PreTrainedModel,
    order: Iterator[torch.Tensor],
    loss: Callable[[torch.Tensor], torch.Tensor],
    held_out: torch.Tensor,
    schedule: Schedule,
    work: Path,
) -> None:
    """Train on windows to the schedule's end, from where an earlier run in `work` was interrupted."""

    def learn(windows: torch.Tensor) -> Learnt:
        return Learnt(loss(windows), windows.numel() - len(windows))

    work.mkdir(parents=True, exist_ok=True)
    measure, measured = lambda: [held_out_loss(model, held_out)], "loss"
    repeat(model, order, learn, measure, schedule, work, measured=measured, tell=tell)


# ----------------------------------------------------------------------------------------------------------------------
# The target.

ROWS = 12
SEED = 20261121
EVALUATION_WINDOWS = 64
SCHEDULE = Schedule(4e-3, 50, 2400, 950)


def load_tokenizer(folder: Path, files: list[SourceFile]) -> PreTrainedTokenizerFast:
    """The tokenizer in `folder`, learnt from the training split's library files the first time."""
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(f.text for f in files if not f.held_out and not is_test(Path(f.path))).save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def train_target(work: Path) -> None:
    """Into `work` / target: bfloat16 safetensors, with the tokenizer."""
    torch.manual_seed(SEED)
    files = read_corpus()
    changed = differences(files, json.loads(MANIFEST.read_text()))
    print(f"{len(files)} files; {len(changed)} differ from the manifest", flush=True)
    tokenizer = load_tokenizer(work / "target", files)
    held_out = held_out_windows(encode([f for f in files if f.held_out], tokenizer), EVALUATION_WINDOWS)
    model = LlamaForCausalLM(pair_config(width=384, inner=1024, layers=6, heads=6))
    order = batches(training_stream(files, tokenizer), ROWS, SEED)
    taught(model, order, lambda windows: next_token_loss(model, windows), held_out, SCHEDULE, work / "target.training")
    with replaced_in(work / "target") as folder:
        model.bfloat16().save_pretrained(folder)
