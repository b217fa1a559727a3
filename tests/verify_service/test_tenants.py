"""Tenants that share a verifier: a flooding one beside a well-behaved one, by scripted models and forwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.harness.certificates import Authority
from specwire.core.invalid import Code, InvalidParameter
from specwire.core.text import BEFORE
from specwire.core.verify.chains import Offer
from specwire.core.verify.session import Allowance
from specwire.rpc import renewal
from specwire.rpc.channel import open_channel
from specwire.rpc.errors import retry_after
from specwire.rpc.keys import Keys
from specwire.rpc.renewal import Origin
from specwire.rpc.server_options import ModelServiceOptions
from specwire.rpc.tls import ClientTls
from specwire.v1 import verify_pb2, verify_pb2_grpc
from tests.verify_service.peer import Peer
from tests.verify_service.rig import chain, oracle
from tests.verify_service.tenants import ENDLESS, PROMPT, big, decided, floods, stepped
from tests.wait import until
from verify_service.engine.sessions import PARK_AFTER_US
from verify_service.engine.shares import TenantLimits, TenantShares
from verify_service.server import RunningVerifier, TenantTable, start, tenants_of


def test_a_flood_of_sessions_costs_a_neighbour_its_share_only() -> None:
    """Each row costs as much as the first: one session of Ada's beside 15 of Bob's decides as many tokens as all."""
    rig = big(1.0, TenantShares({}))
    rig.open(0, PROMPT, tenant="ada", max_tokens=ENDLESS)
    floods(rig, 15)
    stepped(rig, 400)
    counts = decided(rig)
    assert counts["bob"] == pytest.approx(counts["ada"], rel=0.1)
    jain = counts.total() ** 2 / (2 * sum(each**2 for each in counts.values()))
    assert jain >= 0.98
    theirs = [len(rig.tokens[handle]) for handle in range(100, 115)]
    assert max(theirs) - min(theirs) <= 3  # they take turns


def test_who_opens_and_abandons_gets_no_tokens_beside_its_rows() -> None:
    """A prompt decides a first token, and Bob opens one text after the other: that counts as well."""
    rig = big(0.2, TenantShares({}))
    for handle in range(4):
        rig.open(handle, PROMPT, tenant="ada", max_tokens=ENDLESS)
    floods(rig, 8)
    opened = 108

    def abandon() -> None:
        nonlocal opened
        rig.open(opened, (opened % 60, 3, 4), link=1, tenant="bob", max_tokens=ENDLESS)
        rig.tick(1, closes=(opened - 8,))
        opened += 1

    stepped(rig, 200, abandon)
    counts = decided(rig)
    assert opened == 308
    assert counts["bob"] == pytest.approx(counts["ada"], rel=0.1)


def test_where_rows_are_free_nobody_is_left_out() -> None:
    rig = big(0.001, TenantShares({}))
    rig.open(0, PROMPT, tenant="ada", max_tokens=ENDLESS)
    floods(rig, 15)
    stepped(rig, 100)
    counts = decided(rig)
    assert counts["bob"] > 14 * counts["ada"] > 0


def test_the_texts_are_those_of_plain_decoding() -> None:
    rig = big(1.0, TenantShares({"bob": TenantLimits(weight=2, tokens=2000)}))
    rig.open(0, PROMPT, tenant="ada", max_tokens=40)
    for handle in range(100, 106):
        rig.open(handle, (handle - 90, 3), link=1, tenant="bob", max_tokens=30)
    rig.run()
    assert rig.tokens[0] == oracle(rig.lm, PROMPT, 40)
    for handle in range(100, 106):
        assert rig.tokens[handle] == oracle(rig.lm, (handle - 90, 3), 30)
    assert len(rig.finished) == 7


def test_who_is_left_out_of_steps_is_not_charged_for_them() -> None:
    rig = big(1.0, TenantShares({}))
    rig.open(0, PROMPT, tenant="ada", max_tokens=ENDLESS)
    floods(rig, 15)
    stepped(rig, 300)
    plain_us = rig.engine.costs.plain(1)
    assert all(held.session.ledger.balance_us < 3 * plain_us for held in rig.engine.roster)


@pytest.mark.parametrize("parents", [(), (BEFORE,) * 16], ids=["chain", "siblings"])
def test_trees_that_are_always_wrong_do_not_slow_a_neighbour_down(parents: tuple[int, ...]) -> None:
    """Bob's draft tokens are always wrong, 16 at a time: the ledgers refuse them."""

    def rate(wrong: bool) -> float:
        rig = big(0.5, TenantShares({}), slots=2)
        rig.open(0, PROMPT, tenant="ada", max_tokens=ENDLESS)
        rig.open(100, PROMPT, link=1, tenant="bob", max_tokens=ENDLESS)
        rig.step()
        number = 0

        def propose() -> None:
            nonlocal number
            held = rig.engine.roster.get(1, 100)
            assert held is not None
            text = list(held.session.text.tokens)
            ((right,),) = ([token] for token in oracle(rig.lm, text, 1))
            number += 1
            others = [token for token in range(3, 20) if token != right][:16]
            rig.propose(100, replace(chain(number, text, others), parents=parents), link=1)

        stepped(rig, 150, propose if wrong else lambda: None)
        assert rig.engine.tally.offers[Offer.STARTED] == (150 if wrong else 0)
        return decided(rig)["ada"] / rig.now

    assert rate(True) >= 0.9 * rate(False)


