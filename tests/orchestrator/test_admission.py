"""The table of limits, and what is done beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest

from orchestrator.admission import LIMITS, LONG_BYTES, Admission
from orchestrator.store import StoredSession
from orchestrator.tenants import Access, Allowances
from specwire.rpc.errors import StatusError
from specwire.v1 import common_pb2, generation_pb2_grpc
from specwire.v1 import generation_pb2 as pb
from tests.orchestrator.stack import PROMPT, stack
from tests.wait import raised

PAGE = Path(__file__).resolve().parents[2] / "docs" / "SECURITY.md"


def test_the_page_has_the_table() -> None:
    rows = [f"| {each.what} | {each.most:,} | {each.counted} | {each.told} |" for each in LIMITS]
    assert "\n".join(["| --- | --- | --- | --- |", *rows, ""]) in PAGE.read_text()
    assert len({each.what for each in LIMITS}) == len(LIMITS)


async def test_what_is_long_is_done_by_one_thread_and_tenants_take_turns() -> None:
    admission = Admission(lambda tenant, tokens: None)
    order: list[str] = []
    go_on = threading.Event()

    def work(name: str) -> str:
        order.append(name)
        go_on.wait(60.0)
        return threading.current_thread().name

    asked = [("bob", "b1"), ("bob", "b2"), ("bob", "b3"), ("ada", "a1")]
    tasks = [asyncio.create_task(admission.aside(tenant, LONG_BYTES, work, name)) for tenant, name in asked]
    await asyncio.sleep(0.01)
    go_on.set()
    assert set(await asyncio.gather(*tasks)) == {"aside_0"}
    assert order.index("a1") == 1
    here = await admission.aside("ada", LONG_BYTES - 1, lambda: threading.current_thread().name)
    assert here == threading.current_thread().name
    await raised(ZeroDivisionError, admission.aside("", LONG_BYTES, lambda: 1 // 0))
    admission.stop()


def test_reading_is_charged_by_its_size() -> None:
    now = 0.0
    admission = Admission(Allowances(Access(tokens_per_minute=100), lambda: now).charge)
    admission.charge("ada", 90 * 1024)
    admission.charge("ada", 10 * 1024)
    admission.charge("ada", 1023)
    with pytest.raises(StatusError, match="100 tokens a minute are used up"):
        admission.charge("ada", 0, least=1)
    admission.charge("bob", 0, least=1)
    admission.stop()


NOTE_BYTES = 1 << 20


async def test_whoever_names_a_session_reads_no_more_of_its_log_than_is_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls of 150 bytes had a note of megabytes read on the event loop, which nobody paid for."""
    async with stack(access=Access(tokens_per_minute=10**6)) as parts:
        orchestrator, store = parts.orchestrator.orchestrator, parts.orchestrator.orchestrator.store
        ids, one = pb.TokenIds(ids=PROMPT), common_pb2.Stopping(max_tokens=1)
        async with grpc.aio.insecure_channel(parts.orchestrator.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            charged: list[int] = []
            monkeypatch.setattr(orchestrator.admission, "_charge", lambda tenant, tokens: charged.append(tokens))
            events = [
                each
                async for each in stub.Generate(pb.GenerateRequest(tokens=ids, stopping=one, note="x" * NOTE_BYTES))
            ]
            session_id = events[0].started.session_id
            assert sum(charged) == NOTE_BYTES // 1024
            charged.clear()
            read: list[str] = []
            whole = store.read

            async def noted(session_id: str) -> StoredSession | None:
                read.append(session_id)
                return await whole(session_id)

            monkeypatch.setattr(store, "read", noted)
            watched = pb.WatchRequest(session_id=session_id, from_position=len(PROMPT) + 2, prefix_hash=7)
            for again in (stub.Watch(pb.WatchRequest(session_id=session_id)), stub.Watch(watched)):
                with suppress(grpc.aio.AioRpcError):
                    [each async for each in again]
            await stub.Cancel(pb.CancelRequest(session_id=session_id))
            assert (read, charged) == ([], [])
            await stub.GetSession(pb.GetSessionRequest(session_id=session_id))
            assert (len(read), sum(charged)) == (1, 1 + NOTE_BYTES // 1024)
            refused = stub.Generate(pb.GenerateRequest(parent=session_id, tokens=ids, stopping=one, priority=10**6))
            with pytest.raises(grpc.aio.AioRpcError, match="priority"):
                [each async for each in refused]
            assert (len(read), sum(charged)) == (2, 2 * (1 + NOTE_BYTES // 1024))
