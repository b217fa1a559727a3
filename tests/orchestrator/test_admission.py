"""The table of limits, what is done beside the event loop, and the largest of each field of each request.

For the last a request is made of every message of GenerationService and every route, in which one field is as large as
a message or body may be. Between two turns of the loop no more may be walked than a chat of the most messages takes.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from orchestrator.admission import LIMITS, LONG_BYTES, Admission
from orchestrator.tenants import Access, Allowances
from specwire.rpc.errors import StatusError

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
    admission.stop()


async def test_errors_of_what_is_done_aside_are_its_caller_s() -> None:
    admission = Admission(lambda tenant, tokens: None)
    with pytest.raises(ZeroDivisionError):
        await admission.aside("", LONG_BYTES, lambda: 1 // 0)
    admission.stop()


def test_reading_is_charged_by_its_size() -> None:
    now = 0.0
    admission = Admission(Allowances(Access(tokens_per_minute=100), lambda: now).charge)
    admission.charge("ada", 90 * 1024)
    admission.charge("ada", 8 * 1024)
    with pytest.raises(StatusError, match="100 tokens a minute are used up"):
        admission.charge("ada", 0)
    admission.charge("bob", 0)
    admission.stop()