def test_keys_and_values_beyond_the_limit_are_refused_over_all_links() -> None:
    rig = big(0.1, TenantShares({"bob": TenantLimits(kv_bytes=10 * (len(PROMPT) + 40))}))
    rig.engine.sessions._position_bytes = 5  # the scripted model keeps none
    for handle in (100, 101, 102):
        rig.open(handle, PROMPT, link=handle, tenant="bob")
    rig.open(0, PROMPT, tenant="ada")
    rig.step()
    assert [(refusal.handle, refusal.code) for refusal in rig.refused] == [(102, Code.RESOURCE_EXHAUSTED)]
    assert "bytes of keys and values" in rig.refused[0].message


def test_sessions_beyond_the_limit_are_refused_with_a_time() -> None:
    rig = big(0.1, TenantShares({"bob": TenantLimits(sessions=3)}))
    floods(rig, 5)
    rig.open(0, PROMPT, tenant="ada")
    rig.step()
    assert [refusal.handle for refusal in rig.refused] == [103, 104]
    assert {(refusal.code, refusal.retry_ms) for refusal in rig.refused} == {(Code.RESOURCE_EXHAUSTED, 1000)}
    assert "of at most 3" in rig.refused[0].message
    rig.tick(1, closes=(100,))
    rig.open(105, PROMPT, link=2, tenant="bob")  # another link of the same tenant
    rig.open(106, PROMPT, link=2, tenant="bob")
    rig.step()
    assert [refusal.handle for refusal in rig.refused] == [103, 104, 106]


def test_who_opens_and_abandons_has_what_is_kept_for_it_counted() -> None:
    rig = big(0.1, TenantShares({"bob": TenantLimits(sessions=3)}))
    floods(rig, 3, allowance=Allowance(0, 10))
    stepped(rig, 5)
    rig.engine.sessions.link_lost(1)
    rig.open(200, PROMPT, link=2, tenant="bob")
    rig.step()
    assert [refusal.handle for refusal in rig.refused] == [200]
    rig.now += 60e6  # beyond --detach-grace
    rig.open(201, PROMPT, link=2, tenant="bob")
    rig.step()
    rig.open(202, PROMPT, link=2, tenant="bob")
    stepped(rig, 3)
    assert 202 in rig.tokens


