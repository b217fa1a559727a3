"""An orchestrator's figures, read when somebody asks; see docs/OPERATIONS.md.

Names are those of other servers where they measure the same. A session counts while it is driven here and after its
end; other orchestrators count their own part.
"""

from __future__ import annotations

import re
from collections import Counter

from orchestrator.peers.peer import DrafterPeer, VerifierPeer
from orchestrator.pool import Pool
from orchestrator.session.driver import SessionDriver
from orchestrator.session.stats import Totals
from orchestrator.sessions import Orchestrator
from specwire.core.messages import Discipline, Outcome
from specwire.core.placement import Reason
from specwire.core.session import State
from specwire.registry.entry import Role
from specwire.rpc.link import Link
from specwire.telemetry.metrics import VLLM, Families, by_label, by_labels, counter, draft_families, gauge, histogram
from specwire.telemetry.tally import OrchestratorTally, SessionStats

# Where a plan's reason turns to numbers; the part before has few values.
NUMBERS = re.compile(r"[\s,:]*[-+]?\d.*")


def families(orchestrator: Orchestrator) -> Families:
    running = [driver for driver in orchestrator.sessions.values() if driver.view.output.end is None]
    totals = orchestrator.totals.with_running(driver.view.stats for driver in running)
    yield from _of_sessions(running, totals, orchestrator.tally)
    yield from _of_speculation(totals.stats)
    yield from _as_vllm(totals.stats)
    yield from _of_latency(orchestrator.tally)
    yield from _of_failures(totals.stats, orchestrator.tally)
    yield from _of_plans(running)
    yield from _of_peers(orchestrator.pool)
    yield from _of_registry(orchestrator.pool)
    trouble = "For so long the session log has taken no writes; 0 where it takes them."
    yield gauge("log_trouble_seconds", trouble, orchestrator.log.trouble_s)
    yield gauge("ready", "1 where new sessions are wanted.", orchestrator.unready is None)


def _of_sessions(running: list[SessionDriver], totals: Totals, tally: OrchestratorTally) -> Families:
    states = Counter(driver.session.state for driver in running)
    alive = {state.value: states[state] for state in State if state is not State.ENDED}
    yield by_label(gauge, "sessions", "Sessions by state; fenced: driven elsewhere, shown here.", "state", alive)
    yield gauge("num_sessions_running", "Sessions that are driven or shown here.", len(running))
    yield counter("sessions_begun_total", "Sessions that were begun here.", tally.begun)
    reasons = {reason.name.lower(): count for reason, count in sorted(totals.reasons.items())}
    yield by_label(
        counter, "sessions_finished_total", "Sessions that ended here, by reason.", "finished_reason", reasons
    )
    refused = dict(tally.refused)
    yield by_label(counter, "sessions_refused_total", "Sessions that were not begun, by status.", "status", refused)
    outcomes = {outcome.name.lower(): totals.stats.outcomes[outcome] for outcome in Outcome}
    yield by_label(counter, "generation_tokens_total", "Tokens emitted, by how they came to be.", "outcome", outcomes)
    yield counter("prompt_tokens_total", "Tokens of prompts.", tally.prompt_tokens)
    yield counter("prompt_tokens_cached_total", "Of these, those that needed no forward.", totals.stats.cached_tokens)
    yield counter("target_forwards_total", "Forwards that decided tokens, by session.", totals.stats.target_forwards)
    saved = "Tokens that forwards decided beyond one each."
    yield counter("target_forwards_saved_total", saved, totals.stats.forwards_saved)


def _of_speculation(stats: SessionStats) -> Families:
    prefix = "spec_decode_num"
    by_position = {str(index): count for index, count in enumerate(stats.accepted_at[: positions(stats)])}
    yield counter(f"{prefix}_drafts_total", "Windows of draft tokens.", stats.tested_at[0])
    yield from draft_families(stats.drafts)
    yield by_label(
        counter,
        f"{prefix}_accepted_tokens_per_pos_total",
        "Draft tokens accepted, by place in the window.",
        "position",
        by_position,
    )


def _as_vllm(stats: SessionStats) -> Families:
    """The counters that vLLM's own benchmark reads, by its names: tokens of all sources together, in windows."""
    prefix, drafts = f"{VLLM}spec_decode_num", stats.in_windows
    by_position = {str(index): count for index, count in enumerate(stats.accepted_at[: positions(stats)])}
    yield counter(f"{prefix}_drafts_total", "Windows of draft tokens.", stats.tested_at[0])
    yield counter(f"{prefix}_draft_tokens_total", "Draft tokens put to the target.", drafts.proposed)
    yield counter(f"{prefix}_accepted_tokens_total", "Draft tokens that were accepted.", drafts.accepted)
    text = "Draft tokens accepted, by place in the window."
    yield by_label(counter, f"{prefix}_accepted_tokens_per_pos_total", text, "position", by_position)


