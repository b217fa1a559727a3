"""A GGUF file as a model of transformers, or a `PlainDecoder`: its configuration, its weights, and where they are kept.

The format keeps a model's shape as entries `ARCHITECTURE.KEY`, and weights under names of its own; files of the
`llama` architecture have rows of queries and keys in the order of pairs
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import nn

from specwire.core.model import INT8_DYNAMIC, LLAMACPP, NONE, ModelError
from specwire.lm.gguf_file import GgufFile
from specwire.lm.linear import GROUP, round_layers, rounded_groups
from specwire.lm.model_config import FULL_ATTENTION, SLIDING_ATTENTION, CausalModel, ModelConfig, first_line
from specwire.lm.plain_decoder import DEFAULT, FAMILIES, LINEAR, DecoderConfig, PlainDecoder

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
# Elements that are dequantised at once: more take as much memory several times over, and leave the caches.
PIECE = 1 << 20
# Names of a file's tensors, by the module of transformers that has them.
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
LAYERS = "model.layers."


class Architecture(NamedTuple):
    """model_type: transformers'. paired: queries' and keys' rows are in the order of pairs. added: to norms' scales."""

    model_type: str
    layer_names: dict[str, str] = LAYER_NAMES
    paired: bool = False
    added: float = 0.0


ARCHITECTURES = {
    "llama": Architecture("llama", paired=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma3": Architecture("gemma3_text", GEMMA_LAYER_NAMES, added=1.0),
}


def check_architecture(file: GgufFile) -> None:
    """ModelError for a file that llama.cpp alone computes."""
    if file.architecture not in ARCHITECTURES:
        raise _by_llamacpp(f"of the architecture {file.architecture}")
    if "blk.0.ffn_gate_inp.weight" in file.tensors:
        raise _by_llamacpp("with experts")


def _by_llamacpp(which: str) -> ModelError:
    return ModelError(
        f"runtime: a GGUF file {which} is computed by {LLAMACPP} alone; others read {', '.join(ARCHITECTURES)}"
    )


def config_of(file: GgufFile) -> ModelConfig:
    """The configuration of the model: of a `PlainDecoder` where it can be one, which imports no transformers.

    ModelError for what is missing, or is not known.
    """
    said = _said(file)
    kind = ARCHITECTURES[file.architecture].model_type
    if kind in FAMILIES and said["rope_parameters"]["rope_type"] in (DEFAULT, LINEAR):
        return _made(file, DecoderConfig, kind, said)
    return full_config_of(file)


def full_config_of(file: GgufFile) -> ModelConfig:
    """The configuration that transformers would have of the model. Raises ModelError as `config_of`."""
    from transformers import AutoConfig  # see `model_config.CausalModel`

    said = _said(file)
    return _made(file, AutoConfig.for_model, ARCHITECTURES[file.architecture].model_type, said)


def _made(file: GgufFile, make: Callable[..., ModelConfig], kind: str, said: dict[str, Any]) -> ModelConfig:
    try:
        return make(kind, **said)
    except Exception as error:  # any error of a library for values that do not fit each other
        reason = first_line(error)
        raise ModelError(f"model {str(file.path)!r} has no configuration that can be read: {reason}") from error


def _said(file: GgufFile) -> dict[str, Any]:
    """What a file says of its model, by transformers' names."""
    check_architecture(file)
    heads, attention = int(file.needed("attention.head_count")), file.attention
    said: dict[str, Any] = {
        "vocab_size": file.ids,
        "hidden_size": int(file.needed("embedding_length")),
        "intermediate_size": int(file.needed("feed_forward_length")),
        "num_hidden_layers": int(file.needed("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.of_model("attention.head_count_kv", heads)),
        "head_dim": attention.least_head,
        "rms_norm_eps": float(file.needed("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": file.context(None),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": list(file.eos_ids) or None,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": None,
        "rope_parameters": _rotation(file, attention.least_head),
    }
    if file.architecture == "llama":
        said |= {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}
    if file.architecture == "gemma3":
        said |= _of_gemma(file, said)
    return said


def _rotation(file: GgufFile, head: int) -> dict[str, Any]:
    turned = int(file.of_model("rope.dimension_count", head))
    if turned != head:
        raise _by_llamacpp(f"that turns {turned} of {head} dimensions")
    found: dict[str, Any] = {"rope_type": DEFAULT, "rope_theta": float(file.of_model("rope.freq_base", 10_000.0))}
    kind = file.of_model("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn") or file.turns_longer:
        raise _by_llamacpp(f"with the rotation {kind}")
    if kind != "none":
        found |= {"rope_type": kind, "factor": float(file.of_model("rope.scaling.factor", 1.0))}
    if kind == "yarn":
        found["original_max_position_embeddings"] = int(file.needed("rope.scaling.original_context_length"))
    return found


def _of_gemma(file: GgufFile, said: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's own source says of the family: every sixth layer sees all, and the others turn by 10,000."""
    largest = said["num_hidden_layers"] == 62  # of 27 billion weights, the only one with another scale
    scalar = said["hidden_size"] // said["num_attention_heads"] if largest else said["head_dim"]
    near = {"rope_type": "default", "rope_theta": 10_000.0}
    return {
        "sliding_window": int(file.needed("attention.sliding_window")),
        "query_pre_attn_scalar": scalar,
        "rope_parameters": {FULL_ATTENTION: said["rope_parameters"], SLIDING_ATTENTION: near},
    }


def model_of_file(file: GgufFile, config: ModelConfig, dtype: torch.dtype, quantization: str = NONE) -> CausalModel:
    """The model in `dtype`, filled tensor by tensor. ModelError, which names it, for one that is missing or broken.

    config: one of the above, which decides whose class it is. quantization: of linear layers, which are then
    `Int8Linear`s: so the file that is mapped holds integers.
    """
    try:
        model = PlainDecoder(config, dtype) if isinstance(config, DecoderConfig) else _of_transformers(config, dtype)
    except Exception as error:  # any error of the library for values that do not fit each other
        raise ModelError(f"model {str(file.path)!r} cannot be loaded as a causal model: {first_line(error)}") from error
    kept = str(dtype)[6:]
    if quantization != NONE:
        round_layers(model, dynamic=quantization == INT8_DYNAMIC, empty=True)
        kept += f"-int8x{GROUP}"
    tensors = GgufTensors(file)
    with torch.no_grad():
        fill(model, f"{file.fingerprint()[:32]}-{kept}", tensors.read_into)
    _turn_by_factors(model, tensors)
    model.eval()
    return model


def _of_transformers(config: ModelConfig, dtype: torch.dtype) -> CausalModel:
    from transformers import AutoModelForCausalLM  # see `model_config.CausalModel`
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def _turn_by_factors(model: CausalModel, tensors: GgufTensors) -> None:
    """Llama 3's rotations: the file has the factors by which frequencies are divided."""
    if "rope_freqs.weight" not in tensors.file.tensors:
        return
    rotary: Any = model.get_submodule("model.rotary_emb")
    rotary.inv_freq = rotary.inv_freq / tensors.read("rope_freqs.weight")


class GgufTensors:
    """Reads a file's tensors under transformers' names."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._kind = ARCHITECTURES[file.architecture]
        self._heads = int(file.needed("attention.head_count"))
        self._kv_heads = int(file.of_model("attention.head_count_kv", self._heads))
        self._content = np.memmap(file.path, np.uint8, "r")
        self._scales: dict[str, torch.Tensor] = {}  # of layers that were rounded

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill `target`, of the shape that transformers gives this parameter. ModelError if the file's is another.

        dtype: from which what an Int8Linear has is rounded.
        """
        layer, _, last = name.rpartition(".")
        if last in ("integers", "scale"):
            known = self._scales.get(layer) if last == "scale" else None
            found = self._rounded(layer)[last == "scale"] if known is None else known
            if found.shape != target.shape:
                raise self._broken(self._stored_name(f"{layer}.weight"), f"makes {last} of the shape {[*found.shape]}")
            target.copy_(found)
            return
        stored, shape = self._stored_name(name), tuple(target.shape)
        tensor = self.file.tensors.get(stored)
        if tensor is None:
            raise self._broken(stored, "is missing")
        if tensor.shape[::-1] != shape:
            raise self._broken(stored, f"has the shape {[*tensor.shape[::-1]]}, not {[*shape]}")
        rows = target.view(-1, shape[-1])
        added = self._kind.added if "norm" in stored else 0.0

        def fill_from(first: int, data: Bytes, kind: GGMLQuantizationType) -> None:
            values = self._dequantised(stored, data, kind)
            rows[first : first + len(values)] = torch.from_numpy(values) - added

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # NumPy lets go of the interpreter
            for done in [threads.submit(fill_from, *piece) for piece in self._pieces(stored)]:
                done.result()
        if self._kind.paired and (".attn_q." in stored or ".attn_k." in stored):
            heads = self._heads if ".attn_q." in stored else self._kv_heads
            target.copy_(target.view(heads, -1, 2, *shape[1:]).transpose(1, 2).reshape(shape).clone())

    def _rounded(self, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Of an Int8Linear; its scales are kept, which are wanted later."""
        name = f"{layer}.weight"
        if layer == "lm_head" and self._stored_name(name) not in self.file.tensors:
            name = "model.embed_tokens.weight"  # the two are one
        tensor = self.file.tensors.get(self._stored_name(name))
        if tensor is None:
            raise self._broken(self._stored_name(name), "is missing")
        weight = torch.empty(tensor.shape[::-1])  # in float32: what is rounded twice is off by more
        self.read_into(name, weight)
        integers, self._scales[layer] = rounded_groups(weight)
        return integers, self._scales[layer]

    def read(self, stored: str) -> torch.Tensor:
        """A small tensor, flat."""
        found = [self._dequantised(stored, data, kind) for _, data, kind in self._pieces(stored)]
        return torch.from_numpy(np.concatenate(found)).flatten()

    def _pieces(self, stored: str) -> Iterator[tuple[int, Bytes, GGMLQuantizationType]]:
        """Some rows at a time: the first one's number, and bytes (rows, any). ModelError if the tensor is broken."""
        shape, number, start = self.file.tensors[stored]
        try:
            kind = GGMLQuantizationType(number)
            block, size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise self._broken(stored, f"is of the unknown type {number}") from error
        width, count = shape[0], math.prod(shape[1:])
        stride = width // block * size
        if width % block or start + count * stride > len(self._content):
            raise self._broken(stored, "ends too early" if width % block == 0 else f"has rows of {width} elements")
        each = max(1, PIECE // width)
        for first in range(0, count, each):
            begin, many = start + first * stride, min(each, count - first)
            yield first, self._content[begin : begin + many * stride].reshape(many, stride), kind

    def _dequantised(self, stored: str, data: Bytes, kind: GGMLQuantizationType) -> Floats:
        """Rows in float32, in memory of their own."""
        try:
            values = dequantize(data, kind)
        except NotImplementedError as error:
            raise self._broken(stored, f"is of a type that cannot be dequantised: {kind.name}") from error
        return np.array(values, np.float32, copy=not values.flags.writeable).reshape(len(data), -1)

    def _stored_name(self, name: str) -> str:
        module, _, last = name.rpartition(".")
        if module in NAMES:
            return f"{NAMES[module]}.{last}"
        layer, _, inner = module.removeprefix(LAYERS).partition(".")
        return f"blk.{layer}.{self._kind.layer_names.get(inner, inner)}.{last}"

    def _broken(self, stored: str, how: str) -> ModelError:
        return ModelError(f"model {str(self.file.path)!r}: its tensor {stored} {how}")


# ----------------------------------------------------------------------------------------------------------------------
# Weights in a file that is mapped: made once of a model's own files, read where they lie, given back when read.
#
# A runtime packs weights into an order of its own while it loads. What it reads of a file is given back meanwhile, so a
# model is in memory once, and the next start converts nothing. Files are named by what they hold, are written beside
# and renamed into place, and the ones unused for longest go where all of them take too much room.

# Bytes of all files, and of a model that is worth one.
MOST_BYTES, LEAST_BYTES = 16 << 30, 64 << 20
SUFFIX = ".weights"
# Counted up with each other order of tensors in a file (`_places`).
LAYOUT = 2
# Of each tensor: a line of a processor's cache.
ALIGNED = 64
# Seconds between two looks at what has been read.
INTERVAL_S = 0.05

_mapped: WeakKeyDictionary[nn.Module, mmap.mmap] = WeakKeyDictionary()


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/specwire. OSError for somebody without a home, as a container's user may be."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specwire"
    except RuntimeError as error:
        raise FileNotFoundError(f"no folder for what is kept: {error}") from error


def fill(model: nn.Module, name: str, read_into: Callable[[str, torch.Tensor], None]) -> None:
    """Fill the model's parameters, which hold nothing yet, by a mapped file, or in memory where that cannot be.

    name: of what the file holds. read_into: fills a tensor for a parameter's name.
    """
    parameters = dict(model.named_parameters())
    places, size = _places(parameters)
    if size >= LEAST_BYTES:
        try:
            path = cache_folder() / f"{LAYOUT}-{name}{SUFFIX}"
            if not path.is_file() or path.stat().st_size != size:
                _write(path, size, {each: (place, parameters[each]) for each, place in places.items()}, read_into)
            memory = _map(path, size, mmap.MAP_PRIVATE)
        except OSError as reason:
            logger.info("weights are kept in memory, not in a file (%s): %s", name, reason)
        else:
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            for each, place in places.items():
                parameters[each].data = _tensor(whole, place, parameters[each])
            _mapped[model] = memory
            return
    for each, parameter in parameters.items():
        read_into(each, parameter.data)


@contextmanager
def given_back(model: nn.Module) -> Iterator[None]:
    """Give back, meanwhile and at the end, what was read of the model's mapped weights. Reading brings it back."""
    memory = _mapped.get(model)
    if memory is None:
        yield
        return
    done = threading.Event()

    def give_back() -> None:
        while not done.wait(INTERVAL_S):
            memory.madvise(mmap.MADV_DONTNEED)

    thread = threading.Thread(target=give_back, name="weights", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        memory.madvise(mmap.MADV_DONTNEED)


def give_back_freed() -> None:
    """Give what loading has freed back to the system, where the C library would keep it for what may come (glibc)."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _places(parameters: dict[str, nn.Parameter]) -> tuple[dict[str, int], int]:
    """Where each begins, and bytes of all.

    Matrices first, each dtype by itself, so that no scales lie between integers: those which are multiplied together
    lie together then, and are not copied for it.
    """
    places, at = {}, 0

    def kind(pair: tuple[str, nn.Parameter]) -> tuple[bool, str]:
        return pair[1].dim() < 2, str(pair[1].dtype)

    for name, parameter in sorted(parameters.items(), key=kind):
        places[name], at = at, at + -(-parameter.nbytes // ALIGNED) * ALIGNED
    return places, at


def _tensor(whole: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    return whole[place : place + like.nbytes].view(like.dtype).view(like.shape)


def _map(path: Path, size: int, kind: int) -> mmap.mmap:
    """Private ones can be written, too, but are not: PyTorch warns of memory that cannot."""
    with path.open("r+b" if kind == mmap.MAP_SHARED else "rb") as file:
        found = mmap.mmap(file.fileno(), size, kind, mmap.PROT_READ | mmap.PROT_WRITE)
    with suppress(OSError):
        os.utime(path)
    return found


def _write(
    path: Path,
    size: int,
    parameters: dict[str, tuple[int, nn.Parameter]],
    read_into: Callable[[str, torch.Tensor], None],
) -> None:
    """OSError where there is no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _make_room(path.parent, size)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with beside.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        memory = _map(beside, size, mmap.MAP_SHARED)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        for name, (place, parameter) in parameters.items():
            read_into(name, _tensor(whole, place, parameter))
            memory.madvise(mmap.MADV_DONTNEED)  # what was written stays the file's
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _make_room(folder: Path, size: int) -> None:
    """Delete the files unused for longest while all would take more than MOST_BYTES; who maps one keeps it."""
    found = sorted(((each.stat().st_mtime, each) for each in folder.glob(f"*{SUFFIX}*")), reverse=True)
    for _, each in found:
        size += each.stat().st_size
        if size > MOST_BYTES:
            each.unlink(missing_ok=True)
