"""What a session asks its driver to do; effects are run in the order given."""

from __future__ import annotations

from dataclasses import dataclass

from specwire.core.acceptance import Outcome
from specwire.core.chain import Proposal
from specwire.core.drafting import Pace
from specwire.core.limits import FinishReason
from specwire.core.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class OpenVerifier:
    attach: int
    tokens: tuple[int, ...]
    durable: int
    credit: int
    due: int


@dataclass(frozen=True, slots=True)
class SendProgress:
    durable: int
    credit: int
    due: int


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
    proposal: Proposal


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
    end: End | None
    logprobs: tuple[TokenLogprobs, ...] = ()


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
    | CloseVerifier
    | OpenDrafter
    | AdvanceDrafter
    | CloseDrafter
    | RelayProposal
    | Append
    | Emit
    | EmitEnd
)
