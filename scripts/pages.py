"""References that scripts write into build/docs, and how they are asked to."""

from __future__ import annotations

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Where `make docs` puts what is not under version control.
BUILT = ROOT / "build" / "docs"


def asked_to_write(description: str | None) -> bool:
    """Read the command line: --write, or --check."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write it")
    mode.add_argument("--check", action="store_true", help="write nothing; exit 1 where something is wrong")
    return bool(parser.parse_args().write)


def build(page: Path, text: str, *, write: bool) -> None:
    """Put a generated page where it belongs, and say where that is; without `write` it was only rendered."""
    if write:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
        print(page)
