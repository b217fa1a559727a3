"""Tries the llama.cpp that `make setup-llamacpp` built: the demo drafter in 4 and 8 bits, each in a process of its own.

A build for another processor, or for instructions that this one's system does not let it use, ends a process by a
signal in its first forward. Here that is told; in `specwire verify` it would be the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from gguf import GGMLQuantizationType as Type

from demo_pair import DRAFT
from deploy.stack.processes import signalled
from tests.lm.gguf_files import written

REMEDY = (
    ".venv/bin/python -m pip uninstall -y llama-cpp-python; .venv/bin/python -m pip cache remove llama_cpp_python; "
    "CMAKE_ARGS='-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF' make -B setup-llamacpp builds it for any processor of this kind"
)
# Loading computes a text at once and in pieces, and compares.
LOAD = (
    "import sys; from specwire.lm import load_model; load_model(sys.argv[1], slots=2, context=128, runtime='llamacpp')"
)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        for kind in (Type.Q4_0, Type.Q8_0):
            path = written(DRAFT, Path(folder) / f"draft-{kind.name.lower()}.gguf", kind)
            if reason := failure([sys.executable, "-c", LOAD, path]):
                print(f"setup-llamacpp: a model in {kind.name}: {reason}; {REMEDY}", file=sys.stderr)
                return 1
    print("setup-llamacpp: models in 4 and 8 bits are computed")
    return 0


def failure(command: list[str]) -> str:
    """Why a process failed; "" if it did not."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode < 0:
        return signalled(-ended.returncode)
    return "" if ended.returncode == 0 else (ended.stderr.strip().splitlines() or ["no reason was told"])[-1]


if __name__ == "__main__":
    sys.exit(main())
