"""What is kept beside a head or drafter that was trained: by which arguments, on what, and how right it became."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specwire.files import write_text
from specwire.lm.training.loop import Trained
from specwire.provenance import commit, cpu_model, versions

RECORD = "training.json"
PACKAGES = ("specwire", "torch", "transformers", "safetensors", "tokenizers", "numpy")


def this_run() -> dict[str, Any]:
    """What a training runs on here and now."""
    return {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": versions(PACKAGES),
        "commit": commit(),
    }


def write_record(
    folder: Path, seed: int, arguments: Mapping[str, Any], trained: Trained, further: Mapping[str, Any] | None = None
) -> None:
    """Into the folder of what was trained. arguments: by names for the user. further: what else was measured."""
    curve = [{"step": step, "by_position": shares} for step, shares in trained.curve]
    record = {"seed": seed, "arguments": dict(arguments), "runs": trained.runs, "held_out_acceptance": curve}
    record |= further or {}
    write_text(folder / RECORD, json.dumps(record, indent=1) + "\n")
