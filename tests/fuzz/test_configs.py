"""Whatever stands in a config file or the environment: options, or one sentence why not.

Likewise in files of models and tables.
"""

from __future__ import annotations

from tests.fuzz.configs import command_lines, read, type_line, written
from tests.fuzz.files import KINDS, Spoilt, read_spoilt, spoilt
from tests.fuzz.messages import try_examples

EXAMPLES = 100


def test_files_and_environments() -> None:
    try_examples(written(), read, EXAMPLES)


def test_command_lines() -> None:
    try_examples(command_lines(), type_line, EXAMPLES)


def test_files() -> None:
    try_examples(spoilt(), read_spoilt, 3 * EXAMPLES)


def test_whole_files_are_read() -> None:
    for kind in KINDS:
        assert read_spoilt(Spoilt(kind, (), 1.0)) == {"READ": 1}
