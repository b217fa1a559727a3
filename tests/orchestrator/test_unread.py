"""What an orchestrator keeps for a client that does not read, counted where it is kept; the others read on."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from orchestrator.session.driver import SessionDriver
from specwire.client import AsyncClient, Chunk
from specwire.core.session import State
from specwire.rpc.link import Link
from tests.orchestrator.stack import DRAFT, PROMPT, TARGET, Stack, plain, stack

LENGTH, READ_FIRST, FURTHER = 4000, 16, 20
LIMIT_S = 120.0
STILL_S = 1.0


async def still(parts: Stack) -> SessionDriver:
    """The one session, once it gets no further."""
    before = -1
    for _ in range(round(LIMIT_S / STILL_S)):
        await asyncio.sleep(STILL_S)
        drivers = list(parts.orchestrator.orchestrator.sessions.values())
        now = len(drivers[0].session.text) if drivers else -1
        if now == before >= READ_FIRST:
            return drivers[0]
        before = now
    raise AssertionError("it did not stand still")


def check_bounded(parts: Stack, driver: SessionDriver) -> None:
    """Nothing waits but the text itself; of that no more was decided than the client has room for."""
    session, peers = driver.session, parts.orchestrator.orchestrator.pool
    assert session.state is State.RUNNING
    assert session.durable == session.emitted == len(session.text) <= session.credit
    assert session.credit <= session.taken + session.buffer
    assert len(session.text) - session.taken <= session.buffer
    assert session.in_flight is None
    assert len(driver.view.output.tokens) == session.emitted - session.prompt_length
    for link in (*(peer.link for peer in peers.verifiers), *(peer.link for peer in peers.drafters)):
        assert isinstance(link, Link)
        assert (link.up, link.queued) == (True, 0)


async def test_over_grpc() -> None:
    async with stack(TARGET, DRAFT) as parts, AsyncClient(parts.orchestrator.address) as client:
        events = client.generate([5, 6, 7], max_tokens=LENGTH, ignore_eos=True, logprobs=5, timeout=2 * LIMIT_S)
        read = 0
        while read < READ_FIRST:
            event = await anext(events)
            read += len(event.tokens) if isinstance(event, Chunk) else 0
        driver = await still(parts)
        check_bounded(parts, driver)
        assert len(driver.view.output.tokens) < LENGTH
        others = [event async for event in client.generate(PROMPT, max_tokens=40, ignore_eos=True, timeout=LIMIT_S)]
        told = [token for event in others if isinstance(event, Chunk) for token in event.tokens]
        assert told == plain(TARGET, PROMPT, 40)
        stood = len(driver.view.output.tokens)
        while read < stood + FURTHER:
            event = await anext(events)
            read += len(event.tokens) if isinstance(event, Chunk) else 0
        assert len(driver.view.output.tokens) > stood  # it goes on where its client does
        await events.aclose()


@pytest.mark.parametrize("details", [False, True], ids=["text", "details"])
async def test_over_http(details: bool) -> None:
    async with stack(TARGET, DRAFT, http="127.0.0.1:0") as parts:
        assert parts.orchestrator.http is not None
        host, _, port = parts.orchestrator.http.removeprefix("http://").rpartition(":")
        # With log-probabilities a token is long: without, a busy machine joins so many in an event that all of the text
        # fits into the sockets.
        asked = {"prompt": [5, 6, 7], "max_tokens": LENGTH, "ignore_eos": True, "logprobs": 5}
        asked |= {"stream": True, "details": details}
        body = json.dumps(asked).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            slow.sendall(head.encode() + body)
            driver = await still(parts)
            check_bounded(parts, driver)
            assert len(driver.view.output.tokens) < LENGTH
