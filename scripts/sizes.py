"""Lines of Python in each room, held to what pyproject.toml states, so that growth is a decision."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What protoc writes, and what other people's packages bring.
NOT_OURS = {"v1", "node_modules"}


def sizes(rooms: list[str]) -> tuple[Counter[str], Counter[str]]:
    """Lines and files of each room; a file belongs to the deepest of the rooms that it lies in."""
    lines, files = Counter[str](), Counter[str]()
    for room in rooms:
        deeper = [ROOT / other for other in rooms if other.startswith(f"{room}/")]
        for path in (ROOT / room).rglob("*.py"):
            if not NOT_OURS & {*path.relative_to(ROOT).parts} and not any(path.is_relative_to(each) for each in deeper):
                lines[room] += len(path.read_bytes().splitlines())
                files[room] += 1
    return lines, files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 where a room has outgrown its size")
    check = parser.parse_args().check
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["specwire"]["sizes"]
    reserve = 1 + stated.pop("reserve_percent") / 100
    lines, files = sizes([*stated])
    grown = [room for room, size in stated.items() if lines[room] > size * reserve]
    if not check:
        for room in stated:
            print(f"{room:22} {lines[room]:7,} lines {files[room]:5} files   stated {stated[room]:7,}")
    unstated = {path.parent.name for path in ROOT.glob("*/__init__.py")} - stated.keys()
    for room in sorted(unstated | {room for room in stated if not lines[room]}):
        print(f"{room}: is a package without a size in tool.specwire.sizes, or a size without code", file=sys.stderr)
    for room in grown:
        most = int(stated[room] * reserve)
        told = "take something out, or state a larger size (pyproject.toml, tool.specwire.sizes) and say why"
        print(f"{room}: {lines[room]:,} lines, at most {most:,}: {told}", file=sys.stderr)
    return int(bool(grown or unstated) or not all(lines[room] for room in stated))


if __name__ == "__main__":
    sys.exit(main())
