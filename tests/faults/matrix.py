"""The failover matrix as data: what may go wrong, what a client then sees, who notices it, who goes on.

docs/RELIABILITY.md shows it (`scripts/reliability.py`), `test_matrix.py` and `test_demo_pair.py` do it to real
processes, and `python -m tests.faults.measure` measures how soon it is noticed and how long text pauses.
"""

from __future__ import annotations

from tests.faults.cells import (
    AWAY_S,
    CUT_S,
    ENDED,
    HTTP_SILENT_S,
    NO_ANSWER,
    NO_EVENT,
    NOTHING,
    PAUSE,
    SILENT,
    STOPPED_S,
    Cell,
    Notice,
)

PARTIES = ("drafter", "verifier", "orchestrator", "Redis")
PARTY_FAULTS = ("SIGKILL", "SIGSTOP", "graceful stop", "restart")
CLIENTS_LINE, HTTP_LINE, JOINED_LINE = "client-orchestrator", "HTTP client-orchestrator", "drafter-orchestrator"
# JOINED_LINE is that of a drafter that dials in.
LINKS = (
    CLIENTS_LINE,
    HTTP_LINE,
    "orchestrator-verifier",
    "orchestrator-drafter",
    JOINED_LINE,
    "orchestrator-Redis",
)
LINK_FAULTS = ("cut", "stall", "reset")
# What `make test` plays, every place and every fault at least once; the last two, which take longest, at the same time.
QUICK = (
    ("drafter", "graceful stop"),
    ("verifier", "SIGKILL"),
    ("Redis", "restart"),
    (CLIENTS_LINE, "cut"),
    (HTTP_LINE, "reset"),
    ("orchestrator-verifier", "reset"),
    ("orchestrator-drafter", "reset"),
    (JOINED_LINE, "reset"),
)
QUICK_SILENT = (("orchestrator", "SIGSTOP"), ("orchestrator-Redis", "stall"))

