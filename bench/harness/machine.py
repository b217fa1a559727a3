"""What a measurement ran on, without the machine's name, and how many of its cores each process used."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.harness import ROOT
from deploy.stack.options import cores
from specwire.core.model import AUTO
from specwire.rpc.process import say

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "ray", "redis", "numpy", "openvino-genai")

CpuSeconds = Callable[[], float]


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


class CoreUse:
    """Cores in use by each process while each row ran: another process that is busy disturbs a row.

    Call `ran` after each run. A clock gives the processor time that its process, and what is below it, has used.
    """

    def __init__(self, clocks: Mapping[str, CpuSeconds]) -> None:
        self._clocks = clocks
        self._used: dict[str, dict[str, float]] = {}
        self._elapsed: dict[str, float] = {}
        self._last_used = self._read()
        self._last = time.perf_counter()

    def ran(self, row: str) -> None:
        now, used = time.perf_counter(), self._read()
        row_used = self._used.setdefault(row, dict.fromkeys(used, 0.0))
        for name, seconds in used.items():
            row_used[name] += seconds - self._last_used[name]
        self._elapsed[row] = self._elapsed.get(row, 0.0) + now - self._last
        self._last, self._last_used = now, used

    def by_row(self) -> dict[str, dict[str, float]]:
        """Mean number of cores in use, by row and process."""
        return {
            row: {name: round(seconds / self._elapsed[row], 3) for name, seconds in used.items()}
            for row, used in self._used.items()
        }

    def _read(self) -> dict[str, float]:
        return {name: clock() for name, clock in self._clocks.items()}
