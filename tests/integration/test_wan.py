"""Over a long line: real processes on both sides of a relay that delays, holds back and cuts; the text is the same."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from bench.harness.child import descendants
from bench.relay.link import RelayLink
from bench.wan.rig import Orchestration, WanPair, WanRig, places, rig
from specwire.core.law.sampling import Sampling
from tests.faults.streams import Stream, plain

TARGET = "scripted:7:vocab=64:delay_ms=4"
SAMPLED = Sampling(temperature=0.9, seed=11)
TOKENS = 120
# For faults: no reader is so late that it is over before one, and it is left once it has gone on behind it.
LONG = 4000
TEXTBOOK = Orchestration("lockstep:4", patient=True)


@pytest.fixture(scope="module")
def line() -> Iterator[WanRig]:
    """Give both sides of the line; at the end nothing of them is left."""
    before = set(descendants(os.getpid()))
    pair = WanPair(f"{TARGET}:device=cloud", "scripted:7:vocab=64:agree=0.8:delay_ms=1:device=edge")
    with places() as where, rig(where, pair, [Orchestration(), TEXTBOOK]) as started:
        yield started
    assert set(descendants(os.getpid())) <= before


@pytest.fixture(params=[Orchestration(), TEXTBOOK], ids=["default", "textbook"])
def address(line: WanRig, request: pytest.FixtureRequest) -> str:
    return line.addresses[request.param]


@pytest.mark.parametrize("rtt_ms", [0, 40])
def test_the_text_does_not_depend_on_the_line(line: WanRig, address: str, rtt_ms: float) -> None:
    line.shape(rtt_ms)
    with Stream(address, max_tokens=TOKENS) as stream:
        assert stream.rest() == plain(TARGET, TOKENS)
    with Stream(address, max_tokens=TOKENS, temperature=0.9, seed=11) as stream:
        assert stream.rest() == plain(TARGET, TOKENS, sampling=SAMPLED)


@pytest.mark.parametrize(("fault", "seconds"), [(RelayLink.cut, 1.0), (RelayLink.stall, 2.0)], ids=["cut", "stalled"])
def test_a_link_that_fails_in_the_middle_of_a_sentence_changes_nothing(
    line: WanRig, address: str, fault: Callable[[RelayLink, float], None], seconds: float
) -> None:
    """The text goes on behind the fault, and is the same."""
    line.shape(40)
    with Stream(address, max_tokens=LONG) as stream:
        stream.until(TOKENS // 4)
        for link in line.links:
            fault(link, seconds)
        stream.until_arrived(time.monotonic() + seconds)
        stream.until(len(stream.tokens) + TOKENS)
        assert stream.tokens == plain(TARGET.rpartition(":")[0], len(stream.tokens))


def test_jitter_and_a_narrow_line_change_nothing(line: WanRig, address: str) -> None:
    for link in line.links:
        link.shape(20, jitter_ms=15, mbit=1)
    with Stream(address, max_tokens=TOKENS) as stream:
        assert stream.rest() == plain(TARGET, TOKENS)
