"""llama.cpp's server as a peer: what a completion took; the server itself where its package is installed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives in an environment of its own; what is tested here does not call it."""
    monkeypatch.setitem(sys.modules, "xllamacpp", ModuleType("xllamacpp"))


def test_a_forward_decides_one_token_beside_those_that_it_accepts() -> None:
    from bench.peers.llamacpp_peer import run_of

    timings = {"prompt_ms": 250.0, "draft_n": 8, "draft_n_accepted": 3}
    assert run_of({"tokens": [1, 2, 3, 4, 5], "timings": timings}, 2.0) == {
        "tokens": [1, 2, 3, 4, 5],
        "seconds": 2.0,
        "first_token_seconds": 0.25,
        "forwards": 2,
        "tested": 8,
        "accepted": 3,
    }
    plain = run_of({"tokens": [1, 2], "timings": {"prompt_ms": 1.0}}, 1.0)
    assert (plain["forwards"], plain["tested"], plain["accepted"]) == (2, 0, 0)


def test_what_the_server_says_is_told_for_the_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.peers.llamacpp_peer import LlamacppPeer

    def completion(self: LlamacppPeer, request: object, prompt: list[int]) -> dict[str, object]:
        if prompt == [2]:
            raise OSError("the context is full")
        return {"tokens": [7], "timings": {"prompt_ms": 1.0}}

    monkeypatch.setattr(LlamacppPeer, "_completion", completion)
    peer = LlamacppPeer()
    monkeypatch.setattr(peer, "_asked", {"mode": "plain"})
    assert peer.generate({"prompts": [[1], [2]]}) == {"error": "OSError: the context is full"}
    found = peer.generate({"prompts": [[1], [3]]})
    assert [run["tokens"] for run in found["runs"]] == [[7], [7]]  # type: ignore[attr-defined]
