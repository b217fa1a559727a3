"""What heads' folders have in common: a config.json, and tensors in safetensors.

Each is read as what it must be, before anything of its size is allocated. Errors are `ModelError`s, one sentence that
names the file and the key or the tensor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from specwire.core.model import ModelError
from specwire.lm.model_files import INDEX, WEIGHTS, files_named, opened

CONFIG = "config.json"
# Types of numbers that weights, and lists of ids, may be stored in.
FLOATS = ("F64", "F32", "F16", "BF16")
WHOLE = ("I64", "I32")


class ConfigKeys:
    """Keys of a JSON object in a file. A key that is null is as if it were not there.

    within: the keys that lead to the object from the file's whole.
    """

    def __init__(self, path: Path, given: Mapping[str, Any], within: str = "") -> None:
        self.path, self._given, self._within = path, given, within

    def __contains__(self, key: str) -> bool:
        return self._given.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._given if key in self)

    def wrong(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self.path}: {self._within}{key}: {why}")

    def whole_number(self, key: str, default: int | None = None, least: int = 1) -> int:
        """default: None where the key is needed."""
        found = int(self._told(key, default, int, "a whole number"))
        if found < least:
            raise self.wrong(key, f"must be at least {least}, not {short(found)}")
        return found

    def whole_numbers(self, key: str) -> list[int] | None:
        found: Any = self.any(key)
        if found is None:
            return None
        if not isinstance(found, list) or not all(type(one) is int for one in found):
            raise self.wrong(key, f"must be a list of whole numbers, not {short(found)}")
        return found

    def number(self, key: str, default: float) -> float:
        """Above 0, and finite."""
        found = self._told(key, default, int | float, "a number above 0")
        if not 0 < found <= sys.float_info.max:
            raise self.wrong(key, f"must be a number above 0, not {short(found)}")
        return float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._told(key, default, bool, "true or false"))

    def text(self, key: str, default: str) -> str:
        return str(self._told(key, default, str, "text"))

    def _told(self, key: str, default: Any, kind: Any, what: str) -> Any:
        found = self.any(key, default)
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise self.wrong(key, f"must be {what}, not {short(found)}")
        return found

    def object(self, key: str) -> ConfigKeys:
        """One without keys where it is not there."""
        found = self._told(key, {}, dict, "an object")
        return ConfigKeys(self.path, found, f"{self._within}{key}.")

    def any(self, key: str, default: Any = None) -> Any:
        """Unchecked."""
        return self._given[key] if key in self else default

    def only(self, key: str, served: Any) -> None:
        """ModelError for any other value than the one that is served, which is the default."""
        found = self.any(key, served)
        if found != served or isinstance(found, bool) != isinstance(served, bool):
            raise self.wrong(
                key, f"only {served if isinstance(served, str) else json.dumps(served)} is served, not {short(found)}"
            )


def read_config(folder: Path) -> dict[str, Any]:
    """Raises ModelError."""
    path = folder / CONFIG
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(whole, dict):
        raise ModelError(f"{path}: cannot be read: it is not an object")
    return whole


class Stored(NamedTuple):
    """Where a tensor is, and its name there."""

    path: Path
    name: str


class Tensors:
    """Tensors of safetensors files by name. A tensor is read when it is asked for, if its header says what it must."""

    def __init__(self, where: Path, stored: Mapping[str, Stored]) -> None:
        """where: file or folder that lacks what is not in `stored`."""
        self.where, self._stored = where, stored

    @classmethod
    def of_file(cls, path: Path, called: Callable[[str], str] = str) -> Tensors:
        """called: what a tensor of the file is called here, by its name there."""
        stored: dict[str, Stored] = {}
        for name in tensor_names(path):
            other = stored.setdefault(called(name), Stored(path, name))
            if other.name != name:
                raise ModelError(f"{path}: {name}: is there twice, also as {other.name}")
        return cls(path, stored)

    @classmethod
    def of_folder(cls, folder: Path, called: Callable[[str], str] = str) -> Tensors:
        """Of one file, or of those that an index names."""
        if not (folder / INDEX).is_file():
            return cls.of_file(folder / WEIGHTS, called)
        return cls(folder, {called(name): Stored(path, name) for name, path in tensor_files(folder).items()})

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def wrong(self, name: str, why: str) -> ModelError:
        stored = self._stored.get(name, Stored(self.where, name))
        return ModelError(f"{stored.path}: {stored.name}: {why}")

    def weights(self, name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """Of one of these shapes, in the dtype that is stored, all finite."""
        found = self._read(name, shapes, FLOATS, "weights")
        if not bool(torch.isfinite(found).all()):
            raise self.wrong(name, "has values that are not finite")
        return found

    def ids(self, name: str, count: int) -> torch.Tensor:
        """So many whole numbers, int64."""
        return self._read(name, ((count,),), WHOLE, "ids").long()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._header(name)[0]

    def check(self, name: str, *shapes: tuple[int, ...]) -> None:
        """That it is there, in one of these shapes."""
        shape = self.shape(name)
        if shape not in shapes:
            raise self.wrong(name, f"is {shape}, not {' or '.join(str(each) for each in dict.fromkeys(shapes))}")

    def check_names(self, known: Collection[str], what: str) -> None:
        """ModelError for what would be left out silently: biases, more layers, scales of rounded weights."""
        for name in self:
            if name not in known:
                raise self.wrong(name, f"is not part of {what}")

    def _header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Its shape and type of numbers."""
        if name not in self._stored:
            raise self.wrong(name, "is not there")
        try:
            with safe_open(self._stored[name].path, "pt") as file:
                header = file.get_slice(self._stored[name].name)
                return tuple(header.get_shape()), str(header.get_dtype())
        except Exception as error:  # what a broken file can raise is many things
            raise self.wrong(name, f"cannot be read: {error}") from error

    def _read(self, name: str, shapes: tuple[tuple[int, ...], ...], kinds: tuple[str, ...], what: str) -> torch.Tensor:
        self.check(name, *shapes)
        kind = self._header(name)[1]
        if kind not in kinds:
            raise self.wrong(name, f"is stored as {kind}, and {what} only as {', '.join(kinds)}")
        try:
            with safe_open(self._stored[name].path, "pt") as file:
                found: torch.Tensor = file.get_tensor(self._stored[name].name)
        except Exception as error:  # as above
            raise self.wrong(name, f"cannot be read: {error}") from error
        return found


def tensor_names(path: Path) -> list[str]:
    """Of a safetensors file. Raises ModelError."""
    try:
        with opened(path) as file:
            return list(file.keys())
    except Exception as error:  # what a broken file can raise is many things
        raise ModelError(f"{path}: cannot be read: {error}") from error


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint's directory; empty if it has none. ModelError names a file."""
    path = folder / INDEX
    try:
        if path.is_file():
            index: dict[str, Any] = json.loads(path.read_text())
            files_named(index)
            found: dict[str, str] = index["weight_map"]
            return {name: folder / file for name, file in found.items()}
        path = folder / WEIGHTS
        if not path.is_file():
            return {}
    except Exception as error:  # what a broken file can raise is many things
        raise ModelError(f"{path}: cannot be read: {error}") from error
    return dict.fromkeys(tensor_names(path), path)
