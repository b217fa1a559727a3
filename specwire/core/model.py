"""What the engine and the drafters ask of a language model, whatever computes it, and how far its slots are valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, Required, TypedDict

# What may compute forwards; LLAMACPP: those of a GGUF file.
# AUTO: of other models OPENVINO where it is installed and agrees with the model, else TORCH.
TORCH, OPENVINO, LLAMACPP, AUTO = RUNTIMES = ("torch", "openvino", "llamacpp", "auto")
# What a verifier's forwards are computed with: our own runtimes, or vLLM's worker.
SPECWIRE, VLLM = ENGINES = ("specwire", "vllm")
# What a GGUF file's keys and values may be kept in, with the bytes of an element; AUTO_KV: float32 where the weights
# are float32, else float16. Those in blocks of KV_BLOCK elements share a scale.
AUTO_KV, KV_BLOCK = "auto", 32
KV_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
KV_TYPES = (AUTO_KV, *KV_BYTES)
# What weights may be rounded to beyond the dtype; under the last one what they multiply, too.
NONE, INT8, INT8_DYNAMIC, WEIGHTS16 = QUANTIZATIONS = ("none", "int8", "int8-dynamic", "bfloat16")
# The options by which vLLM splits a model over several processes, its ranks: every layer, or the layers into stages.
RANKS, STAGES = "tensor-parallel-size", "pipeline-parallel-size"


# How the name of a model ends that is a GGUF file.
GGUF = ".gguf"


def is_gguf(spec: str) -> bool:
    return spec.lower().endswith(GGUF)


class ModelError(ValueError):
    """A model cannot be loaded or cannot be served; the message is one sentence for the user."""


# What a file states beyond these is refused before anything is made of it. The largest published models have 10 million
# positions, some 130 layers, and a million ids.
MOST_CONTEXT, MOST_LAYERS, MOST_IDS = 1 << 24, 4096, 1 << 22


def served_context(stated: int | None, wanted: int | None) -> int:
    """Positions to serve: as many as are wanted, at most those that the model states; ModelError if that is none."""
    if wanted is None:
        if stated is None:
            raise ModelError("context: the model states no maximum length, so one must be given")
        if not 2 <= stated <= MOST_CONTEXT:
            raise ModelError(
                f"context: must be from 2 to {MOST_CONTEXT} positions, and the model states {stated!s:.40}"
            )
        return stated
    if stated is not None and wanted > stated:
        raise ModelError(f"context: the model was made for {stated!s:.40} positions, not {wanted}")
    if not 2 <= wanted <= MOST_CONTEXT:
        raise ModelError(f"context: must be from 2 to {MOST_CONTEXT} positions, not {wanted}")
    return wanted


class ModelLost(Exception):
    """A model can compute nothing any more: a process that it is split over is gone. One sentence."""


class TreeFeed(NamedTuple):
    """Where the tokens of a feed stand that are no line.

    Rows [0, trunk) of the slot are text, which every token sees. ancestors[i]: the rows from `trunk` on that token i
    descends from, by depth, itself left out; rows of this feed or of earlier ones. Token i has position
    trunk + len(ancestors[i]), and sees the text, its ancestors and itself.
    """

    trunk: int
    ancestors: tuple[tuple[int, ...], ...]


class Feed(NamedTuple):
    """Tokens for one slot in one forward.

    They occupy rows `start .. start + len(tokens) - 1`, which are their positions as well, unless there is a `tree`,
    whose trunk ends at `start` or before it. `start` may not exceed what the slot holds; a lower start is a rollback.
    The logits of the last `wanted` tokens are returned. The last `rows` are what steps of one token each would feed: a
    runner that computes a prompt's tokens otherwise gives these the bits of such steps.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    wanted: int
    tree: TreeFeed | None = None
    rows: int = 0

    @property
    def stop(self) -> int:
        """Row behind the last token's, which is the position behind it unless there is a tree."""
        return self.start + len(self.tokens)

    @property
    def positions(self) -> Sequence[int]:
        """Where the tokens stand."""
        if self.tree is None:
            return range(self.start, self.stop)
        return [self.tree.trunk + len(ancestors) for ancestors in self.tree.ancestors]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model is: enough to compare two of them and to encode text for them.

    Attributes:
        architecture: the model's class, such as LlamaForCausalLM.
        runtime: what computes the forwards: torch, openvino, llamacpp, vllm, or scripted.
        deterministic: a trial found that logits are a function of the text alone, bit for bit.
        vocabulary: number of token ids; logits have this width, whatever the width of the model's output layer.
        context: positions a slot can hold.
        dtype: of weights and arithmetic; of a GGUF file the type that most weights have, such as q8_0.
        quantization: one of QUANTIZATIONS (`specwire.lm.runners.select.How`).
        weights_fingerprint: sha256 (hex) over dtype, quantization, configuration and weights. Device and runtime are
        left out: they round differently, as another machine does, and a session may still move between them.
        vocabulary_fingerprint: sha256 (hex) over the sorted (id, token) pairs.
        tokenizer_json: serialisation of `tokenizers`, empty if the model has none.
        chat_template: Jinja source, empty if the model has none.
        special_tokens: what chat templates may name, such as bos_token; only with a chat template.
    """

    name: str
    architecture: str
    vocabulary: int
    context: int
    eos_ids: tuple[int, ...]
    dtype: str
    device: str
    weights_fingerprint: str
    vocabulary_fingerprint: str
    runtime: str = TORCH
    deterministic: bool = False
    quantization: str = NONE
    tokenizer_json: bytes = field(default=b"", repr=False)
    chat_template: str = field(default="", repr=False)
    special_tokens: dict[str, str] = field(default_factory=dict, repr=False, hash=False)


class SlotModel(Protocol):
    """A causal language model over `slots` independent texts, each rolled back by lowering an integer.

    Not safe for use by two threads at once. Invariant: cached(slot) never exceeds what was fed, and what the slot holds
    for position p was computed from the text [0, p]; what it holds for a row of a tree, from the text and the row's
    ancestors.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def slots(self) -> int: ...

    @property
    def failed(self) -> frozenset[int]:
        """Slots whose logits in the last forward were not finite. Their contents are already discarded."""
        ...

    @property
    def branches(self) -> bool:
        """Whether feeds may have a tree."""
        ...

    def cached(self, slot: int) -> int:
        """Number of rows of the slot that are valid, those of a tree too."""
        ...

    def rollback(self, slot: int, length: int) -> None:
        """Lower the slot's valid length to `length`; ValueError if it holds less."""
        ...

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Let rows start, start + 1, ... hold what rows[0], rows[1], ... held, and drop what else was from `start` on.

        ValueError if `rows` do not rise, or are not all among start .. cached(slot) - 1; or if any would move and the
        model takes no trees.
        """
        ...

    @property
    def most_window(self) -> int:
        """Draft tokens behind a text from which a rollback is free: a window is no longer than that."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Memory set aside for the keys and values, and the states, of all slots; 0 where there are none."""
        ...

    @property
    def state_bytes(self) -> int:
        """What states of recurrent layers take of it."""
        ...

    def discard(self, slot: int) -> None:
        """Empty the slot and zero what was written to it; done before another tenant's text lies there."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Let `target` hold the first `length` positions of `source`, and nothing else.

        ValueError if `source` holds less, or is `target`.
        """
        ...

    def forward(self, feeds: Sequence[Feed]) -> Any:
        """Feed tokens of several slots in one pass.

        Returns:
            what the sampler that goes with the model reads, such as logits: a row for each token that is wanted, in the
            order of the feeds.

        Raises:
            ValueError: a feed is invalid; nothing was fed.
        """
        ...


