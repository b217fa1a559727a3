"""What a record was made by: the processor, the versions of packages, the commit of this repository."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def cpu_model() -> str:
    """The processor's name, without the machine's."""
    return proc_field("/proc/cpuinfo", "model name") or platform.processor()


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """None for a package that is not installed."""
    return {name: _version(name) for name in packages}


def commit(root: Path = ROOT) -> str | None:
    """The commit checked out there, with "+" if the tracked files differ from it; None where `root` is no repository's.

    Records of earlier runs do not count: nothing that is measured reads them.
    """
    # An installed package may lie within somebody else's repository.
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
        return head + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def proc_field(path: str, name: str) -> str | None:
    """The first "name : value" of a file of Linux."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _git(root: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
