"""GGUF files behind our interface: llama.cpp computes the forwards, by llama-cpp-python's low-level functions.

A slot's text is a sequence of llama.cpp's, and each branch of a tree behind it is one (`sequences`). All
sequences share one cache (`kv_unified`), so that a prefix is copied by marking its cells as the copy's, too, and a
rollback is the removal of positions from a sequence.

    forward             one llama_decode of a ragged batch: (token, position, sequence) each
    rollback to p       llama_memory_seq_rm(sequence, p, end), at the next feed of the slot
    prefix, branch      llama_memory_seq_cp(source, target, 0, stop): no bytes are moved
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from specwire.core.model import Feed, ModelError
from specwire.lm.gguf_file import GgufFile
from specwire.lm.kv_cache import Runner, Sizes, all_finite
from specwire.lm.runners.llamacpp.sequences import SequenceRun, SequenceTable
from specwire.lm.runners.trial import Trial, made_up
from specwire.text.tokenizer import encode

logger = logging.getLogger(__name__)

# Cells that are taken at once beyond those in use, as a part of those.
MORE_CELLS = 1 / 4
# Rows that are computed together. llama.cpp sets aside memory for the logits of all of them.
TOGETHER = 128
# Sequences of one llama.cpp context (LLAMA_MAX_SEQ).
MOST_SEQUENCES = 256
LEAST_FOR_BRANCHES = 2
# Flash attention rounds to 16 bits here and there; quantised values are read by nothing else.
FLASH = {"f32": "DISABLED", "q8_0": "ENABLED", "q4_0": "ENABLED"}
# What llama_decode returns where an allocator failed.
NO_MEMORY = -2
# Levels of llama.cpp's log (ggml.h): the latest errors are kept for ours.
WARNING, ERROR = 3, 4
MOST_TOLD = 8
# Words, numbers, whitespace, marks and scripts that tokenizers cut in unlike ways.
TRIAL_TEXTS = (
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n\n",
    "It's 12345.678 % of what we'll have; DON'T  they say?!  \t\r\n  (yes)...",
    "Grüße, naïve café \u2014 日本語のテキスト, русский текст, ไทย, العربية 🙂👍🏽",
)


class Library:
    """llama_cpp's functions, and the last error that llama.cpp told: it returns none."""

    def __init__(self) -> None:
        """ModelError where llama-cpp-python, or the library that it is to load, is missing."""
        try:
            import llama_cpp
        except ImportError as error:
            raise ModelError("runtime: llamacpp is not installed (pip install 'specwire[llamacpp]')") from error
        except (OSError, RuntimeError) as error:  # of the shared library
            raise ModelError(f"runtime: llamacpp cannot be loaded: {error}") from error
        self.functions: Any = llama_cpp
        self._told: deque[str] = deque(maxlen=MOST_TOLD)
        # Kept as long as llama.cpp may call it.
        self._callback = llama_cpp.llama_log_callback(self._hear)
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()

    def _hear(self, level: int, text: bytes, _: object) -> None:
        said = text.decode(errors="replace").strip()
        if level == ERROR and said:
            self._told.append(said)
        if level in (WARNING, ERROR) and said:
            logger.debug("llama.cpp: %s", said)

    def build(self) -> list[tuple[str, int, int]]:
        """Which build it is: names, sizes and times of its shared libraries; empty where that cannot be told."""
        try:
            folder = Path(self.functions.llama_cpp._lib._name).resolve(strict=True).parent
            found = [(path.name, path.stat()) for path in sorted(folder.glob("*.so*"))]
        except (AttributeError, OSError) as reason:
            logger.info("llama.cpp's build cannot be told: %s", reason)
            return []
        return [(name, known.st_size, known.st_mtime_ns) for name, known in found]

    def reason(self) -> str:
        """What llama.cpp told first of the last failure, without the name of its function."""
        told = next(iter(self._told), "no reason was told")
        self._told.clear()
        return told.partition(": ")[2].rstrip(".") or told


