"""One stack for the whole folder; before every test, what an earlier one has ended runs again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.run_record import Playing, of_matrix, of_vllm
from tests.faults.stack import Stack, stack

# Options that say where a run is recorded, of whom, and what is written.
RECORDED = {"--played": ("make test-faults-all", of_matrix), "--played-on-vllm": ("make test-vllm", of_vllm)}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the run is recorded."""
    for option, (command, _) in RECORDED.items():
        parser.addoption(option, type=Path, metavar="FILE", help=f"write how each test ended, as JSON ({command})")


def pytest_configure(config: pytest.Config) -> None:
    """Have it recorded, where that was asked for."""
    for option, (_, results) in RECORDED.items():
        out: Path | None = config.getoption(option, None)
        # Where several processes run the tests, one hears of all of them.
        if out is not None and not hasattr(config, "workerinput"):
            config.pluginmanager.register(Playing(out, results), option)


# Files that take minutes, the longest first: with several workers nobody is to begin them when the others have ended.
LONGEST = (
    "test_rolling.py",
    "test_soak.py",
    "test_matrix.py",
    "test_orchestrators.py",
    "test_log.py",
    "test_links.py",
    "test_hostile.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def running_stack() -> Iterator[Stack]:
    """Give the processes, which are gone afterwards."""
    with stack() as running:
        yield running


@pytest.fixture
def healthy(running_stack: Stack) -> Stack:
    """Give the stack with all its parts alive."""
    running_stack.mend()
    return running_stack
