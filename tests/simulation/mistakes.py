"""The known mistakes that the simulation must catch, put into the real code one at a time, and in which scenarios."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.core import mistakes as core
from tests.patches import Patch
from tests.simulation import log_mistakes as log
from tests.simulation import mistake_scenarios as made
from tests.simulation import peer_mistakes as peers
from tests.simulation import request_mistakes as requests
from tests.simulation.scenario import Scenario, random_scenario


@dataclass(frozen=True)
class Mistake:
    """make: puts it in. by: what is said of it, a regular expression. shows: whether it can show in a scenario.

    scenarios: by seed. first: the seed that is tried before the others, where it took many to find one that shows it.
    """

    make: Callable[[Patch], None]
    by: str
    shows: Callable[[Scenario], bool] = made.always
    scenarios: Callable[[int], Scenario] = random_scenario
    first: int = 0

    @property
    def name(self) -> str:
        return self.make.__name__


MISTAKES = [
    # The state machines
    Mistake(core.emit_before_append, "emitted is not what was shown"),
    Mistake(core.flow_control_ignored, "credit beyond what is earned"),
    Mistake(core.undurable_tokens_half_forgotten, "the verifier decided", scenarios=made.links_cut_and_a_slow_log),
    Mistake(core.credit_ignored, "a verifier decided, its credit"),
    Mistake(core.chain_outlives_its_contradiction, "draft nodes live", made.drafted),
    Mistake(core.tail_delivered_from_its_start, "the verifier decided", scenarios=made.links_cut_and_a_slow_log),
    # Trees
    Mistake(core.sibling_taken_for_child, "draft nodes live|a window is no path", scenarios=made.branching),
    Mistake(core.candidate_taken_for_a_node, "it does not descend|draft nodes live", scenarios=made.branching),
    Mistake(core.run_ahead_of_the_line_only, "drafted ahead", scenarios=made.branching),
    Mistake(peers.pruned_rows_kept, "cache is not its text's", scenarios=made.branching),
    # Heads
    Mistake(core.head_s_tokens_taken_untested, "a verifier decided what cannot be", scenarios=made.poor_heads),
    Mistake(core.head_for_every_rule, "a head drafts under a rule that looks at it", scenarios=made.headed_and_weighed),
    Mistake(peers.failed_head_asked_again, "a head that failed is asked again", scenarios=made.frail_heads),
    # The log and its owners
    Mistake(log.fence_not_checked, "under fence", scenarios=made.taken_over),
    Mistake(log.append_repeated, "the log holds what cannot be", made.has("acks_lost")),
    Mistake(log.unknown_outcome_taken_for_success, "durable, acknowledged", made.has("effects_lost", "log_down")),
    Mistake(log.fenced_owner_goes_on, "prefix_hash|acknowledged", scenarios=made.taken_over),
    Mistake(log.lost_log_begun_anew, "acknowledged|DATA_LOSS|in the log", scenarios=made.log_lost_under_way),
    Mistake(log.tasks_left_behind, "left running", scenarios=made.left_behind),
    Mistake(log.emits_in_stopping_what_is_not_acknowledged, "emitted, acknowledged", scenarios=made.told_to_stop),
    Mistake(log.living_sessions_swept, "cancelled by nobody", scenarios=made.long_lived),
    Mistake(log.orphans_left_alone, "runs for ever", scenarios=made.orphaned),
    Mistake(log.cancellation_in_the_log_overlooked, "it goes on, cancelled", scenarios=made.cancelled_elsewhere),
    Mistake(log.deleted_session_written_again, "that was deleted is written", scenarios=made.deleted_elsewhere),
    Mistake(
        log.deadline_forgotten_by_the_next_owner,
        "goes on after its deadline",
        scenarios=made.passed_on_before_its_deadline,
    ),
    Mistake(
        log.promise_dropped_while_the_log_is_silent, "it goes on, cancelled", scenarios=made.cancelled_before_an_outage
    ),
    Mistake(log.deletion_not_promised, "it goes on, deleted", scenarios=made.deleted_before_a_loss),
    Mistake(log.cut_off_counted_by_attempts, "had ended runs again", scenarios=made.ended_elsewhere_and_forgotten),
    Mistake(log.damaged_log_claimed, "was refused, and has changed", scenarios=made.damaged_and_taken),
    Mistake(log.fences_by_the_log_s_clock_alone, "was granted before", scenarios=made.failed_over),
    Mistake(log.stale_at_the_verifier_for_good, "superseded", scenarios=made.failed_over_without_the_claimer),
    Mistake(log.ready_without_a_log, "it is ready, and its log", scenarios=made.cancelled_in_an_outage),
    Mistake(log.session_begun_without_memory, "that cannot be logged", scenarios=made.out_of_memory),
    # Requests, and what clients are told
    Mistake(
        requests.tokens_after_the_end_of_an_accepted_run,
        "a verifier decided what cannot be",
        scenarios=made.short_and_well_drafted,
    ),
    Mistake(requests.reader_s_place_off_by_the_withheld_text, "a client reads", made.LINK_LOST, first=101),
    Mistake(requests.library_s_hash_a_token_behind, "prefix_hash", scenarios=made.taken_over),
    Mistake(
        requests.begins_sessions_while_it_stops, "was begun by an orchestrator that stops", scenarios=made.told_to_stop
    ),
    Mistake(requests.parent_of_another_tenant_taken, "another tenant's session", scenarios=made.two_tenants),
    Mistake(requests.request_id_joined_across_tenants, "a client reads a session of", scenarios=made.two_tenants),
    Mistake(requests.cache_shared_across_tenants, "cached, and never had", scenarios=made.two_tenants),
    Mistake(requests.request_id_joined_with_another_body, "the prompt, asked for", scenarios=made.two_bodies),
    Mistake(requests.parent_s_last_token_left_out, "the prompt, asked for", scenarios=made.next_turns),
    Mistake(requests.completions_without_a_number, "sampling, asked for", scenarios=made.several_completions),
    Mistake(
        requests.completions_share_their_noise, "a verifier decided what cannot be", scenarios=made.several_completions
    ),
    Mistake(requests.lossy_not_marked, "lossy, by rule", scenarios=made.lossy),
    Mistake(
        requests.log_probabilities_lost_in_a_replay, "log-probabilities, due", scenarios=made.reported_and_taken_over
    ),
    Mistake(requests.ends_too_early, "a verifier decided what cannot be", scenarios=made.not_to_end_early),
    Mistake(
        requests.stop_string_cut_on_the_wrong_side_after_a_takeover,
        "text, of tokens",
        scenarios=made.stopped_by_strings_and_taken_over,
    ),
    Mistake(
        requests.text_made_by_the_latest_tokenizer, "text, of tokens|a client reads", scenarios=made.unequal_tokenizers
    ),
    # Verifiers and drafters
    Mistake(peers.stale_opening_accepted, "generation served", scenarios=made.late_openings),
    Mistake(peers.verifier_s_rollback_off_by_one, "cache", made.drafted),
    Mistake(peers.resumed_beyond_the_log, "the verifier decided", scenarios=made.away_and_back),
    Mistake(peers.drafter_s_cache_not_rolled_back, "cache is not its text's", made.drafted),
    Mistake(peers.run_ahead_ignored, "drafted ahead", made.drafted),
    Mistake(peers.lost_verifier_not_told, "nothing more has happened", scenarios=made.links_cut_and_a_slow_log),
    Mistake(
        peers.opens_sessions_while_it_stops, "was opened at a verifier that stops", scenarios=made.verifier_told_to_stop
    ),
    Mistake(peers.penalties_forget_the_log, "a verifier decided what cannot be", scenarios=made.penalised_and_moved),
    Mistake(
        peers.refused_draft_token_accepted,
        "a verifier decided what cannot be",
        scenarios=made.weighed_and_badly_drafted,
    ),
    Mistake(peers.copied_prefix_too_long, "cache", scenarios=made.shared_prompts),
    Mistake(peers.urgent_sessions_passed_over, "whose turn it was", scenarios=made.a_queue),
    Mistake(
        peers.verifiers_compared_by_weights_alone,
        "cannot be|the log ends|a client reads",
        scenarios=made.unequal_somehow,
    ),
    Mistake(peers.former_verifier_trusted, "decided what cannot be|the log ends", scenarios=made.swapped),
]
