"""One stack for the whole folder; before every test, what an earlier one has ended runs again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.matrix_record import Playing
from tests.faults.stack import Stack, stack


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the run is recorded: `make test-faults-all`."""
    parser.addoption("--played", type=Path, metavar="FILE", help="write which rows of the matrix were played, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Have it recorded, where that was asked for."""
    out: Path | None = config.getoption("--played", None)
    # Where several processes run the tests, one hears of all of them.
    if out is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Playing(out), "playing")


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
