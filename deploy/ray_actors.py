"""The Ray actors: one service each, in a thread apart from Ray's.

Plain classes with plain methods: a coroutine method would make Ray run the actor on an event loop of its own. They are
two classes because the class's name is what Ray shows as the name of the process.
"""

from __future__ import annotations

from pathlib import Path

import draft_service.server
import verify_service.server
from deploy.service_thread import ServiceThread, Start, ThreadOutcome
from specwire.rpc.model_service import ModelServiceOptions
from specwire.telemetry.options import inherited


class ServiceActor:
    """After its process died Ray runs __init__ again, with the same arguments, in another."""

    def __init__(self, start: Start, options: ModelServiceOptions, address_file: Path) -> None:
        inherited().start(type(self).__name__.lower())
        self._service = ServiceThread(start, options, address_file)

    def outcome(self) -> ThreadOutcome:
        """Wait for the start."""
        return self._service.outcome()

    def stop(self) -> None:
        """Stop the service; the actor's process stays."""
        self._service.stop()


class VerifierActor(ServiceActor):
    """The target model's service."""

    def __init__(self, options: ModelServiceOptions, address_file: Path) -> None:
        super().__init__(verify_service.server.start, options, address_file)


class DrafterActor(ServiceActor):
    """A draft model's service."""

    def __init__(self, options: ModelServiceOptions, address_file: Path) -> None:
        super().__init__(draft_service.server.start, options, address_file)


ACTORS: dict[str, type[VerifierActor] | type[DrafterActor]] = {"verifier": VerifierActor, "drafter": DrafterActor}
