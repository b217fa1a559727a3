"""What a deployment's services say of themselves in the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from specwire.registry.directory import Directory, RegistryUnavailable
from specwire.registry.entry import Role, ServiceEntry, ServiceState

# An orchestrator looks at the registry every second, and says what it has found every two.
KNOWN_LIMIT_S = 20.0
PAUSE_S = 0.5


async def listed(url: str) -> tuple[ServiceEntry, ...]:
    """Who is in the registry. Raises RegistryUnavailable."""
    directory = Directory.at(url)
    try:
        return (await directory.listing()).entries
    finally:
        await directory.close()


def are_known(addresses: Iterable[str], entries: Iterable[ServiceEntry]) -> bool:
    """Every orchestrator gives its new sessions to the versions of the verifiers there."""
    found = {entry.address: entry for entry in entries}
    verifiers = [found.get(address) for address in addresses]
    if None in verifiers:
        return False
    versions = [model for entry in verifiers if entry is not None for model in entry.models]
    serving = [
        entry for entry in found.values() if entry.role is Role.ORCHESTRATOR and entry.state is ServiceState.SERVING
    ]
    return all(any(each.equals(model) for model in entry.models) for entry in serving for each in versions)


def wait_until_known(url: str, addresses: Iterable[str], limit_s: float = KNOWN_LIMIT_S) -> bool:
    """Whether `are_known` came to hold in time: of verifiers that have no room it may not."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if are_known(addresses, asyncio.run(listed(url))):
                return True
        except RegistryUnavailable:
            pass  # it may answer again
        time.sleep(PAUSE_S)
    return False
