"""A session's log, damaged in Redis, as its readers and its next turn meet it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import redis.asyncio

from orchestrator.store.scripts import roll_key, session_keys
from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.fuzz.services import LIMIT_S, OURS, Services
from tests.fuzz.values import META, OUTCOMES, ROLL, TOKENS, Damage, damage_key

# What stands in a key of another type is Redis' refusal, and so the log that cannot be used.
FORBIDDEN = {*OURS} - {grpc.StatusCode.UNAVAILABLE}


def meet(services: Services, url: str, damage: list[Damage]) -> Counter[str]:
    """How each call about a session ended whose log was damaged so. AssertionError if it is our own failure."""
    seen: Counter[str] = Counter()
    with services.channel(services.orchestrator) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for name, call in _calls(stub).items():
            session_id = services.complete()
            asyncio.run(_spoil(services, url, session_id, damage))
            code = _code(call, session_id)
            assert code not in FORBIDDEN, f"{name} answered {code.name} where there was {damage}"
            seen[f"{name} {code.name}"] += 1
    logged = services.failures.take()
    assert not logged, f"{damage}: {logged}"
    return seen


def _calls(stub: Any) -> dict[str, Callable[[str], Any]]:
    pb, limit = generation_pb2, {"timeout": LIMIT_S}
    turn = pb.TokenIds(ids=[5])
    return {
        "Watch": lambda name: list(stub.Watch(pb.WatchRequest(session_id=name, take_over=True), **limit)),
        "GetSession": lambda name: stub.GetSession(pb.GetSessionRequest(session_id=name), **limit),
        "Cancel": lambda name: stub.Cancel(pb.CancelRequest(session_id=name), **limit),
        "Generate": lambda name: list(stub.Generate(pb.GenerateRequest(parent=name, tokens=turn), **limit)),
        "DeleteSession": lambda name: stub.DeleteSession(pb.DeleteSessionRequest(session_id=name), **limit),
    }


def _code(call: Callable[[str], Any], session_id: str) -> grpc.StatusCode:
    try:
        call(session_id)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


async def _spoil(services: Services, url: str, session_id: str, damage: list[Damage]) -> None:
    keys = dict(zip((META, TOKENS, OUTCOMES), session_keys(session_id), strict=True))
    keys[ROLL] = roll_key(services.weights)
    async with redis.asyncio.Redis.from_url(url) as client:
        for each in damage:
            if each.key in keys and not (each.key == ROLL and each.other_type):  # that is all sessions' own
                await damage_key(client, keys[each.key], each)