class RankGroup(Protocol):
    """The processes of a model that vLLM splits: rank 0 computes for the caller, the others do what it tells them."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def meet(self) -> str:
        """Return, once all ranks are there, the path of a file that they find each other by.

        Raises:
            OSError: a rank could not be started, or has ended.
        """
        ...

    def tell(self, order: bytes) -> None:
        """Rank 0 has every other rank do this, after all that it was told before. OSError if one is gone."""
        ...

    def loss(self) -> str:
        """Why a rank is gone; "" if none is known to be."""
        ...


class SlotTable:
    """Valid lengths of the slots of one model; whatever computes it keeps one.

    Invariant: 0 <= cached <= written <= context for every slot; what lies in [cached, written) is stale.
    """

    def __init__(self, slots: int, context: int, vocabulary: int, branches: bool = True) -> None:
        """branches: feeds may have a tree."""
        if slots < 1:
            raise ValueError(f"slots: must be at least 1, not {slots}")
        self.context, self.branches = context, branches
        self._vocabulary = vocabulary
        self._cached = [0] * slots
        self._written = [0] * slots

    def __len__(self) -> int:
        return len(self._cached)

    def cached(self, slot: int) -> int:
        if not 0 <= slot < len(self._cached):
            self._check_slot(slot)
        return self._cached[slot]

    def written(self, slot: int) -> int:
        """Positions of the slot that may hold something other than zero."""
        return self._written[slot]

    def rollback(self, slot: int, length: int) -> None:
        held = self.cached(slot)
        if not 0 <= length <= held:
            raise ValueError(f"length: slot {slot} holds {held} positions and cannot be rolled back to {length}")
        self._cached[slot] = length

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        held = self.cached(slot)
        if not 0 <= start <= held:
            raise ValueError(f"start: slot {slot} holds {held} positions, nothing can be kept from {start} on")
        if any(row >= later for row, later in pairwise((start - 1, *rows, held))):
            raise ValueError(f"rows: those kept of slot {slot} must rise from {start} to below {held}, not {[*rows]}")
        if not self.branches and rows and rows[-1] >= start + len(rows):
            raise ValueError(f"rows: this model takes no trees, so that rows {[*rows]} cannot move to {start} and on")
        self._cached[slot] = start + len(rows)

    def copy(self, source: int, target: int, length: int) -> None:
        held = self.cached(source)
        self._check_slot(target)
        if source == target:
            raise ValueError(f"target: slot {target} cannot be copied to itself")
        if not 0 <= length <= held:
            raise ValueError(f"length: slot {source} holds {held} positions, of which {length} cannot be copied")
        self._cached[target] = length
        self._written[target] = max(self._written[target], length)

    def clear(self, slot: int) -> None:
        self._check_slot(slot)
        self._cached[slot] = self._written[slot] = 0

    def write(self, feeds: Sequence[Feed]) -> None:
        """Record, before the forward, that the feeds' ranges will be overwritten."""
        for feed in feeds:
            self._cached[feed.slot] = min(feed.start, self._cached[feed.slot])
            self._written[feed.slot] = max(feed.stop, self._written[feed.slot])

    def commit(self, feeds: Sequence[Feed]) -> None:
        """Record, after the forward, that the feeds' ranges are valid."""
        for feed in feeds:
            self._cached[feed.slot] = feed.stop

    def void(self, feeds: Sequence[Feed]) -> None:
        """Record, before a forward that leaves nothing valid, that the feeds' ranges will be overwritten."""
        for feed in feeds:
            self._written[feed.slot] = max(feed.stop, self._written[feed.slot])

    def check(self, feeds: Sequence[Feed], beyond: bool = False) -> None:
        """ValueError, naming field and value, unless the feeds can be computed in one forward.

        beyond: they touch nothing that is valid, and may begin behind rows that are not.
        """
        if not feeds:
            raise ValueError("feeds: at least one is needed")
        for feed in feeds:
            self._check_start(feed, beyond)
            self._check_feed(feed)
        if len({feed.slot for feed in feeds}) < len(feeds):
            raise ValueError(f"feeds: a slot occurs twice among {[feed.slot for feed in feeds]}")

    def _check_start(self, feed: Feed, beyond: bool) -> None:
        held = self.cached(feed.slot)
        least, most = (held, max(held, self._written[feed.slot])) if beyond else (0, held)
        if not least <= feed.start <= most:
            raise ValueError(f"start: slot {feed.slot} holds {held} positions, cannot be fed from {feed.start}")

    def _check_feed(self, feed: Feed) -> None:
        if not feed.tokens:
            raise ValueError(f"tokens: slot {feed.slot} was fed none")
        if feed.stop > self.context:
            raise ValueError(
                f"tokens: slot {feed.slot} would hold {feed.stop} positions, the context is {self.context}"
            )
        if not 0 <= feed.wanted <= len(feed.tokens):
            raise ValueError(f"wanted: must be from 0 to the {len(feed.tokens)} tokens fed, not {feed.wanted}")
        if min(feed.tokens) < 0 or max(feed.tokens) >= self._vocabulary:
            wrong = next(token for token in feed.tokens if not 0 <= token < self._vocabulary)
            raise ValueError(f"tokens: id {wrong} is outside the vocabulary of {self._vocabulary}")
        if feed.tree is not None:
            self._check_tree(feed, feed.tree)

    def _check_tree(self, feed: Feed, tree: TreeFeed) -> None:
        if not self.branches:
            raise ValueError(f"tree: this model takes none, slot {feed.slot} was fed one")
        if not 0 <= tree.trunk <= feed.start:
            raise ValueError(f"trunk: must be from 0 to the start {feed.start} of slot {feed.slot}, not {tree.trunk}")
        if len(tree.ancestors) != len(feed.tokens):
            raise ValueError(f"ancestors: {len(tree.ancestors)} of the {len(feed.tokens)} tokens of slot {feed.slot}")
        for row, ancestors in enumerate(tree.ancestors, feed.start):
            if any(above >= below for above, below in pairwise((tree.trunk - 1, *ancestors, row))):
                raise ValueError(
                    f"ancestors: those of row {row} of slot {feed.slot} must rise from {tree.trunk} to below {row}, "
                    f"not {[*ancestors]}"
                )
            above = ancestors[-1] if ancestors else -1
            if above >= feed.start and tuple(tree.ancestors[above - feed.start]) != tuple(ancestors[:-1]):
                raise ValueError(f"ancestors: row {row} of slot {feed.slot} has others than row {above}, its parent")

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < len(self._cached):
            raise ValueError(f"slot: must be from 0 to {len(self._cached) - 1}, not {slot}")


