"""The failover matrix as data: what may go wrong, what a client then sees, who notices it, who goes on.

docs/RELIABILITY.md shows it (`scripts/reliability.py`), `tests/faults/test_matrix.py` does it to real processes, and
`python -m tests.faults.measure` measures the pauses.
"""

from __future__ import annotations

from dataclasses import dataclass

STOPPED_S = 10.0
# How long Redis is away where it does not come back at once, and a link is cut.
AWAY_S = 3.0
CUT_S = 5.0

PARTIES = ("drafter", "verifier", "orchestrator", "Redis")
PARTY_FAULTS = ("SIGKILL", "SIGSTOP", "graceful stop", "restart")
LINKS = ("client-orchestrator", "orchestrator-verifier", "orchestrator-drafter", "orchestrator-Redis")
LINK_FAULTS = ("cut", "stall", "reset")

NOTHING = "nothing: at most one step takes longer"
PAUSE = "a pause"
ENDED = "at once: the connection ends"
SILENT = "10 s: keepalive (ping every 5 s, answered within 5 s)"
NO_ANSWER = "2 s: a round trip without an answer"


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault at one place.

    seen: by the client whose text streams. noticed: within which time, by what. then: who goes on, and how.
    bound_s: the longest pause on a machine that is not overloaded, the time away included.
    also: further tests, FILE::FUNCTION within tests/faults, or FOLDER/FILE::FUNCTION within tests.
    quick: belongs to `make test`.
    """

    where: str
    fault: str
    seen: str
    noticed: str
    then: str
    bound_s: float
    also: tuple[str, ...] = ()
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.where}, {self.fault}".replace(" ", "-").replace(",", "")


CELLS = (
    Cell(
        "drafter",
        "SIGKILL",
        NOTHING,
        ENDED,
        "the verifier decides alone, another drafter drafts if there is one; it is dialled again at least every second",
        0.5,
        ("test_peers.py::test_a_session_outlives_its_drafter",),
    ),
    Cell(
        "drafter",
        "SIGSTOP",
        NOTHING,
        f"one step: what it owes is not waited for longer than that pays; {SILENT}",
        "the verifier decides alone; awake, the drafter hears what it missed and drafts again",
        0.5,
        ("test_peers.py::test_a_drafter_that_hangs_for_a_while",),
    ),
    Cell(
        "drafter",
        "graceful stop",
        NOTHING,
        ENDED,
        "as after SIGKILL; it ends with exit code 0",
        0.5,
        ("test_drain.py::test_a_drafter_leaves_at_once",),
    ),
    Cell(
        "drafter",
        "restart",
        NOTHING,
        ENDED,
        "the verifier decides alone until the new one is dialled, as a new source",
        0.5,
        ("test_peers.py::test_a_killed_drafter_costs_nothing_and_comes_back",),
        quick=True,
    ),
    Cell(
        "verifier",
        "SIGKILL",
        PAUSE,
        ENDED,
        "another verifier feeds the text from the log and decides on; it is taken after two failed attempts to dial "
        "the former one, or after 2 s",
        3.0,
        ("test_links.py::test_a_verifier_is_replaced_while_proposals_are_in_flight", "test_demo_pair.py::test_killed"),
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
        "at once: it says so",
        "it takes no new sessions and decides on for its `--grace`; what has not ended then is taken over by another",
        3.0,
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
        quick=True,
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
            "test_demo_pair.py::test_killed",
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
        "at once: its streams end with `UNAVAILABLE`",
        "as after SIGKILL; it ends with exit code 0",
        2.0,
        (
            "test_orchestrators.py::test_left",
            "test_log.py::test_sigterm_while_text_streams",
            "test_drain.py::test_what_is_handed_over_goes_on_at_another_orchestrator",
        ),
        quick=True,
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
    ),
    Cell(
        "Redis",
        "graceful stop",
        "a pause; `UNAVAILABLE` after 30 s without a log",
        ENDED,
        f"comes back with what it saved, here after {AWAY_S:g} s: the append is repeated, and found done or not",
        AWAY_S + 2.5,
        quick=True,
    ),
    Cell(
        "Redis",
        "restart",
        PAUSE,
        ENDED,
        "comes back with an old state: the owner writes what is missing under its fence",
        2.5,
        ("test_log.py::test_a_log_that_was_lost_is_written_again_from_its_owners_memory",),
        quick=True,
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
        quick=True,
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
    ),
    Cell(
        "orchestrator-verifier",
        "reset",
        PAUSE,
        ENDED,
        "the next connection takes the session over, with what was decided meanwhile",
        2.0,
        ("test_links.py::test_a_link_that_is_cut_and_hangs_again_and_again_while_sampled_text_is_drafted",),
        quick=True,
    ),
    Cell(
        "orchestrator-drafter",
        "cut",
        NOTHING,
        ENDED,
        "the verifier decides alone; dialled again, the drafter is a new source",
        0.5,
        ("test_links.py::test_a_drafter_s_link_is_slow_hangs_and_breaks",),
    ),
    Cell(
        "orchestrator-drafter",
        "stall",
        NOTHING,
        f"one step: as for SIGSTOP; {SILENT}",
        "the verifier decides alone; proposals that come late are stale, and dropped",
        0.5,
        ("test_links.py::test_a_drafter_s_link_is_slow_hangs_and_breaks",),
    ),
    Cell("orchestrator-drafter", "reset", NOTHING, ENDED, "as cut", 0.5, quick=True),
    Cell(
        "orchestrator-Redis",
        "cut",
        PAUSE,
        ENDED,
        "appends of unknown outcome are repeated every 0.1 s: the script compares, and adds what is missing",
        CUT_S + 2.5,
        ("test_log.py::test_acknowledgements_that_are_cut_off_lose_and_repeat_nothing",),
    ),
    Cell("orchestrator-Redis", "stall", PAUSE, NO_ANSWER, "as for SIGSTOP of Redis", STOPPED_S + 2.5),
    Cell(
        "orchestrator-Redis",
        "reset",
        PAUSE,
        ENDED,
        "as cut, at once",
        1.0,
        ("test_log.py::test_a_line_to_the_log_that_breaks_between_two_sessions",),
        quick=True,
    ),
)


def shown_by(cell: Cell) -> tuple[str, ...]:
    """Every test that shows the cell, named as `also` does."""
    return (f"test_matrix.py::test_a_fault[{cell.name}]", *cell.also)
