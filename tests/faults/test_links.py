"""Links that break, hang and slow down between living processes: the text is the target's, nothing is decided twice."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.relay.link import RelayLink
from bench.wan.wire import messages_of
from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason
from specwire.v1 import draft_pb2
from tests.faults.parts import ServiceProcess, steps_of
from tests.faults.stack import PLAIN, TARGET, Stack
from tests.faults.streams import LIMIT_S, Stream, plain

LENGTH = 240
# Long enough for a drafter that was given up for its distance to be probed again, a few times.
LONG = 720
SAMPLED = Sampling(temperature=0.8, seed=5)
# Longer than a whole credit's worth of steps: the verifier has paused when the link is back.
LONG_CUT_S = 5.0
# A dead connection is noticed within 10 s.
NOTICED_S = 12.0


@contextmanager
def orchestrated(stack: Stack, drafter: str, *verifiers: str) -> Iterator[ServiceProcess]:
    """An orchestrator of its own; nothing in it may have gone wrong."""
    orchestrator = stack.orchestrate(drafter, *verifiers)
    try:
        orchestrator.ready()
        yield orchestrator
        assert orchestrator.lives
        assert "Traceback" not in orchestrator.said()
    finally:
        orchestrator.kill()


def greedy(orchestrator: ServiceProcess, drafting: bool = True) -> Stream:
    return Stream(orchestrator.address, max_tokens=LENGTH, drafting=drafting, ngram=False)


def sampled(orchestrator: ServiceProcess, length: int = LENGTH) -> Stream:
    return Stream(orchestrator.address, max_tokens=length, ngram=False, temperature=0.8, seed=5)


def forwards(stream: Stream, length: int = LENGTH) -> int:
    """The session's own account of what the target computed for it; it has ended as asked."""
    assert stream.finished is not None, stream.error
    assert stream.finished.reason is FinishReason.LENGTH
    assert stream.finished.stats.output_tokens == length
    return stream.finished.stats.target_forwards


@pytest.mark.parametrize("drafted", [False, True], ids=["greedy-plain", "sampled-drafted"])
def test_a_link_cut_for_seconds_mid_sentence(healthy: Stack, drafted: bool) -> None:
    """What is decided meanwhile is delivered, once: every step of the verifier's is in the text, none was repeated."""
    with (
        RelayLink(healthy.verifier.address) as link,
        orchestrated(healthy, healthy.drafter.address, link.address) as served,
    ):
        before = steps_of(healthy.verifier.address)
        with sampled(served) if drafted else greedy(served, drafting=False) as stream:
            stream.until(60)
            link.cut(LONG_CUT_S)
            assert stream.rest() == plain(PLAIN, LENGTH, sampling=SAMPLED if drafted else None)
            steps = steps_of(healthy.verifier.address) - before - 1
            assert forwards(stream) == steps
            assert drafted or steps == LENGTH
        assert list(healthy.log(stream.session_id).tokens) == stream.tokens


def test_a_link_that_is_cut_and_hangs_again_and_again_while_sampled_text_is_drafted(healthy: Stack) -> None:
    rng = random.Random(3)
    with (
        RelayLink(healthy.verifier.address) as link,
        orchestrated(healthy, healthy.drafter.address, link.address) as served,
    ):
        before = steps_of(healthy.verifier.address)
        with sampled(served) as stream:
            for fault, seconds in [
                (link.cut, 0.0),
                (link.stall, 1.0),
                (link.cut, 0.3),
                (link.cut, 0.0),
                (link.stall, 0.2),
            ]:
                stream.until(len(stream.tokens) + rng.randrange(10, 40))
                fault(seconds)
            assert stream.rest() == plain(PLAIN, LENGTH, sampling=SAMPLED)
            assert forwards(stream) == steps_of(healthy.verifier.address) - before - 1


