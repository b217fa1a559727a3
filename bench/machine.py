"""What a measurement ran on, without the machine's name."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deploy.stack.options import cores
from specwire.core.model import AUTO
from specwire.rpc.process import say

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "ray", "redis", "numpy", "openvino-genai")
ROOT = Path(__file__).resolve().parent.parent


def describe() -> dict[str, object]:
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": cores(),
        "memory_gib": round(int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
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
    """The commit measured, with "+" if the tracked files differ from it; None outside a repository.

    Records of earlier runs do not count: nothing that is measured reads them.
    """
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
        return head + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def _field(path: str, name: str) -> str | None:
    """The first "name : value" of a file of Linux."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
