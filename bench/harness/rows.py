"""The rows: (a) and (b) transformers, plain and assisted; (c), (d) and (h) this system: off, on, with a head too.

Those of a box are in `bench.main.box`, those of OpenVINO GenAI in `bench.peers.openvino_rows`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness.child import BenchChild, Message
from bench.harness.runs import Arrival, BenchError, Run
from demo_pair import held_out_prompts
from specwire.client import Chunk, Client, Event, Finished, SpecwireError, Started
from specwire.core.messages import FinishReason

LOAD_LIMIT = 600.0
RUN_LIMIT = 600.0

PLAIN, ASSISTED, DRAFTING_OFF, DRAFTING_ON, WITH_HEAD = "a", "b", "c", "d", "h"
GENAI, GENAI_DRAFT, GENAI_LOOKUP = "e", "e-draft", "e-lookup"
FORWARD, PAUSED, ONE_OFF, ONE_ON, SEVERAL_OFF, SEVERAL_ON = "f", "g", "o-off", "o-on", "s-off", "s-on"


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of assisted generation; None leaves the library's own.

    Attributes:
        schedule: how the number of draft tokens changes.
        k: that number, or the first one.
        confidence: a draft token less probable than this ends the window.
    """

    name: str
    schedule: str | None = None
    k: int | None = None
    confidence: float | None = None

    @property
    def settings(self) -> dict[str, str | float | None]:
        return {
            "num_assistant_tokens_schedule": self.schedule,
            "num_assistant_tokens": self.k,
            "assistant_confidence_threshold": self.confidence,
        }


VARIANTS = (
    *(Variant(f"constant k = {k}", "constant", k, 0.0) for k in (3, 5, 8)),
    Variant("heuristic from k = 5", "heuristic", 5, 0.0),
    Variant("default"),
)


@dataclass(frozen=True, slots=True)
class TransformersRow:
    """`generate` of transformers; assisted if it has a variant."""

    peer: BenchChild
    variant: Variant | None = None

    @property
    def key(self) -> str:
        return PLAIN if self.variant is None else ASSISTED

    @property
    def label(self) -> str:
        return "transformers" if self.variant is None else f"transformers assisted, {self.variant.name}"

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        settings = None if self.variant is None else self.variant.settings
        request = {"do": "generate", "prompt": list(prompt), "tokens": tokens, "variant": settings}
        return self._run(self.peer.ask(request, RUN_LIMIT), tokens)

    def _run(self, answer: Message, tokens: int) -> Run:
        decided = answer["decided"]
        k = self.variant.k if self.variant is not None and self.variant.schedule == "constant" else None
        return Run(
            tokens=exactly(tokens, answer["tokens"], self.label),
            seconds=answer["seconds"],
            first_token_seconds=answer["first_token_seconds"],
            forwards=len(decided),
            # Of n decided tokens the last is the target's own: n - 1 were accepted, and one more tested if that is < k.
            tested=None if k is None else sum(min(count, k) for count in decided),
            accepted=None if k is None else sum(count - 1 for count in decided),
        )


@dataclass(frozen=True, slots=True)
class SpecwireRow:
    """Our stack, asked by a client through gRPC."""

    client: Client
    drafting: bool

    @property
    def key(self) -> str:
        return DRAFTING_ON if self.drafting else DRAFTING_OFF

    @property
    def label(self) -> str:
        return f"specwire, drafting {'on' if self.drafting else 'off'}"

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        began_ns = time.monotonic_ns()
        try:
            events = list(
                self.client.generate(
                    prompt, max_tokens=tokens, ignore_eos=True, drafting=self.drafting, timeout=RUN_LIMIT
                )
            )
            ended_ns = time.monotonic_ns()
            self._forget(events)
        except SpecwireError as error:
            raise BenchError(f"{self.label}: {error}") from error
        return run_of(events, began_ns, ended_ns, tokens, self.label, self.drafting)

    def _forget(self, events: Sequence[Event]) -> None:
        """Have the session deleted: the verifier then keeps nothing that a later run of the prompt would begin from."""
        for event in events:
            if isinstance(event, Started):
                self.client.delete_session(event.session_id, timeout=RUN_LIMIT)


