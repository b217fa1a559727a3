"""Measure specwire against transformers and OpenVINO GenAI on one machine: python -m bench.main.run --help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness.entry import run
from bench.main import results
from bench.main.measure import measure
from bench.main.plot import draw
from bench.main.report import report
from bench.main.settings import parser, settings_of


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser().parse_args(argv), settings_of, measure, tell)


def tell(found: results.Results, out: Path) -> bool:
    results.write(found, out)
    draw(found, out.with_suffix(".png"))
    print(report(found))
    return found.texts_hold


if __name__ == "__main__":
    # Threads of numeric libraries in this process would only stand in the way of those that are measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
