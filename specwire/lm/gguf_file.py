"""GGUF files without llama.cpp: their metadata, and what they say of model and vocabulary.

The format: magic, version, counts of tensors and of entries, the entries (name, type, value), then names, shapes and
types of the tensors. All numbers are little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specwire.core.model import (
    AUTO_KV,
    KV_BLOCK,
    KV_BYTES,
    KV_TYPES,
    MOST_IDS,
    MOST_LAYERS,
    ModelError,
    served_context,
)
from specwire.lm.model_files import TOKENIZER, ModelText, file_of
from specwire.named_models import GGUF_MAGIC
from specwire.text.tokenizer import vocabulary_fingerprint, vocabulary_map

VERSIONS = (2, 3)
# Of entries and tensors, of dimensions, and of arrays in arrays: a broken file must not keep us busy.
MOST, MOST_DIMENSIONS, MOST_DEPTH = 1 << 20, 8, 4
# Formats of numbers by type; a string and an array are types of their own.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Names of tensors' types, and bits of an element, scales of its block included; of types that are not known at least so
# many.
TENSOR_TYPES = {kind.value: kind.name.lower() for kind in GGMLQuantizationType}
BITS = {kind.name.lower(): 8 * size / block for kind, (block, size) in GGML_QUANT_SIZES.items()}
LEAST_BITS = 1
# Of what is made as much as these entries of the model say, and the most that any has.
SIZES = {
    "vocab_size": MOST_IDS,
    "block_count": MOST_LAYERS,
    "embedding_length": 1 << 24,
    "feed_forward_length": 1 << 24,
    "attention.head_count": 1 << 16,
    "attention.head_count_kv": 1 << 16,
    "attention.key_length": 1 << 16,
    "attention.value_length": 1 << 16,
}
# Bytes that tensors begin at a multiple of, unless the file says another number.
ALIGNMENT = 32
# Tensors with a row for each token.
EMBEDDINGS = ("token_embd.weight", "output.weight")
# Types of tokens: of text, one that stands for no text, one beside the merged ones, one that fills a gap between ids.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
NO_TOKENIZER = ("none", "no_vocab")
# Ids that end a text: those of these entries, and those of tokens that llama.cpp takes for ends whatever a file says
# (`llama_vocab::impl::load`).
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# fmt: off
END_TOKENS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
}
# fmt: on
# What chat templates may name, by the entry that has its id.
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "sep"}


class StoredTensor(NamedTuple):
    """shape: fastest dimension first. kind: the number of its type. start: where its data begins in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


