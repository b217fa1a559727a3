"""Tenants: whose a session is, what each may have, and that nobody can tell another's session from none."""

from __future__ import annotations

from array import array
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import grpc
import pytest

import orchestrator.server
from orchestrator.options import OrchestratorOptions
from orchestrator.pool import StartError
from orchestrator.store import SessionRecord
from orchestrator.store.encoding import encode_record, pack_logprobs
from orchestrator.tenants import (
    ANONYMOUS,
    MOST_TENANT_REFERENCES,
    Access,
    Allowances,
    check_owner,
    new_session_id,
    record_bytes,
    rules_of,
)
from specwire.client import AsyncClient, Started
from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.core.law.sampling import GUESSING_RULES, Rule, Sampling
from specwire.core.messages import TokenLogprobs
from specwire.core.text import Stopping
from specwire.rpc.channel import open_channel
from specwire.rpc.errors import StatusError
from specwire.rpc.keys import Keys
from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, TARGET, Services, plain, stack
from tests.wait import asked, limits, raised

ADA, BOB = "the-token-of-ada", "the-token-of-bob"
KEYS = Keys({ADA: "ada", BOB: "bob"})
LIMIT_S = 120.0


# Ids


def test_an_id_is_its_tenants_alone() -> None:
    ids = {new_session_id(tenant) for tenant in ("ada", "ada", "bob", ANONYMOUS)}
    assert len({each[:32] for each in ids}) == 4
    known = new_session_id("ada")
    check_owner(known, "ada")
    for session_id, tenant in ((known, "bob"), (known, ANONYMOUS), (known[:-1], "ada"), ("", "ada"), ("é" * 44, "ada")):
        with pytest.raises(StatusError) as refused:
            check_owner(session_id, tenant)
        assert refused.value.code is grpc.StatusCode.NOT_FOUND
        assert refused.value.message == f"session_id: no session {session_id!r}"


# Allowances


PLAIN = Sampling()


def record(
    session_id: str, tenant: str = "ada", prompt: int = 10, most: int = 40, sampling: Sampling = PLAIN
) -> SessionRecord:
    return SessionRecord(session_id, tuple(range(prompt)), sampling, Stopping(most), tenant)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refusal(allowances: Allowances, asked: SessionRecord) -> StatusError:
    with pytest.raises(StatusError) as refused:
        allowances.admit(asked)
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return refused.value