@cache
def library() -> Library:
    return Library()


class GgufWeights:
    """A file's weights and vocabulary in llama.cpp. Freed with the object."""

    def __init__(self, file: GgufFile, gpu_layers: int = 0) -> None:
        """ModelError if llama.cpp cannot load the file, or keeps a state that cannot be rolled back."""
        self.library = library()
        llama = self.library.functions
        if gpu_layers and not llama.llama_supports_gpu_offload():
            raise ModelError(f"gpu-layers: this build of llama.cpp has no GPU to take {gpu_layers} layers")
        self.gpu_layers = gpu_layers
        params = llama.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.check_tensors = True  # a NaN among the weights would be read by every text
        if file.is_quantised and not gpu_layers:
            # Mapped, it stays in memory beside what llama.cpp packs anew of it: 1,970 MiB for Qwen's 1,065, read 1,380.
            params.load_mode = llama.LLAMA_LOAD_MODE_NONE
        self.model = llama.llama_model_load_from_file(str(file.path).encode(), params)
        if not self.model:
            raise ModelError(f"model {str(file.path)!r} cannot be loaded by llama.cpp: {self.library.reason()}")
        self._free = weakref.finalize(self, llama.llama_model_free, self.model)
        self._vocabulary = llama.llama_model_get_vocab(self.model)
        self.width = int(llama.llama_vocab_n_tokens(self._vocabulary))
        self._check_kind(file)

    def _check_kind(self, file: GgufFile) -> None:
        llama = self.library.functions
        kind = file.architecture
        if llama.llama_model_has_encoder(self.model) or not llama.llama_model_has_decoder(self.model):
            raise ModelError(f"{kind} models have an encoder; a causal, decoder-only model is needed")
        if llama.llama_model_is_recurrent(self.model) or llama.llama_model_is_hybrid(self.model):
            raise ModelError(f"this {kind} model has recurrent layers, whose state cannot be rolled back to a position")
        if llama.llama_model_is_diffusion(self.model):
            raise ModelError(f"this {kind} model writes by diffusion; a causal model is needed")

    @property
    def window(self) -> int:
        """Positions that some layers attend to at most; 0 where none slides. Cells behind it are kept (`swa_full`)."""
        return max(0, int(self.library.functions.llama_model_n_swa(self.model)))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id at which llama.cpp itself would end a text."""
        is_end = self.library.functions.llama_vocab_is_eog
        return tuple(id_ for id_ in range(self.width) if is_end(self._vocabulary, id_))

    def agrees(self, tokenizer: Tokenizer) -> bool:
        """Whether llama.cpp cuts TRIAL_TEXTS, at which tokenizers differ, into its tokens."""
        return all(encode(tokenizer, text) == self.tokens(text) for text in TRIAL_TEXTS)

    def tokens(self, text: str) -> list[int]:
        """What llama.cpp makes of a text."""
        data = text.encode()
        room = (ctypes.c_int32 * (len(data) + 1))()
        count = self.library.functions.llama_tokenize(self._vocabulary, data, len(data), room, len(room), False, False)
        return list(room[:count])


class LlamaMemory:
    """The sequences of a llama.cpp context; see `SequenceMemory`."""

    def __init__(self, library: Library, context: Any) -> None:
        self._library, self._llama = library, library.functions
        self._context, self._memory = context, self._llama.llama_get_memory(context)

    def move(self, context: Any, sequences: Sequence[int]) -> None:
        """Be another context's, which takes what these hold. Raises RuntimeError."""
        new = LlamaMemory(self._library, context)
        for sequence in sequences:
            new.put(sequence, self.state(sequence))
        self._context, self._memory = context, new._memory

    def remove(self, sequence: int, start: int) -> None:
        if not self._llama.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise RuntimeError(f"llama.cpp cannot remove the positions from {start} on of sequence {sequence}")

    def share(self, source: int, target: int, stop: int) -> None:
        self._llama.llama_memory_seq_cp(self._memory, source, target, 0, stop)

    def zero(self) -> None:
        """Zero all cells, and let no sequence have any."""
        self._llama.llama_memory_clear(self._memory, True)

    def state(self, sequence: int) -> bytearray:
        """What it holds. Raises RuntimeError, as `put` does."""
        state = bytearray(self._llama.llama_state_seq_get_size(self._context, sequence))
        buffer = (ctypes.c_uint8 * len(state)).from_buffer(state)
        if self._llama.llama_state_seq_get_data(self._context, buffer, len(state), sequence) != len(state):
            raise RuntimeError(f"llama.cpp cannot give what sequence {sequence} holds: {self._library.reason()}")
        return state

    def put(self, sequence: int, state: bytearray) -> None:
        """Let it hold what one held."""
        buffer = (ctypes.c_uint8 * len(state)).from_buffer(state)
        if self._llama.llama_state_seq_set_data(self._context, buffer, len(state), sequence) != len(state):
            raise RuntimeError(f"llama.cpp cannot put back what sequence {sequence} held: {self._library.reason()}")