class Attention(NamedTuple):
    """Elements of one position: keys and values of all layers; and of the narrowest head."""

    keys: int
    values: int
    least_head: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a file's head says.

    elements: of all tensors, by their type's name.
    """

    path: Path
    metadata: Mapping[str, Any]
    elements: Counter[str]
    tensors: Mapping[str, StoredTensor]

    @property
    def ids(self) -> int:
        """Rows of the embedding."""
        embedding = self.tensors.get(EMBEDDINGS[0])
        return embedding.shape[-1] if embedding is not None and embedding.shape else 0

    @property
    def turns_longer(self) -> bool:
        """Whether positions are turned by other factors in a cache longer than the model's original context."""
        return "rope_factors_long.weight" in self.tensors

    @property
    def has_learned_positions(self) -> bool:
        """Whether a table has a row for each position, and so none beyond the context."""
        return "position_embd.weight" in self.tensors

    @property
    def architecture(self) -> str:
        return str(self._needed("general.architecture", str))

    def of_model(self, key: str, default: object = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def dtype(self) -> str:
        """The type that most weights have, such as q8_0."""
        (name, _), *_ = self.elements.most_common(1)
        return name

    @property
    def is_quantised(self) -> bool:
        """Whether most weights have 8 bits or fewer."""
        return self.dtype not in ("f64", "f32", "f16", "bf16")

    @property
    def products(self) -> int:
        """Multiplications of a forward of one token without logits, attention apart."""
        return sum(math.prod(each.shape) for name, each in self.tensors.items() if name not in EMBEDDINGS)

    @property
    def has_tokenizer(self) -> bool:
        return self.metadata.get("tokenizer.ggml.model", NO_TOKENIZER[0]) not in NO_TOKENIZER

    def context(self, wanted: int | None) -> int:
        """Positions to serve; ModelError for more than the model was made for."""
        return served_context(int(self._needed(f"{self.architecture}.context_length", int)), wanted)

    def needed(self, key: str) -> Any:
        """A number of the model's; ModelError if the file lacks it, or has another for each layer."""
        value = self.of_model(key)
        if not isinstance(value, int | float):
            raise ModelError(f"model {str(self.path)!r}: {self.architecture}.{key} is missing, or no number")
        return value

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id at which llama.cpp itself would end a text."""
        ends = {self._named_id(key) for key in ENDS}
        tokens = self.tokens
        return tuple(id_ for id_ in sorted(tokens) if id_ in ends or tokens[id_] in END_TOKENS)

    def check_rotation(self, slots: int, context: int) -> None:
        """ModelError if llama.cpp would turn short texts as long ones, because the cache of all slots is long."""
        limit = self.of_model("rope.scaling.original_context_length", 0)
        if self.turns_longer and context <= limit < slots * context:
            raise ModelError(
                f"slots: llama.cpp turns positions of this model otherwise in a cache beyond {limit} positions "
                f"(longrope), and {slots} slots of {context} are more; give fewer, or a context beyond {limit}"
            )

    @property
    def attention(self) -> Attention:
        layers = int(self._needed(f"{self.architecture}.block_count", int))
        heads = self.of_model("attention.head_count", 1)
        each = heads if isinstance(heads, list) else [heads] * layers
        kept = self.of_model("attention.head_count_kv", each)
        kept = kept if isinstance(kept, list) else [kept] * layers
        size = self._needed(f"{self.architecture}.embedding_length", int) // max(1, max(each))
        key, value = (int(self.of_model(f"attention.{name}_length", size)) for name in ("key", "value"))
        return Attention(sum(kept) * key, sum(kept) * value, min(key, value))

    def kv_type(self, asked: str) -> str:
        """Of keys and values, where one of KV_TYPES is asked. ModelError if the heads cannot be cut into its blocks."""
        if asked not in KV_TYPES:
            raise ModelError(f"kv-type: must be one of {', '.join(KV_TYPES)}, not {asked!r}")
        if asked == AUTO_KV:
            return "f32" if self.dtype == "f32" else "f16"
        least = self.attention.least_head
        if asked.startswith("q") and least % KV_BLOCK:
            raise ModelError(f"kv-type: {asked} needs heads of a multiple of {KV_BLOCK} elements, not of {least}")
        return asked

    def position_bytes(self, kv_type: str) -> float:
        """Bytes of one position of one slot."""
        return (self.attention.keys + self.attention.values) * KV_BYTES[kv_type]

    @property
    def tokens(self) -> dict[int, str]:
        """Token of each id; a model without a tokenizer calls its ids by their numbers."""
        if not self.has_tokenizer:
            return vocabulary_map(b"", int(self.of_model("vocab_size", self.ids)))
        names = self._needed("tokenizer.ggml.tokens", list)
        types = self.metadata.get("tokenizer.ggml.token_type") or [0] * len(names)
        found = {id_: str(name) for id_, (name, kind) in enumerate(zip(names, types, strict=False)) if kind != UNUSED}
        if not found:
            raise ModelError(f"model {str(self.path)!r}: tokenizer.ggml.tokens has no tokens")
        return found

    def text(self) -> ModelText:
        """Tokens, chat template, and the tokenizer.json beside the file, if there is one.

        ModelError unless that has the file's own tokens at the file's ids.
        """
        tokens, beside = self.tokens, self.path.parent / TOKENIZER
        serialised = b""
        if beside.is_file():
            with file_of(str(self.path.parent), TOKENIZER):
                serialised = beside.read_bytes()
                told = vocabulary_map(serialised, 0)
            if vocabulary_fingerprint(told) != vocabulary_fingerprint(tokens):
                wrong = min((set(told.items()) ^ set(tokens.items())), default=(0, ""))[0]
                raise ModelError(
                    f"model {str(self.path)!r}: {TOKENIZER} beside it is of another vocabulary: id {wrong} is "
                    f"{told.get(wrong)!r} there, {tokens.get(wrong)!r} in the file"
                )
        template = str(self.metadata.get("tokenizer.chat_template", ""))
        ids = {name: self._named_id(key) for name, key in SPECIAL.items()}
        special = {name: tokens[id_] for name, id_ in ids.items() if id_ in tokens} if template else {}
        return ModelText(serialised, template, special, tokens)

    def fingerprint(self) -> str:
        """sha256 (hex) over the whole file."""
        told = self.path.stat()
        return _sha256(self.path, told.st_size, told.st_mtime_ns)

    def _named_id(self, key: str) -> int:
        """A special token's id, if the file says one; else -1, which is none."""
        found = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        return found if isinstance(found, int) else -1

    def _needed(self, key: str, kind: type) -> Any:
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            raise ModelError(f"model {str(self.path)!r}: {key} is missing, or no {kind.__name__}")
        return value


@lru_cache(maxsize=8)
def _sha256(path: Path, _size: int, _changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_gguf(spec: str) -> GgufFile:
    """The head of a file; ModelError, which names it, if there is none that can be read.

    The last one is kept until `forget_read`: a load asks for it many times, and it takes a tenth of a second to read.
    """
    path = Path(spec).expanduser()
    if not path.is_file():
        raise ModelError(f"model {spec!r}: there is no such file")
    told = path.stat()
    if not told.st_size:
        raise ModelError(f"model {spec!r} cannot be read as a GGUF file: it is empty")
    return _read(spec, path, told.st_size, told.st_mtime_ns)


def forget_read() -> None:
    """Keep no file's head: its tables of tokens take megabytes."""
    _read.cache_clear()


@lru_cache(maxsize=1)
def _read(spec: str, path: Path, size: int, _changed: int) -> GgufFile:
    try:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            reader = Reader(content)
            metadata, tensors = reader.head()
    except (OSError, ValueError) as error:
        raise ModelError(f"model {spec!r} cannot be read as a GGUF file: {error}") from error
    _check_sizes(spec, metadata, tensors, size)
    elements: Counter[str] = Counter()
    for shape, kind, _ in tensors.values():
        elements[TENSOR_TYPES.get(kind, f"type {kind}")] += math.prod(shape)
    if not elements:
        raise ModelError(f"model {spec!r} has no tensors")
    return GgufFile(path, metadata, elements, tensors)


def _check_sizes(spec: str, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], length: int) -> None:
    """ModelError for sizes that a file of `length` bytes cannot have."""
    for name, tensor in tensors.items():
        bits = math.prod(tensor.shape) * BITS.get(TENSOR_TYPES.get(tensor.kind, ""), LEAST_BITS)
        if min(tensor.shape, default=1) < 1 or tensor.start + bits / 8 > length:
            raise ModelError(
                f"model {spec!r}: the tensor {name!r:.80} of {'x'.join(map(str, tensor.shape)):.80} elements from byte "
                f"{tensor.start} on does not fit into its {length} bytes; is it cut off?"
            )
    kind, held = metadata.get("general.architecture"), length * 8 // LEAST_BITS
    for name, most in SIZES.items():
        key = f"{kind}.{name}"
        value = metadata.get(key, 1)
        sizes = value if isinstance(value, list) and value and name != "block_count" else [value]
        for size in sizes:
            if isinstance(size, int) and size > held:
                raise ModelError(f"model {spec!r}: {key} is {size}, more than its {length} bytes can hold")
            if not isinstance(size, int) or not (name == "block_count") <= size <= most:
                raise ModelError(f"model {spec!r}: {key} is {size!r:.80}, no size that a model has")


class Reader:
    """Reads the head of a file front to back. ValueError where it is broken."""

    def __init__(self, content: mmap) -> None:
        self._content, self._at = content, 0

    def head(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        """Entries and tensors by name."""
        if self._bytes(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            turned = int.from_bytes(version.to_bytes(4, "little"), "big")
            if turned in VERSIONS:
                raise ValueError("its numbers are big-endian; convert it anew")
            raise ValueError(
                f"version {version} is not known, only {' and '.join(map(str, VERSIONS))}; convert it anew"
            )
        tensors, entries = self._count("Q"), self._count("Q")
        metadata = {self._string(): self._value(self._number("I")) for _ in range(entries)}
        told = dict(self._tensor() for _ in range(tensors))
        aligned = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(aligned, int) or aligned < 1:
            raise ValueError(f"general.alignment is {aligned!r:.80}")
        first = -(-self._at // aligned) * aligned
        return metadata, {name: tensor._replace(start=first + tensor.start) for name, tensor in told.items()}

    def _tensor(self) -> tuple[str, StoredTensor]:
        name, dimensions = self._string(), self._number("I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r:.80} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return name, StoredTensor(shape, self._number("I"), self._number("Q"))

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self._string()
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind != ARRAY or depth == MOST_DEPTH:
            raise ValueError(f"an entry of type {kind} is not known")
        inner = self._number("I")
        count = self._count("Q")
        if inner in NUMBERS:
            form = f"<{count}{NUMBERS[inner]}"
            return list(struct.unpack(form, self._bytes(struct.calcsize(form))))
        one: Callable[[], Any] = self._string if inner == STRING else lambda: self._value(inner, depth + 1)
        return [one() for _ in range(count)]

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode(errors="replace")

    def _count(self, form: str) -> int:
        count = int(self._number(form))
        if count > MOST:
            raise ValueError(f"it says that it has {count} entries")
        return count

    def _number(self, form: str) -> Any:
        form = f"<{form}"
        try:
            (number,) = struct.unpack_from(form, self._content, self._at)
        except struct.error:
            raise self._cut_off() from None
        self._at += struct.calcsize(form)
        return number

    def _bytes(self, count: int) -> bytes:
        if count > len(self._content) - self._at:
            raise self._cut_off()
        self._at += count
        return self._content[self._at - count : self._at]

    def _cut_off(self) -> ValueError:
        return ValueError(f"it ends too early, after {len(self._content)} bytes; is it cut off?")
