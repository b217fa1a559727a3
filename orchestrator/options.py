"""The orchestrator's options, validated when built."""

from __future__ import annotations

from dataclasses import dataclass

from specwire.core.controller import parse_plan


@dataclass(frozen=True, slots=True)
class OrchestratorOptions:
    """Addresses are HOST:PORT; times are seconds.

    buffer: tokens that a verifier may decide beyond what is durable and taken by the client.
    start_timeout: wait at start for a verifier (and for every drafter that is named) to answer.
    peer_timeout: how long a session waits for a verifier before it fails with UNAVAILABLE.
    detach_grace: how long a session with a request id goes on without a reader; without one it is cancelled at once.
    retention: how long the log keeps a session after its last change.
    plan: auto, or a fixed plan for every session (`specwire.core.controller.parse_plan`), for measurements.
    """

    verifiers: tuple[str, ...]
    drafters: tuple[str, ...] = ()
    redis_url: str = "memory:"
    listen: str = "127.0.0.1:0"
    insecure: bool = False
    buffer: int = 64
    start_timeout: float = 120.0
    peer_timeout: float = 30.0
    store_timeout: float = 30.0
    detach_grace: float = 30.0
    retention: float = 3600.0
    plan: str = "auto"

    def __post_init__(self) -> None:
        if not self.verifiers:
            raise ValueError("verifiers: at least one address is needed")
        for name in ("start_timeout", "peer_timeout", "store_timeout", "retention"):
            if not getattr(self, name) > 0:  # nor NaN
                raise ValueError(f"{name}: must be positive, not {getattr(self, name)}")
        parse_plan(self.plan)
        if self.buffer < 2:
            raise ValueError(f"buffer: must be at least 2, not {self.buffer}")
