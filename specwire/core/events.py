"""What can happen to a session, as its orchestrator sees it."""

from __future__ import annotations

from dataclasses import dataclass

from specwire.core.acceptance import Outcome
from specwire.core.chain import Proposal, SourceKind
from specwire.core.drafting import Pace
from specwire.core.limits import FinishReason
from specwire.core.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class VerifierReady:
    """A verifier's link is up and assigned to this session.

    buffer: what this verifier may decide beyond min(durable, taken by the client); 0 = as much as before.
    """

    buffer: int = 0


@dataclass(frozen=True, slots=True)
class VerifierOpened:
    """The verifier took the session in and decides from `position` on."""

    attach: int
    position: int


@dataclass(frozen=True, slots=True)
class VerdictArrived:
    """kind: of the source of the draft tokens that were tested, if any were. logprobs: one per token, or none."""

    attach: int
    position: int
    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    finish: FinishReason | None = None
    kind: SourceKind = SourceKind.DRAFTER
    logprobs: tuple[TokenLogprobs, ...] = ()


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
    """A drafter's link is up and assigned; `source` is new for every assignment. pace, due: its first plan."""

    source: int
    pace: Pace = Pace()
    due: int = 0


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """It, or its link, is gone; the others go on."""

    source: int


@dataclass(frozen=True, slots=True)
class ProposalArrived:
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class PacePlanned:
    """The settings of one drafter's controller from now on."""

    source: int
    pace: Pace
    due: int


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
    | PacePlanned
    | Appended
    | ClientTook
    | EndRequested
    | OwnerLost
)
