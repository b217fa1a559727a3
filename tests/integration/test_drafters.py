"""Several drafters for one session, as processes of their own: a good one and a poor one."""

from __future__ import annotations

import signal
from collections.abc import Callable

from specwire.client import DrafterStats
from tests.faults.parts import Parts
from tests.faults.streams import Stream, plain
from tests.integration.stack_process import running
from tests.wait import asked_blocking

TARGET = "scripted:7:vocab=64"
GOOD, POOR = f"{TARGET}:agree=0.9", f"{TARGET}:agree=0.3"
LENGTH = 400


def told(address: str, holds: Callable[[dict[int, DrafterStats]], object]) -> dict[int, DrafterStats]:
    """The figures by source of the first text for which they hold: one may be over before its drafters are opened.

    Of drafters with equally many sessions the one that is named first is assigned first.
    """

    def ask() -> dict[int, DrafterStats]:
        with Stream(address, max_tokens=LENGTH) as stream:
            assert stream.rest() == plain(TARGET, LENGTH)
            assert stream.finished is not None
            return {each.source: each for each in stream.finished.stats.drafters}

    return asked_blocking(ask, holds)


def test_the_edge_s_own_drafter_and_one_that_dials_in(owned: Parts) -> None:
    verifier = owned.start("verify", f"{TARGET}:delay_ms=10")
    named = ("--verifier", verifier.ready(), "--draft", POOR)
    edge = owned.start("edge", *named, "--accept-drafters", "--drafters-per-session", "2")
    with running("draft", GOOD, "--connect", edge.ready(), "--json") as joined:
        assert joined.ready()["connected"] == edge.address
        drafters = told(edge.address, lambda each: len(each) == 2 and sum(one.accepted for one in each.values()))
        assert all(drafter.plan for drafter in drafters.values())
    for service in (edge, verifier):
        service.kill()


def test_a_stack_on_one_machine_with_two_drafters() -> None:
    models = ("--target", f"{TARGET}:delay_ms=10", "--draft", GOOD, "--draft", POOR, "--drafters-per-session", "2")
    with running("up", *models, "--listen", "127.0.0.1:0", "--json") as stack:
        address = stack.ready()["address"]
        assert told(address, lambda each: list(each) == [1, 2] and sum(one.accepted for one in each.values()))
        stack.process.send_signal(signal.SIGTERM)
        assert stack.wait() == 0
        assert stack.nothing_left()
