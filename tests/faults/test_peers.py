"""Drafters and verifiers die, hang and come back while text streams; the text is the target's."""

from __future__ import annotations

import signal
import time

import pytest

from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason
from tests.faults.stack import PLAIN, TARGET, Stack
from tests.faults.streams import Stream, plain

LONG = 4000


def assert_plain(stream: Stream, length: int) -> None:
    """It ended as asked, with the text that the target alone writes."""
    assert stream.rest() == plain(PLAIN, length)
    assert stream.error is None
    assert stream.finished is not None
    assert stream.finished.reason is FinishReason.LENGTH
    assert stream.finished.stats.output_tokens == length
    assert stream.text == " ".join(map(str, stream.tokens))


def assert_plain_so_far(stream: Stream) -> None:
    assert stream.tokens == plain(PLAIN, LONG)[: len(stream.tokens)]


def test_a_killed_drafter_costs_nothing_and_comes_back(healthy: Stack) -> None:
    with healthy.generate(LONG) as stream:
        stream.until_accepted()
        healthy.drafter.kill()
        stream.until(len(stream.tokens) + 100)
        healthy.drafter.restart()
        healthy.drafter.ready()
        stream.until_accepted()
        assert_plain_so_far(stream)


def test_a_session_outlives_its_drafter(healthy: Stack) -> None:
    with healthy.generate(LONG) as stream:
        stream.until_accepted()
        healthy.drafter.kill()
        stream.until_arrived(time.monotonic())
        stream.until(len(stream.tokens) + 150)
        assert_plain_so_far(stream)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "drained"])
def test_a_verifier_is_replaced_mid_sentence(healthy: Stack, number: signal.Signals) -> None:
    length = 2000  # beside other work a drafter does not pay, and is only tried now and then
    with healthy.generate(length) as stream:
        stream.until(60)
        healthy.verifier.send(number)
        healthy.verifier.wait()
        healthy.verifier.restart()
        healthy.verifier.ready()
        stream.until_accepted()  # the drafter serves the new verifier too
        assert_plain(stream, length)


def test_a_text_waits_for_a_verifier_as_long_as_was_said(healthy: Stack) -> None:
    verifier = healthy.parts.start("verify", TARGET)
    verifier.ready()
    impatient = healthy.parts.start("orchestrate", "--verifier", verifier.address, "--verifier-wait", "0.5")
    impatient.ready()
    with Stream(impatient.address, max_tokens=LONG) as stream:
        stream.until(20)
        verifier.kill()
        began = time.monotonic()
        stream.rest()
    assert 0.4 < time.monotonic() - began < 25.0  # and not the 30 s that it waits unless told
    assert stream.error is not None
    assert str(stream.error).startswith("UNAVAILABLE: no verifier took the session within 0.5 s")
    assert_plain_so_far(stream)
    impatient.kill()


def test_a_replaced_verifier_goes_on_with_the_same_noise(healthy: Stack) -> None:
    sampled = Sampling(temperature=0.9, top_k=20, seed=11)
    with healthy.generate(300, temperature=0.9, top_k=20, seed=11) as stream:
        stream.until(100)
        healthy.verifier.restart()
        assert stream.rest() == plain(PLAIN, 300, sampling=sampled)
        assert stream.finished is not None


def test_a_drafter_that_hangs_for_a_while(healthy: Stack) -> None:
    with healthy.generate(LONG) as stream:
        stream.until_accepted()
        healthy.drafter.send(signal.SIGSTOP)
        stream.until(len(stream.tokens) + 300)
        healthy.drafter.send(signal.SIGCONT)
        stream.until_accepted()
        assert_plain_so_far(stream)


@pytest.mark.parametrize(
    "seconds", [pytest.param(1.0, id="unnoticed"), pytest.param(12.0, id="noticed", marks=pytest.mark.whole_matrix)]
)
def test_a_verifier_that_hangs_for_a_while(healthy: Stack, seconds: float) -> None:
    with healthy.generate(400) as stream:
        stream.until(100)
        healthy.verifier.send(signal.SIGSTOP)
        time.sleep(seconds)  # how long the fault lasts
        healthy.verifier.send(signal.SIGCONT)
        assert_plain(stream, 400)


def test_both_peers_at_once(healthy: Stack) -> None:
    with healthy.generate(400) as stream:
        stream.until(100)
        healthy.drafter.kill()
        healthy.verifier.kill()
        healthy.drafter.restart()
        healthy.verifier.restart()
        assert_plain(stream, 400)
        healthy.drafter.ready()
