"""A session's log, damaged in Redis, as its readers, its next turn and who repeats its request meet it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import redis.asyncio

from orchestrator.store.scripts import SECRET_KEY, request_key, roll_key, session_keys
from orchestrator.tenants import ANONYMOUS
from specwire.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.faults.streams import PROMPT
from tests.fuzz.services import LIMIT_S, OURS, Services
from tests.fuzz.values import META, OUTCOMES, REQUEST, ROLL, SECRET, TOKENS, Damage, damage_key

# What stands in a key of another type is Redis' refusal, and so the log that cannot be used.
FORBIDDEN = {*OURS} - {grpc.StatusCode.UNAVAILABLE}
LENGTH = 12
NUMBERS = itertools.count()
LIMIT = {"timeout": LIMIT_S}


@dataclass(frozen=True, slots=True)
class Begun:
    """A session that has ended, and the request that it was."""

    session_id: str
    request: generation_pb2.GenerateRequest


def meet(services: Services, url: str, damage: list[Damage]) -> Counter[str]:
    """How each call about a session ended whose log was damaged so. AssertionError if it is our own failure."""
    seen: Counter[str] = Counter()
    with services.channel(services.orchestrator) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for name, call in _calls(stub).items():
            begun = _begun(stub)
            asyncio.run(_spoil(services, url, begun, damage))
            code = _code(call, begun)
            assert code not in FORBIDDEN, f"{name} answered {code.name} where there was {damage}"
            seen[f"{name} {code.name}"] += 1
    logged = services.failures.take()
    assert not logged, f"{damage}: {logged}"
    return seen


def _begun(stub: Any) -> Begun:
    request = generation_pb2.GenerateRequest(
        tokens=generation_pb2.TokenIds(ids=PROMPT),
        stopping=common_pb2.Stopping(max_tokens=LENGTH, ignore_eos=True),
        request_id=f"damaged {next(NUMBERS)}",
    )
    started, *_, last = stub.Generate(request, **LIMIT)
    assert last.HasField("finished")
    return Begun(started.started.session_id, request)


def _calls(stub: Any) -> dict[str, Callable[[Begun], Any]]:
    pb, turn = generation_pb2, generation_pb2.TokenIds(ids=[5])
    return {
        "Watch": lambda begun: list(stub.Watch(pb.WatchRequest(session_id=begun.session_id, take_over=True), **LIMIT)),
        "GetSession": lambda begun: stub.GetSession(pb.GetSessionRequest(session_id=begun.session_id), **LIMIT),
        "Cancel": lambda begun: stub.Cancel(pb.CancelRequest(session_id=begun.session_id), **LIMIT),
        "Generate": lambda begun: list(
            stub.Generate(pb.GenerateRequest(parent=begun.session_id, tokens=turn), **LIMIT)
        ),
        "Generate again": lambda begun: list(stub.Generate(begun.request, **LIMIT)),
        "DeleteSession": lambda begun: stub.DeleteSession(
            pb.DeleteSessionRequest(session_id=begun.session_id), **LIMIT
        ),
    }


def _code(call: Callable[[Begun], Any], begun: Begun) -> grpc.StatusCode:
    try:
        call(begun)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


async def _spoil(services: Services, url: str, begun: Begun, damage: list[Damage]) -> None:
    keys = dict(zip((META, TOKENS, OUTCOMES), session_keys(begun.session_id), strict=True))
    keys |= {
        ROLL: roll_key(services.weights),
        SECRET: SECRET_KEY,
        REQUEST: request_key(ANONYMOUS, begun.request.request_id),
    }
    async with redis.asyncio.Redis.from_url(url) as client:
        for each in damage:
            if not (each.key in (ROLL, SECRET) and each.other_type):  # those are all sessions' own
                await damage_key(client, keys[each.key], each)
