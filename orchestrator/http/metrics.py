"""/metrics in Prometheus' text form: what this orchestrator has counted since it started.

Names that other servers have for the same thing are theirs. A session counts while it is driven here and after its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from starlette.responses import PlainTextResponse, Response

from orchestrator.http.service import Call, Service
from orchestrator.stats import SessionStats
from orchestrator.totals import Totals
from specwire.core.acceptance import Outcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = {
    Outcome.ACCEPTED: "accepted",
    Outcome.RECOVERED: "recovered",
    Outcome.BONUS: "bonus",
    Outcome.DIRECT: "direct",
}


class Metrics:
    """Also counts HTTP's own answers: see `observe`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._answers: Counter[tuple[str, int]] = Counter()

    def observe(self, route: str, status: int) -> None:
        self._answers[route, status] += 1

    async def answer(self, _: Call) -> Response:
        return PlainTextResponse(self.text(), media_type=CONTENT_TYPE)

    def text(self) -> str:
        orchestrator = self._service.orchestrator
        running = [driver for driver in orchestrator.sessions.values() if driver.output.end is None]
        totals = orchestrator.totals.with_running(driver.stats for driver in running)
        lines = [
            *_family("num_sessions_running", "gauge", "Sessions that are driven or shown here.", [("", len(running))]),
            *_of_sessions(totals),
            *_of_speculation(totals),
            *_family(
                "http_responses_total",
                "counter",
                "HTTP answers by route and status.",
                [(f'{{route="{r}",status="{s}"}}', count) for (r, s), count in sorted(self._answers.items())],
            ),
        ]
        return "\n".join(lines) + "\n"


def _of_sessions(totals: Totals) -> list[str]:
    reasons = [(f'{{finished_reason="{reason.name.lower()}"}}', n) for reason, n in sorted(totals.reasons.items())]
    outcomes = [(f'{{outcome="{name}"}}', totals.stats.outcomes[outcome]) for outcome, name in OUTCOMES.items()]
    return [
        *_family("sessions_finished_total", "counter", "Sessions that ended here, by reason.", reasons),
        *_family("generation_tokens_total", "counter", "Tokens decided, by how they came to be.", outcomes),
        *_family(
            "target_forwards_total", "counter", "Forwards that decided tokens.", _one(totals.stats.target_forwards)
        ),
    ]


def _of_speculation(totals: Totals) -> list[str]:
    stats = totals.stats
    by_position = [(f'{{position="{i}"}}', n) for i, n in enumerate(stats.accepted_at[: positions(stats)])]
    accepted = stats.outcomes[Outcome.ACCEPTED]
    prefix = "spec_decode_num_"
    return [
        *_family(f"{prefix}drafts_total", "counter", "Windows of draft tokens tested.", _one(stats.tested_at[0])),
        *_family(f"{prefix}draft_tokens_total", "counter", "Draft tokens tested.", _one(stats.proposed)),
        *_family(f"{prefix}accepted_tokens_total", "counter", "Draft tokens accepted.", _one(accepted)),
        *_family(f"{prefix}accepted_tokens_per_pos_total", "counter", "Accepted, by place in the window.", by_position),
    ]


def positions(stats: SessionStats) -> int:
    """Places of a window that were ever tested."""
    return max((index + 1 for index, tested in enumerate(stats.tested_at) if tested), default=0)


def _one(value: int) -> list[tuple[str, int]]:
    return [("", value)]


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[str, int]]) -> list[str]:
    full = f"specwire:{name}"
    return [f"# HELP {full} {text}", f"# TYPE {full} {kind}", *(f"{full}{labels} {n}" for labels, n in samples)]
