"""What a client was told, whichever client it is."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

from specwire.core.messages import FinishReason, TokenLogprobs
from tests.simulation.asks import Ask


@dataclass(frozen=True, slots=True)
class Begun:
    """prompt: where it was echoed."""

    prompt_tokens: int
    prompt_hash: int | None
    lossy: bool
    prompt: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Ended:
    reason: FinishReason
    text_length: int
    lossy: bool
    cached_tokens: int


@dataclass
class Heard:
    """Of one completion.

    tenant: as orchestrators call it. prompt: all that the output goes on behind, a parent's text included.
    error: the status that its last attempt ended with, if it has no end. unasked: there was no turn to go on behind.
    """

    ask: Ask
    tenant: str = ""
    choice: int = 0
    prompt: tuple[int, ...] = ()
    session_id: str = ""
    started: Begun | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    end: Ended | None = None
    error: grpc.StatusCode | None = None
    details: str = ""
    left: bool = False
    cancelled: bool = False
    deleted: bool = False
    unasked: bool = False
    done: bool = False
    attempts: int = 0

    def has(self, tokens: int | None) -> bool:
        """Whether so many tokens are here; None never are."""
        return tokens is not None and bool(self.session_id) and len(self.tokens) >= tokens
