"""The target's own continuations of training files: what a drafter must learn to foresee."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from demo_pair.train.data import WINDOW, Stream

PREFIX = 160
ROWS = 64
SAMPLED_TEMPERATURE = 0.8


def own_windows(target: PreTrainedModel, stream: Stream, count: int, seed: int) -> torch.Tensor:
    """(count, WINDOW + 1) windows: PREFIX tokens of the corpus, then the target's text, half greedy, half sampled."""
    generator = np.random.default_rng(seed)
    starts = generator.integers(0, len(stream) - PREFIX, size=count)
    prefixes = torch.from_numpy(np.stack([stream[s : s + PREFIX] for s in starts]).astype(np.int64))
    torch.manual_seed(seed)
    parts = [
        continued(target, rows, sampled=index % 2 == 1, done=index * ROWS, count=count)
        for index, rows in enumerate(prefixes.split(ROWS))
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
