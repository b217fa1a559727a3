"""/metrics: what this orchestrator has counted since it started, in Prometheus' text form.

Names that other servers have for the same thing are theirs. A session counts while it is driven here and after its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from starlette.responses import PlainTextResponse, Response

from orchestrator.http.service import Call, Service
from orchestrator.sessions import Orchestrator
from orchestrator.totals import Totals
from specwire.core.acceptance import Outcome
from specwire.telemetry.metrics import CONTENT_TYPE, Family, Registry, by_label, counter, gauge
from specwire.telemetry.process import process_families

SERVICE = "orchestrate"


class Metrics:
    """Also counts HTTP's own answers: see `observe`."""

    def __init__(self, service: Service) -> None:
        self._answers: Counter[tuple[str, int]] = Counter()
        self._registry = Registry()
        self._registry.add(SERVICE, process_families)
        self._registry.add(SERVICE, lambda: families(service.orchestrator))
        self._registry.add(SERVICE, self._http)

    def observe(self, route: str, status: int) -> None:
        self._answers[route, status] += 1

    async def answer(self, _: Call) -> Response:
        return PlainTextResponse(self._registry.text(), media_type=CONTENT_TYPE)

    def _http(self) -> Iterable[Family]:
        samples = [
            ("", (("route", route), ("status", str(status))), count)
            for (route, status), count in sorted(self._answers.items())
        ]
        yield Family("http_responses_total", "counter", "HTTP answers by route and status.", samples)


def families(orchestrator: Orchestrator) -> Iterable[Family]:
    """Of the sessions that were driven here."""
    running = [driver for driver in orchestrator.sessions.values() if driver.output.end is None]
    totals = orchestrator.totals.with_running(driver.stats for driver in running)
    reasons = {reason.name.lower(): count for reason, count in sorted(totals.reasons.items())}
    outcomes = {outcome.name.lower(): totals.stats.outcomes[outcome] for outcome in Outcome}
    yield gauge("num_sessions_running", "Sessions that are driven or shown here.", len(running))
    yield by_label("counter", "sessions_finished_total", "Sessions that ended here.", "finished_reason", reasons)
    yield by_label("counter", "generation_tokens_total", "Tokens of sessions here, by how.", "outcome", outcomes)
    yield counter("target_forwards_total", "Forwards that decided tokens.", totals.stats.target_forwards)
    yield from _of_speculation(totals)


def _of_speculation(totals: Totals) -> Iterable[Family]:
    stats, prefix = totals.stats, "spec_decode_num"
    accepted = stats.outcomes[Outcome.ACCEPTED]
    by_position = {str(index): count for index, count in enumerate(stats.accepted_at) if count}
    yield counter(f"{prefix}_drafts_total", "Windows of draft tokens tested.", stats.tested_at[0])
    yield counter(f"{prefix}_draft_tokens_total", "Draft tokens tested.", stats.proposed)
    yield counter(f"{prefix}_accepted_tokens_total", "Draft tokens accepted.", accepted)
    yield by_label(
        "counter",
        f"{prefix}_accepted_tokens_per_pos_total",
        "Draft tokens accepted, by place in the window.",
        "position",
        by_position,
    )
