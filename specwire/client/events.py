"""What the service says, as values, and as the one exception.

`received_ns` is this process's monotonic clock when the message was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc

from specwire.core.messages import FinishReason, Outcome, TokenLogprobs
from specwire.rpc.channel import unreachable
from specwire.rpc.errors import retry_after


class SpecwireError(Exception):
    """A call failed, or was refused before it was sent.

    Attributes:
        message: one sentence.
        retry_after: seconds after which the server wants to be asked again; None if it does not say.
        reached: False if no connection to the service could be made.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, retry_after: float | None = None, *, reached: bool = True
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.retry_after = retry_after
        self.reached = reached


def from_rpc(error: grpc.RpcError, address: str, *, tls: bool = False) -> SpecwireError:
    """What gRPC raised, for a reader; `error` is a finished call, blocking or of asyncio, to an address with `tls`."""
    code, details = error.code(), error.details() or ""
    nobody = unreachable(details, address, tls=tls) if code is grpc.StatusCode.UNAVAILABLE else None
    message = nobody or details or f"the call to {address} failed"
    return SpecwireError(code, message, retry_after(error), reached=nobody is None)


def closed() -> SpecwireError:
    return SpecwireError(grpc.StatusCode.CANCELLED, "the client was closed")


def invalid(field: str, message: str) -> SpecwireError:
    return SpecwireError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {message}")


@dataclass(frozen=True, slots=True)
class SamplingInForce:
    """How tokens are drawn, with the seed and the rule filled in by the service."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    rule: str
    choice: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """What the output goes on behind."""

    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Started:
    """The session exists; `session_id` is the right to watch and cancel it.

    prompt_hash: `specwire.core.text.hash_of` the prompt's tokens; None from a service that does not say.
    prompt: only where it was asked for (`echo`). lossy: the rule, asked for by name, may change the text.
    """

    session_id: str
    prompt_tokens: int
    sampling: SamplingInForce
    received_ns: int
    prompt_hash: int | None = None
    prompt: PromptEcho | None = None
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the verifier, `number` since its start; times in microseconds. See StepTimings in verify.proto."""

    number: int
    sessions: int
    rows: int
    forward_us: int
    choose_us: int
    gap_us: int
    waited_us: int
    drafted_us: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Nanoseconds on the hosts' monotonic clocks; comparable only between processes of one machine.

    step: the one that decided the chunk's newest token.
    """

    forward_ended_ns: int
    verdict_received_ns: int
    durable_ns: int
    emitted_ns: int
    step: Step


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call; those of one call have its `index`. See ToolCallDelta in generation.proto.

    id, name: with the first one. arguments: more of a JSON object's text. whole: None while the call goes on; False of
    one that broke off, and is none.
    """

    index: int
    id: str
    name: str
    arguments: str
    whole: bool | None


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What text is as a chat's answer: more content, more reasoning, more of calls."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call. arguments: the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Durable tokens at absolute positions position, position + 1, ... and the text that they release.

    text_ends: for each token, where its text ends in the whole output, in code points.
    logprobs: one per token where they were asked for, else none. delta: what `text` is as an answer, of a chat.
    """

    position: int
    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    text: str
    text_ends: tuple[int, ...]
    timings: Timings | None
    received_ns: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    delta: ChatDelta | None = None


@dataclass(frozen=True, slots=True)
class DrafterStats:
    """What one drafter did for a session; see DrafterStats in generation.proto."""

    source: int
    model: str
    proposed: int
    accepted: int
    plan: str
    tested: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """A session's figures; see Stats in generation.proto. Times in microseconds."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    target_forwards: int = 0
    proposed: int = 0
    accepted: int = 0
    recovered: int = 0
    bonus: int = 0
    direct: int = 0
    time_to_first_token_us: int = 0
    duration_us: int = 0
    tested_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    proposed_ngram: int = 0
    accepted_ngram: int = 0
    proposed_prediction: int = 0
    accepted_prediction: int = 0
    plan: str = ""
    drafters: tuple[DrafterStats, ...] = ()
    cached_tokens: int = 0
    tested: int = 0
    tested_ngram: int = 0
    tested_prediction: int = 0
    forwards_saved: int = 0
    proposed_head: int = 0
    tested_head: int = 0
    accepted_head: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The session is over; `text` is what was withheld until now, `message` says what failed with reason ERROR.

    delta: as of `Chunk`.
    """

    reason: FinishReason
    message: str
    text: str
    text_length: int
    stats: Stats
    received_ns: int
    lossy: bool = False
    delta: ChatDelta | None = None


Event = Started | Chunk | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation. lossy: its rule, asked for by name, may have changed the text.

    content, reasoning, tool_calls: of a chat, what `text` is as an answer.
    """

    session_id: str
    prompt_tokens: int
    sampling: SamplingInForce
    text: str
    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    finish_reason: FinishReason
    message: str
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: PromptEcho | None = None
    lossy: bool = False
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def seed(self) -> int:
        return self.sampling.seed

    @property
    def answer(self) -> dict[str, Any]:
        """Of a chat, the message with which its next turn goes on."""
        calls = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in self.tool_calls
        ]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}


