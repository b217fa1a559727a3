"""One stack for all tests of the front door; those that end one have another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.orchestrator.http.front import Front, front
from tests.orchestrator.stack import DRAFT, SLOW_TARGET


@pytest.fixture(scope="package")
def door() -> Iterator[Front]:
    with front(SLOW_TARGET, DRAFT) as running:
        yield running