def test_references_of_running_sessions_are_counted_by_tenant() -> None:
    allowances = Allowances(Access(), Clock())
    many = (array("I", [5]) * (MOST_TENANT_REFERENCES // 2),)
    running = [replace(record(str(n)), references=many) for n in range(4)]
    allowances.admit(running[0])
    allowances.admit(running[1])
    message = f"have {MOST_TENANT_REFERENCES} tokens of them, and {MOST_TENANT_REFERENCES // 2} more exceed"
    assert message in refusal(allowances, running[2]).message
    allowances.admit(record("without"))
    allowances.admit(replace(record("theirs", tenant="bob"), references=many))
    allowances.settle(running[0], 0)
    allowances.settle(running[0], 0)
    allowances.admit(running[2])
    allowances.leave(running[1])
    allowances.admit(running[3])
    refusal(allowances, replace(record("5"), references=(array("I", [5]),)))


def test_a_session_that_is_taken_over_counts_and_is_not_charged() -> None:
    allowances = Allowances(Access(sessions=2, tokens_per_minute=50), Clock())
    allowances.adopt(record("from elsewhere"))
    allowances.admit(record("1"))
    allowances.adopt(record("1"))
    assert refusal(allowances, record("2")).message == "this tenant has 2 sessions running, of at most 2"
    allowances.settle(record("from elsewhere"), 10)
    assert refusal(allowances, record("2")).message == "this tenant's 50 tokens a minute are used up"


def test_a_session_that_is_taken_away_frees_its_place_and_no_tokens() -> None:
    allowances = Allowances(Access(sessions=1, tokens_per_minute=60), Clock())
    allowances.admit(record("1"))
    allowances.leave(record("1"))
    allowances.settle(record("1"), 10)
    assert refusal(allowances, record("2")).message == "this tenant's 60 tokens a minute are used up"
    allowances.admit(record("3", prompt=1, most=1))


def test_sessions_that_come_from_elsewhere_are_bounded() -> None:
    """Else a tenant could begin any number at one orchestrator, and move them to another."""
    allowances = Allowances(Access(sessions=2), Clock())
    for n in range(4):
        assert allowances.may_adopt(record(str(n)))
        allowances.adopt(record(str(n)))
    assert not allowances.may_adopt(record("5"))
    assert allowances.may_adopt(record("6", tenant="bob"))
    assert Allowances(Access(), Clock()).may_adopt(record("7"))


def test_tokens_come_back_with_time_and_with_what_was_not_taken() -> None:
    clock = Clock()
    allowances = Allowances(Access(tokens_per_minute=120), clock)
    allowances.admit(record("1"))
    allowances.admit(record("2"))
    assert refusal(allowances, record("3")).retry_after == pytest.approx(15.0)  # 30 tokens are missing, 2 come a second
    allowances.admit(record("4", tenant="bob"))
    allowances.settle(record("1"), 30)
    assert refusal(allowances, record("3")).retry_after == pytest.approx(5.0)
    clock.now = 5.0
    allowances.admit(record("3"))
    clock.now = 10_000.0
    for n in (5, 6):
        allowances.admit(record(str(n)))
    assert refusal(allowances, record("7")).message == "this tenant's 120 tokens a minute are used up"


def noted(session_id: str, size: int, tenant: str = "ada") -> SessionRecord:
    return replace(record(session_id, tenant), note="x" * size)


def test_what_the_log_keeps_is_counted_by_tenant_until_it_is_kept_no_longer() -> None:
    """Notes of ended sessions took no tokens, and filled the log for everybody."""
    clock = Clock()
    allowances = Allowances(Access(log_bytes=11_000), clock, retention=60.0)
    for n in range(2):
        allowances.admit(noted(str(n), 3000))
        clock.now = float(n)
        allowances.settle(noted(str(n), 3000), 20)
        allowances.settle(noted(str(n), 3000), 20)
    beside = record_bytes(noted("2", 3000))
    assert 4000 < beside < 5000
    error = refusal(allowances, noted("2", 3000))
    kept = 2 * (beside + 8 * 20)
    assert f"the log keeps {kept} bytes of this tenant's sessions, and {beside + 8 * 50} more" in error.message
    assert error.retry_after == pytest.approx(59.0)
    allowances.admit(noted("3", 3000, "bob"))
    clock.now = 60.0
    allowances.admit(noted("2", 3000))
    refusal(allowances, noted("4", 3000))
    allowances.deleted("1")
    allowances.admit(noted("4", 3000))
    allowances.settle(noted("4", 3000), 0, logged=False)
    allowances.admit(noted("5", 3000))


def test_what_came_from_elsewhere_and_what_is_driven_elsewhere_is_kept_too() -> None:
    clock = Clock()
    allowances = Allowances(Access(log_bytes=10_000), clock, retention=60.0)
    allowances.adopt(noted("1", 8000))
    allowances.leave(noted("1", 8000))
    refusal(allowances, noted("2", 3000))
    clock.now = 60.0
    allowances.admit(noted("2", 3000))


def test_few_tokens_a_minute_bound_what_is_kept() -> None:
    assert Access().most_kept(3600.0) is None
    assert Access(tokens_per_minute=1000).most_kept(3600.0) == 64 << 20
    assert Access(tokens_per_minute=10**6).most_kept(3600.0) == 64 * 61 * 10**6
    assert Access(tokens_per_minute=1000, log_bytes=5).most_kept(3600.0) == 5


def test_work_without_a_session_is_charged() -> None:
    clock = Clock()
    allowances = Allowances(Access(tokens_per_minute=60), clock)
    allowances.charge("ada", 1000)  # no more than there can be
    with pytest.raises(StatusError, match="60 tokens a minute are used up"):
        allowances.charge("ada", 1)
    allowances.charge("bob", 10)
    clock.now = 1.0
    allowances.charge("ada", 1)
    Allowances(Access(), clock).charge("ada", 10**9)


def test_what_can_never_be_admitted_is_invalid() -> None:
    allowances = Allowances(Access(tokens_per_minute=49), Clock())
    with pytest.raises(InvalidParameter) as refused:
        allowances.admit(record("1"))
    assert str(refused.value) == "max_tokens: prompt and output may come to 50 tokens, and a tenant has 49 a minute"


def test_limits_are_positive() -> None:
    with pytest.raises(InvalidParameter, match=r"--tenant-sessions: must be at least 1, not 0"):
        Access(sessions=0)
    with pytest.raises(InvalidParameter, match=r"--tenant-log: must be at least 1, not 0"):
        Access(log_bytes=0)
    with pytest.raises(InvalidParameter, match=r"--tenant-tokens: must be at least 1, not -1"):
        Access(tokens_per_minute=-1)


# Through the wire


async def statuses(address: str, token: str, session_id: str) -> list[tuple[grpc.StatusCode, str]]:
    """What Watch, GetSession and Cancel end with, without the library's retries; the id is left out of the message."""
    async with open_channel(address, token=token) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        calls = (
            stub.Watch(generation_pb2.WatchRequest(session_id=session_id, take_over=True), timeout=LIMIT_S).read(),
            stub.GetSession(generation_pb2.GetSessionRequest(session_id=session_id), timeout=LIMIT_S),
            stub.Cancel(generation_pb2.CancelRequest(session_id=session_id), timeout=LIMIT_S),
        )
        found = []
        for call in calls:
            error = await raised(grpc.aio.AioRpcError, call)
            found.append((error.code(), (error.details() or "").replace(session_id, "ID")))
        return found


async def test_another_tenants_session_is_one_that_never_was() -> None:
    async with (
        stack(SLOW_TARGET, access=Access(KEYS)) as running,
        AsyncClient(running.client.address, token=ADA) as ada,
    ):
        events = ada.generate(PROMPT, max_tokens=60, ignore_eos=True, request_id="mine", timeout=LIMIT_S)
        started = await anext(events)
        assert isinstance(started, Started)
        seen = await statuses(running.client.address, BOB, started.session_id)
        assert seen == await statuses(running.client.address, BOB, new_session_id("ada"))
        assert seen == await statuses(running.client.address, BOB, new_session_id("bob"))
        assert seen == [(grpc.StatusCode.NOT_FOUND, "session_id: no session 'ID'")] * 3
        async with AsyncClient(running.client.address, token=BOB) as bob:
            other = await bob.complete((9, 9), max_tokens=5, ignore_eos=True, request_id="mine", timeout=LIMIT_S)
        assert list(other.tokens) == plain(TARGET, (9, 9), 5)
        tokens = [token async for event in events if hasattr(event, "tokens") for token in event.tokens]
    assert tokens == plain(TARGET, PROMPT, 60)


async def test_an_orchestrator_shows_its_peers_their_token() -> None:
    keys = Keys({BOB: "orchestrator"})
    async with AsyncExitStack() as parts:
        services = Services(parts)
        verifier = await services.verifier(TARGET, keys=keys)
        running = await services.orchestrator([verifier.address], peer_token=BOB, start_timeout=LIMIT_S)
        client = await services.client(running)
        done = await client.complete(PROMPT, max_tokens=5, ignore_eos=True, timeout=LIMIT_S)
        waits = limits(0.5)

        async def why() -> str:
            refused = await raised(
                StartError,
                orchestrator.server.start(OrchestratorOptions((verifier.address,), start_timeout=next(waits))),
            )
            return str(refused)

        told = await asked(why, lambda answer: "does not answer" not in answer)
        assert "UNAUTHENTICATED: authorization: a token is needed" in told
    assert list(done.tokens) == plain(TARGET, PROMPT, 5)


# Options


def test_rules_by_name() -> None:
    assert rules_of(None) is None
    assert rules_of("greedy, coupled") == GUESSING_RULES
    for given in ("", "greedy,", "greedy,guess", "threshold(0.1)"):
        with pytest.raises(InvalidParameter, match="^--rules: must be names of greedy, coupled, rejection, block,"):
            rules_of(given)
    assert OrchestratorOptions(("v:1",)).rules == frozenset(Rule)
    assert OrchestratorOptions(("v:1",), accept_drafters=True).rules == GUESSING_RULES


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(constraint=Constraint(ConstraintKind.CHOICES, ("x" * 64,) * 1000)),
        Sampling(logit_bias=tuple((4_000_000_000 + token, -99.5) for token in range(1024))),
        Sampling(logprobs=20),
    ],
)
def test_all_that_a_session_has_in_the_log_is_counted(sampling: Sampling) -> None:
    """Constraints of 64 KiB were counted with a hundredth of what they take."""
    most = 1 << 20
    allowances, admitted = Allowances(Access(log_bytes=most), Clock(), retention=60.0), 0
    with suppress(StatusError):
        for number in range(1000):
            allowances.admit(record(str(number), sampling=sampling))
            admitted += 1
    reported = 0 if sampling.logprobs is None else 40 * len(pack_logprobs(TokenLogprobs(-1.0, ((7, -1.0),) * 20)))
    takes = len(encode_record(record("0", sampling=sampling))) + reported
    assert most / 2 < admitted * takes <= most
