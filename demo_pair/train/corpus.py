"""The corpus: source files of the Python standard library, split by file, listed with hashes.

A file is held out when a hash of its path says so, so the split depends neither on the machine nor on the
order in which files are found. Test-suite files are never held out: held-out prompts should look like the
library code that a completion user writes, not like assertions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

MANIFEST = Path(__file__).resolve().parent / "corpus.json"

# Tables, generated data and files that are invalid on purpose teach nothing about writing Python.
EXCLUDED_PARTS = {"site-packages", "__pycache__", "encodings", "pydoc_data", "lib2to3", "data", "idle_test"}
EXCLUDED_PREFIXES = ("badsyntax_", "bad_coding", "test_unicode", "test_codec")
MIN_BYTES, MAX_BYTES = 400, 300_000
HELD_OUT_ONE_IN = 25


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus: its path below the library's root (POSIX form), text and split."""

    path: str
    text: str
    held_out: bool

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def is_test(path: Path) -> bool:
    return any(part in ("test", "tests") or part.endswith("_test") for part in path.parts)


def wanted(path: Path) -> bool:
    return not (set(path.parts) & EXCLUDED_PARTS or path.name.startswith(EXCLUDED_PREFIXES))


def held_out(path: Path) -> bool:
    number = int.from_bytes(hashlib.sha256(path.as_posix().encode()).digest()[:4], "big")
    return not is_test(path) and number % HELD_OUT_ONE_IN == 0


class Manifest(TypedDict):
    """`rows`: path, digest and split of every file; `sha256` is over the rows."""

    python: str
    files: int
    sha256: str
    rows: list[list[str]]


def read_corpus(root: Path | None = None) -> list[SourceFile]:
    """Read the library under `root` (default: the running interpreter's), sorted by path."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = []
    for full in sorted(root.rglob("*.py")):
        path = full.relative_to(root)
        if not wanted(path) or not MIN_BYTES <= full.stat().st_size <= MAX_BYTES:
            continue
        try:
            text = full.read_text(encoding="utf-8")
            compile(text, str(path), "exec", dont_inherit=True)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        files.append(SourceFile(path.as_posix(), text, held_out(path)))
    return files


def manifest_of(files: list[SourceFile]) -> Manifest:
    rows = [[f.path, f.digest, "held_out" if f.held_out else "train"] for f in files]
    whole = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return {"python": sysconfig.get_python_version(), "files": len(rows), "sha256": whole, "rows": rows}


def differences(files: list[SourceFile], manifest: Manifest) -> list[str]:
    """Paths whose content differs between this machine's library and the recorded manifest."""
    recorded = {path: digest for path, digest, _ in manifest["rows"]}
    here = {f.path: f.digest for f in files}
    return sorted(p for p in recorded.keys() | here.keys() if recorded.get(p) != here.get(p))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record this machine's library as the manifest")
    arguments = parser.parse_args()
    files = read_corpus()
    if arguments.write:
        rows = manifest_of(files)
        MANIFEST.write_text(json.dumps(rows, separators=(",", ":")).replace("],[", "],\n[") + "\n")
    changed = differences(files, json.loads(MANIFEST.read_text()))
    size = sum(len(f.text) for f in files) / 1e6
    held = sum(f.held_out for f in files)
    print(f"{len(files)} files, {size:.1f} MB, {held} held out; {len(changed)} differ from the manifest")


if __name__ == "__main__":
    main()
