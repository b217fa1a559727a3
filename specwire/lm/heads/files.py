"""What heads' folders have in common: a config.json, and tensors in safetensors. Errors name file and key or tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from specwire.core.model import ModelError

CONFIG = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Raises ModelError."""
    path = folder / CONFIG
    try:
        whole = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(whole, dict):
        raise ModelError(f"{path}: cannot be read: it is not an object")
    return whole


def whole_number(path: Path, config: Mapping[str, Any], key: str, default: int | None = None, least: int = 0) -> int:
    """config[key] of the file `path`. Raises ModelError for what is no whole number, or less than `least`."""
    given = config.get(key, default)
    if not isinstance(given, int) or isinstance(given, bool):
        raise ModelError(f"{path}: {key}: must be a whole number, not {given!r}")
    if given < least:
        raise ModelError(f"{path}: {key}: must be at least {least}, not {given}")
    return given


def flag(path: Path, config: Mapping[str, Any], key: str) -> bool:
    """config[key] of the file `path`; False if it is not there. Raises ModelError."""
    given = config.get(key)
    if given not in (None, False, True):
        raise ModelError(f"{path}: {key}: must be true or false, not {given!r}")
    return bool(given)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Raises ModelError."""
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def tensor_of(path: Path, stored: Mapping[str, torch.Tensor], name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
    """stored[name] of the file `path`, if it has one of these shapes. Raises ModelError."""
    if name not in stored:
        raise ModelError(f"{path}: {name}: is not there")
    if tuple(stored[name].shape) not in shapes:
        wanted = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
        raise ModelError(f"{path}: {name}: is {tuple(stored[name].shape)}, not {wanted}")
    return stored[name]
