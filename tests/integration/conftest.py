"""Which of these tests run beside which: `make test` has three at a time, and they share two cores.

Workers get groups of tests, the next one to whoever is free. What takes long is dealt out first.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.faults.parts import Parts, parts
from tests.integration.pauses import Pause, record
from tests.integration.stack_process import DRAFT, END_LIMIT, TARGET, Command, running
from tests.orchestrator.redis_for_tests import RedisServer

HERE = Path(__file__).parent
PAUSES = pytest.StashKey[list[Pause]]()
GROUPS = {
    # A Ray cluster keeps both cores busy while it starts: one at a time.
    "ray": ("test_one_machine",),
    "documents": ("test_documents",),
    # Timed lines.
    "line": ("test_wan",),
    # One stack for both.
    "stack": ("test_stack", "test_examples"),
    "benches": ("test_bench", "test_bench_step"),
}
# Behind the groups come files that take a minute, so that nobody begins one when the others have ended.
LONGEST = (
    "test_edge",
    "test_console",
    "test_progress",
    "test_runtime",
    "test_processes",
    "test_http_clients",
    "test_secured",
)


def group_of(path: Path) -> str:
    """A file that is in no group is one by itself."""
    return next((name for name, files in GROUPS.items() if path.stem in files), path.stem)


class ByGroup(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A worker that is free gets the next group, whole. xdist's own groups are lost on pytest 9.2's tests."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(Path(nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByGroup:
    config.option.loadscopereorder = False
    return ByGroup(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = [*GROUPS, *LONGEST]
    ours = [item for item in items if item.path.parent == HERE]
    ours.sort(key=lambda item: order.index(group) if (group := group_of(item.path)) in order else len(order))
    items[:] = [*(item for item in items if item.path.parent != HERE), *ours]


@pytest.fixture(scope="module")
def owned() -> Iterator[Parts]:
    """Give the owner of a file's processes."""
    with parts() as owner:
        yield owner


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """Give a real Redis."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def stack() -> Iterator[Command]:
    """One stack for the tests of its group, ended by Ctrl-C at last."""
    with running("up", "--json", "--listen", "127.0.0.1:0", "--target", TARGET, "--draft", DRAFT) as command:
        yield command
        command.process.send_signal(signal.SIGINT)
        assert command.wait(END_LIMIT) == 0, command.said()
        assert command.nothing_left(), command.family()


@pytest.fixture(scope="session")
def address(stack: Command) -> str:
    ready = stack.ready()
    assert ready["redis"].startswith("unix://")
    assert ready["http"].startswith("http://127.0.0.1:")
    assert ready == {**ready, "target": TARGET, "draft": DRAFT}
    return str(ready["address"])


@pytest.fixture(scope="session")
def pauses(pytestconfig: pytest.Config) -> list[Pause]:
    """Take what a cluster's tests saw of streams; told when all tests are over."""
    return pytestconfig.stash.setdefault(PAUSES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash.get(PAUSES, [])
    record(found)
    for pause in found:
        terminalreporter.write_line(str(pause))
