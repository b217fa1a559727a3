"""Which tests `make test` leaves to `make test-all`: python -m tests.thorough writes the list anew.

It is by function, from the times that the last `make test-all` left in build/test. What takes longest is left out, but
for what stands for many: see KEPT. A test of this list (tests/test_thorough.py) holds each line to a function that is
there.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("thorough.txt")
TIMES = ROOT / "build" / "test"
# Seconds of a function, over all its parameters, in one of three workers on two cores.
LONG_S = 3.0
# What `make test` has all the same: a stack that is asked, each process killed, a real model, Ray.
KEPT = (
    "tests/faults/test_matrix.py",
    "tests/integration/test_one_machine.py",
    "tests/integration/test_real_model.py",
    "tests/integration/test_stack.py",
)


def listed() -> frozenset[str]:
    """FILE::FUNCTION of each test that is left out, FILE from the repository's root."""
    return frozenset(LIST.read_text().split())


def measured(reports: Iterable[Path]) -> dict[str, float]:
    """Seconds of each function of some JUnit reports. Whatever stands in a class counts for the class."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            name = _name(case.get("classname", ""), case.get("name", ""))
            if (ROOT / name.partition("::")[0]).exists():  # of a whole file that is left out there is another line
                seconds[name] += float(case.get("time", "0"))
    return seconds


def _name(module: str, test: str) -> str:
    path, *inner = module.replace(".", "/"), test.partition("[")[0]
    while not (ROOT / f"{path}.py").exists() and "/" in path:
        path, _, last = path.rpartition("/")
        inner = [last]
    return f"{path}.py::{inner[0]}"


def long_ones(seconds: Mapping[str, float]) -> Iterator[str]:
    for name, took in sorted(seconds.items()):
        if took >= LONG_S and not name.startswith(KEPT):
            yield name


def main() -> int:
    reports = sorted(TIMES.glob("*.xml"))
    if not reports:
        sys.stderr.write(f"thorough: {TIMES.relative_to(ROOT)} has no reports: run make test-all first\n")
        return 1
    seconds = measured(reports)
    names = list(long_ones(seconds))
    LIST.write_text("".join(f"{name}\n" for name in names))
    left = sum(seconds.values()) - sum(seconds[name] for name in names)
    sys.stdout.write(f"{len(names)} functions are left out; {left:.0f} of {sum(seconds.values()):.0f} s remain\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
