"""What passes between the rooms of the core: events, effects, proposals, verdicts and their parts.

Everything here is a value. It decides nothing, and every other room may import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specwire.core.invalid import InvalidParameter as InvalidParameter


class FinishReason(IntEnum):
    """Why a session ended (the numbers are those of the wire; 0 there means that it has not)."""

    EOS = 1
    STOP_ID = 2
    STOP_STRING = 3
    LENGTH = 4
    CANCELLED = 5
    DEADLINE = 6
    ERROR = 7


class Outcome(IntEnum):
    """How a token came to be decided (the numbers are those of the wire)."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3
    DIRECT = 4


DIRECT = (Outcome.DIRECT,)


class Decision(NamedTuple):
    """What one forward decides for one session: `tokens` in order, and the outcome of each.

    Invariant: 1 <= len(tokens) == len(outcomes) <= len(window) + 1. What of it a session may keep can be empty, where a
    constraint refuses the first token.
    """

    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def accepted(self) -> int:
        return self.outcomes.count(Outcome.ACCEPTED)

    def clipped(self, length: int) -> Decision:
        return Decision(self.tokens[:length], self.outcomes[:length])


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms, rounded to float32, so that the wire and the log carry exactly what was reported.

    logprob: of the decided token. top: the most probable ids with theirs, falling, ties by rising id; ids of
    probability 0 are left out.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# Most ids that a drafter keeps, and about what their integer weights add up to: ids below 1 / 8192 are left out.
MOST_KEPT = 32
PARTS = 4096
# Most ids that a verifier accepts.
MOST_IDS = 256
MOST_TOTAL = (1 << 31) - 1

Number = float | Fraction


@dataclass(frozen=True, slots=True)
class Weights:
    """ids[i] is drawn with probability weights[i] / total."""

    ids: tuple[int, ...]
    weights: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.weights)

    def of(self, token: int) -> int:
        """The token's own weight; 0 where it cannot be drawn."""
        return self.weights[self.ids.index(token)] if token in self.ids else 0

    def possible(self, token: int, vocabulary: int) -> bool:
        """Whether this is a distribution over the vocabulary from which `token` can have been drawn."""
        sound = 0 < len(self.ids) == len(self.weights) <= MOST_IDS and len(set(self.ids)) == len(self.ids)
        if not sound or min(self.weights) < 1 or self.total > MOST_TOTAL:
            return False
        return min(self.ids) >= 0 and max(self.ids) < vocabulary and token in self.ids


class DraftToken(NamedTuple):
    """A draft token, and what it was drawn from where that was told."""

    token: int
    weights: Weights | None = None


MOST_SOURCES = 64

# Fences are microseconds of a clock: a number from here on, of the year 2112, is none.
FENCE_LIMIT = 1 << 52
# Draft tokens in the window of a verdict that is believed; a verifier tests MOST_WINDOW.
MOST_TESTED = 256


class SourceKind(IntEnum):
    """Where draft tokens come from (the numbers are those of the wire)."""

    DRAFTER = 1
    NGRAM = 2
    PREDICTION = 3
    HEAD = 4


@dataclass(frozen=True, slots=True)
class Proposal:
    """A chunk of one source's chain: `tokens` stand at absolute positions base + offset, base + offset + 1, ...

    Of a tree, `offset` counts its nodes, and `parents` say where each stands.

    prefix_hash is the hash of the text before `base`; required in a chain's first chunk (offset 0).
    parents: of a tree, one per token: the number of the node that it stands behind, or -1 for the text before `base`.
    Nodes are numbered in the order drafted, from `offset` on here. Empty: each stands behind the one before it.
    weights: one per token, what it was drawn from, by randomness of `epoch`; under rules that weigh draft tokens only.
    draft_us: microseconds that drafting the piece took; 0 where that was not told.
    """

    source: int
    chain: int
    base: int
    offset: int
    tokens: tuple[int, ...]
    prefix_hash: int | None = None
    weights: tuple[Weights, ...] = ()
    epoch: int = 0
    parents: tuple[int, ...] = ()
    draft_us: int = 0


class RelayedProposal(Protocol):
    """A proposal in the form that it came in, the core's or the wire's: it is relayed without being decoded."""

    @property
    def source(self) -> int: ...


