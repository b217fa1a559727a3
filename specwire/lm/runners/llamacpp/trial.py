"""A runner held to llama.cpp itself: a text that a context of the library's own defaults computes at once.

Products of quantised weights round what they multiply to 8 bits. A sum in another order moves some of it to the next
integer, and that moves others, so that two ways to compute one text differ by some hundredths of the logits' spread:
on three real files of 4 bits by .03 to .08 over all rows (the worst has 18 layers of 640), by .2 in the worst row. A
wrong base of positions, a row of a rolled back text, or a window that is ignored differ by .14 and more over all rows,
or by .4 in one. The largest deviation of a logit from the largest logit tells the two apart far less.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from specwire.core.model import ModelError
from specwire.lm.gguf_file import GgufFile
from specwire.lm.kv_cache import Sizes
from specwire.lm.runners.llamacpp.runner import FLASH, GgufWeights
from specwire.lm.runners.trial import Trial, made_up

# By what a file's weights, or its keys and values, are: whole, in 16 bits, or quantised.
WHOLE, HALF, QUANTISED = 1e-3, 1 / 32, 1 / 8
HALVES = ("f16", "bf16")
# Multiplications that a text of the trial may take, and one that goes beyond a window; tokens of the former.
WORK, WINDOW_WORK = 1e10, 8e10
LEAST_TOKENS, MOST_TOKENS = 40, 96
# How far a text goes beyond a window. A few tokens that are not seen any more make no difference.
BEYOND = 128
# Rows that are compared at the end of the text, and of the short text beside it.
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


def gguf_trial(weights: GgufWeights, file: GgufFile, sizes: Sizes, kv_type: str) -> Trial:
    """By llama.cpp's own context. ModelError if that by itself computes nothing that is finite."""
    tolerance, text = tolerance_of(file, kv_type), _trial_text(weights, file, sizes)
    split = max(len(text) // 2, len(text) - TAIL)
    rows = [*range(split, len(text)), *range(min(BESIDE, split))]
    expected = _plain(weights, text, sorted(rows), kv_type)[torch.tensor(rows).argsort().argsort()]
    if not torch.isfinite(expected).all():
        raise ModelError(f"{file.path.name}: llama.cpp gives logits for it that are not finite")
    return Trial(text, split, expected[:, : sizes.vocabulary], lambda rows, wanted: spread(rows, wanted) / tolerance)


def _trial_text(weights: GgufWeights, file: GgufFile, sizes: Sizes) -> list[int]:
    """As long as the work allows, and beyond the model's window if that is possible."""
    products, window = max(1, file.products), weights.window
    count = max(LEAST_TOKENS, min(MOST_TOKENS, int(WORK / products)))
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
