"""Messages between the service (event loop) and the engine (its thread): commands in, reports out.

A link is one `Connect` stream, known to the engine by a number; a handle names a session on its link.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from specwire.core.invalid import Code
from specwire.core.law.constraint import Matcher
from specwire.core.law.sampling import Sampling, TokenScore
from specwire.core.messages import AssignedDrafter, Proposal, SourcePace, Verdict
from specwire.core.text import Stopping
from specwire.core.verify.session import Allowance


@dataclass(frozen=True, slots=True)
class QueuePatience:
    """sessions: how many may wait for a slot; 0: none. wait_us: for how long."""

    sessions: int = 0
    wait_us: float = 30e6


# Commands


@dataclass(frozen=True, slots=True)
class Opening:
    """Validated; see Open in verify.proto. deadline_us: on the engine's clock, None for none.

    ngram, head: the verifier may propose from the text itself, by a head. epoch: see `specwire.core.law.noise`.
    prediction: what the output may look like. drafters: of the session. references: tokens of each document
    of the request's own. scope: sessions of the same scope may share its cache; shared: and be proposed its text.
    priority: orders the sessions that wait within a scope.
    tenant: whom the link belongs to, where there are tenants (`verify_service.engine.shares`).
    """

    handle: int
    session_id: str
    fence: int
    attach: int
    tokens: tuple[int, ...]
    prompt_length: int
    sampling: Sampling
    stopping: Stopping
    allowance: Allowance
    deadline_us: float | None = None
    ledger_us: int = 0
    ngram: bool = True
    epoch: int = 0
    scope: bytes = b""
    priority: int = 0
    prediction: tuple[int, ...] = ()
    head: bool = True
    tenant: str = ""
    shared: bool = False
    references: tuple[int, ...] = ()
    drafters: tuple[AssignedDrafter, ...] = ()

    @property
    def generation(self) -> tuple[int, int]:
        return self.fence, self.attach


@dataclass(frozen=True, slots=True)
class Tick:
    """One message of a link: what happened to its sessions, and when it arrived (microseconds, engine's clock).

    proposals, progress, references, drafters: each with its session's handle; drafters are all that it has by then.
    """

    link: int
    arrived_us: float
    opens: tuple[Opening, ...] = ()
    proposals: tuple[tuple[int, Proposal], ...] = ()
    progress: tuple[tuple[int, Allowance], ...] = ()
    closes: tuple[int, ...] = ()
    forgotten: tuple[str, ...] = ()
    references: tuple[tuple[int, array[int]], ...] = ()
    drafters: tuple[tuple[int, tuple[AssignedDrafter, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """The constraint of a session that was opened with one: where its output stands, or why it cannot be served."""

    link: int
    handle: int
    generation: tuple[int, int]
    found: Matcher | Refusal


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The stream is over: nobody hears of its sessions any more."""

    link: int


@dataclass(slots=True)
class Scoring:
    """Score tokens[from_position:]; `reply` gets the scores, or a code and a message, in the engine's thread.

    top: how many of the most probable ids are told with each. others: further continuations of tokens[:from_position],
    whose scores follow. tenant: whose call it is, where there are tenants. fed: tokens that were computed so far.
    """

    tokens: tuple[int, ...]
    from_position: int
    reply: Callable[[list[TokenScore] | Refusal], None]
    top: int = 0
    cancelled: bool = False
    others: tuple[tuple[int, ...], ...] = ()
    tenant: str = ""
    fed: int = 0


@dataclass(frozen=True, slots=True)
class TurnAway:
    """The verifier is about to stop: sessions that wait for a slot should go elsewhere."""

    message: str


Command = Tick | Begun | LinkLost | Scoring | TurnAway


# Reports


@dataclass(frozen=True, slots=True)
class Refusal:
    """A session (or a Score: handle 0) that the engine refused or dropped.

    fence: the newer fence, where that is the reason. retry_ms: after which it may be asked again; 0 is not known.
    """

    handle: int
    code: Code
    message: str
    fence: int = 0
    retry_ms: int = 0


class Decided(NamedTuple):
    """A verdict, and whom it is for."""

    handle: int
    attach: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Admitted:
    """tail: what was decided beyond `position` before this connection; resumed: the session was held.

    cached: positions before `position` that need no forward. paces: of its drafters.
    """

    handle: int
    attach: int
    position: int
    resumed: bool = False
    tail: tuple[Decided, ...] = ()
    cached: int = 0
    paces: tuple[SourcePace, ...] = ()


class StepTimings(NamedTuple):
    """See StepTimings in verify.proto."""

    step: int
    sessions: int
    rows: int
    forward_us: int
    choose_us: int
    gap_us: int
    waited_us: int
    forward_ended_ns: int
    drafted_us: int = 0


@dataclass(slots=True)
class Report:
    """What one link is told at a time: usually the report of one step."""

    admitted: list[Admitted] = field(default_factory=list)
    decided: list[Decided] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    timings: StepTimings | None = None


Reports = dict[int, Report]
