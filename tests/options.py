"""A command line as its command reads it, and files of keys that it may name."""

from __future__ import annotations

import argparse
from pathlib import Path

from specwire.options import add_options


def parsed(command: str, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, command)
    return parser.parse_args(words)


def private(file: Path, content: str | bytes, mode: int = 0o600) -> str:
    """Write a file that its owner alone may read, as keys are, at once, as tools for secrets do; its path."""
    fresh = file.with_suffix(".new")
    fresh.write_bytes(content.encode() if isinstance(content, str) else content)
    fresh.chmod(mode)
    fresh.replace(file)
    return str(file)