@dataclass(frozen=True, slots=True)
class PartScore:
    """A part of a given text: its token ids, and the natural log-probability of each given all that precedes it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def logprob(self) -> float:
        """Of the part as a whole."""
        return sum(self.logprobs)


@dataclass(frozen=True, slots=True)
class TextScore:
    """A given continuation, in the parts that were sent."""

    parts: tuple[PartScore, ...]

    @property
    def logprob(self) -> float:
        """Of the continuation as a whole."""
        return sum(part.logprob for part in self.parts)


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session as the log has it: `tokens` begin with the prompt; finish_reason None while it runs.

    durability: what the log survives, by name. created, ended: Unix time in seconds; ended is None while it runs.
    """

    prompt_tokens: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    fence: int
    durability: str = ""
    created: float = 0.0
    ended: float | None = None
    lossy: bool = False


@dataclass(slots=True)
class PartialCompletion:
    """Events of one stream on their way to a Completion."""

    started: Started | None = None
    finished: Finished | None = None
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[ToolCallDelta]] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
            case Chunk():
                self.texts.append(event.text)
                self.tokens += event.tokens
                self.outcomes += event.outcomes
                self.logprobs += event.logprobs
                self._add_delta(event.delta)
            case Finished():
                self.texts.append(event.text)
                self.finished = event
                self._add_delta(event.delta)

    def _add_delta(self, delta: ChatDelta | None) -> None:
        if delta is None:
            return
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        for each in delta.tool_calls:
            self.calls.setdefault(each.index, []).append(each)

    def _whole_calls(self) -> tuple[ToolCall, ...]:
        whole = (parts for _, parts in sorted(self.calls.items()) if parts[-1].whole)
        return tuple(ToolCall(parts[0].id, parts[0].name, "".join(each.arguments for each in parts)) for parts in whole)

    def completion(self) -> Completion:
        if self.started is None or self.finished is None:
            raise SpecwireError(grpc.StatusCode.DATA_LOSS, "the stream ended before the session was finished")
        return Completion(
            session_id=self.started.session_id,
            prompt_tokens=self.started.prompt_tokens,
            sampling=self.started.sampling,
            text="".join(self.texts),
            tokens=tuple(self.tokens),
            outcomes=tuple(self.outcomes),
            finish_reason=self.finished.reason,
            message=self.finished.message,
            stats=self.finished.stats,
            logprobs=tuple(self.logprobs),
            prompt=self.started.prompt,
            lossy=self.started.lossy or self.finished.lossy,
            content="".join(self.content),
            reasoning="".join(self.reasoning),
            tool_calls=self._whole_calls(),
        )
