"""One stack for all tests of the front door; those that end one have another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.orchestrator.http.front import Front, front
from tests.orchestrator.stack import DRAFT, SLOW_TARGET
from tests.orchestrator.tiny import tiny


@pytest.fixture(scope="package")
def door() -> Iterator[Front]:
    with front(SLOW_TARGET, DRAFT) as running:
        yield running


@pytest.fixture(scope="package")
def tiny_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Before a small model with a tokenizer for any text: what it writes is nonsense, and fits what is demanded."""
    folder = tmp_path_factory.mktemp("tiny")
    target = tiny(folder / "target", 1)
    with front(target, tiny(folder / "draft", 2, like=target, noise=0.01)) as running:
        yield running
