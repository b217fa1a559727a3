"""What was found out of a model once, for later starts on this machine: a small file of JSON in the cache folder each.

It is found again for the same code of this project, libraries, processor, cores, threads and variables, and the same
of whatever else decides it. A folder that cannot be read or written is no error: it is found out anew then.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from specwire.lm.gguf_weights import cache_folder

logger = logging.getLogger(__name__)

FOLDER, MOST_REMEMBERED = "remembered", 256
# Of what finds it out.
CODE = [Path(__file__).resolve().parents[2] / package for package in ("specwire", "verify_service")]
LIBRARIES = ("torch", "openvino", "llama-cpp-python", "transformers")
# Beginnings of environment variables that decide how those compute.
VARIABLES = ("ATEN_", "DNNL_", "GGML_", "KMP_", "LLAMA_", "MKL_", "OMP_", "ONEDNN_", "OV_", "TBB_", "TORCH_")


def recalled(*decides: object) -> Any:
    """What was found, or None.

    decides: what it is, and all that decides it beside the above, each with a `repr` that tells all of it.
    """
    try:
        path = _path(decides)
        if not path.is_file():
            return None
        content = path.read_bytes()
    except OSError as reason:
        logger.info("nothing is remembered of %s: %s", decides[0], reason)
        return None
    with suppress(OSError):  # of a folder that can only be read
        os.utime(path)
    try:
        return json.loads(content)
    except ValueError:
        return None


def remember(found: object, *decides: object) -> None:
    """Have it recalled. Those that were recalled last are kept."""
    try:
        path = _path(decides)
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, prefix="new-", delete=False) as file:
            beside = Path(file.name)
        try:
            beside.write_text(json.dumps(found))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as reason:
        logger.info("%s will be found out again: %s", decides[0], reason)
        return
    with suppress(OSError):  # another process may forget the same ones
        for each in sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime)[:-MOST_REMEMBERED]:
            each.unlink(missing_ok=True)


def _path(decides: tuple[object, ...]) -> Path:
    variables = sorted(pair for pair in os.environ.items() if pair[0].startswith(VARIABLES))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    whole = repr((decides, cores, torch.get_num_threads(), variables, _surroundings()))
    return cache_folder() / FOLDER / hashlib.sha256(whole.encode()).hexdigest()[:40]


@cache
def _surroundings() -> str:
    """Of this project's code, the libraries and the processor. Raises OSError where its code cannot be read."""
    code, paths = hashlib.sha256(), sorted(path for folder in CODE for path in folder.rglob("*.py") if path.is_file())
    if not paths:
        raise FileNotFoundError(f"{CODE[0]} has no code to tell by")
    for path in paths:
        code.update(path.read_bytes())
    versions = []
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions.append((name, version(name)))
    processor = platform.processor()
    with suppress(OSError):
        processor = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        told = ("model name", "flags", "Features", "CPU")  # not its clock, which changes
        processor = "".join(line for line in processor.splitlines() if line.startswith(told))
    return repr((code.hexdigest(), versions, processor, platform.machine()))
