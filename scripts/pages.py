"""Pages that scripts write: tables between markers that name the script, and whole references in build/docs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Where `make docs` puts what is not under version control.
BUILT = ROOT / "build" / "docs"


def with_table(page: str, name: str, script: str, table: str) -> str:
    """Replace what stands between a table's markers; raises ValueError where one is missing."""
    begin, end = f"<!-- {name}: written by scripts/{script}.py -->", f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"needs the markers {begin} and {end}, in this order")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


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


def grid(rows: list[list[str]]) -> str:
    """Render rows, the first of which is the head."""
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def interval(estimate: dict[str, float]) -> str:
    """Render a median and its interval."""
    return f"{estimate['value']:.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})"


def bars_table(results: dict[str, Any]) -> str:
    """Render every bar of a record, those that do not hold too."""
    rows = [["bar", "measured", "needed", "holds"]]
    for bar in results["bars"]:
        needed = f"{bar['sense']} {bar['needed']:g}"
        rows.append([bar["name"], interval(bar), needed, "yes" if bar["holds"] else "**no**"])
    return grid(rows)