def test_a_full_verifier_makes_room_for_a_tenant_below_its_share() -> None:
    rig = big(0.1, TenantShares({}), slots=4, queue=8)
    floods(rig, 6)
    stepped(rig, 5)
    for handle in (0, 1, 2):
        rig.open(handle, PROMPT, tenant="ada", max_tokens=ENDLESS)
    stepped(rig, 5)
    assert decided(rig)["ada"] == 0  # Bob's sessions have not had their slots for long
    rig.now += PARK_AFTER_US
    stepped(rig, 60)
    served = Counter(held.tenant for held in rig.engine.roster.served)
    assert served == {"ada": 2, "bob": 2}
    assert rig.engine.sessions.counts["session of a tenant above its share gave up its slot"] == 2
    rig.tick(0, closes=(0, 1, 2))
    stepped(rig, 40)
    for handle in range(100, 106):
        text = rig.tokens.get(handle, [])
        assert text == oracle(rig.lm, (handle % 60, 3, 4), len(text))


def test_slots_are_limited_while_others_are_free() -> None:
    rig = big(0.1, TenantShares({"bob": TenantLimits(slots=2)}), queue=8)
    floods(rig, 4)
    rig.open(0, PROMPT, tenant="ada", max_tokens=ENDLESS)
    stepped(rig, 5)
    assert Counter(held.tenant for held in rig.engine.roster.served) == {"ada": 1, "bob": 2}
    rig.tick(1, closes=(100,))
    stepped(rig, 5)
    assert Counter(held.tenant for held in rig.engine.roster.served) == {"ada": 1, "bob": 2}


def test_a_full_queue_is_shared_too() -> None:
    shares = TenantShares({})
    rig = big(0.1, shares, slots=2, queue=4)
    floods(rig, 20)
    for handle in (0, 1, 2, 3):
        rig.open(handle, PROMPT, tenant="ada")
    rig.step()
    refused = Counter("ada" if refusal.handle < 100 else "bob" for refusal in rig.refused)
    assert refused == {"bob": 14, "ada": 2}
    assert shares.refused == {"other": 16}
    rig.now += rig.patience.wait_us
    rig.step()
    assert shares.refused == {"other": 22}  # those that have waited for too long, too
    assert {(refusal.code, refusal.retry_ms) for refusal in rig.refused} == {(Code.RESOURCE_EXHAUSTED, 1000)}


def test_rows_of_a_step_are_limited() -> None:
    rig = big(0.001, TenantShares({"bob": TenantLimits(rows=4)}))
    rig.open(0, PROMPT, tenant="ada", max_tokens=ENDLESS)
    floods(rig, 12)
    stepped(rig, 14)  # prompts
    before = decided(rig)
    stepped(rig, 30)
    after = decided(rig)
    assert after["bob"] - before["bob"] == 4 * (after["ada"] - before["ada"]) > 0


def test_decided_tokens_per_second_are_limited() -> None:
    rig = big(0.001, TenantShares({"bob": TenantLimits(tokens=100)}))
    floods(rig, 4)
    began = rig.now
    while rig.now < began + 10e6:
        stepped(rig, 1)
    assert 1000 <= decided(rig)["bob"] <= 1000 + 100 + 8


def test_prompts_of_a_flood_get_their_share_of_the_time() -> None:
    """Bob opens one long prompt after the other; Ada decodes. Without shares nearly each step has a chunk of his."""

    def speed(shares: TenantShares | None) -> float:
        rig = big(0.05, shares)
        rig.open(0, PROMPT, tenant="ada", max_tokens=ENDLESS)
        number = 100

        def flood() -> None:
            nonlocal number
            if not any(held.tenant == "bob" for held in rig.engine.roster):
                prompt = [number % 50 + 3, *range(3, 60)] * 20
                rig.open(number, prompt, link=1, tenant="bob", max_tokens=1)
                number += 1

        began = rig.now
        while rig.now < began + 2e6:
            flood()
            stepped(rig, 1)
            rig.tick(1, closes=tuple(range(100, number)) if number - 1 in rig.finished else ())
        assert number > 102
        return len(rig.tokens[0]) / (rig.now - began)

    alone_us = 1000.0
    assert speed(TenantShares({})) >= 0.9 * 0.5 / alone_us
    assert speed(None) < 0.25 / alone_us


