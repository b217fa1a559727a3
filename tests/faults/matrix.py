"""The failover matrix as data: what goes wrong, what a client then sees, who notices it, who goes on.

docs/RELIABILITY.md has its bounds (`scripts/figures`), `test_matrix.py` and `test_demo_pair.py` do it to real
processes, and `python -m tests.faults.measure` measures how soon it is noticed and how long text pauses.
"""

from __future__ import annotations

from dataclasses import dataclass

STOPPED_S = 10.0
# Seconds of a fault that only keepalive notices: 10 s, as elsewhere, would end just when it does.
HELD_S = 13.0
# How long Redis is away where it does not come back at once, and a link is cut.
AWAY_S = 3.0
CUT_S = 5.0
# Seconds that the matrix's HTTP client waits for an event; comments on a silent stream (`--sse-keep-alive`) come later.
HTTP_SILENT_S = 5.0

NOTHING = "nothing"
PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class Notice:
    """Within how many seconds, and by what."""

    within_s: float
    how: str

    def __str__(self) -> str:
        return f"{self.within_s:g} s: {self.how}"


# The end of a connection is noticed at once; the second is for processes that have no core just then.
ENDED = Notice(1.0, "connection ends")
SILENT = Notice(11.0, "keepalive")
NO_ANSWER = Notice(3.0, "no answer in 2 s")
NO_EVENT = Notice(HTTP_SILENT_S + 1.0, f"the client's read timeout, {HTTP_SILENT_S:g} s")
LOOK = Notice(2.0, "next poll")
NO_LOOK = Notice(6.0, "two polls unanswered")


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault at one place.

    seen: by the client whose text streams. noticed: by whoever has to. then: who goes on, and how.
    bound_s: the longest pause on a machine that is not overloaded, the time away included; None: a step more than text
        takes between two chunks without the fault.
    also: further tests, FILE::FUNCTION within tests/faults, or FOLDER/FILE::FUNCTION within tests.
    outlasted: nobody can go on while the fault lasts, so that `bound_s` has its STOPPED_S in it.
    """

    where: str
    fault: str
    seen: str
    noticed: Notice
    then: str
    bound_s: float | None
    also: tuple[str, ...] = ()
    outlasted: bool = False

    @property
    def name(self) -> str:
        return f"{self.where}, {self.fault}".replace(" ", "-").replace(",", "")

    @property
    def pause(self) -> str:
        """`bound_s`, for people."""
        return "1 step" if self.bound_s is None else f"{self.bound_s:g}"

    @property
    def about_drafter(self) -> bool:
        return "drafter" in self.where

    @property
    def unseen(self) -> bool:
        """Whether no client's text may wait for it."""
        return self.bound_s is None

    @property
    def silent(self) -> bool:
        """Nobody answers, and no connection breaks, for STOPPED_S."""
        return self.fault in ("SIGSTOP", "stall")

    @property
    def over_at_once(self) -> bool:
        """Whether it may be over before anybody notices it."""
        return self.fault == "reset" or (self.where, self.fault) == ("Redis", "restart")


def cell(
    where: str,
    fault: str,
    then: str,
    bound_s: float | None = None,
    *,
    noticed: Notice = ENDED,
    seen: str = "",
    also: tuple[str, ...] = (),
    outlasted: bool = False,
) -> Cell:
    """seen: a pause where it may last, and nothing where not, unless given."""
    seen = seen or (NOTHING if bound_s is None else PAUSE)
    return Cell(where, fault, seen, noticed, then, bound_s, also, outlasted)


def held_s(cell: Cell) -> float:
    """Seconds for which nobody answers."""
    return HELD_S if cell.silent and cell.noticed.within_s >= SILENT.within_s else STOPPED_S


PARTIES = ("drafter", "verifier", "orchestrator", "Redis")
PARTY_FAULTS = ("SIGKILL", "SIGSTOP", "graceful stop", "restart")
CLIENTS_LINE, HTTP_LINE, JOINED_LINE = "client-orchestrator", "HTTP client-orchestrator", "drafter-orchestrator"
# JOINED_LINE is that of a drafter that dials in, REGISTRYS_LINE all those to the registry, at once.
REGISTRYS_LINE = "services-registry"
LINKS = (
    CLIENTS_LINE,
    HTTP_LINE,
    "orchestrator-verifier",
    "orchestrator-drafter",
    JOINED_LINE,
    "orchestrator-Redis",
    REGISTRYS_LINE,
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
    (REGISTRYS_LINE, "reset"),
)
QUICK_SILENT = (("orchestrator", "SIGSTOP"), ("orchestrator-Redis", "stall"))

