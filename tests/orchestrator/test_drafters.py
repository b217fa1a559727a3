"""Several drafters of one session: what one does, suffers or is believed of is its own affair."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from orchestrator.peers.peer import known_by, share_host
from orchestrator.session import drafters as module
from orchestrator.session.drafters import Drafters
from orchestrator.store import SessionRecord
from orchestrator.store.sqlite import SqliteStore
from specwire.client import Chunk
from specwire.core.law.sampling import Sampling, with_rule
from specwire.core.text import Stopping, hash_of
from specwire.rpc.convert import MOST_KNOWN_BY
from specwire.rpc.errors import code_number
from specwire.telemetry.tally import DraftCounts, DrafterCounts, SessionStats
from specwire.v1 import common_pb2, draft_pb2, verify_pb2
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, TARGET, plain, stack
from tests.orchestrator.test_driver import Scene, SilentLink
from tests.wait import until

FULL = code_number(grpc.StatusCode.RESOURCE_EXHAUSTED)


class DraftedScene(Scene):
    """It runs, and has two drafters."""

    def __init__(self, store: SqliteStore, fence: int, record: SessionRecord) -> None:
        super().__init__(store, fence, record, drafters_per_session=2, buffer=1000)
        session = self.driver.session
        self.driver.verifying.on_opened(verify_pb2.Opened(attach=session.attach, position=len(session.text)))
        self.chains = 0

    @property
    def drafters(self) -> Drafters:
        return self.driver.drafters

    def link(self, number: int) -> SilentLink:
        link = self.peers[number].link
        assert isinstance(link, SilentLink)
        return link

    def relayed(self) -> list[common_pb2.Proposal]:
        link = self.verifier.link
        assert isinstance(link, SilentLink)
        sent = [part for part in link.sent if isinstance(part, verify_pb2.ConnectVerifyRequest)]
        return [proposal for part in sent for proposal in part.proposals]

    def propose(self, number: int, *tokens: int) -> None:
        """A new chain behind the text, drafted at 1 ms a token."""
        (handle,) = self.peers[number].subjects
        text = self.driver.session.text.tokens
        self.chains += 1
        proposal = common_pb2.Proposal(
            handle=handle,
            chain=self.chains,
            base=len(text),
            tokens=tokens,
            prefix_hash=hash_of(text),
            draft_us=1000 * len(tokens),
        )
        self.peers[number].on_message(draft_pb2.ConnectDraftResponse(proposals=[proposal]))

    def told(self) -> list[list[verify_pb2.Drafter]]:
        """What its verifier was told of its drafters, one message after the other."""
        link = self.verifier.link
        assert isinstance(link, SilentLink)
        sent = [part for part in link.sent if isinstance(part, verify_pb2.ConnectVerifyRequest)]
        opened = [list(each.drafters) for part in sent for each in part.opens]
        return opened + [list(each.drafters) for part in sent for each in part.drafters]

    def judge(self, source: int, tested: int, *tokens: int, paces: Sequence[verify_pb2.SourcePace] = ()) -> None:
        """A verdict over a window of `source`, all of whose tokens but the last were accepted."""
        session = self.driver.session
        outcomes = [common_pb2.OUTCOME_ACCEPTED] * (len(tokens) - 1) + [common_pb2.OUTCOME_RECOVERED]
        verdict = verify_pb2.Verdict(
            attach=session.attach,
            position=len(session.text),
            tokens=tokens,
            outcomes=outcomes,
            tested=tested,
            kind=common_pb2.SOURCE_KIND_DRAFTER,
            source=source,
            paces=paces,
        )
        self.driver.verifying.on_verdict(verdict, verify_pb2.StepTimings(), 0)


@asynccontextmanager
async def scene(sampling: Sampling = Sampling()) -> AsyncIterator[DraftedScene]:  # noqa: B008 # frozen
    record = SessionRecord("s", (1, 2), sampling, Stopping(1000))
    store = SqliteStore()
    played = DraftedScene(store, await store.create(record, 60.0), record)
    try:
        yield played
    finally:
        await played.driver.close()


def sources(played: DraftedScene) -> list[int]:
    return list(played.driver.session.drafters)


WEIGHING = with_rule(Sampling(temperature=0.8, seed=1), "rejection")


async def test_a_proposal_is_relayed_as_it_came_but_for_whose_it_is_and_what_nobody_here_knows() -> None:
    """What its rule needs passes unread."""
    async with scene(WEIGHING) as played:
        (handle,) = played.peers[0].subjects
        weights = [common_pb2.DraftWeights(ids=[7, 8], weights=[3, 1])]
        sent = common_pb2.Proposal(
            handle=handle, chain=1, base=2, tokens=[7], prefix_hash=0, draft_us=9, weights=weights, epoch=5, source=77
        )
        unknown = b"\xf8\x07\x01"  # field 127, a varint
        received = draft_pb2.ConnectDraftResponse(
            proposals=[common_pb2.Proposal.FromString(sent.SerializeToString() + unknown)]
        )
        played.peers[0].on_message(received)
        (relayed,) = played.relayed()
        (at_verifier,) = played.verifier.subjects
        expected = common_pb2.Proposal(
            handle=at_verifier,
            source=1,
            chain=1,
            base=2,
            tokens=[7],
            prefix_hash=0,
            draft_us=9,
            weights=weights,
            epoch=5,
        )
        assert relayed.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


async def relayed(sampling: Sampling, **fields: Any) -> common_pb2.Proposal:
    """What the verifier gets of a proposal of the first drafter."""
    async with scene(sampling) as played:
        (handle,) = played.peers[0].subjects
        sent = common_pb2.Proposal(handle=handle, chain=1, base=2, **fields)
        played.peers[0].on_message(draft_pb2.ConnectDraftResponse(proposals=[sent]))
        (found,) = played.relayed()
        return found


@pytest.mark.parametrize("parents", [[], [1], [2, 1], [1, 2], [0, (1 << 32) - 1], [1] * 3])
async def test_a_tree_is_relayed_with_its_parents_possible_or_not(parents: list[int]) -> None:
    found = await relayed(Sampling(), tokens=[7, 8], prefix_hash=0, parents=parents)
    assert list(found.parents) == parents


@pytest.mark.parametrize(("sampling", "weighed"), [(Sampling(), 0), (WEIGHING, 2)], ids=["greedy", "rejection"])
async def test_of_a_flood_no_more_is_relayed_than_makes_the_piece_wrong(sampling: Sampling, weighed: int) -> None:
    """Nor are weights read: rules that look at no draft token need none, whether the piece is a chain's or a tree's."""
    weights = [common_pb2.DraftWeights(ids=[7, 8], weights=[3, 1])] * 5000
    found = await relayed(sampling, tokens=[7], parents=[1] * 5000, weights=weights)
    assert (list(found.parents), len(found.weights)) == ([1, 1], weighed)


async def test_the_loss_of_one_leaves_the_other_and_it_comes_back_as_another_source() -> None:
    async with scene() as played:
        played.peers[0].on_down()
        assert sources(played) == [2]
        played.propose(1, 4)
        assert [proposal.source for proposal in played.relayed()] == [2]
        played.place(played.driver)
        assert sources(played) == [2, 3]
        assert [each.lost for each in played.driver.view.stats.drafters] == [True, False, False]


async def test_one_that_refuses_is_asked_again_while_the_other_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY", 0.05)
    async with scene() as played:
        (handle,) = played.peers[0].subjects
        refused = common_pb2.Refused(handle=handle, code=FULL, message="full")
        played.peers[0].on_message(draft_pb2.ConnectDraftResponse(refused=[refused]))
        assert sources(played) == [2]
        assert played.driver.drafters.missing == 0, "not at once"
        await until(lambda: sources(played) == [2, 3])
        assert list(played.drafters.refusals.values()) == [1]


async def test_the_verifier_is_told_of_each_and_again_when_one_is_lost() -> None:
    async with scene() as played:
        assert [[each.source for each in told] for told in played.told()] == [[], [1], [1, 2]]
        assert {(each.plan, each.shares_cores) for told in played.told() for each in told} == {("auto", False)}
        played.peers[0].on_down()
        assert [each.source for each in played.told()[-1]] == [2]


@pytest.mark.parametrize(
    ("planned", "proposed", "told"),
    [
        ("lockstep: fixed", 0, "lockstep: fixed, nothing proposed yet"),
        ("stream: gain 2.00", 3, "stream: gain 2.00"),
        ("off: no gain expected", 0, "off: no gain expected"),
        ("", 0, ""),
    ],
)
def test_that_nothing_is_proposed_is_told_with_the_plan(planned: str, proposed: int, told: str) -> None:
    """As if all were well it said "lockstep: fixed"."""
    assert DrafterCounts(1, "m", DraftCounts(proposed), planned).plan == told


async def test_a_pace_comes_with_the_verdict_and_goes_on_with_its_tokens() -> None:
    async with scene() as played:
        played.propose(0, 3, 3, 3, 3)
        off = verify_pb2.SourcePace(source=2, pace=draft_pb2.Pace(chunk=1, run_ahead=0), reason="off: no gain expected")
        on = verify_pb2.SourcePace(source=1, pace=draft_pb2.Pace(chunk=4, run_ahead=9), reason="stream: gain 2.00")
        unknown = verify_pb2.SourcePace(source=7, pace=draft_pb2.Pace(chunk=1, run_ahead=1))
        played.judge(1, 4, 3, 3, 3, 3, 1, paces=[off, on, unknown])
        good, poor = played.driver.view.stats.drafters
        assert good.drafts == DraftCounts(4, 4, 4)
        assert (good.plan, poor.plan) == ("stream: gain 2.00", "off: no gain expected")
        assert played.driver.view.stats.plan == f"{good.plan}; {poor.plan}"
        for number, pace in ((0, on.pace), (1, off.pace)):
            (advance,) = [each for part in played.link(number).sent for each in part.advances]  # type: ignore[attr-defined]  # a link that records
            assert (list(advance.tokens), advance.pace) == ([3, 3, 3, 3, 1], pace)
        played.judge(0, 0, 5)
        assert len([each for part in played.link(1).sent for each in part.advances]) == 1, "it is paused"  # type: ignore[attr-defined]  # a link that records


@pytest.mark.parametrize("pace", [draft_pb2.Pace(), draft_pb2.Pace(chunk=1, run_ahead=1 << 20)])
async def test_a_pace_that_nobody_could_follow_ends_the_session(pace: draft_pb2.Pace) -> None:
    async with scene() as played:
        played.judge(1, 0, 3, paces=[verify_pb2.SourcePace(source=1, pace=pace)])
        await played.driver.view.ended(5.0)
        failure = played.driver.view.failure
        assert failure is not None
        assert "pace." in failure.message


async def test_a_void_verdict_counts_for_nobody() -> None:
    async with scene() as played:
        played.propose(0, 3, 3)
        verdict = verify_pb2.Verdict(attach=9, position=2, tokens=[3], outcomes=[common_pb2.OUTCOME_ACCEPTED], source=1)
        verdict.tested = 1
        played.driver.verifying.on_verdict(verdict, verify_pb2.StepTimings(), 0)
        assert played.driver.view.stats.drafters[0].drafts == played.driver.view.stats.drafted == DraftCounts()


# Over real connections


async def test_a_session_gets_as_many_as_are_allowed_and_another_when_one_stops() -> None:
    async with stack(SLOW_TARGET, DRAFT, DRAFT, DRAFT, drafters_per_session=2) as running:
        known = running.orchestrator.orchestrator
        tokens: list[int] = []
        async for event in running.client.generate(PROMPT, max_tokens=120, ignore_eos=True):
            if not isinstance(event, Chunk):
                continue
            tokens += event.tokens
            (driver,) = known.sessions.values()
            assert len(driver.drafters) <= 2
            if len(driver.view.stats.drafters) == 2 and len(tokens) >= 30:
                serving = next(peer.link.address for peer in known.pool.drafters if driver.drafters.has(peer))
                await next(drafter for drafter in running.drafters if drafter.address == serving).stop(0.0)
                await until(partial(_have, driver.view.stats, 3))
        assert tokens == plain(TARGET, PROMPT, 120)
        (ended,) = known.sessions.values()
        assert [drafter.source for drafter in ended.view.stats.drafters] == [1, 2, 3]


def _have(stats: SessionStats, drafters: int) -> bool:
    return len(stats.drafters) == drafters


# What is kept, and what is asked for


def info(name: str, host: str = "", device: str = "cpu") -> common_pb2.GetModelInfoResponse:
    return common_pb2.GetModelInfoResponse(weights_fingerprint=name, host_id=host, device=device)


def record(tenant: str = "", temperature: float = 0.0) -> SessionRecord:
    return SessionRecord("s", (1, 2), Sampling(temperature), Stopping(1000), tenant)


def test_a_drafter_is_known_by_its_weights_its_host_and_the_rule() -> None:
    names = {
        known_by(record(), info("a")),
        known_by(record(temperature=1.0), info("a")),
        known_by(record(), info("b")),
        known_by(record(), info("a", host="h")),
    }
    assert len(names) == 4
    assert known_by(record(tenant="t"), info("a")) in names, "tenants are told apart by their scopes"
    assert len(known_by(record(), info("a" * 500, host="h" * 500))) <= MOST_KNOWN_BY


def test_who_has_no_core_in_common_with_the_verifier_does_not_share_its_host() -> None:
    verifier, drafter = info("v", host="h"), info("d", host="h")
    assert share_host(verifier, drafter), "an older service does not tell its cores"
    verifier.cores[:], drafter.cores[:] = [0, 1], [1, 2]
    assert share_host(verifier, drafter)
    drafter.cores[:] = [2]
    assert not share_host(verifier, drafter)


def test_who_shares_a_host_is_asked_for_each_drafter() -> None:
    verifier = info("t", host="h")
    assert share_host(verifier, info("a", host="h"))
    assert not share_host(verifier, info("a", host="h", device="cuda:0"))
    assert not share_host(verifier, info("a", host="other"))
    assert not share_host(info("t"), info("a"))
