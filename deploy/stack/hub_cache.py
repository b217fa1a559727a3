"""How many bytes of models a start has fetched so far, for whoever watches it.

The services that fetch them are processes of their own, some of them Ray's, and their bars end in pipes. But all fetch
into one folder, the hub's cache on this machine, whose layout is public: a folder for each model, in it `blobs` with
what is there and, as `*.incomplete`, what is coming, and `snapshots` with the files by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from specwire.progress import amount

BYTES = "B"
INDEX = "model.safetensors.index.json"
# The unit in which a file says how much room it takes (stat(2)).
BLOCK = 512


def hub_cache() -> Path:
    """Where models are kept that were fetched: huggingface_hub's own variables, in its order."""
    kept = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    home = Path(os.environ.get("HF_HOME", kept), "hub")
    named = os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE", home))
    return Path(os.path.expandvars(Path(named).expanduser()))


def file_here(model: str, name: str) -> Path | None:
    """One of the files of a directory, or of a model that was fetched before; None where it is not on this machine."""
    folder, kept = Path(model).expanduser(), hub_cache() / f"models--{model.replace('/', '--')}"
    with suppress(OSError):
        if not folder.is_dir():
            folder = kept / "snapshots" / (kept / "refs" / "main").read_text().strip()
        return folder / name if (folder / name).is_file() else None
    return None


class Fetching:
    """Counts the bytes fetched of `models` from now on. Directories and scripted models are not fetched."""

    def __init__(self, models: Iterable[str], cache: Path) -> None:
        self._folders = [cache / f"models--{model.replace('/', '--')}" for model in dict.fromkeys(models)]
        self._before = {folder: held(folder) for folder in self._folders}

    def text(self) -> str:
        """Such as "1.2 MB of 4.00 GB fetched", where it is known how large all are that come; "" for nothing."""
        coming = [folder for folder in self._folders if held(folder) > self._before[folder]]
        if not coming:
            return ""
        done, sizes = sum(map(held, coming)), [whole(folder) for folder in coming]
        if all(sizes):
            return f"{amount(done, BYTES)} of {amount(max(done, sum(sizes)), BYTES)} fetched"
        return f"{amount(done - sum(self._before[folder] for folder in coming), BYTES)} fetched"


def held(folder: Path) -> int:
    """Bytes that are there; a file that is written in several places at once takes less room than it is long."""
    total = 0
    with suppress(OSError):
        for entry in os.scandir(folder / "blobs"):
            with suppress(OSError):  # it has its own name by now
                status = entry.stat()
                total += min(status.st_size, status.st_blocks * BLOCK)
    return total


def whole(folder: Path) -> int:
    """Bytes of all weights, as the list of a model in several files says; 0 where nothing says it (yet)."""
    for index in folder.glob(f"snapshots/*/{INDEX}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(index.read_bytes())["metadata"]["total_size"])
    return 0
