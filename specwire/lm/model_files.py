"""A model's files: reading those beside the weights, naming broken ones, and fingerprints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from specwire.core.model import ModelError
from specwire.lm.model_config import ModelConfig, check_sizes, first_line
from specwire.named_models import check_path
from specwire.text.tokenizer import vocabulary_map

# Configuration entries that say who saved the model and where, not what it is.
INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
ADAPTER = "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Of a file of tensors: the number that is its header's length, and the longest header that the library reads.
HEADER_BYTES, MOST_HEADER = 8, 100_000_000


class ModelText(NamedTuple):
    """A model's tokenizer and templates. tokens: by id; empty where the model has no tokenizer."""

    tokenizer_json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    tokens: dict[int, str]

    def vocabulary(self, width: int) -> dict[int, str]:
        """Token of each id of a model with this many ids."""
        return self.tokens or vocabulary_map(b"", width)


@contextmanager
def file_of(spec: str, name: str) -> Iterator[None]:
    """Turn an error in reading a model's file into a ModelError that names the file."""
    try:
        yield
    except Exception as error:  # any error that the libraries raise for a broken file
        reason = first_line(error).removeprefix("tokenizer_json: ")
        raise ModelError(f"model {spec!r}: {name} cannot be read: {reason}") from error


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file. ValueError for one that is shorter than it says: the library would tell no sizes."""
    check_whole(file)
    with safe_open(file, "pt") as held:
        yield held


def check_whole(file: Path) -> None:
    """Of its length alone: what is broken otherwise is left to the library. Raises ValueError."""
    length = file.stat().st_size
    if not length:
        raise ValueError("it is empty")
    with file.open("rb") as content:
        begins = HEADER_BYTES + int.from_bytes(content.read(HEADER_BYTES), "little")
        if length < HEADER_BYTES or begins > length:
            raise ValueError(f"its header would end at byte {begins}, and it has {length}; is it cut off?")
        ends = begins + _bytes_of_tensors(content.read(begins - HEADER_BYTES) if begins <= MOST_HEADER else b"")
    if ends > length:
        raise ValueError(f"it has {length} of {ends} bytes; is it cut off?")


def _bytes_of_tensors(header: bytes) -> int:
    """As a file's header says; 0 where it cannot be read."""
    with suppress(ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return max(int(each["data_offsets"][1]) for name, each in json.loads(header).items() if name != "__metadata__")
    return 0


def read_text(spec: str) -> ModelText:
    """Tokenizer, chat template and what it may name, of a local directory or hub id; empty where the model has none.

    Raises ModelError, which names the file.
    """
    check_path(spec)
    with file_of(spec, TOKENIZER):
        serialised = read_file(spec, TOKENIZER)
    if not serialised:
        with file_of(spec, "the tokenizer"):
            serialised = _converted(spec)
    with file_of(spec, TOKENIZER):
        tokens = vocabulary_map(serialised, 0)
    template = _chat_template(spec)
    return ModelText(serialised, template, _special_tokens(spec) if template else {}, tokens)


# Of a configuration that does not say how many ids there are.
MOST_VOCABULARY = 1 << 32


def check_files(spec: str, config: ModelConfig) -> None:
    """ModelError for a directory whose weights are not all there or are cut off, or fewer than its configuration needs,
    or whose EOS ids cannot be read, or are none of its ids: every text would look for them, every peer be told.

    transformers silently ignores a broken generation_config.json and takes what config.json has.
    """
    text: Any = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", MOST_VOCABULARY)
    with file_of(spec, GENERATION):
        stated = stated_eos(spec)
        _check_eos(stated, vocabulary)
    with file_of(spec, CONFIG):
        _check_eos(getattr(text, "eos_token_id", None) if stated is None else None, vocabulary)
    if Path(spec).is_dir():
        check_weights(spec, config)


def check_weights(spec: str, config: ModelConfig) -> None:
    """The same of the weights of a directory or hub id; those of a hub id are fetched."""
    if read_file(spec, ADAPTER):
        return
    stored = tensors = 0
    for file in _weights_of(spec):
        with file_of(spec, file.name), opened(file) as held:
            stored, tensors = stored + file.stat().st_size, tensors + len(held.keys())
    with file_of(spec, CONFIG):
        check_sizes(config, stored, tensors)


def stated_eos(spec: str) -> Any:
    """What the model's file of generation says of the ids that end a text; None if nothing. Raises ValueError."""
    return _object(spec, GENERATION).get("eos_token_id")


def _check_eos(found: object, vocabulary: int) -> None:
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(each) is not int or not 0 <= each < vocabulary for each in ids):
        raise ValueError(f"eos_token_id: must be an id or several, from 0 to {vocabulary - 1}, not {found!r:.80}")


