"""What sessions learnt about the drafters that serve them, for the sessions after them."""

from __future__ import annotations

from orchestrator.link import Info
from specwire.core.planner import Planner
from specwire.core.sampling import Rule

# Whoever dials in chooses what it is called, so names must not pile up.
MOST_KNOWN = 64


class Experience:
    """Beside one verifier, the planner of the latest session for each drafter and rule; the next one starts from it.

    A drafter is known by its weights and its host: one that connects again is the same. Of too many the oldest go.
    """

    def __init__(self) -> None:
        self._planners: dict[tuple[Rule, str, str], Planner] = {}

    def recall(self, rule: Rule, drafter: Info) -> Planner | None:
        return self._planners.get((rule, drafter.weights_fingerprint, drafter.host_id))

    def keep(self, rule: Rule, drafter: Info, planner: Planner) -> None:
        key = (rule, drafter.weights_fingerprint, drafter.host_id)
        self._planners.pop(key, None)
        self._planners[key] = planner
        if len(self._planners) > MOST_KNOWN:
            del self._planners[next(iter(self._planners))]


def share_host(verifier: Info, drafter: Info) -> bool:
    """Whether the drafter competes with the verifier for cores; one that dialled in is not asked where it is."""
    return bool(drafter.host_id) and (drafter.host_id, drafter.device) == (verifier.host_id, verifier.device)
