"""Where a reader that comes back goes on, and whether it may: PROTOCOL.md, section 12."""

from __future__ import annotations

import asyncio

import grpc

from orchestrator.driver import SessionDriver
from orchestrator.output import Cursor
from orchestrator.statuses import store_statuses
from orchestrator.store import SessionStore
from specwire.core.sampling import InvalidParameter
from specwire.core.text import extend_hash
from specwire.rpc.errors import StatusError
from specwire.v1 import generation_pb2 as pb


async def cursor_of(request: pb.WatchRequest, driver: SessionDriver, store: SessionStore, timeout: float) -> Cursor:
    """The reader's place in the driver's output.

    A reader that comes from another orchestrator may know more than has been shown here by now; this waits for it, at
    most `timeout` seconds.

    Raises:
        InvalidParameter: no position of the output.
        StatusError: DATA_LOSS, the reader's text is not the log's; UNAVAILABLE, the output did not get there in time.
    """
    first = len(driver.record.prompt)
    position = request.from_position or first
    shown = first + len(driver.output.tokens)
    if position > shown and request.HasField("prefix_hash"):
        await _catch_up(driver, store, position, timeout)
    elif not first <= position <= shown:
        raise InvalidParameter("from_position", f"must be from {first} to {shown}, not {position}")
    if request.HasField("prefix_hash") and hash_before(driver, position) != request.prefix_hash:
        raise StatusError(grpc.StatusCode.DATA_LOSS, f"prefix_hash: the text before {position} is another one")
    return driver.output.cursor_at(position)


async def _catch_up(driver: SessionDriver, store: SessionStore, position: int, timeout: float) -> None:
    """Wait until the output reaches `position`, if the log does."""
    with store_statuses():
        log = await store.read(driver.record.session_id)
    length = 0 if log is None else log.length
    if position > length:
        message = f"from_position: the log ends at {length}, before {position}, which was shown"
        raise StatusError(grpc.StatusCode.DATA_LOSS, message)
    try:
        async with asyncio.timeout(timeout):
            await driver.output.reached(position)
    except TimeoutError:
        message = f"from_position: the text did not reach {position} within {timeout:g} s"
        raise StatusError(grpc.StatusCode.UNAVAILABLE, message) from None


def hash_before(driver: SessionDriver, position: int) -> int:
    """The hash of the text before `position`, which is not before the prompt's end."""
    value = driver.prompt_hash
    for token in driver.output.tokens[: position - len(driver.record.prompt)]:
        value = extend_hash(value, token)
    return value
