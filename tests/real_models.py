"""The files of `make setup-models`, for tests that need real models."""

from __future__ import annotations

import pytest

from specwire.named_models import NAMED, file_of, how_to_get

NAMES = SMOL, QWEN, GEMMA = "smollm2-135m", "qwen2.5-coder-1.5b", "gemma-3-270m"


def real_model(name: str) -> str:
    """The model's file; skips the test, by name, where `make setup-models` has not run."""
    path = file_of(name)
    if not path.is_file() or path.stat().st_size != NAMED[name].size:
        pytest.skip(f"{name} is not there: {how_to_get(name)}")
    return str(path)