class Verdict(NamedTuple):
    """What a step decided for a session: `tokens` stand at position, position + 1, ...

    Verifier and orchestrator have this one form of it, and the wire its own; the log holds what several decided.

    width: draft tokens in the window, which came from a source of `kind`; of several drafters, from `source`.
    met: the drafter whose token came too late for the window and stood at its last row, behind it; 0 for none.
    logprobs: one per token where the session reports them, else none.
    ledger_us: the session's balance behind this step.
    paces: of drafters that are to draft in another way from now on.
    """

    position: int
    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    width: int
    finish: FinishReason | None = None
    kind: SourceKind = SourceKind.DRAFTER
    source: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    met: int = 0
    ledger_us: int = 0
    paces: tuple[SourcePace, ...] = ()

    @property
    def accepted(self) -> int:
        return self.outcomes.count(Outcome.ACCEPTED)

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)

    def behind(self, position: int) -> Verdict:
        """The part at `position` and later. All tokens before a verdict's last one were draft tokens."""
        cut = max(0, position - self.position)
        if cut == 0:
            return self
        return self._replace(
            position=position,
            tokens=self.tokens[cut:],
            outcomes=self.outcomes[cut:],
            logprobs=self.logprobs[cut:],
            width=max(0, self.width - cut),
        )


class SourcePace(NamedTuple):
    """How one drafter of a session is to draft from now on. reason: for people."""

    source: int
    pace: Pace
    reason: str = ""


class AssignedDrafter(NamedTuple):
    """A drafter of a session, as its verifier is told of it.

    source: numbers it among all that the session ever had. known_by: names it among its tenant's: what one session
    learnt of it, the next one knows. shares_cores: it computes on the verifier's. plan: auto, or a fixed plan; see
    `parse_plan`.
    """

    source: int
    known_by: str = ""
    shares_cores: bool = False
    plan: str = "auto"


@dataclass(frozen=True, slots=True)
class Pace:
    """How far and in what portions to draft; the verifier plans it.

    branches: most draft tokens that one forward extends; 1 is a chain. Who cannot branch drafts a chain in any case.
    Rules that weigh draft tokens have chains only.
    """

    chunk: int = 4
    run_ahead: int = 4
    branches: int = 1

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise InvalidParameter("chunk", f"must be at least 1, not {self.chunk}")
        if self.run_ahead < 0:
            raise InvalidParameter("run_ahead", f"must not be negative, not {self.run_ahead}")
        if self.branches < 1:
            raise InvalidParameter("branches", f"must be at least 1, not {self.branches}")

    def of_a_chain(self) -> Pace:
        """For rules that weigh draft tokens: a chain, in chunks that fit a window."""
        return Pace(min(self.chunk, MOST_WINDOW), self.run_ahead)

    @property
    def nodes(self) -> int:
        """Most draft tokens that may descend from the decided text: a run-ahead for each branch, within bounds."""
        return self.run_ahead if self.branches == 1 else min(MOST_NODES_AHEAD, self.branches * self.run_ahead)


# Most draft tokens that a step tests for one session. Start-up measures forwards of up to twice as many rows
# (`verify_service.engine.calibration.WIDTHS`), compiled runners have graphs for as many, PROTOCOL.md tells peers.
MOST_WINDOW = 16


# Draft tokens ahead of the decided text.
MOST_RUN_AHEAD = 128
# Of a stream until a token's drafting was measured, in a try, and where a reader wants to see what is drafted.
FIRST_PACE = Pace(1, 32)
# Window of a drafter on the verifier's cores until a token's drafting was measured, and in a try; depth of a head's
# try. With four tokens at first the ledgers had little left (sweep).
PROBE_WINDOW = 2
# Nodes that a forward of a drafter elsewhere may extend. How many it does extend is chosen with each forward.
MOST_BRANCHES = 16
# Draft tokens that are less probable than this are not considered, nor extended where a drafter branches: they would
# cost the link and the verifier more than they are worth. With 0.01 branches lost 1 to 3 % (sweep).
NEGLIGIBLE = 0.005
# Nodes of a tree. The verifier drops a tree of more than 256 nodes, and tokens more than 256 beyond the decided text.
MOST_NODES_AHEAD = 240


