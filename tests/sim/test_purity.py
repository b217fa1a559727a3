"""The simulator starts fast and draws nothing that a seed does not fix: it imports no model, wire or log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_it_imports_no_model_wire_or_log() -> None:
    source = (
        "import sys, specwire.sim; print(sorted({'torch', 'grpc', 'redis', 'ray', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=30.0)
    assert done.stdout == "[]\n"
