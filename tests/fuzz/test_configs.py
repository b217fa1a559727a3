"""Whatever stands in a config file or the environment: options, or one sentence why not.

Likewise in files of models and tables.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.fuzz.configs import Written, command_lines, read, type_line, written
from tests.fuzz.files import KINDS, Spoilt, read_spoilt, spoilt

EXAMPLES = 100
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=EXAMPLES, suppress_health_check=SLOW)
@given(written())
def test_files_and_environments(case: Written) -> None:
    read(case)


@settings(max_examples=EXAMPLES, suppress_health_check=SLOW)
@given(command_lines())
def test_command_lines(words: list[str]) -> None:
    type_line(words)


@settings(max_examples=3 * EXAMPLES, suppress_health_check=SLOW)
@given(spoilt())
def test_files(case: Spoilt) -> None:
    read_spoilt(case)


def test_whole_files_are_read() -> None:
    for kind in KINDS:
        assert read_spoilt(Spoilt(kind, (), 1.0)) == {"READ": 1}
