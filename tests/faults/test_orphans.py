"""An orchestrator and the client that it served are both gone for good: the log must not say for ever that it runs."""

from __future__ import annotations

import time

import pytest

from orchestrator.store import StoredSession
from specwire.client import Client, Started
from specwire.core.limits import FinishReason
from tests.faults.stack import PLAIN, Stack
from tests.faults.streams import PROMPT, plain

# Of the call. The rest is for noticing that its owner is silent: see docs/RELIABILITY.md, the times.
TIMEOUT_S = 4.0
LIMIT_S = 60.0


@pytest.mark.whole_matrix
def test_a_killed_orchestrators_session_ends_at_its_deadline(healthy: Stack) -> None:
    other = healthy.orchestrate(healthy.drafter.address)
    try:
        other.ready()
        with Client(healthy.orchestrator.address, patience=0.0) as client:
            events = client.generate(PROMPT, max_tokens=4000, ignore_eos=True, request_id="orphan", timeout=TIMEOUT_S)
            started = next(events)
            assert isinstance(started, Started)
            next(events)
            healthy.orchestrator.kill()
        log = ended(healthy, started.session_id)
        assert log.reason is FinishReason.DEADLINE
        assert list(log.tokens) == plain(PLAIN, len(log.tokens))
        assert log.text_length == len(" ".join(map(str, log.tokens)))
    finally:
        other.kill()


def ended(healthy: Stack, session_id: str) -> StoredSession:
    deadline = time.monotonic() + LIMIT_S
    while (log := healthy.log(session_id)).reason is None:
        assert time.monotonic() < deadline, "it still runs in the log"
        time.sleep(0.5)
    return log
