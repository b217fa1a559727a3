"""Figures that every process has."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from specwire.telemetry.metrics import Family, counter, gauge

PACKAGE = "specwire"
STARTED = time.time()
STATM = Path("/proc/self/statm")


def installed_version() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


def process_families() -> Iterable[Family]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield Family("build_info", "gauge", "1; what runs.", [("", (("version", installed_version()),), 1)])
    yield gauge("process_start_time_seconds", "When the process began, Unix time.", STARTED)
    yield counter("process_cpu_seconds_total", "User and system time.", used.ru_utime + used.ru_stime)
    yield gauge("process_resident_memory_bytes", "Memory that is in use now.", resident_bytes())


def resident_bytes() -> int:
    """0 where the system does not say."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
