"""What a measurement ran on, without the machine's name."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

from bench.harness import ROOT
from specwire import provenance
from specwire.core.model import AUTO
from specwire.options import cores
from specwire.rpc.process import say

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "ray", "redis", "numpy", "openvino-genai")


def describe() -> dict[str, object]:
    return {
        "cpu": provenance.cpu_model(),
        "cores": cores(),
        "memory_gib": round(int((provenance.proc_field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": provenance.versions(PACKAGES),
        "load_average": list(os.getloadavg()),
    }


def dtype_of(asked: str) -> str:
    """What to measure in: what was asked for, or, for AUTO, what this machine computes itself. It is said.

    Asked in a process of its own: what measures does not import torch.
    """
    if asked != AUTO:
        return asked
    code = "from specwire.lm import native_dtype; print(native_dtype())"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    say(f"bench: in {found.strip()}, which this machine computes itself (--dtype says otherwise)")
    return found.strip()


def commit() -> str | None:
    """See `specwire.provenance.commit`."""
    return provenance.commit(ROOT)