# Who a link belongs to


@asynccontextmanager
async def sharing(
    shares: TenantShares, tenants: Origin[TenantTable] | None = None, **options: Any
) -> AsyncIterator[RunningVerifier]:
    served = ModelServiceOptions("scripted:7", slots=4, context=512, **options)
    running = await start(served, shares=shares, tenants=tenants)
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def linked(running: RunningVerifier, tls: ClientTls | None, token: str = "") -> AsyncIterator[Peer]:
    async with open_channel(running.address, tls, token) as channel:
        call = verify_pb2_grpc.VerifyServiceStub(channel).Connect()
        try:
            yield Peer(call, running.info)
        finally:
            call.cancel()


async def opened_and_refused(peers: Sequence[Peer]) -> list[tuple[list[int], list[int]]]:
    """Of each link what becomes of two sessions that it opens, one after the other's link has done so, too."""
    for number, peer in enumerate(peers):
        for handle in (1, 2):
            await peer.open(handle, PROMPT, session_id=f"{number}-{handle}", progress=verify_pb2.Progress(credit=4))
        while len(peer.opened) + len(peer.refused) < 2:
            await peer.receive()
    return [(peer.opened, [each.handle for each in peer.refused]) for peer in peers]


async def test_a_token_names_the_tenant_of_all_its_links() -> None:
    ada, bob = "the-token-of-ada", "the-token-of-bob"
    shares = TenantShares({"ada": TenantLimits(sessions=3)})
    async with (
        sharing(shares, keys=Keys({ada: "ada", bob: "bob"})) as running,
        linked(running, None, ada) as first,
        linked(running, None, ada) as second,
        linked(running, None, bob) as third,
    ):
        told = await opened_and_refused([first, second, third])
        assert told == [([1, 2], []), ([1], [2]), ([1, 2], [])]
        (refused,) = second.refused
        assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert refused.retry_after_ms == 1000
        assert refused.message == "this tenant has 3 sessions open, of at most 3"
    assert shares.refused == {"ada": 1}


async def test_a_token_names_the_tenant_of_a_text_to_score() -> None:
    ada, bob = "the-token-of-ada", "the-token-of-bob"
    shares = TenantShares({"ada": TenantLimits(sessions=1)})
    request = verify_pb2.ScoreRequest(tokens=PROMPT, from_position=1)
    async with sharing(shares, keys=Keys({ada: "ada", bob: "bob"})) as running, linked(running, None, ada) as first:
        await first.open(1, PROMPT, session_id="one", progress=verify_pb2.Progress(credit=4))
        while not first.opened:
            await first.receive()
        async with open_channel(running.address, None, bob) as channel:
            await verify_pb2_grpc.VerifyServiceStub(channel).Score(request)
        async with open_channel(running.address, None, ada) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await verify_pb2_grpc.VerifyServiceStub(channel).Score(request)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_after(refused.value) == 1.0
    assert shares.refused == {"ada": 1}


async def test_nobody_reaches_another_tenants_session_or_cache() -> None:
    """Bob knows the id and the scope of Ada's session, and names a newer fence."""
    ada, bob = "the-token-of-ada", "the-token-of-bob"
    prompt = [*range(3, 40)]
    async with (
        sharing(TenantShares({}), keys=Keys({ada: "ada", bob: "bob"})) as running,
        linked(running, None, ada) as hers,
        linked(running, None, bob) as his,
    ):
        same: dict[str, Any] = {"session_id": "the-same", "cache_scope": b"scope"}
        await hers.open(1, prompt, **same, progress=verify_pb2.Progress(credit=len(prompt) + 4))
        while len(hers.tokens.get(1, ())) < 4:
            await hers.receive()
        await his.open(1, prompt, **same, fence=9)
        await his.send(forgotten=["the-same"])
        opened = (await his.receive()).opened
        assert [(each.resumed, each.cached) for each in opened] == [(False, 0)]
        await his.until_finished(1)
        await hers.send(progress=[verify_pb2.Progress(handle=1, credit=1 << 20)])
        await hers.until_finished(1)
        assert hers.tokens[1] == his.tokens[1]
        assert not hers.refused