def _weights_of(spec: str) -> list[Path]:
    """The files that a model's directory, or a hub id on this machine, keeps its weights in."""
    with file_of(spec, INDEX):
        index = _object(spec, INDEX)
        if index and not isinstance(index.get("weight_map"), dict):
            raise ValueError("weight_map: is missing, or no object")
        names = files_named(index) if index else [WEIGHTS]
    if not Path(spec).is_dir():
        return [_fetched(spec, name) for name in names]
    missing = [name for name in names if not (Path(spec) / name).is_file()]
    if missing:
        message = f"model {spec!r} cannot be loaded as a causal model: there is no file named {missing[0]}"
        raise ModelError(f"{message}, which {INDEX} names" if index else message)
    return [Path(spec) / name for name in names]


def files_named(index: Mapping[str, Any]) -> list[str]:
    """By what model.safetensors.index.json holds. ValueError for one that lies elsewhere, or is none."""
    names = set(index["weight_map"].values())
    for name in names:
        if not isinstance(name, str) or name != Path(name).name:
            raise ValueError(f"weight_map: must name files beside it, not {name!r:.80}")
    return sorted(names)


def _object(spec: str, name: str) -> dict[str, Any]:
    """What one of the model's JSON files holds; empty if it has none of this name. Raises ValueError."""
    value = json.loads(read_file(spec, name) or b"{}")
    if not isinstance(value, dict):
        raise ValueError("must hold an object")
    return value


def read_file(spec: str, name: str) -> bytes:
    """Content of one of the model's files, empty if it has none of this name."""
    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = _cached(spec, name, **options)
    return Path(path).read_bytes() if path else b""


def _cached(spec: str, name: str, **options: bool) -> str | None:
    """Path of one of the model's files on this machine, where it may be fetched to."""
    from transformers.utils.hub import cached_file  # see `model_config.CausalModel`

    return cached_file(spec, name, **options)


def _converted(spec: str) -> bytes:
    """Tokenizers in older formats, converted by transformers where it can."""
    from transformers import AutoTokenizer  # as above

    if not read_file(spec, TOKENIZER_CONFIG):
        return b""
    backend = getattr(AutoTokenizer.from_pretrained(spec, trust_remote_code=False), "backend_tokenizer", None)
    return b"" if backend is None else str(backend.to_str()).encode()


def _chat_template(spec: str) -> str:
    with file_of(spec, TEMPLATE):
        jinja = read_file(spec, TEMPLATE).decode()
    if jinja:
        return jinja
    with file_of(spec, TOKENIZER_CONFIG):
        template = _object(spec, TOKENIZER_CONFIG).get("chat_template", "")
        if isinstance(template, list):
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), "")
    return str(template or "")


def _special_tokens(spec: str) -> dict[str, str]:
    """Special tokens, such as bos_token, by name. Of the two files that may hold them the newer format counts."""
    entries: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS, TOKENIZER_CONFIG):
        with file_of(spec, name):
            entries |= _object(spec, name)
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in entries.items()}
    return {k: text for k, text in contents.items() if k.endswith("_token") and isinstance(text, str)}


def weights_fingerprint(model: nn.Module, config: ModelConfig, precision: str) -> str:
    """sha256 (hex) over precision (dtype and quantization), configuration and every tensor by name."""
    return _fingerprint(config, precision, sorted(model.state_dict().items()))


def files_fingerprint(spec: str, config: ModelConfig, precision: str) -> str:
    """As `weights_fingerprint`, of the tensors as the files of a directory or hub id have them.

    Raises ModelError, which names the file.
    """
    return _fingerprint(config, precision, _tensors_of(spec))


def _fingerprint(config: ModelConfig, precision: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """tensors: by name, in order."""
    entries = {key: value for key, value in config.to_dict().items() if key not in INCIDENTAL}
    digest = hashlib.sha256(json.dumps([precision, entries], sort_keys=True, default=str).encode())
    for name, tensor in tensors:
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors_of(spec: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of all files, by name, in order."""
    files = {}
    for file in _weights_of(spec):
        with file_of(spec, file.name), opened(file) as held:
            files.update(dict.fromkeys(held.keys(), file))
    for name, file in sorted(files.items()):
        with file_of(spec, file.name), safe_open(file, "pt") as held:
            tensor = held.get_tensor(name)
        yield name, tensor


def _fetched(spec: str, name: str) -> Path:
    with file_of(spec, name):
        return Path(str(_cached(spec, name)))