def positions(stats: SessionStats) -> int:
    """Places of a window that were ever tested."""
    return max((index + 1 for index, tested in enumerate(stats.tested_at) if tested), default=0)


def _of_latency(tally: OrchestratorTally) -> Families:
    yield histogram("time_to_first_token_seconds", "From the request to its first token.", tally.first_token_s)
    yield histogram("inter_token_latency_seconds", "Between tokens, as they are emitted.", tally.between_s)
    yield histogram("e2e_request_latency_seconds", "From the request to its end.", tally.whole_s)
    yield histogram("request_queue_time_seconds", "From the request to its place at a verifier.", tally.queue_s)
    yield histogram("log_append_seconds", "Until the session log has acknowledged an append.", tally.append_s)


def _of_failures(stats: SessionStats, tally: OrchestratorTally) -> Families:
    yield counter(
        "log_append_failures_total", "Appends that the log refused or did not take in time.", tally.append_failures
    )
    yield counter("session_claims_total", "Sessions taken up that another orchestrator drove.", tally.claims)
    yield counter("sessions_fenced_total", "Sessions that another orchestrator took.", tally.fenced)
    yield counter("session_opens_total", "Places of sessions at verifiers.", stats.opens)
    yield counter("session_reopens_total", "Of these, those after the first.", stats.reopens)
    yield counter(
        "session_verifier_losses_total", "Verifiers lost, by each session that had them.", stats.verifier_losses
    )
    yield counter("session_drafter_losses_total", "Drafters lost, by each session that had them.", stats.drafter_losses)
    yield counter("session_drafter_refusals_total", "Drafters that would not serve a session.", stats.drafter_refusals)


def _of_plans(running: list[SessionDriver]) -> Families:
    plans = [d.plan for driver in running for d in driver.view.stats.drafters if d.plan and not d.lost]
    text = "Drafters of sessions by how their verifiers have them draft, and why."
    yield by_labels(gauge, "drafting_plans", text, ("discipline", "reason"), sorted(Counter(map(_plan, plans)).items()))


def _plan(plan: str) -> tuple[str, str]:
    """What a verifier says becomes a label only where it is of a known kind."""
    discipline, _, reason = plan.partition(": ")
    return (discipline, NUMBERS.sub("", reason)) if discipline in set(Discipline) else ("other", "")


def _of_peers(pool: Pool) -> Families:
    """A drafter that dials in chooses its name, so only peers that are dialled become labels."""
    peers: list[tuple[str, VerifierPeer | DrafterPeer]] = [
        *(("verifier", verifier) for verifier in pool.verifiers),
        *(("drafter", drafter) for drafter in pool.drafters),
    ]
    up = Counter(role for role, peer in peers if peer.up)
    yield by_label(
        gauge, "links_up", "Peers that can be used now.", "role", {r: up[r] for r in ("verifier", "drafter")}
    )
    dialled = [((role, peer.link.address), peer, peer.link) for role, peer in peers if isinstance(peer.link, Link)]
    labels = "role", "peer"
    ups = ((at, peer.up) for at, peer, _ in dialled)
    yield by_labels(gauge, "link_up", "1 where the peer can be used.", labels, ups)
    text = "The least of the latest measurements; 0 before the link was ever up."
    trips = ((at, link.round_trip_us / 1e6) for at, _, link in dialled)
    yield by_labels(gauge, "link_round_trip_seconds", text, labels, trips)
    placed = ((at, len(peer.subjects)) for at, peer, _ in dialled)
    yield by_labels(gauge, "link_sessions", "Sessions that are open there.", labels, placed)


def _of_registry(pool: Pool) -> Families:
    placed = {reason.value: pool.placed[reason] for reason in Reason}
    yield by_label(counter, "placements_total", "Sessions given to a verifier, by why to that one.", "reason", placed)
    feed = pool.feed
    services = {role.value: feed.services[role] if feed is not None else 0 for role in Role}
    yield by_label(gauge, "registry_services", "Services that are registered.", "role", services)
    ignored = dict(feed.ignored) if feed is not None else {}
    yield by_label(gauge, "registry_ignored", "What is registered and not believed, or not dialled.", "reason", ignored)
    silent = feed.silent_s if feed is not None else 0.0
    yield gauge("registry_silent_seconds", "Since the registry answered last; 0 without one.", silent)