CELLS = (
    Cell(
        "drafter",
        "SIGKILL",
        NOTHING,
        ENDED,
        "the verifier decides alone, another drafter drafts if there is one; it is dialled again at least every second",
        None,
        ("test_peers.py::test_a_session_outlives_its_drafter",),
    ),
    Cell(
        "drafter",
        "SIGSTOP",
        NOTHING,
        Notice(SILENT.within_s, f"{SILENT.how}; until then a step waits no longer for what it owes than that pays"),
        "the verifier decides alone; awake, the drafter hears what it missed and drafts again",
        None,
        ("test_peers.py::test_a_drafter_that_hangs_for_a_while",),
    ),
    Cell(
        "drafter",
        "graceful stop",
        NOTHING,
        ENDED,
        "as after SIGKILL; it ends with exit code 0",
        None,
        ("test_drain.py::test_a_drafter_leaves_at_once",),
    ),
    Cell(
        "drafter",
        "restart",
        NOTHING,
        ENDED,
        "the verifier decides alone until the new one is dialled, as a new source",
        None,
        ("test_peers.py::test_a_killed_drafter_costs_nothing_and_comes_back",),
    ),
    Cell(
        "verifier",
        "SIGKILL",
        PAUSE,
        ENDED,
        "another verifier feeds the text from the log and decides on; it is taken after two failed attempts to dial "
        "the former one, or after 2 s",
        3.0,
        ("test_links.py::test_a_verifier_is_replaced_while_proposals_are_in_flight",),
    ),
    Cell(
        "verifier",
        "SIGSTOP",
        PAUSE,
        SILENT,
        "another verifier, 2 s later; what the stopped one still says has an old attach, and is void",
        12.5,
        ("test_peers.py::test_a_verifier_that_hangs_for_a_while",),
    ),
    Cell(
        "verifier",
        "graceful stop",
        "nothing for its `--grace`; then a pause",
        Notice(1.0, "it says so"),
        "it takes no new sessions and decides on for its `--grace`; another one takes over what has not ended then, "
        "at once",
        1.5,
        (
            "test_peers.py::test_a_verifier_is_replaced_mid_sentence",
            "test_drain.py::test_a_verifier_lets_its_sessions_end_and_others_take_the_new_ones",
        ),
    ),
    Cell(
        "verifier",
        "restart",
        "a pause until it is back; after 30 s without a verifier `UNAVAILABLE`",
        ENDED,
        "the new process, alone: dialled at least every second, it feeds the text from the log",
        30.0,
        (
            "test_peers.py::test_a_replaced_verifier_goes_on_with_the_same_noise",
            "orchestrator/test_generation.py::test_without_a_verifier_a_session_fails_in_time",
        ),
    ),
    Cell(
        "orchestrator",
        "SIGKILL",
        PAUSE,
        ENDED,
        "the client calls `Watch` at its next address; that orchestrator claims the session, and the verifier, which "
        "still has it, goes on",
        2.0,
        (
            "test_orchestrators.py::test_killed",
            "test_log.py::test_a_killed_orchestrator_had_shown_nothing_but_the_log",
        ),
    ),
    Cell(
        "orchestrator",
        "SIGSTOP",
        PAUSE,
        SILENT,
        "as after SIGKILL; awake, the former owner finds its appends refused, and shows its readers the log",
        12.0,
        (
            "test_orchestrators.py::test_stopped_for_a_while",
            "test_orchestrators.py::test_split_brain",
            "test_orchestrators.py::test_taken_from_one_that_runs",
        ),
    ),
    Cell(
        "orchestrator",
        "graceful stop",
        "nothing for its `--grace`; then a pause",
        Notice(1.5, "its streams end with `UNAVAILABLE` once its `--grace` is over, here 0.3 s"),
        "as after SIGKILL; it ends with exit code 0",
        2.0,
        (
            "test_orchestrators.py::test_left",
            "test_log.py::test_sigterm_while_text_streams",
            "test_drain.py::test_what_is_handed_over_goes_on_at_another_orchestrator",
        ),
    ),
    Cell(
        "orchestrator",
        "restart",
        "a pause until it is back; `UNAVAILABLE` once the client's patience of 30 s has ended",
        ENDED,
        "the new process at the same address, for a client that knows no other: it claims the session from the log",
        30.0,
        ("test_orchestrators.py::test_alone_and_back_again", "test_orchestrators.py::test_nobody_is_left"),
    ),
    Cell(
        "Redis",
        "SIGKILL",
        "a pause; `UNAVAILABLE` after 30 s without a log",
        ENDED,
        f"comes back empty, here after {AWAY_S:g} s: the owner writes the session again, from memory, under its fence",
        AWAY_S + 2.5,
        (
            "test_log.py::test_a_log_that_was_lost_is_written_again_from_its_owners_memory",
            "test_split_log.py::test_the_newest_fence_wins",
            "test_log.py::test_a_session_that_cannot_be_logged_does_not_begin",
            "orchestrator/test_store_lost.py::test_a_log_that_stays_away_ends_the_stream_and_shows_nothing_more",
        ),
    ),
    Cell(
        "Redis",
        "SIGSTOP",
        PAUSE,
        NO_ANSWER,
        "the append is repeated every 2.1 s until it is answered; what of it had been done is found equal",
        STOPPED_S + 2.5,
        ("test_log.py::test_a_paused_log_pauses_the_text",),
        outlasted=True,
    ),
    Cell(
        "Redis",
        "graceful stop",
        "a pause; `UNAVAILABLE` after 30 s without a log",
        ENDED,
        f"comes back with what it saved, here after {AWAY_S:g} s: the append is repeated, and found done or not",
        AWAY_S + 2.5,
    ),
    Cell(
        "Redis",
        "restart",
        PAUSE,
        ENDED,
        "comes back with an old state: the owner writes what is missing under its fence",
        2.5,
        ("test_log.py::test_a_log_that_was_lost_is_written_again_from_its_owners_memory",),
    ),
    Cell(
        "client-orchestrator",
        "cut",
        PAUSE,
        ENDED,
        "`Watch` at the next address, which claims the session",
        2.0,
        ("test_orchestrators.py::test_the_clients_own_line",),
    ),
    Cell(
        "client-orchestrator",
        "stall",
        PAUSE,
        SILENT,
        "`Watch` at the next address, which claims the session, or replays it if it has ended meanwhile",
        12.0,
        (
            "test_orchestrators.py::test_the_clients_own_line",
            "test_orchestrators.py::test_a_line_that_hangs_is_left_for_another_address",
        ),
    ),
    Cell(
        "client-orchestrator",
        "reset",
        PAUSE,
        ENDED,
        "`Watch` at the same address, for a client that knows no other: the session has gone on there",
        2.0,
        ("test_orchestrators.py::test_the_clients_own_line",),
    ),
    Cell(
        "HTTP client-orchestrator",
        "cut",
        PAUSE,
        ENDED,
        "the request again, under its id and with `Last-Event-ID`, at the next address, which claims the session",
        2.0,
        ("orchestrator/http/test_elsewhere.py::test_a_stream_goes_on_where_its_orchestrator_left_it",),
    ),
    Cell(
        "HTTP client-orchestrator",
        "stall",
        PAUSE,
        NO_EVENT,
        "as cut, or replayed if the session has ended meanwhile",
        HTTP_SILENT_S + 2.0,
    ),
    Cell(
        "HTTP client-orchestrator",
        "reset",
        PAUSE,
        ENDED,
        "the request again, at the same address: the session has gone on there",
        2.0,
        ("orchestrator/http/test_leaving.py::test_with_a_request_id_a_stream_goes_on_and_is_resumed_where_it_was",),
    ),
    Cell(
        "orchestrator-verifier",
        "cut",
        PAUSE,
        ENDED,
        "the verifier keeps the session and decides on as far as its credit; the next connection brings what is "
        "missing. Where there is another verifier, it takes over after 2 s",
        CUT_S + 2.5,
        (
            "test_links.py::test_a_link_cut_for_seconds_mid_sentence",
            "test_links.py::test_a_session_goes_back_to_the_verifier_that_keeps_it",
        ),
    ),
    Cell(
        "orchestrator-verifier",
        "stall",
        PAUSE,
        SILENT,
        "the same connection, or the next one: the newest (fence, attach) has the session",
        STOPPED_S + 3.0,
        ("test_links.py::test_a_link_that_hangs_for_longer_than_it_takes_to_notice",),
        outlasted=True,
    ),
    Cell(
        "orchestrator-verifier",
        "reset",
        PAUSE,
        ENDED,
        "the next connection takes the session over, with what was decided meanwhile",
        2.0,
        ("test_links.py::test_a_link_that_is_cut_and_hangs_again_and_again_while_sampled_text_is_drafted",),
    ),
    Cell(
        "orchestrator-drafter",
        "cut",
        NOTHING,
        ENDED,
        "the verifier decides alone; dialled again, the drafter is a new source",
        None,
        ("test_links.py::test_a_drafter_s_link_is_slow_hangs_and_breaks",),
    ),
    Cell(
        "orchestrator-drafter",
        "stall",
        NOTHING,
        Notice(SILENT.within_s, f"{SILENT.how}; until then as for SIGSTOP"),
        "the verifier decides alone; proposals that come late are stale, and dropped",
        None,
        ("test_links.py::test_a_drafter_s_link_is_slow_hangs_and_breaks",),
    ),
    Cell("orchestrator-drafter", "reset", NOTHING, ENDED, "as cut", None),
    Cell(
        "drafter-orchestrator",
        "cut",
        NOTHING,
        ENDED,
        "the verifier decides alone; the drafter dials in again, ever more slowly, and is a new source",
        None,
        ("orchestrator/test_hub.py::test_it_waits_for_its_orchestrator_and_joins_again",),
    ),
    Cell(
        "drafter-orchestrator",
        "stall",
        NOTHING,
        Notice(SILENT.within_s, f"{SILENT.how}, at both ends; until then as for SIGSTOP"),
        "the verifier decides alone; proposals that come late are stale, and dropped",
        None,
    ),
    Cell("drafter-orchestrator", "reset", NOTHING, ENDED, "as cut", None),
    Cell(
        "orchestrator-Redis",
        "cut",
        PAUSE,
        ENDED,
        "appends of unknown outcome are repeated every 0.1 s: the script compares, and adds what is missing",
        CUT_S + 2.5,
        ("test_log.py::test_acknowledgements_that_are_cut_off_lose_and_repeat_nothing",),
    ),
    Cell("orchestrator-Redis", "stall", PAUSE, NO_ANSWER, "as for SIGSTOP of Redis", STOPPED_S + 2.5, outlasted=True),
    Cell(
        "orchestrator-Redis",
        "reset",
        PAUSE,
        ENDED,
        "as cut, at once",
        1.0,
        ("test_log.py::test_a_line_to_the_log_that_breaks_between_two_sessions",),
    ),
)


def shown_by(cell: Cell) -> tuple[str, ...]:
    """Every test that shows the cell, named as `also` does."""
    return (*(f"{file}::test_a_fault[{cell.name}]" for file in ("test_matrix.py", "test_demo_pair.py")), *cell.also)
