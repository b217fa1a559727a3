"""Two clients at once, while faults come in a seeded order."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import pytest

from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason
from tests.faults.stack import PLAIN, Stack
from tests.faults.streams import Stream, plain

LENGTH = 800
OTHER = (9, 9)
SAMPLED = Sampling(temperature=0.8, seed=5)
FAULT_S = 0.5


def kill_drafter(stack: Stack) -> None:
    stack.drafter.restart()


def kill_verifier(stack: Stack) -> None:
    stack.verifier.restart()


def hang_drafter(stack: Stack) -> None:
    stack.drafter.send(signal.SIGSTOP)
    time.sleep(FAULT_S)  # how long the fault lasts
    stack.drafter.send(signal.SIGCONT)


def hang_log(stack: Stack) -> None:
    stack.redis.pause()
    time.sleep(FAULT_S)
    stack.redis.resume()


FAULTS: list[Callable[[Stack], None]] = [kill_drafter, kill_verifier, hang_drafter, hang_log]


@pytest.mark.parametrize("seed", [7])
def test_a_storm(healthy: Stack, seed: int) -> None:
    rng = random.Random(seed)
    order = rng.sample(FAULTS, len(FAULTS))
    greedy = healthy.generate(LENGTH)
    sampled = Stream(healthy.orchestrator.address, OTHER, max_tokens=LENGTH, temperature=0.8, seed=5)
    with greedy, sampled:
        for fault in order:
            greedy.until(len(greedy.tokens) + rng.randrange(50, 150))
            fault(healthy)
        assert greedy.rest() == plain(PLAIN, LENGTH)
        assert sampled.rest() == plain(PLAIN, LENGTH, OTHER, SAMPLED)
        for stream in (greedy, sampled):
            assert stream.finished is not None
            assert stream.finished.reason is FinishReason.LENGTH
            assert stream.finished.stats.output_tokens == LENGTH
            assert list(healthy.log(stream.session_id).tokens) == stream.tokens


def test_one_client_leaves_and_the_other_goes_on(healthy: Stack) -> None:
    with healthy.generate(300) as stays:
        with healthy.generate(LENGTH) as leaves:
            stays.until(30)
            leaves.until(30)
        assert stays.rest() == plain(PLAIN, 300)
