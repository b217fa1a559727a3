"""What a measurement ran on, without the machine's name, and how many of its cores each process used."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from bench.harness import ROOT
from specwire import provenance
from specwire.core.model import AUTO
from specwire.options import cores
from specwire.rpc.process import say

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "ray", "redis", "numpy", "openvino-genai")

CpuSeconds = Callable[[], float]


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
