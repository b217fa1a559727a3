"""What the event loop tells the drafter's thread, and what that thread tells links.

All of it is validated, but for the ids of an advance: the thread knows whose vocabulary they are of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specwire.core.law.constraint import Matcher
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Pace, Proposal


@dataclass(frozen=True, slots=True)
class Opened:
    handle: int


@dataclass(frozen=True, slots=True)
class DraftedProposal:
    """A chunk of a session's chain."""

    handle: int
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Dropped:
    """The session is refused or dropped, with a gRPC status code (its number) and one sentence."""

    handle: int
    code: int
    message: str


Reply = Opened | DraftedProposal | Dropped


class ReplyLink(Protocol):
    """A connected orchestrator, whose handles mean nothing on another link."""

    def send(self, replies: list[Reply]) -> None:
        """Say them, in order; called in the event loop, never blocks."""
        ...


# What the drafter's thread reports at a time.
Replies = dict[ReplyLink, list[Reply]]


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Draft for a text; replaces the session of an open handle.

    prompt_length: None where it is unknown. number: of this opening; a BeginSession with that number follows where the
    session has a constraint. vocabulary: digest of the target's, as it was told; "" where it is the drafter's own.
    """

    link: ReplyLink
    handle: int
    tokens: tuple[int, ...]
    sampling: Sampling
    pace: Pace
    epoch: int = 0
    prompt_length: int | None = None
    number: int = 0
    vocabulary: str = ""


@dataclass(frozen=True, slots=True)
class BeginSession:
    """The constraint of a session; None: draft without one, and let the target refuse what is not allowed."""

    link: ReplyLink
    handle: int
    number: int
    matcher: Matcher | None


@dataclass(frozen=True, slots=True)
class AdvanceSession:
    link: ReplyLink
    handle: int
    position: int
    tokens: tuple[int, ...]
    pace: Pace
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class LearnVocabulary:
    """A target's vocabulary, which is not the drafter's. `digest` is over all of it; width: ids are below that.

    tokenizer_zlib: not trusted.
    """

    digest: str
    tokenizer_zlib: bytes
    width: int
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class CloseSession:
    link: ReplyLink
    handle: int


@dataclass(frozen=True, slots=True)
class LoseLink:
    """The link is gone, and its sessions with it."""

    link: ReplyLink


Command = OpenSession | BeginSession | AdvanceSession | CloseSession | LoseLink | LearnVocabulary