class HeadedRow(SpecwireRow):
    """The same of a stack in which a head drafts, too."""

    __slots__ = ()

    @property
    def key(self) -> str:
        return WITH_HEAD

    @property
    def label(self) -> str:
        return "specwire, drafting on, with a head"


def run_of(events: Sequence[Event], began_ns: int, ended_ns: int, tokens: int, label: str, drafting: bool) -> Run:
    """What a generation's events say of it; BenchError unless it has exactly `tokens` tokens."""
    chunks = [event for event in events if isinstance(event, Chunk)]
    stats = _finished(events[-1] if events else None, label).stats
    return Run(
        tokens=exactly(tokens, [token for chunk in chunks for token in chunk.tokens], label),
        seconds=(ended_ns - began_ns) / 1e9,
        first_token_seconds=(chunks[0].received_ns - began_ns) / 1e9,
        forwards=stats.target_forwards,
        tested=sum(stats.tested_at) if drafting else None,
        accepted=sum(stats.accepted_at) if drafting else None,
        arrivals=tuple(Arrival(len(chunk.tokens), chunk.received_ns, chunk.timings) for chunk in chunks),
        plan=stats.plan,
        stats=stats,
    )


def _finished(event: Event | None, label: str) -> Finished:
    if not isinstance(event, Finished):
        raise BenchError(f"{label}: the stream ended too early")
    if event.reason is not FinishReason.LENGTH:
        raise BenchError(f"{label}: ended with {event.reason.name.lower()}, {event.message or 'no message'}")
    return event


def exactly(wanted: int, tokens: Sequence[int], label: str) -> tuple[int, ...]:
    if len(tokens) != wanted:
        raise BenchError(f"{label}: gave {len(tokens)} tokens, not {wanted}; is prompt + tokens beyond the context?")
    return tuple(tokens)


def start_peer(target: str, draft: str | None, dtype: str, threads: int) -> BenchChild:
    """Transformers with both models loaded."""
    peer = BenchChild("transformers", [sys.executable, "-m", "bench.peers.transformers_peer"])
    try:
        peer.ask({"do": "load", "target": target, "draft": draft, "dtype": dtype, "threads": threads}, LOAD_LIMIT)
    except BaseException:
        peer.stop()
        raise
    return peer


def encoded_prompts(peer: BenchChild, count: int) -> list[list[int]]:
    """Token ids of the first held-out prompts, made by the target's tokenizer: all rows get the same."""
    texts = [prompt.text for prompt in held_out_prompts()[:count]]
    prompts: list[list[int]] = peer.ask({"do": "encode", "texts": texts}, RUN_LIMIT)["prompts"]
    return prompts


def start_stack(target: str, draft: str, dtype: str, ray: bool, *options: str) -> tuple[BenchChild, str]:
    """`specwire up` as a user types it, and the address that it is ready on."""
    stack, ready = up(target, draft, dtype, ray, *options)
    return stack, str(ready["address"])


def up(target: str, draft: str | None, dtype: str, ray: bool, *options: str) -> tuple[BenchChild, Message]:
    """`specwire up` with further options, and its ready line. draft: None for no drafter."""
    drafting = ["--no-draft"] if draft is None else ["--draft", draft]
    command = ["up", "--target", target, *drafting, "--dtype", dtype, "--listen", "127.0.0.1:0", "--json"]
    runtime = () if "--runtime" in options else ("--runtime", "torch")  # rows say which one they measure
    words = [*command, *runtime, *(() if ray else ("--no-ray",)), *options]
    stack = BenchChild("specwire up", [sys.executable, "-m", "deploy", *words])
    try:
        return stack, stack.answer(LOAD_LIMIT)
    except BaseException:
        stack.stop()
        raise
