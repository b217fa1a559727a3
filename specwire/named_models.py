"""Real models by short names: what they are, and the file that `make setup-models` wrote for each."""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path
from typing import NamedTuple

from specwire.core.model import GGUF, ModelError

GGUF_MAGIC = b"GGUF"
# What says what model a directory holds; the second, beside weights that another model's are adapted by.
DESCRIBED_BY = ("config.json", "adapter_config.json")
CHECKOUT = Path(__file__).resolve().parent.parent
FOLDER = CHECKOUT / "build" / "models"
# What is included for named models: a folder of the name each, with `head`, what drafts beside it.
TRAINED = Path(__file__).resolve().parent / "trained"


class NamedModel(NamedTuple):
    """A GGUF file that packages of the package index carry, whole or in parts.

    Attributes:
        title: of the upstream model, whose `licence` applies.
        file: pattern of the one file of each package that is a part.
        size, sha256: of the parts in order, one behind another.
        default: fetched where no model is named.
        terms: the variable that says that its terms are accepted; "" where none need be.
        note: what else whoever fetches it should know.
    """

    title: str
    licence: str
    file: str
    size: int
    sha256: str
    default: bool = True
    terms: str = ""
    note: str = ""


NAMED = {
    "smollm2-135m": NamedModel(
        "SmolLM2-135M-Instruct, Q4_1",
        "Apache-2.0",
        "*/*.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-1.5b": NamedModel(
        "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        "Apache-2.0",
        "*/data/part*.bin",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        note="repackaged by somebody unknown, for measuring; for use, get it from the model's own publisher",
    ),
    "gemma-3-270m": NamedModel(
        "Gemma 3 270M (base), Q4_K_M",
        "Gemma Terms of Use",
        "*/data/*.gguf.part*",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        default=False,
        terms="ACCEPT_GEMMA_TERMS",
        note="for tests only",
    ),
}


# The one that whoever has none is pointed to.
REAL = "smollm2-135m"


def file_of(name: str) -> Path:
    """Where the file of a named model is, once it is there."""
    return FOLDER / f"{name}{GGUF}"


def how_to_get(name: str) -> str:
    """The command that fetches a named model, or several, in a checkout."""
    terms = {f"{NAMED[each].terms}=1 " for each in name.split() if NAMED[each].terms}
    return f"make setup-models {''.join(sorted(terms))}MODELS={name if ' ' not in name else repr(name)}"


def located(spec: str) -> str:
    """The file of a named model; any other way to name a model as it is.

    Raises:
        ModelError: says how to get a named model that is not there.
    """
    if spec in NAMED:
        if not file_of(spec).is_file():
            raise ModelError(
                f"model {spec!r} is not on this machine: {how_to_get(spec)} (in a checkout) fetches it; it is "
                f"{NAMED[spec].title}, {NAMED[spec].size >> 20} MiB, {NAMED[spec].licence}"
            )
        return str(file_of(spec))
    close = difflib.get_close_matches(spec, NAMED, 1, 0.8)
    if close and "/" not in spec and not Path(spec).exists():
        raise ModelError(f"model {spec!r}: {close[0]}?")
    return spec


def check_path(spec: str) -> None:
    """ModelError for what can only be a path of a directory, and is none: no hub knows it."""
    path = Path(spec).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            is_one = file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
        what = f"a GGUF file, whose name must end in {GGUF}" if is_one else f"a file, and no {GGUF} file"
        raise ModelError(f"model {spec!r}: it is {what}")
    looks_local = spec.startswith(("/", ".", "~")) or spec.count("/") > 1
    if not spec or (looks_local and not path.is_dir()):
        raise ModelError(f"model {spec!r}: there is no such directory")


def check_directory(spec: str) -> None:
    """ModelError for what can only be a local directory, and is none that a model is in."""
    check_path(spec)
    path = Path(spec).expanduser()
    if path.is_dir() and not any((path / name).is_file() for name in DESCRIBED_BY):
        inside = sorted(path.glob(f"*{GGUF}"))
        more = f"; name its file: {path / inside[0].name}" if inside else ""
        raise ModelError(f"model {spec!r}: there is no file named {DESCRIBED_BY[0]} in that directory{more}")


def included_head(spec: str) -> Path | None:
    """The head that is included for a GGUF file, which is known by its sum; None if there is none."""
    path = Path(spec).expanduser()
    for name, model in NAMED.items():
        folder = TRAINED / name / "head"
        if folder.is_dir() and path.is_file() and path.stat().st_size == model.size:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == model.sha256:
                    return folder
    return None