@pytest.mark.whole_matrix
def test_a_link_that_hangs_for_longer_than_it_takes_to_notice(healthy: Stack) -> None:
    """Both ends believe in different links for a while."""
    with (
        RelayLink(healthy.verifier.address) as link,
        orchestrated(healthy, healthy.drafter.address, link.address) as served,
    ):
        before = steps_of(healthy.verifier.address)
        with sampled(served) as stream:
            stream.until(60)
            link.stall(NOTICED_S)
            assert stream.rest() == plain(PLAIN, LENGTH, sampling=SAMPLED)
            assert forwards(stream) == steps_of(healthy.verifier.address) - before - 1
        assert "link to" in served.said()


def test_a_drafter_s_link_is_slow_hangs_and_breaks(healthy: Stack) -> None:
    """Proposals arrive seconds too late, and after a reconnect they speak of another connection's text."""
    with RelayLink(healthy.drafter.address) as link, orchestrated(healthy, link.address) as served:
        link.shape(rtt_ms=2000, jitter_ms=500)
        link.capture()
        for temperature, sampling in ((0.0, None), (SAMPLED.temperature, SAMPLED)):
            with Stream(served.address, max_tokens=LONG, temperature=temperature, seed=SAMPLED.seed) as slow:
                assert slow.rest() == plain(PLAIN, LONG, sampling=sampling)
        _, answered = link.captured()
        answers = [draft_pb2.ConnectDraftResponse.FromString(m) for stream in answered for m in messages_of(stream)]
        assert sum(len(answer.proposals) for answer in answers) > 1
        link.shape(rtt_ms=5)
        with sampled(served, 2 * LONG) as stream:
            stream.until(40)
            link.stall(0.5)
            stream.until(120)
            link.cut(0.2)
            stream.until_accepted()
            assert stream.rest() == plain(PLAIN, 2 * LONG, sampling=SAMPLED)
            forwards(stream, 2 * LONG)


# Two verifiers


def until_it_serves(orchestrator: ServiceProcess, verifier: ServiceProcess) -> None:
    """Until new sessions go to the verifier that was named first.

    An orchestrator is ready when any is there, and prefers a nearer one: on a busy machine the first may look far away
    until its round trip was measured some times.
    """
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        before = steps_of(verifier.address)
        with Stream(orchestrator.address, max_tokens=2) as stream:
            stream.rest()
        if steps_of(verifier.address) > before + 1:
            return
    raise AssertionError(f"the verifier that was named first never served: {orchestrator.said()}")


@pytest.fixture(scope="module")
def other(running_stack: Stack) -> Iterator[ServiceProcess]:
    """Give a second verifier of the same target."""
    verifier = running_stack.parts.start("verify", TARGET)
    verifier.ready()
    yield verifier
    verifier.kill()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_verifier_is_replaced_while_proposals_are_in_flight(
    healthy: Stack, other: ServiceProcess, temperature: float
) -> None:
    """The drafter is some ms away, so that one is under way all the time."""
    with (
        RelayLink(healthy.drafter.address) as link,
        orchestrated(healthy, link.address, healthy.verifier.address, other.address) as served,
    ):
        until_it_serves(served, healthy.verifier)
        link.shape(rtt_ms=10)
        with sampled(served) if temperature else greedy(served) as stream:
            stream.until_accepted()
            healthy.verifier.kill()
            before = steps_of(other.address)
            assert stream.rest() == plain(PLAIN, LENGTH, sampling=SAMPLED if temperature else None)
            assert 0 < steps_of(other.address) - before - 1 <= forwards(stream)


def test_a_session_goes_back_to_the_verifier_that_keeps_it(healthy: Stack, other: ServiceProcess) -> None:
    """Where the link is back at once; otherwise the other verifier takes over."""
    with (
        RelayLink(healthy.verifier.address) as link,
        orchestrated(healthy, healthy.drafter.address, link.address, other.address) as served,
    ):
        until_it_serves(served, healthy.verifier)
        others = steps_of(other.address)
        with greedy(served) as stream:
            stream.until(40)
            link.cut(0.0)
            stream.until(120)
            assert steps_of(other.address) == others + 1
            link.cut(20.0)
            assert stream.rest() == plain(PLAIN, LENGTH)
        assert steps_of(other.address) > others + 2
        forwards(stream)