# PyTorch has an error of this name for GPUs. On CPUs it raises a RuntimeError that says it in words, as OpenVINO does.
OUT_OF_MEMORY = "OutOfMemoryError"
WORDS = ("out of memory", "not enough memory", "allocate memory", "bad_alloc", "bad allocation")


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocator failed: a smaller forward may succeed."""
    if isinstance(error, MemoryError) or any(kind.__name__ == OUT_OF_MEMORY for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)


# ----------------------------------------------------------------------------------------------------------------------
# How a model is loaded.


class LoadOptions(TypedDict, total=False):
    """`Loading` by name; all but `slots` may be left out."""

    slots: Required[int]
    context: int | None
    kv_memory: int | None
    heads: str | None
    ranks: RankGroup | None
    device: str
    dtype: str
    threads: int | None
    runtime: str
    deterministic: bool
    quantization: str
    compiled: bool
    engine: str
    engine_options: Mapping[str, Any]
    stages: int
    kv_type: str
    gpu_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What a model is loaded for, and how. Scripted models and tables know slots, context and, the former, heads.

    Attributes:
        slots: texts that it serves at once.
        context: positions per slot; the model's own maximum if None. Memory is set aside for slots x context.
        kv_memory: bytes for keys and values, states, and what a head keeps of each text; `slots` is then as many as
            fit. If not one does with all states of a window, a slot has fewer, and windows are shorter.
        heads: directory of a head (`specwire.lm.heads`), or which of the model's own layers draft
            (`specwire.lm.heads.self_speculation`), then `auto` is torch; of a scripted model, another one.
        ranks: those that vLLM splits the model over, which all load it with the same options; None for one process.
        dtype: float32, bfloat16, float16, or "auto": what `specwire.lm.native_dtype` says of the device.
        threads: threads that PyTorch computes with in this process; unchanged if None.
        runtime, deterministic, quantization, compiled: see `specwire.lm.runners.select.How`.
        engine, engine_options, stages: "vllm" is told of in `specwire.lm.pretrained.load_in_vllm`.
        kv_type, gpu_layers: of a GGUF file, see `specwire.lm.pretrained.load_gguf`.
    """

    slots: int
    context: int | None = None
    kv_memory: int | None = None
    heads: str | None = None
    ranks: RankGroup | None = None
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None
    runtime: str = TORCH
    deterministic: bool = False
    quantization: str = NONE
    compiled: bool = False
    engine: str = SPECWIRE
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    stages: int = 1
    kv_type: str = AUTO_KV
    gpu_layers: int = 0
