"""No message of any caller breaks a service, hangs it, or is answered with a failure of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.services import Services, services
from tests.fuzz.targets import targets

EXAMPLES = 40
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
NAMES = [
    "GenerationService.Generate",
    "GenerationService.Watch",
    "GenerationService.GetSession",
    "GenerationService.Cancel",
    "VerifyService.Connect",
    "VerifyService.Score",
    "VerifyService.GetModelInfo",
    "DraftService.Connect",
    "DraftService.GetModelInfo",
    "DraftHubService.Join",
    "StatusService.GetStatus",
    "GenerationService.DeleteSession",
    "GenerationService.GetServerInfo",
]


@pytest.fixture(scope="module")
def running() -> Iterator[Services]:
    """Give all services, in one process."""
    with services() as started:
        yield started


def test_every_method_is_a_target(running: Services) -> None:
    assert [target.name for target in targets(running)] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_whatever_it_is_told_it_serves_on(running: Services, name: str) -> None:
    (target,) = (each for each in targets(running) if each.name == name)

    @settings(max_examples=EXAMPLES, suppress_health_check=SLOW)
    @given(target.strategy)
    def tell(data: list[bytes]) -> None:
        target.call(running, data)

    tell()
    running.check()