class Discipline(StrEnum):
    """How drafter and verifier share time."""

    STREAM = "stream"
    LOCKSTEP = "lockstep"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Plan:
    """`due`: draft tokens that the verifier may expect after each verdict; 0 = none. `reason`: for metrics."""

    discipline: Discipline
    pace: Pace
    due: int
    reason: str

    def __str__(self) -> str:
        return f"{self.discipline}: {self.reason}"


def off(reason: str) -> Plan:
    """Draft nothing."""
    return Plan(Discipline.OFF, Pace(1, 0), 0, reason)


def in_turns(window: int, reason: str) -> Plan:
    """One chunk of `window` tokens a verdict, which the verifier waits for."""
    return Plan(Discipline.LOCKSTEP, Pace(window, window), window, reason)


def parse_plan(spec: str) -> Plan | None:
    """A fixed plan: off, lockstep:K or stream:CHUNK,RUN_AHEAD[,DUE[,BRANCHES]]; None for auto, where it is planned.

    auto:BRANCHES plans with drafters that extend at most so many tokens in one forward (`branches_of`).

    Raises:
        InvalidParameter: `spec` reads otherwise.
    """
    name, _, numbers = spec.partition(":")
    try:
        values = [int(number) for number in numbers.split(",")] if numbers else []
        match name, values:
            case "auto", [] | [_]:
                _check_branches(values)
                return None
            case "off", []:
                return off("fixed")
            case "lockstep", [window]:
                return _checked(in_turns(window, "fixed"))
            case "stream", [chunk, run_ahead, *rest] if len(rest) <= 2:
                due, branches = (*rest, *(0, 1)[len(rest) :])
                _check_branches((branches,))
                return _checked(Plan(Discipline.STREAM, Pace(chunk, run_ahead, branches=branches), due, "fixed"))
    except ValueError as error:
        raise InvalidParameter("plan", f"{spec!r}: {error}") from error
    raise InvalidParameter(
        "plan", f"must be auto[:BRANCHES], off, lockstep:K or stream:CHUNK,RUN_AHEAD[,DUE[,BRANCHES]], not {spec!r}"
    )


def branches_of(spec: str) -> int:
    """Most tokens that a drafter's forward may extend under a plan that `parse_plan` takes."""
    name, _, number = spec.partition(":")
    return int(number) if name == "auto" and number else MOST_BRANCHES


def first_pace(spec: str, shares_cores: bool) -> Pace:
    """How a drafter begins before its verifier has planned for it. spec: see `parse_plan`."""
    fixed = parse_plan(spec)
    if fixed is not None:
        return fixed.pace
    return Pace(PROBE_WINDOW, PROBE_WINDOW) if shares_cores else FIRST_PACE


def _check_branches(values: Sequence[int]) -> None:
    """Raise ValueError for branches that no drafter is asked for."""
    for branches in values:
        if not 1 <= branches <= MOST_BRANCHES:
            raise ValueError(f"branches must be from 1 to {MOST_BRANCHES}, not {branches}")


def _checked(plan: Plan) -> Plan:
    """Raise ValueError for a plan that no drafter could follow."""
    if not plan.pace.chunk <= plan.pace.run_ahead <= MOST_RUN_AHEAD:
        raise ValueError(f"the run-ahead must be from the chunk to {MOST_RUN_AHEAD}, not {plan.pace.run_ahead}")
    if not 0 <= plan.due <= plan.pace.run_ahead:
        raise ValueError(f"due must be from 0 to the run-ahead, not {plan.due}")
    return plan


# ----------------------------------------------------------------------------------------------------------------------
# Events: what can happen to a session, as its orchestrator sees it.


@dataclass(frozen=True, slots=True)
class VerifierReady:
    """A verifier's link is up and assigned to this session.

    buffer: what this verifier may decide beyond min(durable, taken by the client); 0 = as much as before.
    """

    buffer: int = 0


@dataclass(frozen=True, slots=True)
class VerifierOpened:
    """The verifier took the session in and decides from `position` on. paces: of its drafters."""

    attach: int
    position: int
    paces: tuple[SourcePace, ...] = ()


