"""Every command block of README, docs/ and the other pages does what it says (tests/documents.py has the rules)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import all_blocks
from tests.integration.page import Desk, shared
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_port

BLOCKS = [block for block in all_blocks() if block.is_run]
PAGES = sorted({block.page for block in BLOCKS})


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    port = free_port()
    with (
        RedisServer(port=port, bind="127.0.0.1"),
        tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp") as folder,
        Desk(Path(folder), port, shared(BLOCKS)) as running,
    ):
        yield running


@pytest.mark.parametrize("page", PAGES)
def test_its_commands_do_what_it_says(page: str, desk: Desk) -> None:
    desk.read(block for block in BLOCKS if block.page == page)
