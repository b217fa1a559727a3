"""Texts to score where tenants share a verifier: a flood of them costs a neighbour its share only."""

from __future__ import annotations

from typing import Any

import pytest

from specwire.core.invalid import Code
from tests.verify_service.rig import Rig
from tests.verify_service.tenants import ENDLESS, PROMPT, big, stepped
from verify_service.engine.messages import Scoring
from verify_service.engine.shares import TenantLimits, TenantShares


def scoring(rig: Rig, tenant: str, length: int = 600) -> list[Any]:
    """Have a text of a tenant scored; what it is answered, once it is."""
    answers: list[Any] = []
    tokens = tuple(index % 50 + 3 for index in range(length))
    rig.engine.inbox.put(Scoring(tokens, length - 1, answers.append, tenant=tenant))
    return answers


def test_a_flood_of_texts_to_score_gets_its_share_of_the_time() -> None:
    """Bob always has three long texts there; Ada decodes. Without shares each step is followed by a chunk of his."""

    def speed(shares: TenantShares | None) -> float:
        rig = big(0.05, shares)
        rig.open(0, PROMPT, tenant="ada", max_tokens=ENDLESS)
        asked: list[list[Any]] = []
        began = rig.now
        while rig.now < began + 2e6:
            while sum(not answers for answers in asked) < 3:
                asked.append(scoring(rig, "bob"))
            stepped(rig, 1)
        assert sum(map(len, asked)) >= 10
        return len(rig.tokens[0]) / (rig.now - began)

    alone_us = 1000.0
    assert speed(TenantShares({})) >= 0.9 * 0.5 / alone_us
    assert speed(None) < 0.25 / alone_us


def test_texts_to_score_of_two_tenants_take_turns() -> None:
    rig = big(0.05, TenantShares({}))
    his = [scoring(rig, "bob", 2000) for _ in range(6)]
    hers = scoring(rig, "ada", 1000)
    while not hers:
        stepped(rig, 1)
    assert sum(map(len, his)) <= 1


def test_texts_to_score_leave_slots_to_others() -> None:
    shares = TenantShares({})
    rig = big(0.05, shares, slots=4, queue=4)
    his = [scoring(rig, "bob") for _ in range(6)]
    hers = scoring(rig, "ada")
    rig.open(0, PROMPT, tenant="ada", max_tokens=5)
    stepped(rig, 1)
    refused = [answers[0] for answers in his if answers]
    assert [refusal.code for refusal in refused] == [Code.RESOURCE_EXHAUSTED] * 3
    assert shares.refused == {"other": 3}
    more: list[list[Any]] = []
    while 0 not in rig.finished:  # her session gets the first slot that comes free, whoever asks for it
        more.append(scoring(rig, "bob"))
        stepped(rig, 1)
        assert len(more) < 100
    while not hers:
        stepped(rig, 1)
    assert len(hers[0]) == 1


@pytest.mark.parametrize("limits", [TenantLimits(sessions=2), TenantLimits(slots=2)])
def test_a_text_to_score_counts_as_a_session(limits: TenantLimits) -> None:
    shares = TenantShares({"bob": limits})
    rig = big(0.05, shares)
    rig.open(100, PROMPT, link=1, tenant="bob", max_tokens=ENDLESS)
    first, second = scoring(rig, "bob"), scoring(rig, "bob")
    rig.step()
    assert not first
    assert (second[0].code, "texts to score among them, of at most 2" in second[0].message) == (
        Code.RESOURCE_EXHAUSTED,
        True,
    )
    assert shares.refused == {"bob": 1}


def test_a_text_to_score_holds_memory_of_its_tenant() -> None:
    shares = TenantShares({"bob": TenantLimits()})
    rig = big(0.05, shares)
    sharing = rig.engine._sharing
    assert sharing is not None
    sharing._position_bytes = 10
    answers = scoring(rig, "bob")
    while not answers:
        stepped(rig, 1)
    assert shares.prefilled == {"bob": 599}
    assert shares.kv_byte_us["bob"] > 0


def test_texts_to_score_wait_for_prompt_tokens_per_second() -> None:
    rig = big(0.001, TenantShares({"bob": TenantLimits(prefill=500)}))
    asked = [scoring(rig, "bob") for _ in range(4)]
    began = rig.now
    while not all(asked):
        stepped(rig, 1)
    assert rig.now - began >= (4 * 599 - 500 - 256) / 500 * 1e6
