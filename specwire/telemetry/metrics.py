"""Figures that every process has."""

from __future__ import annotations

import os
import resource
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path

from specwire.core.law.acceptance import DraftCounts
from specwire.core.messages import SourceKind

# ----------------------------------------------------------------------------------------------------------------------
# Figures in Prometheus' text form, version 0.0.4.
#
# Nothing is pushed: whoever counts has plain numbers, and a collector reads them when somebody asks. So counting costs
# an addition, and a service that nobody asks pays for nothing else. No client library is needed, hence no extra.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "specwire:"

# Seconds. Buckets of what clients wait for, of a step and its parts, and of a write into the log.
LATENCIES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
GAPS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
STEPS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Family:
    """All samples of one name. samples: (suffix of the name, labels, value)."""

    name: str
    kind: str
    text: str
    samples: Sequence[tuple[str, Labels, float]]


class Histogram:
    """Counts by bucket. Written by one thread; others may read it at any time, and then miss at most the last addition.

    bounds: ascending; a value counts in the first bucket that is not below it.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def samples(self, labels: Labels = ()) -> list[tuple[str, Labels, float]]:
        """Cumulative, as Prometheus wants them."""
        counts, total, samples = list(self.counts), 0, list[tuple[str, Labels, float]]()
        for bound, count in zip((*map(_number, self.bounds), "+Inf"), counts, strict=True):
            total += count
            samples.append(("_bucket", (*labels, ("le", bound)), total))
        return [*samples, ("_sum", labels, self.sum), ("_count", labels, total)]


def counter(name: str, text: str, value: float) -> Family:
    return Family(name, "counter", text, [("", (), value)])


def gauge(name: str, text: str, value: float) -> Family:
    return Family(name, "gauge", text, [("", (), value)])


def histogram(name: str, text: str, values: Histogram) -> Family:
    return Family(name, "histogram", text, values.samples())


def by_label(kind: str, name: str, text: str, label: str, values: Mapping[str, float]) -> Family:
    """One sample for each value of the label, in their order."""
    return Family(name, kind, text, [("", ((label, each),), value) for each, value in values.items()])


def draft_families(drafts: Mapping[SourceKind, DraftCounts]) -> Iterable[Family]:
    """What became of draft tokens, by who proposed them."""
    told = (
        ("draft", "Draft tokens put to the target, by where they came from.", attrgetter("proposed")),
        ("tested", "Of these, those that were judged, all before them having been accepted.", attrgetter("tested")),
        ("accepted", "Of these, those that were accepted.", attrgetter("accepted")),
    )
    for name, text, of in told:
        values = {kind.name.lower(): of(counts) for kind, counts in drafts.items()}
        yield by_label("counter", f"spec_decode_num_{name}_tokens_total", text, "kind", values)


Collector = Callable[[], Iterable[Family]]


class Registry:
    """The figures of one process, which may run several services: every sample says whose it is (`service`)."""

    def __init__(self) -> None:
        self._collectors: list[tuple[str, Collector]] = []

    def add(self, service: str, collector: Collector) -> None:
        """Read by `collector`, from now on, whenever somebody asks."""
        self._collectors.append((service, collector))

    def include(self, other: Registry) -> None:
        """What `other` has by now is read here, too."""
        self._collectors += other._collectors

    def text(self) -> str:
        """Families of one name, of several services, stand together; the first one's text is theirs."""
        families: dict[str, tuple[Family, list[str]]] = {}
        for service, collector in self._collectors:
            for family in collector():
                _, lines = families.setdefault(family.name, (family, []))
                lines += _lines(family, service)
        heads = (
            (f"# HELP {PREFIX}{f.name} {f.text}", f"# TYPE {PREFIX}{f.name} {f.kind}") for f, _ in families.values()
        )
        pages = zip(heads, (lines for _, lines in families.values()), strict=True)
        return "".join(f"{line}\n" for head, lines in pages for line in (*head, *lines))


def _lines(family: Family, service: str) -> Iterable[str]:
    for suffix, labels, value in family.samples:
        said = ",".join(f'{name}="{_escaped(text)}"' for name, text in (("service", service), *labels))
        yield f"{PREFIX}{family.name}{suffix}{{{said}}} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


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
