"""Several drafters for one session, as processes of their own: one good, one poor, one that dies mid-sentence."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from specwire.client import DrafterStats
from tests.faults.parts import Parts, ServiceProcess
from tests.faults.streams import Stream, plain
from tests.integration.stack_process import running
from tests.wait import asked_blocking

TARGET = "scripted:7:vocab=64"
GOOD, POOR = f"{TARGET}:agree=0.9", f"{TARGET}:agree=0.3"
LENGTH = 400


@dataclass
class Served:
    """A verifier, two drafters, and an orchestrator that gives every session both of them."""

    good: ServiceProcess
    poor: ServiceProcess
    orchestrator: ServiceProcess

    def generate(self, **options: float) -> Stream:
        return Stream(self.orchestrator.address, max_tokens=LENGTH, **options)  # type: ignore[arg-type]  # any field, by name


@pytest.fixture
def served(owned: Parts) -> Iterator[Served]:
    """Give a stack whose plan is fixed and whose verifier waits: how busy the machine is, is not the matter here."""
    verifier = owned.start("verify", f"{TARGET}:delay_ms=10", "--patient")
    good, poor = (owned.start("draft", model) for model in (GOOD, POOR))
    drafters = [part for drafter in (good, poor) for part in ("--drafter", drafter.ready())]
    orchestrator = owned.start(
        "orchestrate", "--verifier", verifier.ready(), *drafters, "--drafters-per-session", "2", "--plan", "lockstep:4"
    )
    orchestrator.ready()
    yield Served(good, poor, orchestrator)
    for service in (orchestrator, good, poor, verifier):
        service.kill()


def figures(stream: Stream) -> dict[int, DrafterStats]:
    """By source; of drafters with equally many sessions the one that is named first is assigned first."""
    assert stream.finished is not None
    return {each.source: each for each in stream.finished.stats.drafters}


def told(address: str, holds: Callable[[dict[int, DrafterStats]], object]) -> dict[int, DrafterStats]:
    """The figures of the first text for which they hold: one may be over before its drafters have been opened."""

    def ask() -> dict[int, DrafterStats]:
        with Stream(address, max_tokens=LENGTH) as stream:
            assert stream.rest() == plain(TARGET, LENGTH)
            return figures(stream)

    return asked_blocking(ask, holds)


def test_both_are_accepted_from_and_one_outlives_the_other(served: Served) -> None:
    def outlived() -> dict[int, DrafterStats]:
        """Of a text in whose middle the good one dies: the drafters with enough accepted for a ratio."""
        if not served.good.lives:
            served.good.restart()
            served.good.ready()
        told(served.orchestrator.address, lambda each: len(each) == 2)  # both are there: they are assigned in order
        with served.generate() as stream:
            stream.until_accepted()
            stream.until(100)
            served.good.kill()
            assert stream.rest() == plain(TARGET, LENGTH)
            drafters = figures(stream)
            assert stream.finished is not None
            assert sum(each.proposed for each in drafters.values()) <= stream.finished.stats.proposed
        return {source: each for source, each in drafters.items() if each.accepted >= 10}

    both = asked_blocking(outlived, lambda drafters: list(drafters) == [1, 2])
    good, poor = both[1], both[2]
    assert good.accepted / good.tested > poor.accepted / poor.tested


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
