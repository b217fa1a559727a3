"""The pair's corpus, tokenizer, token streams, and the deterministic order in which training windows are drawn."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# ----------------------------------------------------------------------------------------------------------------------
# The corpus: source files of the Python standard library, split by file, listed with hashes.
#
# A file is held out when a hash of its path says so, so the split depends neither on the machine nor on the order in
# which files are found. Test-suite files are never held out: held-out prompts should look like the library code that a
# completion user writes, not like assertions.

MANIFEST = Path(__file__).resolve().parent / "corpus.json"

# Tables, generated data and files that are invalid on purpose teach nothing about writing Python.
EXCLUDED_PARTS = {"site-packages", "__pycache__", "encodings", "pydoc_data", "lib2to3", "data", "idle_test"}
EXCLUDED_PREFIXES = ("badsyntax_", "bad_coding", "test_unicode", "test_codec")
MIN_BYTES, MAX_BYTES = 400, 300_000
HELD_OUT_ONE_IN = 25


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus: its path below the library's root (POSIX form), text and split."""

    path: str
    text: str
    held_out: bool

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def is_test(path: Path) -> bool:
    return any(part in ("test", "tests") or part.endswith("_test") for part in path.parts)


def wanted(path: Path) -> bool:
    return not (set(path.parts) & EXCLUDED_PARTS or path.name.startswith(EXCLUDED_PREFIXES))


def held_out(path: Path) -> bool:
    number = int.from_bytes(hashlib.sha256(path.as_posix().encode()).digest()[:4], "big")
    return not is_test(path) and number % HELD_OUT_ONE_IN == 0


class Manifest(TypedDict):
    """`rows`: path, digest and split of every file; `sha256` is over the rows."""

    python: str
    files: int
    sha256: str
    rows: list[list[str]]


def read_corpus(root: Path | None = None) -> list[SourceFile]:
    """Read the library under `root` (default: the running interpreter's), sorted by path."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = []
    for full in sorted(root.rglob("*.py")):
        path = full.relative_to(root)
        if not wanted(path) or not MIN_BYTES <= full.stat().st_size <= MAX_BYTES:
            continue
        try:
            text = full.read_text(encoding="utf-8")
            compile(text, str(path), "exec", dont_inherit=True)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        files.append(SourceFile(path.as_posix(), text, held_out(path)))
    return files


def manifest_of(files: list[SourceFile]) -> Manifest:
    rows = [[f.path, f.digest, "held_out" if f.held_out else "train"] for f in files]
    whole = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return {"python": sysconfig.get_python_version(), "files": len(rows), "sha256": whole, "rows": rows}


def differences(files: list[SourceFile], manifest: Manifest) -> list[str]:
    """Paths whose content differs between this machine's library and the recorded manifest."""
    recorded = {path: digest for path, digest, _ in manifest["rows"]}
    here = {f.path: f.digest for f in files}
    return sorted(p for p in recorded.keys() | here.keys() if recorded.get(p) != here.get(p))


# ----------------------------------------------------------------------------------------------------------------------
# The pair's tokenizer, token streams, and the order in which training windows are drawn from them.

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