async def test_a_certificate_names_the_tenant() -> None:
    ours = Authority()
    shares = TenantShares({"berlin": TenantLimits(sessions=1)}, TenantLimits(sessions=2))
    tls = [ours.client(ours.sign(name=name)) for name in ("berlin", "rome", "oslo")]
    async with (
        sharing(shares, tls=ours.server(client_ca=ours)) as running,
        linked(running, tls[0]) as berlin,
        linked(running, tls[1]) as rome,
        linked(running, tls[2]) as oslo,
    ):
        assert await opened_and_refused([berlin, rome, oslo]) == [([1], [2]), ([1, 2], []), ([1, 2], [])]
    assert shares.refused == {"berlin": 1}


# The file


def written(folder: Path, text: str) -> str:
    file = folder / "tenants.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_says_who_may_have_what(tmp_path: Path) -> None:
    berlin = "{weight: 2, sessions: 200, slots: 16, kv_memory: 8G, tokens: 800, rows: 32, prefill: 4000}"
    read = tenants_of(written(tmp_path, f'berlin: {berlin}\nrome:\n"*": {{sessions: 20}}\n'))
    assert read is not None
    shares = TenantShares(*read.latest)
    assert shares.of("berlin") == TenantLimits(2.0, 200, 16, 8 << 30, 800, 32, 4000)
    assert shares.of("rome") == TenantLimits()
    assert shares.of("whoever") == TenantLimits(sessions=20)
    assert [shares.label(name) for name in ("berlin", "whoever")] == ["berlin", "other"]
    assert tenants_of(None) is None


async def test_limits_are_taken_up_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "LOOK_EVERY_S", 0.05)
    ada = "the-token-of-ada"
    tenants = tenants_of(written(tmp_path, "ada: {sessions: 1}"))
    assert tenants is not None
    shares = TenantShares(*tenants.latest)
    async with sharing(shares, tenants, keys=Keys({ada: "ada"})) as running, linked(running, None, ada) as first:
        few = verify_pb2.Progress(credit=4)
        for handle in (1, 2):
            await first.open(handle, PROMPT, session_id=f"{handle}", progress=few)
        while len(first.opened) + len(first.refused) < 2:
            await first.receive()
        assert (first.opened, [each.handle for each in first.refused]) == ([1], [2])
        written(tmp_path, "ada: {sessions: 2, tokens: 1000}")
        await until(lambda: shares.of("ada").sessions == 2)
        await first.open(3, PROMPT, session_id="3", progress=few)
        while len(first.opened) < 2:
            await first.receive()
        assert first.opened == [1, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- berlin", "must map names of tenants to their limits"),
        ("1: {}", "must map names of tenants to their limits"),
        ("berlin: 4", "berlin: must be limits by name, not 4"),
        ("berlin: {speed: 4}", "berlin: 'speed' is none of weight, kv_memory, sessions, slots, tokens, rows, prefill"),
        ("berlin: {slots: many}", "berlin: slots must be a number, not 'many'"),
        ("berlin: {slots: true}", "berlin: slots must be a number, not True"),
        ("berlin: {slots: 0}", "berlin: slots must be at least 1, not 0"),
        ("berlin: {weight: 0}", "berlin: weight must be from 0.001 to 1000, not 0"),
        ("berlin: {kv_memory: lots}", "berlin: must be a size such as 512M or 1.5G, not 'lots'"),
        ("berlin: {", "is no YAML: "),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter) as told:
        tenants_of(written(tmp_path, text))
    assert str(told.value).startswith("--tenants: ")
    assert message in str(told.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="none cannot be read: No such file or directory"):
        tenants_of(str(tmp_path / "none"))
