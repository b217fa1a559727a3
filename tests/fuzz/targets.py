"""What is called with messages of any kind, and what the answer may be."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from specwire.core.text import hash_of
from specwire.rpc.errors import code_of
from specwire.v1 import common_pb2, draft_pb2, generation_pb2
from tests.faults.streams import PROMPT
from tests.fuzz.messages import METHODS, Pools, Values, encoded, messages, path_of
from tests.fuzz.services import CONTEXT, LIMIT_S, OURS, VOCABULARY, Services
from tests.fuzz.talks import (
    EPOCH,
    FORMS,
    ODD_RULES,
    RULES,
    WARM,
    asking,
    deciding,
    drafting,
    proposals,
    samplings,
    weights,
)

# Answers of an endless stream that are looked at before the call is left.
DESCRIBED = ("architecture", "dtype", "device", "runtime", "weights_fingerprint")
MOST_ANSWERS = 6
LINGER_S = 0.01
MOST_MESSAGES = 4

tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=CONTEXT - 8)
small = st.integers(0, 8)


# Plausible values by field name.
PLAUSIBLE: dict[str, Values] = {
    "handle": st.integers(0, 3),
    "fence": st.one_of(small, st.integers(0, 1 << 40)),
    "attach": small,
    "tokens": tokens,
    "ids": tokens,
    "prompt_length": st.integers(1, 3),
    "vocabulary": st.just(VOCABULARY),
    "context": st.just(CONTEXT),
    "temperature": st.sampled_from([0.0, 0.9]),
    "top_k": small,
    "top_p": st.sampled_from([1.0, 0.9]),
    "seed": small,
    "choice": small,
    "rule": st.sampled_from([*RULES[0.0], *RULES[WARM], "", "", "", *ODD_RULES]),
    "max_tokens": st.integers(1, 20),
    "min_tokens": st.sampled_from([0, 0, 1, 3]),
    "min_p": st.sampled_from([0.0, 0.1]),
    "repetition_penalty": st.sampled_from([1.0, 1.2]),
    "presence_penalty": st.sampled_from([0.0, 0.5]),
    "frequency_penalty": st.sampled_from([0.0, -0.5]),
    "LogitBiasEntry.key": st.integers(0, VOCABULARY - 1),
    "LogitBiasEntry.value": st.sampled_from([-100.0, 1.5]),
    "logprobs": st.integers(0, 3),
    "logprobs_of": st.integers(0, 2),
    "weights": st.lists(st.integers(1, 100), min_size=1, max_size=5),
    "epoch": st.sampled_from([0, EPOCH, EPOCH + 1]),
    "cache_scope": st.sampled_from([b"", b"a", b"b", b"x" * 64]),
    "priority": st.sampled_from([0, 5, -100, 100]),
    "prediction": tokens,
    "prediction_text": st.sampled_from(["5 6 7", "1 1 1 1 1", "nothing of it", ""]),
    "reference_lengths": st.lists(st.sampled_from([1, 2, 5, 0, 1 << 20]), max_size=3),
    "traceparent": st.sampled_from(["", f"00-{'1' * 32}-{'2' * 16}-01", "00-0-0-00"]),
    "forgotten": st.lists(st.sampled_from(["a", "b"]), max_size=2),
    **{name: st.sampled_from(texts) for name, texts in FORMS.items()},
    "texts": st.lists(st.sampled_from(["5", "6 7", ""]), max_size=3),
    "n": st.integers(0, 3),
    "stop_ids": st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
    "stop": st.lists(st.sampled_from(["5", "1 2", " "]), max_size=3),
    "durable": st.integers(0, CONTEXT),
    "credit": st.integers(0, 2 * CONTEXT),
    "due": small,
    "deadline_ms": st.sampled_from([0, 1000]),
    "ledger_us": st.sampled_from([0, 1000]),
    "source": small,
    "chain": small,
    "base": st.integers(0, 20),
    "offset": small,
    "position": st.integers(0, 20),
    "from_position": st.sampled_from([0, len(PROMPT), len(PROMPT) + 1]),
    "prefix_hash": st.one_of(st.just(hash_of(PROMPT)), st.lists(small, max_size=2).map(hash_of)),
    "expected": st.sampled_from([0.0, 1.0]),
    "chunk": st.integers(1, 8),
    "run_ahead": st.integers(0, 16),
    "branches": st.integers(0, 4),
    "parents": st.lists(small, max_size=4),
    "code": st.sampled_from([3, 8, 9]),
    "drafting": st.integers(0, 4),
    "text": st.sampled_from(["5 6 7", "1", "nothing of it", ""]),
    "request_id": st.sampled_from(["", "r1", "r2"]),
    **{name: st.sampled_from(["x", "float32"]) for name in DESCRIBED},
    "model": st.sampled_from(["", "", "", "scripted:7", "x"]),
    "region": st.sampled_from(["", "eu-1"]),
}


# Likewise within a chat.
CHATS: dict[str, Values] = {
    "role": st.sampled_from(["user", "user", "user", "system", "assistant", "tool", ""]),
    "content": st.sampled_from(["5 6 7", "1", "nothing of it", ""]),
    "name": st.sampled_from(["f", "g", ""]),
    "id": st.sampled_from(["a", ""]),
    "tool_call_id": st.sampled_from(["a", ""]),
    "reasoning_content": st.just(""),
    "description": st.sampled_from(["5", ""]),
    "arguments": st.sampled_from(["", "{}", '{"a": 1}', '{"a": ' * 200, "[]"]),
    "parameters": st.sampled_from(["", '{"type": "object"}', '{"properties": {"a": {"type": "integer"}}}', "[", "5"]),
    "template_values": st.sampled_from(["", "", '{"x": [1]}', '{"messages": 5}', "5"]),
    "tool_choice": st.integers(0, 3),
    "tool_name": st.sampled_from(["", "", "f"]),
}


def pools(services: Services) -> Pools:
    """Plausible values by field name, plausible messages by their kind's name."""
    known: dict[str, Values] = PLAUSIBLE | {
        "session_id": st.one_of(st.sampled_from(["a", "b", *services.sessions]), small.map(str)),
        "vocabulary_fingerprint": st.just(services.fingerprint),
        "parent": st.sampled_from(["", "", *services.sessions]),
    }
    sampling = st.one_of(samplings(), messages(common_pb2.Sampling, known))
    chat = messages(generation_pb2.Chat, CHATS)
    return known | {"DraftWeights": weights(), "Proposal": proposals(known), "Sampling": sampling, "Chat": chat}


