"""A command line as its command reads it."""

from __future__ import annotations

import argparse

from specwire.options import add_options


def parsed(command: str, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, command)
    return parser.parse_args(words)
