"""A drafter's figures, read when somebody asks; see docs/OPERATIONS.md."""

from __future__ import annotations

from draft_service.sessions import Sessions
from specwire.core.model import SlotModel
from specwire.registry.entry import Load
from specwire.telemetry.metrics import Families, by_label, counter, gauge, histogram


def families(sessions: Sessions, model: SlotModel) -> Families:
    """Read beside the drafter's thread: each number is right by itself, and all are of about the same moment."""
    tally = sessions.tally
    cached = sum(model.cached(slot) for slot in range(model.slots))
    yield by_label(gauge, "sessions", "Sessions by state.", "state", {"open": len(sessions)})
    yield counter("sessions_opened_total", "Sessions that were opened.", tally.opened)
    refused = dict(tally.refused)
    yield by_label(counter, "sessions_refused_total", "Sessions that were not served, by status.", "status", refused)
    yield gauge("slots", "Sessions that fit at once.", model.slots)
    yield gauge(
        "kv_cache_usage_ratio", "Positions in use of all there are.", cached / (model.slots * model.info.context)
    )
    yield histogram("forward_seconds", "Forwards of the model, and drawing from them.", tally.forward_s)
    yield histogram("batch_rows", "Rows of a forward.", tally.rows)
    yield counter("drafted_tokens_total", "Draft tokens drawn.", tally.drafted)
    yield counter("proposed_tokens_total", "Draft tokens sent in proposals.", tally.proposed)
    yield counter("due_positions_total", "Decided positions within the run-ahead.", tally.due)
    yield counter("late_positions_total", "Those of them for which nothing was proposed in time.", tally.late)
    yield counter("rollbacks_total", "Contradicted chains: the cache goes back.", tally.rollbacks)


def load_of(sessions: Sessions, model: SlotModel) -> Load:
    """The load that the registry is told."""
    running = len(sessions)
    return Load(running, 0, max(0, model.slots - running))
