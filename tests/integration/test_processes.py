"""The services as plain processes through the command line: no Ray, and no torch where no model computes."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.faults.parts import Parts, ServiceProcess
from tests.orchestrator.redis_for_tests import RedisServer

TARGET = "scripted:7:vocab=64"
DRAFT = "scripted:7:vocab=64:agree=0.8"
LIMIT_S = 60.0
NO_RAY = "ray"
NO_MODELS = "ray,torch,transformers,safetensors"
SERVICES = {
    "verifier": "specwire.v1.VerifyService",
    "drafter": "specwire.v1.DraftService",
    "orchestrator": "specwire.v1.GenerationService",
}
ALSO = {"orchestrator": ("specwire.v1.StatusService",)}
COMMON = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}

Trio = dict[str, ServiceProcess]


def trio(owned: Parts, redis: RedisServer, target: str, draft: str) -> Trio:
    """A verifier, a drafter and an orchestrator that are ready."""
    verifier = owned.start("verify", target, without=NO_RAY)
    drafter = owned.start("draft", draft, without=NO_RAY)
    peers = ("--verifier", verifier.ready(), "--drafter", drafter.ready())
    orchestrator = owned.start("orchestrate", *peers, "--redis-url", redis.url, without=NO_MODELS)
    orchestrator.ready()
    return {"verifier": verifier, "drafter": drafter, "orchestrator": orchestrator}


@pytest.fixture(scope="module")
def scripted(owned: Parts, redis: RedisServer) -> Trio:
    """Give a stack of scripted models."""
    return trio(owned, redis, TARGET, DRAFT)


def test_what_is_hidden_cannot_be_imported(owned: Parts) -> None:
    for name in NO_MODELS.split(","):
        code, _, error = owned.run("-c", f"import {name}", without=NO_MODELS)
        assert code == 1
        assert f"No module named '{name}'" in error


@pytest.mark.parametrize("role", SERVICES)
def test_health_and_reflection(scripted: Trio, role: str) -> None:
    with grpc.insecure_channel(scripted[role].address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICES[role]):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=LIMIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(health_pb2.HealthCheckRequest(service="specwire.v1.None"), timeout=LIMIT_S)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = reflection.ServerReflectionInfo(iter([asked]), timeout=LIMIT_S)
        expected = {SERVICES[role], *ALSO.get(role, ()), *COMMON}
        assert {service.name for service in listed.list_services_response.service} == expected
