"""Over a long line: real processes on both sides of a relay that delays, holds back and cuts; the text is the same."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bench.harness.child import descendants
from bench.wan.rig import Orchestration, WanPair, WanRig, rig
from specwire.core.law.sampling import Sampling
from tests.faults.streams import Stream, plain

TARGET = "scripted:7:vocab=64:delay_ms=4"
SAMPLED = Sampling(temperature=0.9, seed=11)
TOKENS = 120
TEXTBOOK = Orchestration("lockstep:4", patient=True)


@pytest.fixture(scope="module")
def line() -> Iterator[WanRig]:
    """Give both sides of the line; at the end nothing of them is left."""
    before = set(descendants(os.getpid()))
    pair = WanPair(f"{TARGET}:device=cloud", "scripted:7:vocab=64:agree=0.8:delay_ms=1:device=edge")
    with rig(pair, [Orchestration(), TEXTBOOK]) as started:
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


def test_jitter_and_a_narrow_line_change_nothing(line: WanRig, address: str) -> None:
    for link in line.links:
        link.shape(20, jitter_ms=15, mbit=1)
    with Stream(address, max_tokens=TOKENS) as stream:
        assert stream.rest() == plain(TARGET, TOKENS)