CELLS = (
    cell(
        "drafter",
        "SIGKILL",
        "the verifier decides alone; another drafter drafts if there is one; the lost one is redialled every second",
    ),
    cell("drafter", "SIGSTOP", "the verifier decides alone; awake, the drafter catches up", noticed=SILENT),
    cell("drafter", "graceful stop", "as after SIGKILL; exit code 0"),
    cell("drafter", "restart", "the verifier decides alone until the new one is dialled, as a new source"),
    cell(
        "verifier",
        "SIGKILL",
        "another verifier prefills the text from the log, after two failed dials of the former one or 2 s",
        3.0,
        also=("test_links.py::test_a_verifier_is_replaced_while_proposals_are_in_flight",),
    ),
    cell(
        "verifier",
        "SIGSTOP",
        "another verifier, 2 s later; verdicts of the stopped one are void (old attach)",
        12.5,
        noticed=SILENT,
    ),
    cell(
        "verifier",
        "graceful stop",
        "no new sessions; after its `--grace` another verifier takes over at once what has not ended",
        1.5,
        noticed=Notice(1.0, "it says so"),
        seen="nothing for its `--grace`, then a pause",
        also=(
            "test_peers.py::test_a_verifier_is_replaced_mid_sentence",
            "test_drain.py::test_a_verifier_lets_its_sessions_end_and_others_take_the_new_ones",
        ),
    ),
    cell(
        "verifier",
        "restart",
        "the new process (there is no other) prefills the text from the log",
        30.0,
        seen="pause; `UNAVAILABLE` after 30 s",
        also=(
            "orchestrator/test_generation.py::test_without_a_verifier_a_session_fails_in_time",
            "test_peers.py::test_a_stream_ends_unavailable_and_its_session_goes_on",
        ),
    ),
    cell(
        "orchestrator",
        "SIGKILL",
        "the client calls `Watch` at its next address, which claims the session; the verifier still has it",
        2.0,
        also=("test_log.py::test_a_killed_orchestrator_had_shown_nothing_but_the_log",),
    ),
    cell(
        "orchestrator",
        "SIGSTOP",
        "as after SIGKILL; awake, the former owner is refused and follows the log",
        12.0,
        noticed=SILENT,
        also=("test_orchestrators.py::test_split_brain",),
    ),
    cell(
        "orchestrator",
        "graceful stop",
        "as after SIGKILL; exit code 0",
        2.0,
        noticed=Notice(1.5, "streams end `UNAVAILABLE` after `--grace`, 0.3 s"),
        seen="nothing for its `--grace`, then a pause",
        also=("test_log.py::test_sigterm_while_text_streams",),
    ),
    cell(
        "orchestrator",
        "restart",
        "the new process at the same address claims the session from the log",
        30.0,
        seen="pause; `UNAVAILABLE` after the client's 30 s",
        also=("test_orchestrators.py::test_nobody_is_left",),
    ),
    cell(
        "Redis",
        "SIGKILL",
        f"empty, back after {AWAY_S:g} s: the owner writes the session again from memory, under its fence",
        AWAY_S + 2.5,
        seen="pause; `UNAVAILABLE` after 30 s",
        also=(
            "test_log.py::test_a_log_that_was_lost_is_written_again_from_its_owners_memory",
            "test_orchestrators.py::test_the_newest_fence_wins",
            "test_log.py::test_a_session_that_cannot_be_logged_does_not_begin",
            "orchestrator/test_log_health.py::test_a_log_that_stays_away_ends_the_stream_and_shows_nothing_more",
            "test_peers.py::test_a_stream_ends_unavailable_and_its_session_goes_on",
        ),
    ),
    cell(
        "Redis",
        "SIGSTOP",
        "the append is repeated every 2.1 s; what was written already is found equal",
        STOPPED_S + 2.5,
        noticed=NO_ANSWER,
        outlasted=True,
    ),
    cell(
        "Redis",
        "graceful stop",
        f"back after {AWAY_S:g} s with what it saved: the append is repeated",
        AWAY_S + 2.5,
        seen="pause; `UNAVAILABLE` after 30 s",
    ),
    cell(
        "Redis",
        "restart",
        "back with an old state: the owner writes what is missing",
        2.5,
        also=("test_log.py::test_a_log_that_was_lost_is_written_again_from_its_owners_memory",),
    ),
    cell("client-orchestrator", "cut", "`Watch` at the next address, which claims the session", 2.0),
    cell("client-orchestrator", "stall", "as cut; a session that has ended is replayed", 12.0, noticed=SILENT),
    cell("client-orchestrator", "reset", "`Watch` at the same address, where the session went on", 2.0),
    cell(
        "HTTP client-orchestrator",
        "cut",
        "the request again (`Last-Event-ID`), at the next address, which claims the session",
        2.0,
        also=("orchestrator/http/test_streams.py::test_a_stream_goes_on_where_its_orchestrator_left_it",),
    ),
    cell(
        "HTTP client-orchestrator",
        "stall",
        "as cut; a session that has ended is replayed",
        HTTP_SILENT_S + 2.0,
        noticed=NO_EVENT,
    ),
    cell(
        "HTTP client-orchestrator",
        "reset",
        "the request again at the same address, where the session went on",
        2.0,
        also=(
            "orchestrator/http/test_streams.py::test_with_a_request_id_a_stream_goes_on_and_is_resumed_where_it_was",
        ),
    ),
    cell(
        "orchestrator-verifier",
        "cut",
        "the verifier decides on up to its credit and reports on the next connection; another verifier, if any, takes "
        "over after 2 s",
        CUT_S + 2.5,
        also=(
            "test_links.py::test_a_link_cut_for_seconds_mid_sentence",
            "test_links.py::test_a_session_goes_back_to_the_verifier_that_keeps_it",
        ),
    ),
    cell(
        "orchestrator-verifier",
        "stall",
        "the same connection or the next one: the newest (fence, attach) wins",
        STOPPED_S + 3.0,
        noticed=SILENT,
        also=("test_links.py::test_a_link_that_hangs_for_longer_than_it_takes_to_notice",),
        outlasted=True,
    ),
    cell(
        "orchestrator-verifier",
        "reset",
        "the next connection brings what was decided meanwhile",
        2.0,
        also=("test_links.py::test_a_link_that_is_cut_and_hangs_again_and_again_while_sampled_text_is_drafted",),
    ),
    cell(
        "orchestrator-drafter",
        "cut",
        "the verifier decides alone; redialled, the drafter is a new source",
        also=("test_links.py::test_a_drafter_s_link_is_slow_hangs_and_breaks",),
    ),
    cell(
        "orchestrator-drafter",
        "stall",
        "the verifier decides alone; late proposals are dropped as stale",
        noticed=SILENT,
        also=("test_links.py::test_a_drafter_s_link_is_slow_hangs_and_breaks",),
    ),
    cell("orchestrator-drafter", "reset", "as cut"),
    cell(
        "drafter-orchestrator",
        "cut",
        "the verifier decides alone; the drafter dials in again (with backoff) as a new source",
        also=("orchestrator/test_hub.py::test_it_waits_for_its_orchestrator_and_joins_again",),
    ),
    cell(
        "drafter-orchestrator",
        "stall",
        "the verifier decides alone; late proposals are dropped as stale",
        noticed=Notice(SILENT.within_s, f"{SILENT.how}, at both ends"),
    ),
    cell("drafter-orchestrator", "reset", "as cut"),
    cell(
        "orchestrator-Redis",
        "cut",
        "unacknowledged appends are repeated every 0.1 s: the script compares and adds what is missing",
        CUT_S + 2.5,
        also=("test_log.py::test_acknowledgements_that_are_cut_off_lose_and_repeat_nothing",),
    ),
    cell("orchestrator-Redis", "stall", "as for SIGSTOP of Redis", STOPPED_S + 2.5, noticed=NO_ANSWER, outlasted=True),
    cell(
        "orchestrator-Redis",
        "reset",
        "as cut, at once",
        1.0,
        also=("test_log.py::test_a_line_to_the_log_that_breaks_between_two_sessions",),
    ),
    cell(
        REGISTRYS_LINE,
        "cut",
        "known services stay in use, for new sessions too; they register again by themselves",
        noticed=LOOK,
        also=("orchestrator/test_registered.py::test_what_is_known_serves_on_while_the_registry_is_away",),
    ),
    cell(
        REGISTRYS_LINE,
        "stall",
        "as cut; an expired service is used while its connection is up",
        noticed=NO_LOOK,
        also=("orchestrator/test_registered.py::test_what_is_known_serves_on_while_the_registry_is_away",),
    ),
    cell(REGISTRYS_LINE, "reset", "as cut", noticed=LOOK),
)


def shown_by(cell: Cell) -> tuple[str, ...]:
    """Every test that shows the cell, named as `also` does."""
    return (*(f"{file}::test_a_fault[{cell.name}]" for file in ("test_matrix.py", "test_demo_pair.py")), *cell.also)
