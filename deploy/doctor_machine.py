"""What this machine has: Python, packages, devices, cores, memory, free ports."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deploy.findings import Finding, bad, ok, warn
from deploy.options import StackError, cores
from deploy.stack import check_free
from orchestrator.options import http_is_installed

TESTED = ((3, 11), (3, 12))
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
# Extras of the package, what they bring, and what is missing without.
EXTRAS = (
    ("lm", ("torch", "transformers", "safetensors"), "no model can be served on this machine"),
    ("ray", ("ray",), "specwire up needs --no-ray"),
    ("openvino", ("openvino",), "no --runtime openvino"),
)


def check_python(found: tuple[int, int] = sys.version_info[:2]) -> Finding:
    name = f"{found[0]}.{found[1]}"
    if found < TESTED[0]:
        return bad("python", name, "install Python 3.11 or 3.12")
    return ok("python", name) if found in TESTED else warn("python", f"{name} is not tested", "use 3.11 or 3.12")


def check_packages(needs_models: bool) -> Iterator[Finding]:
    """needs_models: models were named, so without torch nothing works."""
    for extra, packages, lacking in EXTRAS:
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if not missing:
            yield ok(extra, ", ".join(f"{name} {_version(name)}" for name in packages))
            continue
        grade = bad if needs_models and extra == "lm" else warn
        yield grade(extra, f"{', '.join(missing)} not installed: {lacking}", f"pip install 'specwire[{extra}]'")
    if http_is_installed():
        yield ok("http", ", ".join(f"{name} {_version(name)}" for name in ("starlette", "uvicorn")))
    else:
        yield warn("http", "not installed: gRPC only", "pip install 'specwire[http]'")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(without metadata)"


def check_cores(folder: Path = CGROUP) -> Finding:
    usable, quota = cores(), cpu_quota(folder)
    if quota is not None and quota < usable:
        threads = max(1, math.floor(quota))
        text = f"{usable} usable, but a quota of {quota:g}: more threads than that are stopped again and again"
        return warn("cores", text, f"give --target-threads and --draft-threads {threads} in all")
    return ok("cores", f"{usable} usable")


def cpu_quota(folder: Path = CGROUP) -> float | None:
    """Cores' worth of time that the control group may use; None without a limit."""
    words = _read(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdecimal() else None


def available_memory(meminfo: Path = MEMINFO, folder: Path = CGROUP) -> int | None:
    """Bytes that may still be taken here; None where nobody says."""
    free = [int(line.split()[1]) * 1024 for line in _read(meminfo).splitlines() if line.startswith("MemAvailable:")]
    limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        free.append(max(0, int(limit) - int(used)))
    return min(free, default=None)


def check_memory(available: int | None) -> Finding:
    if available is None:
        return warn("memory", "unknown: nobody says here how much is free", "see to it that the models fit")
    return ok("memory", f"{available / 2**30:.1f} GiB available")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def check_port(listen: str, field: str, asked: bool) -> Finding:
    """asked: somebody wants just this one, so that it must be free."""
    try:
        check_free(listen, field)
    except StackError as error:
        return (bad if asked else warn)("port", str(error), f"stop what listens there, or choose another --{field}")
    return ok("port", f"{listen} is free")
