"""The states of a session, and what leads from one to another, as data. The drawing is in `specwire.core.session`."""

from __future__ import annotations

from enum import StrEnum

from specwire.core.events import (
    Appended,
    EndRequested,
    Event,
    OwnerLost,
    VerdictArrived,
    VerifierLost,
    VerifierOpened,
    VerifierReady,
    VerifierRefused,
)


class State(StrEnum):
    """FENCED: another owner has the session; this one says nothing more."""

    WAITING = "waiting"
    OPENING = "opening"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"
    FENCED = "fenced"


TRANSITIONS: dict[type[Event], dict[State, frozenset[State]]] = {
    VerifierReady: {State.WAITING: frozenset({State.OPENING, State.WAITING})},
    VerifierOpened: {State.OPENING: frozenset({State.RUNNING})},
    VerdictArrived: {State.RUNNING: frozenset({State.RUNNING, State.ENDING})},
    VerifierLost: {State.OPENING: frozenset({State.WAITING}), State.RUNNING: frozenset({State.WAITING})},
    VerifierRefused: {
        State.OPENING: frozenset({State.ENDING}),
        State.RUNNING: frozenset({State.RUNNING, State.ENDING}),
    },
    Appended: {
        State.WAITING: frozenset({State.WAITING, State.OPENING, State.ENDING}),
        State.RUNNING: frozenset({State.RUNNING, State.ENDING}),
        State.ENDING: frozenset({State.ENDED}),
    },
    EndRequested: {
        State.WAITING: frozenset({State.WAITING, State.ENDING}),
        State.OPENING: frozenset({State.ENDING}),
        State.RUNNING: frozenset({State.RUNNING, State.ENDING}),
    },
    OwnerLost: {state: frozenset({State.FENCED}) for state in State if state is not State.ENDED},
}
"""Event -> state -> states that it may lead to. An event that is not listed for a state changes no state there."""
