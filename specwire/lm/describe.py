"""What is read beside a model's weights, and what makes two models the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.utils.hub import cached_file

# Configuration entries that say who saved the model and where, not what it is.
INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


class Text(NamedTuple):
    """A model's way from text to ids."""

    tokenizer_json: bytes
    chat_template: str
    special_tokens: dict[str, str]


def read_text(spec: str) -> Text:
    """Tokenizer, chat template and what it may name, of a local directory or hub id; empty where the model has none."""
    serialised = _read(spec, "tokenizer.json") or _converted(spec)
    template = _chat_template(spec)
    return Text(serialised, template, _special_tokens(spec) if template else {})


def _read(spec: str, name: str) -> bytes:
    """Content of one of the model's files, empty if it has none of this name."""
    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = cached_file(spec, name, **options)
    return Path(path).read_bytes() if path else b""


def _converted(spec: str) -> bytes:
    """Tokenizers in older formats, converted by transformers where it can."""
    if not _read(spec, "tokenizer_config.json"):
        return b""
    backend = getattr(AutoTokenizer.from_pretrained(spec), "backend_tokenizer", None)
    return b"" if backend is None else str(backend.to_str()).encode()


def _chat_template(spec: str) -> str:
    jinja = _read(spec, "chat_template.jinja")
    if jinja:
        return jinja.decode()
    template = json.loads(_read(spec, "tokenizer_config.json") or b"{}").get("chat_template", "")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), "")
    return str(template or "")


def _special_tokens(spec: str) -> dict[str, str]:
    """Such as bos_token; the newer of the two files in which they are kept counts."""
    files = (_read(spec, name) for name in ("special_tokens_map.json", "tokenizer_config.json"))
    entries = {key: value for file in files for key, value in json.loads(file or b"{}").items()}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in entries.items()}
    return {k: text for k, text in contents.items() if k.endswith("_token") and isinstance(text, str)}


def weights_fingerprint(model: nn.Module, config: PreTrainedConfig, precision: str) -> str:
    """sha256 (hex) over precision (dtype and quantization), configuration and every tensor by name."""
    entries = {key: value for key, value in config.to_dict().items() if key not in INCIDENTAL}
    digest = hashlib.sha256(json.dumps([precision, entries], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
