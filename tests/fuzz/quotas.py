"""A tenant that is held to few tokens and bytes, and asks for anything that the log keeps: what is kept stays bounded.

Beside it another tenant's request is served as ever: what one may have kept is no room of another's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc.aio
from hypothesis import strategies as st

from orchestrator.tenants import Access
from specwire.rpc.keys import Keys, show
from specwire.v1 import common_pb2, generation_pb2_grpc
from specwire.v1 import generation_pb2 as pb
from tests.fuzz.messages import Values
from tests.fuzz.services import LIMIT_S, OURS
from tests.orchestrator.stack import PROMPT, Stack, stack

LOG_BYTES, TOKENS, SESSIONS = 1 << 17, 4000, 3
# Of a file of SQLite's there is more than what is counted: pages that are not full, indexes, what stands beside them.
MOST_FILE_BYTES = 4 * LOG_BYTES
GREEDY_TOKEN, OTHER_TOKEN = "g" * 24, "o" * 24
ASKED = 8
NOTES = st.sampled_from(["", "x" * 100, "x" * 20_000, '"' * 60_000, "é" * 30_000])
CHOICES = st.sampled_from([None, ["5"], [f"{number} " * 9 for number in range(900)]])
LOGPROBS = st.sampled_from([None, 0, 20])


def asked() -> Values:
    """Requests, one after the other: note, choices, log-probabilities, length, request id, deleted at the end."""
    one = st.tuples(NOTES, CHOICES, LOGPROBS, st.integers(1, 40), st.integers(0, 5), st.booleans())
    return st.lists(one, min_size=ASKED, max_size=3 * ASKED)


def hold(requests: list[Any]) -> Counter[str]:
    """How each was answered. AssertionError: more is kept than may be, or the other tenant is refused."""
    return asyncio.run(_hold(requests))


async def _hold(requests: list[Any]) -> Counter[str]:
    keys = Keys({GREEDY_TOKEN: "greedy", OTHER_TOKEN: "other"})
    access = Access(keys=keys, tokens_per_minute=TOKENS, sessions=SESSIONS, log_bytes=LOG_BYTES)
    seen: Counter[str] = Counter()
    async with stack(access=access) as running, grpc.aio.insecure_channel(running.orchestrator.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for each in requests:
            code = await _ask(stub, GREEDY_TOKEN, *each)
            assert code not in OURS, f"{code.name} for {each!r:.200}"
            seen[code.name] += 1
        kept = _file_bytes(running)
        assert kept <= MOST_FILE_BYTES, f"{kept} bytes are kept, of at most {MOST_FILE_BYTES}"
        other = await _ask(stub, OTHER_TOKEN, "", None, None, 5, 0, False)
        assert other is grpc.StatusCode.OK, f"another tenant was told {other.name}"
    return seen


async def _ask(
    stub: Any, token: str, note: str, choices: Any, top: int | None, length: int, name: int, deleted: bool
) -> grpc.StatusCode:
    form = None if choices is None else common_pb2.Choices(texts=choices)
    request = pb.GenerateRequest(
        tokens=pb.TokenIds(ids=PROMPT),
        stopping=common_pb2.Stopping(max_tokens=length),
        sampling=common_pb2.Sampling(logprobs=top, choices=form),
        note=note,
        request_id=f"{name}" * 100 if name else "",
    )
    told: dict[str, Any] = {"metadata": show(token), "timeout": LIMIT_S}
    session_id = ""
    try:
        async for event in stub.Generate(request, **told):
            session_id = event.started.session_id or session_id
        if deleted:
            await stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id), **told)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _file_bytes(running: Stack) -> int:
    """Of the log as it is in memory."""
    database: Any = running.orchestrator.orchestrator.store._db  # type: ignore[attr-defined]  # of an SqliteStore
    used, size = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return int(used * size)
