"""Bytes on the wire, hop by hop: what relays before the verifier and before the drafter saw pass, by kind of part.

A hop's bytes are HTTP/2 DATA payload (gRPC's prefix of 5 bytes a message included) and the 9 bytes of each DATA
frame's header. Framing is shared out: a message's falls on the kinds that it carries, in proportion to their bytes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from bench.harness.runs import BenchError
from bench.relay.frames import HEADER, Count
from bench.relay.link import RelayLink, Traffic
from bench.wan.cells import TOKENS, typical_trace
from bench.wan.rig import Orchestration, WanPair, rig
from bench.wan.traces import from_position
from specwire.client import Client
from specwire.core.law.sampling import GUESSING_RULES
from specwire.v1 import draft_pb2, verify_pb2

# Ids of three bytes each, as large vocabularies have; positions of two.
VOCABULARY = 131_072
PROMPT = tuple(20_000 + 7 * index for index in range(512))
CHUNK = 4
# A chain, and a tree of which a forward extends up to 8 nodes; a rule that weighs draft tokens has chains only.
PLAN, TREES = Orchestration(f"stream:{CHUNK},32"), Orchestration(f"stream:{CHUNK},128,0,8")
GRPC_PREFIX = 5
QUIET_S = 0.25
MOST_LOOKS = 100
# Every rule, and its temperature. Under rejection and block a proposal also says what its tokens were drawn from.
RULES = {
    "greedy": 0.0,
    "coupled": 0.8,
    "rejection": 0.8,
    "block": 0.8,
    "threshold(0.3)": 0.8,
    "typical(0.3,0.09)": 0.8,
}
M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class Hop:
    """What one direction of one link carried for one session, the opening left out.

    Attributes:
        bytes: by kind of part, framing included.
        tokens: by kind of part.
        messages: of gRPC.
    """

    name: str
    bytes: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    messages: int = 0

    def per_token(self, kind: str, tokens: int | None = None) -> float:
        """Bytes of a kind over its own tokens, or over `tokens`."""
        count = self.tokens.get(kind, 0) if tokens is None else tokens
        return self.bytes.get(kind, 0.0) / count if count else 0.0


@dataclass(frozen=True, slots=True)
class Wire:
    """The hops of a session under one rule; `decided` tokens in all. trees: its proposals were trees."""

    rule: str
    hops: tuple[Hop, ...]
    decided: int
    trees: bool = False

    @property
    def name(self) -> str:
        return f"{self.rule}, trees" if self.trees else self.rule


class _Kind(Protocol):
    """Reads one kind of message."""

    def FromString(self, data: bytes) -> Message: ...  # noqa: N802 # protobuf's name


def measure_wire(tokens: int = TOKENS, rules: Sequence[str] = tuple(RULES)) -> list[Wire]:
    """One session under each of these rules, in chunks of CHUNK; where trees are allowed, a second one with trees."""
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="specwire-wan-")))
        (folder / "trace").write_text(from_position(typical_trace().bits, len(PROMPT)))
        target = f"scripted:7:vocab={VOCABULARY}:delay_ms=40:device=cloud"
        draft = f"scripted:7:vocab={VOCABULARY}:delay_ms=8:trace={folder / 'trace'}:device=edge"
        started = owned.enter_context(rig(WanPair(target, draft), [PLAN, TREES], watch_drafter=True))
        clients = {plan: owned.enter_context(Client(started.addresses[plan])) for plan in (PLAN, TREES)}
        if started.draft_link is None:
            raise BenchError("wire: the drafter is not watched")
        links = (started.links[0], started.draft_link)
        for client in clients.values():  # each asks its peers once for what is no part of a session
            client.complete(PROMPT, max_tokens=1, ignore_eos=True)
        return [
            *(_watch(clients[PLAN], rule, tokens, links) for rule in rules),
            *(
                replace(_watch(clients[TREES], rule, tokens, links), trees=True)
                for rule in rules
                if rule in GUESSING_RULES
            ),
        ]


def _watch(client: Client, rule: str, tokens: int, links: Sequence[RelayLink]) -> Wire:
    """links: to the verifier, to the drafter."""
    before = _at_rest(links)
    for link in links:
        link.capture()
    completion = client.complete(
        PROMPT, max_tokens=tokens, ignore_eos=True, temperature=RULES[rule], seed=11, rule=rule
    )
    captured = [link.captured() for link in links]
    after = [link.traffic() for link in links]
    kinds: tuple[tuple[str, _Kind], ...] = (
        ("orchestrator to verifier", verify_pb2.ConnectVerifyRequest),
        ("verifier to orchestrator", verify_pb2.ConnectVerifyResponse),
        ("orchestrator to drafter", draft_pb2.ConnectDraftRequest),
        ("drafter to orchestrator", draft_pb2.ConnectDraftResponse),
    )
    payloads = [direction for link in captured for direction in link]
    counts = [count for pair in zip(before, after, strict=True) for count in _difference(*pair)]
    hops = [
        hop_of(name, payload, kind, count) for (name, kind), payload, count in zip(kinds, payloads, counts, strict=True)
    ]
    return Wire(rule, tuple(hops), len(completion.tokens))


def _at_rest(links: Sequence[RelayLink]) -> list[Traffic]:
    """Their traffic once nothing passes: a proposal under way when its session ended is not the next one's."""
    now = [link.traffic() for link in links]
    for _ in range(MOST_LOOKS):
        time.sleep(QUIET_S)
        before, now = now, [link.traffic() for link in links]
        if now == before:
            return now
    raise BenchError(f"wire: the links were never quiet for {QUIET_S:g} s")