@dataclass(frozen=True, slots=True)
class VerdictArrived:
    """attach: the opening that it answers. more: a verdict behind it is on its way already."""

    attach: int
    verdict: Verdict
    more: bool = False


@dataclass(frozen=True, slots=True)
class VerifierLost:
    """The verifier or its link is gone."""


@dataclass(frozen=True, slots=True)
class VerifierRefused:
    """The verifier will not serve, or failed, this session."""

    attach: int
    message: str


@dataclass(frozen=True, slots=True)
class DrafterReady:
    """A drafter's link is up and assigned; its source is new for every assignment. pace: until its verifier says.

    renews: it is to draw in an epoch of its own, under a rule that weighs draft tokens: another drafter may have drawn
    in the present one.
    """

    source: int
    pace: Pace = Pace()
    renews: bool = False


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """The drafter or its link is gone; the others go on."""

    source: int


@dataclass(frozen=True, slots=True)
class ProposalArrived:
    proposal: RelayedProposal


@dataclass(frozen=True, slots=True)
class Appended:
    """The log acknowledged the append in flight."""


@dataclass(frozen=True, slots=True)
class ClientTook:
    """The client's stream has taken the tokens before `position`."""

    position: int


@dataclass(frozen=True, slots=True)
class EndRequested:
    """Cancelled, the deadline passed, or a failure of our own."""

    reason: FinishReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """Another owner has claimed the session: the log refused our fence."""


Event = (
    VerifierReady
    | VerifierOpened
    | VerdictArrived
    | VerifierLost
    | VerifierRefused
    | DrafterReady
    | DrafterLost
    | ProposalArrived
    | Appended
    | ClientTook
    | EndRequested
    | OwnerLost
)


# ----------------------------------------------------------------------------------------------------------------------
# Effects: what a session asks its driver to do, run in the order given.


@dataclass(frozen=True, slots=True)
class OpenVerifier:
    attach: int
    tokens: tuple[int, ...]
    durable: int
    credit: int
    drafters: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SendProgress:
    durable: int
    credit: int


@dataclass(frozen=True, slots=True)
class TellDrafters:
    """Tell the verifier which drafters the session has by now, by source."""

    drafters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseVerifier:
    pass


@dataclass(frozen=True, slots=True)
class OpenDrafter:
    source: int
    tokens: tuple[int, ...]
    pace: Pace


@dataclass(frozen=True, slots=True)
class AdvanceDrafter:
    source: int
    position: int
    tokens: tuple[int, ...]
    pace: Pace


@dataclass(frozen=True, slots=True)
class CloseDrafter:
    source: int


@dataclass(frozen=True, slots=True)
class RelayProposal:
    proposal: RelayedProposal


@dataclass(frozen=True, slots=True)
class End:
    """How a session ended; `text_length` is the output's length in code points."""

    reason: FinishReason
    message: str
    text_length: int


@dataclass(frozen=True, slots=True)
class Append:
    """Append `tokens` at `position`; with `end`, finish the session in the same script.

    logprobs: one per token, or none.
    """

    position: int
    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    end: End | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no log could hold: a bug of the caller."""
        if self.position < 0:
            raise ValueError(f"position: must not be negative, not {self.position}")
        if len(self.outcomes) != len(self.tokens):
            raise ValueError(f"outcomes: {len(self.outcomes)} for {len(self.tokens)} tokens")
        if len(self.logprobs) not in (0, len(self.tokens)):
            raise ValueError(f"logprobs: {len(self.logprobs)} for {len(self.tokens)} tokens")


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand durable tokens and the text that they release to the client. `text_ends`, `released`: see `Release`."""

    position: int
    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    text: str
    text_ends: tuple[int, ...]
    released: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class EmitEnd:
    """The stream's last event; `text` is what was withheld until now."""

    end: End
    text: str


Effect = (
    OpenVerifier
    | SendProgress
    | TellDrafters
    | CloseVerifier
    | OpenDrafter
    | AdvanceDrafter
    | CloseDrafter
    | RelayProposal
    | Append
    | Emit
    | EmitEnd
)