@dataclass(frozen=True, slots=True)
class Target:
    """A method, of METHODS: `strategy` makes the bytes of what is sent on one call.

    beside: a session runs meanwhile, which may hear of it, and writes the target's text.
    """

    name: str
    address: str
    strategy: Values
    beside: bool = False

    def call(self, services: Services, data: list[bytes]) -> Counter[str]:
        """Send it; the statuses seen, those of refused sessions included, and in small letters what was answered.

        AssertionError if one of them is our own failure.
        """
        seen: Counter[str] = Counter()
        services.pardon()
        with services.channel(self.address) as channel, self._beside(services):
            for code in self._codes(channel, data, seen):
                assert code not in OURS, f"{self.name} answered {code.name} to {data!r}"
                seen[code.name] += 1
        logged = services.failures.take()
        assert not logged, f"{self.name}: {data!r}: {logged}"
        return seen

    @contextmanager
    def _beside(self, services: Services) -> Iterator[None]:
        if not self.beside:
            yield
            return
        with ThreadPoolExecutor(1) as pool:
            completed = pool.submit(services.complete)
            yield
            completed.result(LIMIT_S)

    def _codes(self, channel: grpc.Channel, data: list[bytes], seen: Counter[str]) -> Iterator[grpc.StatusCode]:
        kind = METHODS[self.name]
        make = channel.stream_stream if kind.client_streaming else channel.unary_stream
        method: Any = make(path_of(self.name), bytes, GetMessageClass(kind.output_type).FromString)
        call = method(lingering(data) if kind.client_streaming else data[0], timeout=LIMIT_S)
        try:
            for count, answer in enumerate(call, 1):
                seen.update(field.name for field, _ in answer.ListFields())
                yield from (code_of(each.code) for each in getattr(answer, "refused", ()))
                if count == MOST_ANSWERS:
                    call.cancel()
        except grpc.RpcError:
            code: grpc.StatusCode = call.code()
            if code is not grpc.StatusCode.CANCELLED:
                yield code
        else:
            yield grpc.StatusCode.OK


def lingering(data: list[bytes]) -> Iterator[bytes]:
    """As a peer sends: it stays for a moment, so that what it asked for begins."""
    yield from data
    time.sleep(LINGER_S)


# The registry's callers follow it for ever: of them `tests.fuzz.large` asks.
NAMES = [name for name in METHODS if not name.startswith("RegistryService.")]


def targets(services: Services) -> list[Target]:
    """Every method that takes a message. A unary answer is read as a stream of one."""
    known = pools(services)
    # What a call may begin with that is more than plausible.
    begins = {
        "GenerationService.Generate": asking(known),
        "VerifyService.Connect": deciding(known),
        "DraftService.Connect": drafting(known),
    }
    return [_target(services, known, name, begins.get(name)) for name in NAMES]


def _target(services: Services, known: Pools, name: str, begins: Values | None) -> Target:
    method, is_hub = METHODS[name], name == "DraftHubService.Join"
    each = encoded(GetMessageClass(method.input_type), known)
    data = st.lists(each, min_size=1, max_size=MOST_MESSAGES) if method.client_streaming else st.tuples(each).map(list)
    data = _joining(known) if is_hub else data if begins is None else st.one_of(data, begins)
    return Target(name, services.address_of(name), data, beside=is_hub)


@st.composite
def _joining(draw: st.DrawFn, known: Pools) -> list[bytes]:
    """Seven times of eight the first message is a drafter's that fits."""
    model = draw(messages(common_pb2.GetModelInfoResponse, known))
    later = [draw(encoded(draft_pb2.JoinRequest, known)) for _ in range(draw(st.integers(0, 1)))]
    said = draw(st.lists(messages(draft_pb2.ConnectDraftResponse, known), max_size=MOST_MESSAGES))
    later = [*(draft_pb2.JoinRequest(said=each).SerializeToString() for each in said), *later]
    if draw(st.integers(0, 7)) == 0:
        return later
    return [draft_pb2.JoinRequest(model=model).SerializeToString(), *later]
