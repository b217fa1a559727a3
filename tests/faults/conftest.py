"""One stack for the whole folder; before every test, what an earlier one has ended runs again."""

from collections.abc import Iterator

import pytest

from tests.faults.stack import Stack, stack


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
