"""A cancellation that was acknowledged is not lost with the log."""

from __future__ import annotations

import pytest

from orchestrator.cancelling import KEPT_S, Cancellations
from orchestrator.store import MissingSession, SessionRecord
from orchestrator.store.memory import MemoryStore
from specwire.core.limits import Stopping
from specwire.core.sampling import Sampling

RECORD = SessionRecord("session", (1, 2), Sampling(), Stopping(8))


async def is_cancelled(store: MemoryStore) -> bool:
    log = await store.read("session")
    assert log is not None
    return log.cancelled


async def test_what_was_promised_is_said_again_where_the_log_was_lost() -> None:
    """The owner has written it again, and has not heard of it."""
    store = MemoryStore()
    fence = await store.create(RECORD, 60.0)
    cancellations = Cancellations(store)
    await cancellations.ask("session")
    await store.delete("session")
    await cancellations.repeat()  # nothing to cancel now
    lost = MemoryStore()
    vars(store).update(vars(lost))
    await store.recreate(RECORD, [], [], fence, 60.0)
    assert not await is_cancelled(store)
    await cancellations.repeat()
    assert await is_cancelled(store)


async def test_it_is_not_said_for_ever() -> None:
    store = MemoryStore()
    fence = await store.create(RECORD, 60.0)
    cancellations = Cancellations(store)
    await cancellations.ask("session")
    cancellations._until["session"] -= KEPT_S
    vars(store).update(vars(MemoryStore()))
    await store.recreate(RECORD, [], [], fence, 60.0)
    await cancellations.repeat()
    assert not await is_cancelled(store)
    assert not cancellations._until


async def test_what_was_refused_is_not_promised() -> None:
    cancellations = Cancellations(MemoryStore())
    with pytest.raises(MissingSession):
        await cancellations.ask("session")
    assert not cancellations._until
