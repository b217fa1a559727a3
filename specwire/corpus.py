"""Texts to learn, to propose or to answer from: files, and the files in folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from specwire.core.invalid import InvalidParameter
from specwire.core.model import ModelError
from specwire.files import leads_out

# What is read of a folder: texts, and what people write in a repository.
TEXTS = (".txt", ".md", ".rst", ".html", ".css", ".json", ".jsonl", ".toml", ".yaml", ".yml")
SCRIPTS = (".py", ".pyi", ".js", ".jsx", ".mjs", ".cjs", ".ts", ".tsx", ".rb", ".php", ".sh", ".bash", ".sql")
COMPILED = (".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cs", ".go", ".java", ".kt", ".proto", ".rs", ".swift")
SUFFIXES = frozenset((*TEXTS, *SCRIPTS, *COMPILED))
# What programs write there: versions of packages, code without its blanks, others' code.
LOCK_FILES = frozenset(
    ("package-lock.json", "npm-shrinkwrap.json", "pnpm-lock.yaml", "packages.lock.json", "conda-lock.yml")
)
MINIFIED = (".min.js", ".min.css")
FOREIGN_FOLDERS = frozenset(("node_modules",))
# What is read, for help texts.
SEARCHED = "source code, .txt, .md, .rst, .html, .css, .json, .toml, .yaml and .jsonl"


def named_texts(paths: Iterable[Path], field: str) -> Iterator[tuple[str, str]]:
    """Name and text of each file, those in folders in order of their names; of a .jsonl file, of each line's "text".

    A file that is named is read whatever it is; of folders see `files_of`.

    Raises:
        InvalidParameter: of `field`, names the file that cannot be read.
    """
    for path in paths:
        for file in files_of(path) if path.is_dir() else [path]:
            try:
                whole = file.read_text(encoding="utf-8")
                yield from _lines(file, whole) if file.suffix == ".jsonl" else [(str(file), whole)]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InvalidParameter(field, f"{file}: cannot be read: {type(error).__name__}: {error}") from error


def files_of(folder: Path) -> list[Path]:
    """The texts and source files in a folder, in order of their names.

    Lock files, minified code and packages (node_modules) are left out, and hidden files and folders. So is what
    symbolic links have lie elsewhere: whoever may write into the folder need not be whoever may read that.
    """
    found = (each for each in folder.rglob("*") if _is_written(each.relative_to(folder)))
    return sorted(each for each in found if each.is_file() and not leads_out(each, folder))


def _is_written(path: Path) -> bool:
    """Whether a file so named, below a folder, is a text that somebody wrote."""
    foreign = any(part.startswith(".") or part in FOREIGN_FOLDERS for part in path.parts)
    generated = path.name in LOCK_FILES or path.name.endswith(MINIFIED)
    return path.suffix.lower() in SUFFIXES and not foreign and not generated


def texts_of(paths: Sequence[Path]) -> Iterator[str]:
    """The texts of files, and of the files in folders, in order of their names.

    Raises:
        ModelError: names the file that cannot be read.
    """
    try:
        for _, text in named_texts(paths, "data"):
            yield text
    except InvalidParameter as error:
        raise ModelError(str(error)) from error


def _lines(file: Path, whole: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(whole.splitlines(), 1):
        if line.strip():
            yield f"{file}:{number}", str(json.loads(line)["text"])
