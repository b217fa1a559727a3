"""An orchestrator and the client that it served are both gone for good: the log must not say for ever that it runs."""

from __future__ import annotations

import pytest

from orchestrator.store import StoredSession
from specwire.client import Client, Started
from specwire.core.messages import FinishReason
from tests.faults.stack import PLAIN, Stack
from tests.faults.streams import PROMPT, plain
from tests.wait import eventually

# Beyond the call's own: until its owner cannot come back, and until it is missed: see docs/RELIABILITY.md, the times.
LIMIT_S = 120.0


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    ("timeout", "reason"),
    [(4.0, FinishReason.DEADLINE), (300.0, FinishReason.CANCELLED)],
    ids=["at its deadline", "as nobody comes back"],
)
def test_a_killed_orchestrators_session_ends(healthy: Stack, timeout: float, reason: FinishReason) -> None:
    other = healthy.orchestrate(healthy.drafter.address)
    try:
        other.ready()
        with Client(healthy.orchestrator.address, patience=0.0) as client:
            name = f"orphan: {reason.name}"
            events = client.generate(PROMPT, max_tokens=4000, ignore_eos=True, request_id=name, timeout=timeout)
            started = next(events)
            assert isinstance(started, Started)
            next(events)
            healthy.orchestrator.kill()
        log = ended(healthy, started.session_id)
        assert log.reason is reason
        assert list(log.tokens) == plain(PLAIN, len(log.tokens))
        assert log.text_length == len(" ".join(map(str, log.tokens)))
    finally:
        other.kill()


def ended(healthy: Stack, session_id: str) -> StoredSession:
    assert eventually(lambda: healthy.log(session_id).reason is not None, LIMIT_S, pause_s=0.5), (
        "it still runs in the log"
    )
    return healthy.log(session_id)
