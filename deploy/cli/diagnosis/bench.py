"""`specwire bench`: the measurements of a checkout, as `make bench...` runs them; an installed package has none."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from specwire.rpc.process import say

ROOT = Path(__file__).resolve().parent.parent.parent.parent
TARGET = re.compile(r"^bench(?:-([\w-]+))?:.*?## (.*)\n\t.*python -m (bench[\w.]*.*)", re.MULTILINE)
WITHOUT_NAME = "main"


@dataclass(frozen=True, slots=True)
class Measurement:
    """what: it measures. words: its module and the arguments that make gives it."""

    what: str
    words: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="which one (default: list them)")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its own arguments, such as --help")


def run(args: argparse.Namespace) -> int:
    known = targets(ROOT / "Makefile")
    if not known:
        say("specwire bench: error: there is no bench/ here: it is in a checkout of the repository, not in the package")
        return 1
    if args.name is None:
        width = max(map(len, known))
        print("\n".join(f"{name.ljust(width)}  {each.what}" for name, each in known.items()))
        return 0
    if args.name not in known:
        say(f"specwire bench: error: NAME must be one of {', '.join(known)}, not {args.name!r}")
        return 2
    return _become([*known[args.name].words, *args.words])


def _become(words: Sequence[str]) -> NoReturn:
    """The measurement gets this process, its terminal and its signals."""
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", *words])


def targets(makefile: Path) -> dict[str, Measurement]:
    """Measurements by name, as the Makefile lists them."""
    text = makefile.read_text() if makefile.exists() else ""
    found = TARGET.findall(text)
    return {name or WITHOUT_NAME: Measurement(what, tuple(words.split())) for name, what, words in found}