def _difference(before: Traffic, after: Traffic) -> Iterator[Count]:
    for old, new in ((before.up, after.up), (before.down, after.down)):
        yield Count(
            new.bytes - old.bytes,
            new.frames - old.frames,
            new.data_frames - old.data_frames,
            new.data_bytes - old.data_bytes,
        )


def hop_of(name: str, payload: Sequence[bytes], kind: _Kind, count: Count) -> Hop:
    """What captured streams held, given the frames that carried them."""
    hop = Hop(name)
    messages = [message for stream in payload for message in messages_of(stream)]
    hop.messages = len(messages)
    frames = HEADER * count.data_frames / max(1, len(messages))
    for data in messages:
        _account(hop, kind.FromString(data), frames + GRPC_PREFIX)
    return hop


def messages_of(stream: bytes) -> Iterator[bytes]:
    """The messages of one direction of a gRPC call, uncompressed. BenchError for a piece of one."""
    at = 0
    while at < len(stream):
        length = int.from_bytes(stream[at + 1 : at + GRPC_PREFIX], "big")
        at += GRPC_PREFIX + length
        if at > len(stream):
            raise BenchError("wire: a message was captured in part")
        yield stream[at - length : at]


def _account(hop: Hop, message: Message, framing: float) -> None:
    """Add a message's parts; one that opens a session is left out, framing and all."""
    parts: dict[str, int] = {}
    for descriptor, value in message.ListFields():
        values = value if descriptor.is_repeated else [value]
        parts[descriptor.name] = sum(_encoded(one.ByteSize()) for one in values)
        if descriptor.name not in ("opens", "opened"):
            carried = sum(len(getattr(one, "tokens", ())) for one in values)
            hop.tokens[descriptor.name] = hop.tokens.get(descriptor.name, 0) + carried
    total = sum(parts.values())
    for name, size in parts.items():
        if name not in ("opens", "opened"):
            hop.bytes[name] = hop.bytes.get(name, 0.0) + size + framing * size / total


def _encoded(size: int) -> int:
    """A part in its message: a tag of one byte, its length, itself."""
    return 1 + max(1, (size.bit_length() + 6) // 7) + size
