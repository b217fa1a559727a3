"""/metrics: the orchestrator's figures (`orchestrator.metrics`), and HTTP's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from starlette.responses import PlainTextResponse, Response

from orchestrator.http.service import Call, HttpService
from orchestrator.sessions import ORCHESTRATOR
from specwire.telemetry.metrics import CONTENT_TYPE, Family


class Metrics:
    """Also counts HTTP's own answers: see `observe`."""

    def __init__(self, service: HttpService) -> None:
        self._answers: Counter[tuple[str, int]] = Counter()
        self._registry = service.orchestrator.registry
        self._registry.add(ORCHESTRATOR, self._families)

    def observe(self, route: str, status: int) -> None:
        self._answers[route, status] += 1

    async def answer(self, _: Call) -> Response:
        return PlainTextResponse(self._registry.text(), media_type=CONTENT_TYPE)

    def _families(self) -> Iterable[Family]:
        counts = sorted(self._answers.items())
        samples = [("", (("route", route), ("status", str(status))), count) for (route, status), count in counts]
        yield Family("http_responses_total", "counter", "HTTP answers by route and status.", samples)
