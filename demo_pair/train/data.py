"""Token streams and the deterministic order in which training windows are drawn from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerFast

from demo_pair.train.corpus import SourceFile, is_test

WINDOW = 512
Stream = npt.NDArray[np.int32]


def encode(files: list[SourceFile], tokenizer: PreTrainedTokenizerFast) -> Stream:
    """All files as one stream of ids, each file preceded by the end-of-text token."""
    end = tokenizer.eos_token_id
    encodings = tokenizer.backend_tokenizer.encode_batch([f.text for f in files])
    return np.concatenate([np.array([end, *e.ids], dtype=np.int32) for e in encodings])


def training_stream(files: list[SourceFile], tokenizer: PreTrainedTokenizerFast) -> Stream:
    """The training split. Library code counts twice: it is what completion is about, and there is less of it."""
    train = [f for f in files if not f.held_out]
    library = encode([f for f in train if not is_test(Path(f.path))], tokenizer)
    tests = encode([f for f in train if is_test(Path(f.path))], tokenizer)
    return np.concatenate([library, library, tests])


def batches(stream: Stream, rows: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless (rows, WINDOW + 1) batches: an epoch visits all windows once, from a fresh random offset."""
    generator = np.random.default_rng(seed)
    while True:
        offset = int(generator.integers(WINDOW))
        starts = np.arange(offset, len(stream) - WINDOW - 1, WINDOW)
        generator.shuffle(starts)
        for at in range(0, len(starts) - rows + 1, rows):
            windows = [stream[s : s + WINDOW + 1] for s in starts[at : at + rows]]
            yield torch.from_numpy(np.stack(windows).astype(np.int64))


def held_out_windows(stream: Stream, most: int) -> torch.Tensor:
    """(n, WINDOW + 1) windows spread evenly over the held-out stream, n <= most."""
    whole = (len(stream) - 1) // WINDOW
    picked = np.linspace(0, whole - 1, min(most, whole)).astype(int) * WINDOW
    return torch.from_numpy(np.stack([stream[at : at + WINDOW + 1] for at in picked]).astype(np.int64))
