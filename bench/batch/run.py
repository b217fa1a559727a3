"""Measure many sessions at once: python -m bench.batch.run --help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.batch.measure import BatchResults, measure
from bench.batch.plot import draw
from bench.batch.report import report, write
from bench.batch.settings import parser, settings_of
from bench.harness.entry import run


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser().parse_args(argv), settings_of, measure, tell)


def tell(found: BatchResults, out: Path) -> bool:
    write(found, out)
    draw(found.lines, out.with_suffix(".png"))
    print(report(found))
    return found.texts_hold


if __name__ == "__main__":
    # Threads of numeric libraries in this process would only disturb those that are measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
