"""The pair's tokenizer, token streams, and the deterministic order in which training windows are drawn from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
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


# ----------------------------------------------------------------------------------------------------------------------
# The pair's shared tokenizer: byte-level BPE whose pieces follow the shape of Python source.

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"

# A newline with the indentation that follows it is one piece: it becomes one token for the common depths,
# and a drafter that knows the depth of a block gets the whole line start right at once.
PIECES = r" ?[A-Za-z_]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9_]+|\s*\n[ \t]*| +(?=\S)|\s+"


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn `VOCABULARY` merges from `texts`; every byte string can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
