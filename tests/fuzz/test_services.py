"""No message of any caller breaks a service, hangs it, or is answered with a failure of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import pytest

from tests.fuzz import quotas
from tests.fuzz.messages import try_examples
from tests.fuzz.services import UNSENT_BY, Failures, Services, services
from tests.fuzz.targets import NAMES, targets

EXAMPLES, FEW = 40, 8
# As gRPC writes it.
UNSENT = """ExecuteBatchError raised in core by servicer method [/specwire.v1.DraftService/Connect]
Traceback (most recent call last):
  File "src/python/grpcio/grpc/_cython/_cygrpc/aio/server.pyx.pxi", line 710, in grpc._cython.cygrpc._handle_exceptions
  File "src/python/grpcio/grpc/_cython/_cygrpc/aio/callback_common.pyx.pxi", line 99, in execute_batch
grpc._cython.cygrpc.ExecuteBatchError: Failed "execute_batch": \
(<grpc._cython.cygrpc.SendStatusFromServerOperation object at 0x7f72c1ae4e10>,)"""


@pytest.fixture(scope="module")
def running() -> Iterator[Services]:
    """Give all services, in one process."""
    with services() as started:
        yield started


@pytest.mark.parametrize(
    ("logger", "text", "ours"),
    [
        (UNSENT_BY, UNSENT, False),
        (UNSENT_BY, UNSENT.replace("SendStatusFromServer", "SendMessage"), True),
        (UNSENT_BY, UNSENT.replace("ExecuteBatchError", "UsageError"), True),
        (UNSENT_BY, UNSENT + "\n\nDuring handling of the above exception, another exception occurred:", True),
        ("orchestrator.sessions", UNSENT, True),
    ],
)
def test_a_status_that_nobody_waits_for_is_the_only_error_that_is_not_ours(logger: str, text: str, ours: bool) -> None:
    failures = Failures()
    failures.handle(logging.LogRecord(logger, logging.ERROR, __file__, 1, text, None, None))
    assert failures.take() == ([text] if ours else [])


@pytest.mark.parametrize("name", NAMES)
def test_whatever_it_is_told_it_serves_on(running: Services, name: str) -> None:
    (target,) = (each for each in targets(running) if each.name == name)
    try_examples(target.strategy, partial(target.call, running), EXAMPLES)
    running.check()


def test_what_is_kept_of_a_tenant_stays_bounded() -> None:
    try_examples(quotas.asked(), quotas.hold, FEW)
