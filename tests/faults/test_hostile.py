"""Drafters that lie, flood and vanish: the text is the target's, and the next session is served as well."""

from __future__ import annotations

import grpc
import pytest

from specwire.core.law.sampling import Sampling
from tests.faults.hostile import ATTACKS, hostile, joined
from tests.faults.stack import PLAIN, Stack
from tests.faults.streams import Stream, plain

LENGTH, SEED = 150, 11


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_drafter_changes_a_text(healthy: Stack, attack: str) -> None:
    with hostile(ATTACKS[attack]) as drafter:
        orchestrator = healthy.orchestrate(drafter.address)
        try:
            address = orchestrator.ready()
            for temperature in (0.0, 0.9):
                with Stream(address, max_tokens=LENGTH, temperature=temperature, seed=SEED) as stream:
                    assert stream.rest() == plain(PLAIN, LENGTH, sampling=Sampling(temperature, seed=SEED))
                    assert stream.finished is not None
                    assert stream.finished.stats.output_tokens == LENGTH
            assert drafter.attacked()
            assert ("sent more tokens than it was asked for" in orchestrator.said()) == (attack == "flood")
            assert "Traceback" not in orchestrator.said()
        finally:
            orchestrator.kill()
    assert healthy.verifier.lives
    assert "Traceback" not in healthy.verifier.said()


@pytest.mark.parametrize("attack", ["garbage", "refuse", "vanish", "flood", "giant"])
def test_no_drafter_that_dialled_in_changes_a_text(healthy: Stack, attack: str) -> None:
    orchestrator = healthy.parts.start("orchestrate", "--verifier", healthy.verifier.address, "--accept-drafters")
    try:
        address = orchestrator.ready()
        with joined(ATTACKS[attack], address) as joining:
            for temperature in (0.0, 0.9):
                with Stream(address, max_tokens=LENGTH, temperature=temperature, seed=SEED) as stream:
                    assert stream.rest() == plain(PLAIN, LENGTH, sampling=Sampling(temperature, seed=SEED))
            assert joining.drafter.attacked()
            if attack in ("flood", "giant"):
                assert joining.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("sent more tokens than it was asked for" in orchestrator.said()) == (attack == "flood")
        assert "Traceback" not in orchestrator.said()
    finally:
        orchestrator.kill()
    assert healthy.verifier.lives
