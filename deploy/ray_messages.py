"""What the process that hosts Ray is told, and what it answers: one JSON object a line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from specwire.rpc.model_service import ModelServiceOptions


@dataclass(frozen=True, slots=True)
class RayOrder:
    """What to host. Given as the process's one argument.

    directory: a private folder with a short path (Ray puts sockets below it, whose paths may have 107 bytes).
    services: options of each service by its role.
    start_timeout: seconds until every service must be healthy.
    """

    directory: str
    services: dict[str, ModelServiceOptions]
    start_timeout: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RayOrder:
        fields = json.loads(text)
        services = {role: ModelServiceOptions(**options) for role, options in fields["services"].items()}
        return RayOrder(fields["directory"], services, fields["start_timeout"])


@dataclass(frozen=True, slots=True)
class RayAnswer:
    """Either progress (once for each step), or the addresses (once), or an error (last)."""

    progress: str = ""
    addresses: dict[str, str] | None = None
    error: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RayAnswer:
        return RayAnswer(**json.loads(text))
