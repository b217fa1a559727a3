"""What is read of a process while its threads end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.harness.child import cpu_seconds
from bench.vllm.profile import wire_seconds


def test_a_thread_that_has_ended_meanwhile_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread is told by its number: it counts whatever it is called."""
    before = cpu_seconds(os.getpid(), os.getpid())
    read = Path.read_text

    def ended(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
        if path.name == "comm":
            raise ProcessLookupError(str(path))
        return read(path, encoding, errors)

    monkeypatch.setattr(Path, "read_text", ended)
    assert before <= wire_seconds(os.getpid()) <= before + 5.0