class LlamaCppRunner(Runner):
    """`Runner` over llama.cpp.

    Invariant: the context has cells for all rows that are held or fed. It is made for few, and for more as texts grow:
    llama.cpp fills the memory of all its cells when a context is made.

    cells: that are taken at once beyond those in use, at least. for_branches: sequences beside the slots'; trees need
    two, and for each llama.cpp sets aside the memory of two rows of logits. rows: of a forward there are at least
    the first, and a multiple of the second; row_counts: what of that is tried.
    """

    row_counts: Sequence[tuple[int, int]] = ((1, 1),)
    rows = (1, 1)
    cells = 2048
    for_branches = 32
    memory = LlamaMemory

    def __init__(self, weights: GgufWeights, file: GgufFile, sizes: Sizes, kv_type: str, threads: int) -> None:
        """kv_type: of keys and values, see `GgufFile.kv_type`. ModelError if llama.cpp makes no such cache."""
        if sizes.slots > MOST_SEQUENCES:
            raise ModelError(f"slots: llama.cpp holds {MOST_SEQUENCES} texts at most, not {sizes.slots}")
        self._weights, self._library = weights, weights.library
        llama = self._llama = weights.library.functions
        sequences = min(MOST_SEQUENCES, sizes.slots + self.for_branches)
        # Whoever tries the runner may find that its model takes none.
        self.branches = sequences - sizes.slots >= LEAST_FOR_BRANCHES
        self._most = self._most_cells(sizes)
        self._position_bytes = file.position_bytes(kv_type)
        self._params = self._parameters(sizes, sequences, kv_type, threads)
        # Where the length of the cache says how positions are turned, it must not change.
        self._context = self._made(self._most if file.turns_longer else min(self._most, self.cells))
        if not self._context:
            raise ModelError(f"runtime: llamacpp cannot make a cache of {kv_type}: {self._library.reason()}")
        self._free = weakref.finalize(self, llama.llama_free, self._context)
        self._memory = self.memory(self._library, self._context)
        self._table = SequenceTable(self._memory, sizes.slots, sequences)
        self._batch = LlamaBatch(llama, 64)

    def _parameters(self, sizes: Sizes, sequences: int, kv_type: str, threads: int) -> Any:
        llama, on_gpu = self._llama, self._weights.gpu_layers > 0
        params = llama.llama_context_default_params()
        # llama.cpp ends the process where there are fewer of these, or of cells, than sequences.
        params.n_batch = max(self._most, sequences)
        params.n_ubatch = max(min(self._most, TOGETHER), sequences)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True  # streams of their own cannot share the cells of a part of a text
        params.swa_full = True
        params.type_k = params.type_v = getattr(llama, f"GGML_TYPE_{kv_type.upper()}")
        params.flash_attn_type = getattr(llama, f"LLAMA_FLASH_ATTN_TYPE_{FLASH.get(kv_type, 'AUTO')}")
        params.offload_kqv = params.op_offload = on_gpu
        return params

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cells that there are now."""
        return int(int(self._llama.llama_n_ctx(self._context)) * self._position_bytes)

    def _made(self, cells: int) -> Any:
        """A context of so many cells, or None."""
        self._cells = self._params.n_ctx = max(cells, self._params.n_seq_max)
        return self._llama.llama_init_from_model(self._weights.model, self._params)

    @classmethod
    def slot_cells(cls, context: int) -> int:
        """Cells of a slot, at most."""
        return context

    def _most_cells(self, sizes: Sizes) -> int:
        return sizes.slots * sizes.context

    def _needed(self, feeds: Sequence[Feed]) -> int:
        """Cells for these feeds beside all that is held."""
        return self._table.rows + sum(len(feed.tokens) for feed in feeds)

    def _reserve(self, feeds: Sequence[Feed]) -> None:
        """Have these cells. Raises MemoryError."""
        needed = min(self._most, self._needed(feeds))
        if needed <= self._cells:
            return
        before, old = self._cells, self._context
        self._table.give_trees_up()
        context = self._made(min(self._most, needed + max(self.cells, int(needed * MORE_CELLS))))
        if not context:
            self._cells = before
            raise MemoryError(f"llama.cpp has no cells for {needed} positions: {self._library.reason()}")
        try:
            self._memory.move(context, self._table.lines)
        except RuntimeError:
            self._cells = before
            self._llama.llama_free(context)
            raise
        self._context = context
        self._free.detach()
        self._free = weakref.finalize(self, self._llama.llama_free, context)
        self._llama.llama_free(old)

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Raises MemoryError, or RuntimeError with what llama.cpp told."""
        self._reserve(feeds)
        rows = self._decoded(feeds)
        return rows if all_finite(rows) else self._apart(feeds)

    def _decoded(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Logits of the feeds."""
        parts = [self._computed(runs) for runs in self._table.runs(feeds)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _computed(self, runs: Sequence[SequenceRun]) -> torch.Tensor:
        """Logits of one forward."""
        llama = self._llama
        count = sum(len(run.tokens) for run in runs)
        if count > self._batch.room:
            self._batch = LlamaBatch(llama, count)
        status = llama.llama_decode(self._context, self._batch.filled(runs, count))
        if status != 0:
            self._table.lost(runs)
            told = f"llama.cpp computed nothing (status {status}): {self._library.reason()}"
            raise MemoryError(told) if status == NO_MEMORY else RuntimeError(told)
        # A copy: llama.cpp writes the next logits to the same place.
        rows = torch.empty(sum(run.wanted for run in runs), self._weights.width)
        if rows.numel():
            ctypes.memmove(rows.data_ptr(), llama.llama_get_logits(self._context), rows.nbytes)
        return rows

    def _apart(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Logits of a forward for each feed, after one that was not finite.

        All texts share a cache, and in it a NaN poisons attention even where it is masked: also that of texts in the
        same forward. What is not finite by itself is taken out of the cache again.
        """
        for feed in feeds:
            self._table.cut(feed.slot, feed.start)
        self._scrub()
        parts = []
        for feed in feeds:
            parts.append(self._decoded([feed]))
            if not all_finite(parts[-1]):
                self._table.cut(feed.slot, feed.start)
                self._scrub()
        return torch.cat(parts)

    def zero(self, slot: int, stop: int) -> None:
        """Give the slot's cells back: nobody reads them, and the next text that takes them overwrites what they hold.

        So they are not zeroed here. What is not finite never stays in them.
        """
        self._table.cut(slot, 0)

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self._table.keep(slot, start, rows)

    def copy(self, source: int, target: int, stop: int) -> None:
        self._table.copy(source, target, stop)

    def _scrub(self) -> None:
        """Zero every cell that no text holds. llama.cpp zeroes all or none: what they hold is taken out and back.

        Only texts are: put back, two sequences share no cells, and branches would need more than there are.
        """
        self._table.give_trees_up()
        held = {line: self._memory.state(line) for line in self._table.lines}
        self._memory.zero()
        for line, state in held.items():
            self._memory.put(line, state)


class LlamaBatch:
    """llama.cpp's description of a forward, over arrays of ours. room: tokens."""

    def __init__(self, llama: Any, room: int) -> None:
        self.room = room
        self._token, self._position = np.zeros(room, np.int32), np.zeros(room, np.int32)
        self._sequence, self._wanted = np.zeros(room, np.int32), np.zeros(room, np.int8)
        self._counts = np.ones(room, np.int32)
        # A list of sequences for each token: of one.
        self._lists = (self._sequence.ctypes.data + 4 * np.arange(room)).astype(np.uintp)
        self._batch = llama.llama_batch(
            0,
            _pointer(self._token, ctypes.c_int32),
            None,
            _pointer(self._position, ctypes.c_int32),
            _pointer(self._counts, ctypes.c_int32),
            ctypes.cast(self._lists.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            _pointer(self._wanted, ctypes.c_int8),
        )

    def filled(self, runs: Sequence[SequenceRun], count: int) -> Any:
        """A llama_batch of so many tokens, until the next call."""
        at = 0
        self._wanted[:count] = 0
        for run in runs:
            stop = at + len(run.tokens)
            self._token[at:stop] = run.tokens
            self._position[at:stop] = np.arange(run.position, run.position + len(run.tokens))
            self._sequence[at:stop] = run.sequence
            self._wanted[stop - run.wanted : stop] = 1
            at = stop
        self._batch.n_tokens = count
        return self._batch


def _pointer(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))


# ----------------------------------------------------------------------------------------------------------------------
# A runner held to llama.cpp itself: a text that a context of the library's own defaults computes at once.
#
# Products of quantised weights round what they multiply to 8 bits. A sum in another order moves some of it to the next
# integer, and that moves others, so that two ways to compute one text differ by some hundredths of the logits' spread:
# on three real files of 4 bits by .03 to .08 over all rows (the worst has 18 layers of 640), by .2 in the worst row. A
# wrong base of positions, a row of a rolled back text, or a window that is ignored differ by .14 and more over all
# rows, or by .4 in one. The largest deviation of a logit from the largest logit tells the two apart far less.

# By what a file's weights, or its keys and values, are: whole, in 16 bits, or quantised.
WHOLE, HALF, QUANTISED = 1e-3, 1 / 32, 1 / 8
HALVES = ("f16", "bf16")
# Multiplications that a text of the trial may take, and one that goes beyond a window; tokens of the former.
WORK, WINDOW_WORK = 1e10, 8e10
LEAST_TOKENS, MOST_TOKENS = 40, 96
# How far a text goes beyond a window. A few tokens that are not seen any more make no difference.
BEYOND = 128
# Rows that are compared at the end of the text, mostly, and of the short text beside it.
TAIL, BESIDE = 24, 8
TEXT = (
    "The river rises in the hills, and for most of the year its water is clear enough to count the stones. ",
    "In 1923 a bridge of three arches was built here; two of them are still standing, and one fell in a flood. ",
    "def area(width, height):\n    return width * height\n\n\nprint(area(3, 4))\n",
    "Nobody in the village remembers who planted the chestnut trees, but all know which one was hit by lightning. ",
    "Bread needs flour, water, salt and time: mix them in the evening, and bake in the morning at 240 degrees. ",
    "The committee met on Tuesday and decided, by seven votes to two, that the library should stay open on Sundays. ",
    "A train leaves Vienna at nine and reaches Prague before one, so there is time for lunch and for the museum. ",
    "for (int i = 0; i < n; i++) {\n    total += prices[i] * amounts[i];\n}\n",
    "Whales were once animals of the land; their bones still tell of legs, and their young still need air at once. ",
    "She opened the letter, read it twice, put it back into its envelope, and did not speak of it until the spring. ",
)


def gguf_trial(
    weights: GgufWeights, file: GgufFile, sizes: Sizes, kv_type: str, least: int = LEAST_TOKENS, tail: int = TAIL
) -> Trial:
    """By llama.cpp's own context. ModelError if that by itself computes nothing that is finite.

    least: tokens of the text, where the context has room. tail: of it that are compared, at its end.
    """
    tolerance, text = tolerance_of(file, kv_type), _trial_text(weights, file, sizes, least)
    split = max(len(text) // 2, len(text) - tail)
    rows = [*range(split, len(text)), *range(min(BESIDE, split))]
    expected = _plain(weights, text, sorted(rows), kv_type)[torch.tensor(rows).argsort().argsort()]
    if not torch.isfinite(expected).all():
        raise ModelError(f"{file.path.name}: llama.cpp gives logits for it that are not finite")
    return Trial(text, split, expected[:, : sizes.vocabulary], lambda rows, wanted: spread(rows, wanted) / tolerance)


def _trial_text(weights: GgufWeights, file: GgufFile, sizes: Sizes, least: int) -> list[int]:
    """As long as the work allows, and beyond the model's window if that is possible."""
    products, window = max(1, file.products), weights.window
    count = max(least, min(MOST_TOKENS, int(WORK / products)))
    if window and (window + BEYOND) * products <= WINDOW_WORK:
        count = max(count, window + BEYOND)
    count = min(count, sizes.context - 1)
    # In three orders, for those that need more tokens.
    told = "".join("".join((*TEXT[turn:], *TEXT[:turn])) for turn in (0, 3, 7))
    ids = weights.tokens(told) if file.has_tokenizer else []
    return ids[:count] if len(ids) >= count else made_up(count, sizes.vocabulary)


def _plain(weights: GgufWeights, text: Sequence[int], rows: Sequence[int], kv_type: str) -> torch.Tensor:
    """Logits of these rows of the text."""
    llama, count, width = weights.library.functions, len(text), weights.width
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = count
    params.n_threads = params.n_threads_batch = torch.get_num_threads()
    params.n_outputs_max = len(rows)
    params.swa_full = False
    params.type_k = params.type_v = getattr(llama, f"GGML_TYPE_{kv_type.upper()}")
    params.flash_attn_type = getattr(llama, f"LLAMA_FLASH_ATTN_TYPE_{FLASH.get(kv_type, 'AUTO')}")
    context = llama.llama_init_from_model(weights.model, params)
    if not context:
        raise MemoryError(weights.library.reason())
    batch = llama.llama_batch_init(count, 0, 1)
    try:
        for at, token in enumerate(text):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, at, 1, 0
            batch.logits[at] = at in rows
        batch.n_tokens = count
        status = llama.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama.cpp computed nothing (status {status}): {weights.library.reason()}")
        found = torch.empty(len(rows), width)
        ctypes.memmove(found.data_ptr(), llama.llama_get_logits(context), found.nbytes)
        return found
    finally:
        llama.llama_batch_free(batch)
        llama.llama_free(context)


def tolerance_of(file: GgufFile, kv_type: str) -> float:
    """How far logits may be from llama.cpp's own, over their spread."""
    kinds = {*file.elements, kv_type}
    if kinds - {"f32", *HALVES}:
        return QUANTISED
    return HALF if kinds & set(HALVES) else WHOLE


def spread(rows: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of what two sets of logits differ by, each row's over the spread of what is expected in it.

    A third of the worst row's, where that is more. What all logits of a row have in common changes nothing. NaN where
    something is not finite.
    """
    off = (rows - expected).std(dim=1, correction=0) / expected.std(dim=1, correction=0).clamp(min=1e-6)
    return float(torch.maximum(off.square().mean().sqrt(), off.max() / 3))
