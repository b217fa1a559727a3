"""Processes that are asked to stop: what runs ends first or goes on elsewhere, and nothing of them is left."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import draft_service.server
import orchestrator.server
import verify_service.server
from bench.harness.services import ANY_PORT
from deploy.cli.services import edge
from orchestrator.options import OrchestratorOptions
from specwire.client import AsyncClient, Client, SpecwireError
from specwire.redis import MEMORY
from specwire.registry.options import NOWHERE, RegistryOptions
from specwire.rpc.server_options import ModelServiceOptions
from tests.faults.http_streams import HttpStream
from tests.faults.parts import (
    Parts,
    ServiceProcess,
    check_keys_expire,
    check_ports_are_free,
    check_ports_are_taken,
    parts,
)
from tests.faults.stack import DRAFT, PLAIN, TARGET
from tests.faults.streams import LIMIT_S, PROMPT, Stream, plain
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_address
from tests.wait import eventually

# Some seconds: it still runs when a busy test has asked who stops, and is asked to stop again.
LENGTH = 400
PATIENT = ("--grace", "60")
States = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def log() -> Iterator[RedisServer]:
    """Give a real Redis."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def owned() -> Iterator[Parts]:
    """Give the owner of a test's processes."""
    with parts() as owner:
        yield owner
    assert owner.living() == []


def orchestrate(owned: Parts, log: RedisServer, *peers: str) -> ServiceProcess:
    service = owned.start("orchestrate", *peers, "--redis-url", log.url, "--http", ANY_PORT, *PATIENT)
    service.ready()
    return service


def metrics_at() -> tuple[str, str]:
    """The option that has a service tell its figures, and where."""
    return "--metrics", free_address()


def until_not_serving(address: str) -> None:
    asked = health_pb2.HealthCheckRequest()
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert eventually(lambda: stub.Check(asked, timeout=LIMIT_S).status == States.NOT_SERVING)


def refused_at(address: str) -> SpecwireError:
    """What a new session is told."""
    with Client(address, patience=0.0) as client, pytest.raises(SpecwireError) as refused:
        client.complete(PROMPT, max_tokens=5, timeout=LIMIT_S)
    return refused.value


def test_an_orchestrator_lets_its_sessions_end_and_takes_no_others(owned: Parts, log: RedisServer) -> None:
    verifier, metrics = owned.start("verify", TARGET), metrics_at()
    serving = orchestrate(owned, log, "--verifier", verifier.ready(), *metrics)
    ports = (serving.address, serving.http, metrics[1])
    check_ports_are_taken(*ports)
    with Stream(serving.address, max_tokens=LENGTH) as stream, HttpStream(serving.http, max_tokens=LENGTH) as other:
        stream.until(5)
        other.until(5)
        serving.send(signal.SIGTERM)
        until_not_serving(serving.address)
        told = refused_at(serving.address)
        assert (told.code, told.message) == (grpc.StatusCode.UNAVAILABLE, "the orchestrator is stopping")
        for each in (stream, other):
            each.check_whole(plain(PLAIN, LENGTH))
    assert serving.wait() == 0
    assert serving.said().splitlines()[-1] == "specwire orchestrate: draining"
    check_ports_are_free(*ports)
    check_keys_expire(log)


def test_a_verifier_lets_its_sessions_end_and_others_take_the_new_ones(owned: Parts, log: RedisServer) -> None:
    metrics = metrics_at()
    first = owned.start("verify", TARGET, *PATIENT, *metrics)
    second = owned.start("verify", TARGET, *PATIENT)
    addresses = [first.ready(), second.ready()]
    serving = orchestrate(owned, log, "--verifier", addresses[0])
    both = orchestrate(owned, log, "--verifier", addresses[0], "--verifier", addresses[1])
    with Stream(serving.address, max_tokens=LENGTH) as stream:
        stream.until(5)
        first.send(signal.SIGTERM)
        until_not_serving(addresses[0])
        for _ in range(3):
            with Stream(both.address, max_tokens=10) as other:
                assert other.rest() == plain(PLAIN, 10)
        stream.check_whole(plain(PLAIN, LENGTH))
    assert first.wait() == 0
    assert "Traceback" not in first.said()
    check_ports_are_free(addresses[0], metrics[1])


@pytest.mark.parametrize("alone", [True, False], ids=["in memory", "with Redis and a registry"])
async def test_no_task_is_left_by_any_service(alone: bool, log: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where tasks can be counted."""
    url, registration = (MEMORY, NOWHERE) if alone else (log.url, RegistryOptions(log.url))
    figures = ModelServiceOptions(TARGET, metrics=ANY_PORT), ModelServiceOptions(DRAFT, metrics=ANY_PORT)
    verifier = await verify_service.server.start(figures[0], registration=registration)
    drafter = await draft_service.server.start(figures[1], registration)
    known = OrchestratorOptions(
        (verifier.address,) if alone else (),
        (drafter.address,) if alone else (),
        url,
        accept_drafters=True,
        http=ANY_PORT,
        metrics=ANY_PORT,
        registration=registration,
    )
    serving = await orchestrator.server.start(known)
    joined = await draft_service.server.dial_in(ModelServiceOptions(DRAFT, metrics=ANY_PORT), serving.address, None)
    monkeypatch.setattr(edge, "share_machine", lambda: None)  # that of the tests
    near = replace(known, drafters=(), accept_drafters=False)
    at_the_edge = await edge.start(edge.EdgeOptions(ModelServiceOptions(DRAFT), near))
    async with AsyncClient(at_the_edge.address) as client:
        done = await client.complete(PROMPT, max_tokens=20, ignore_eos=True, timeout=LIMIT_S)
    assert list(done.tokens) == plain(PLAIN, 20)
    assert serving.http is not None
    other = HttpStream(serving.http.removeprefix("http://"), max_tokens=LENGTH)
    await asyncio.to_thread(other.until, 5)
    async with AsyncClient(serving.address, patience=0) as client:
        events = client.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True, request_id="left", timeout=LIMIT_S)
        await anext(events)
        await serving.stop(0.0)
        with pytest.raises(SpecwireError) as left:  # this client waits for nobody to go on with it
            async for _ in events:
                pass
        assert left.value.code is grpc.StatusCode.UNAVAILABLE
    await asyncio.to_thread(other.rest)
    assert other.error is not None
    other.close()
    for service in (at_the_edge, joined, drafter, verifier):
        await service.stop(0.0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
