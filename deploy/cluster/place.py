"""Where a replica is, as it says itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """address: "" until it is ready. http: the URL of an orchestrator that has one. error: why it cannot start.

    draining: it was told to end. registered: its address in the registry, where it advertises another one.
    """

    address: str
    node: str
    http: str = ""
    error: str = ""
    draining: bool = False
    registered: str = ""

    @property
    def known_as(self) -> str:
        """Its address in the registry; "" until it is ready."""
        return self.registered or self.address
