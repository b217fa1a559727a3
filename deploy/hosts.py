"""What hosts the verifier and the drafter, and what a host must do."""

from __future__ import annotations

from typing import Protocol


class Host(Protocol):
    """Starts services, keeps them on the addresses they were first given, restarts those that die."""

    async def start(self) -> dict[str, str]:
        """Return each role's address once its service is healthy; StackError with one sentence if one cannot be."""
        ...

    async def failed(self) -> str:
        """Return the reason once the services cannot be kept up; otherwise never."""
        ...

    async def stop(self) -> None:
        """End every process. Idempotent, and right at any time, also while start() runs or after it failed."""
        ...
