"""Signs of life: while an orchestrator lives, the log knows whose its sessions are, and does not let them expire."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from orchestrator.appender import RENEW_S

logger = logging.getLogger(__name__)


class Leased(Protocol):
    """A session that may be this orchestrator's."""

    async def renew(self) -> None: ...


async def keep_leases(sessions: Callable[[], Iterable[Leased]]) -> None:
    """Have the sessions renew their leases, until cancelled. All of them leave in one round trip of the log."""
    while True:
        await asyncio.sleep(RENEW_S / 2)
        done = await asyncio.gather(*(session.renew() for session in sessions()), return_exceptions=True)
        for error in done:
            if isinstance(error, Exception):
                logger.error("a session's lease could not be renewed", exc_info=error)
