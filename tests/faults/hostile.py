"""A hostile DraftService."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from specwire.core.text import Text
from specwire.lm import load_model
from specwire.lm.scripted import Script
from specwire.rpc.model_info import model_info_to_wire
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.faults.stack import PLAIN

SEED = 20_24
VOCABULARY = 64
MOST_UINT32 = (1 << 32) - 1
MOST_UINT64 = (1 << 64) - 1
SCRIPT = Script.parse(PLAIN)

Response = draft_pb2.ConnectDraftResponse


def scripted(text: Sequence[int], count: int) -> list[int]:
    """The tokens that PLAIN will choose behind the text, under greedy."""
    prefix = 0
    for token in text:
        prefix = SCRIPT.extend(prefix, token)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(SCRIPT.logits(prefix).argmax()))
        prefix = SCRIPT.extend(prefix, tokens[-1])
    return tokens


@dataclass(frozen=True, slots=True)
class Victim:
    """The target that it attacks. model: loads as a drafter that would fit. right: as `scripted`, of that target."""

    model: str = PLAIN
    right: Callable[[Sequence[int], int], list[int]] = scripted


class Known:
    """What a drafter knows of one session: its text, the number of its chain, how many tokens it was asked for."""

    def __init__(self, victim: Victim, handle: int, tokens: list[int], run_ahead: int) -> None:
        self.handle = handle
        self.text = Text(tokens)
        self.chain = 0
        self.asked = run_ahead
        self._victim = victim

    def advance(self, position: int, tokens: list[int], run_ahead: int) -> None:
        self.text.truncate(position)
        self.text.extend(tokens)
        self.asked += run_ahead

    def affords(self, response: Response) -> bool:
        """Whether this much was asked for; if so, it is used up."""
        cost = sum(max(1, len(proposal.tokens)) for proposal in response.proposals)
        if cost > self.asked:
            return False
        self.asked -= cost
        return True

    def proposal(self, tokens: list[int], **changes: int) -> common_pb2.Proposal:
        """A new chain behind the text, as an honest drafter begins one, except for `changes`."""
        self.chain += 1
        base = len(self.text)
        honest = {"handle": self.handle, "chain": self.chain, "base": base, "prefix_hash": self.text.hash_at(base)}
        return common_pb2.Proposal(**{**honest, **changes}, tokens=tokens, draft_us=1)  # type: ignore[arg-type]  # any field, by name

    def right(self, count: int) -> list[int]:
        """The tokens that the target will choose, under greedy."""
        return self._victim.right(self.text.tokens, count)


SCRIPTED = Victim()
Attack = Callable[[Known, random.Random], Iterator[Response]]


def garbage(known: Known, rng: random.Random) -> Iterator[Response]:
    """Numbers that are out of every range."""
    extremes = [0, 1, MOST_UINT32, rng.randrange(MOST_UINT32)]
    field = rng.choice(["handle", "source", "base", "offset", "chain"])
    yield Response(proposals=[known.proposal([1, 2], **{field: rng.choice(extremes)})])
    yield Response(proposals=[known.proposal(rng.choice([[VOCABULARY, MOST_UINT32], []]))])
    wild = known.proposal([0])
    wild.draft_us = MOST_UINT32
    yield Response(proposals=[wild], opened=[draft_pb2.OpenedDraft(handle=MOST_UINT32)])
    yield Response(refused=[common_pb2.Refused(handle=MOST_UINT32, code=-1, message="\n" * 9)])


def last_chain(known: Known, rng: random.Random) -> Iterator[Response]:
    """The highest chain number there is: nothing can replace it."""
    yield Response(proposals=[known.proposal([rng.randrange(VOCABULARY)], chain=MOST_UINT64)])


def wrong_hash(known: Known, rng: random.Random) -> Iterator[Response]:
    """Right tokens of another text, and a chain that has no hash."""
    yield Response(proposals=[known.proposal(known.right(3), prefix_hash=rng.getrandbits(64))])
    headless = known.proposal(known.right(3))
    headless.ClearField("prefix_hash")
    yield Response(proposals=[headless])


def right_once(known: Known, rng: random.Random) -> Iterator[Response]:
    """One right token to be let in, then wrong ones, in chunks that overlap."""
    good = known.right(1)
    first = known.proposal([*good, (good[0] + rng.randrange(1, VOCABULARY)) % VOCABULARY])
    more = common_pb2.Proposal()
    more.CopyFrom(first)
    more.offset = 1
    yield Response(proposals=[first])
    yield Response(proposals=[more])


def repeated(known: Known, rng: random.Random) -> Iterator[Response]:
    """Every chunk three times, the last one before its predecessor again, overlaps of every width."""
    tokens = known.right(4)
    if known.asked < 20:
        tokens = tokens[:1]
    first, second = known.proposal(tokens), common_pb2.Proposal()
    second.CopyFrom(first)
    second.offset = rng.randrange(len(tokens))
    del second.tokens[: second.offset]
    yield Response(proposals=[first, first])
    yield Response(proposals=[second, first])
    yield Response(proposals=[second])


def gaps(known: Known, rng: random.Random) -> Iterator[Response]:
    """Chunks that never come: a chain's middle, its beginning, and a base that is far ahead."""
    tokens = known.right(4)
    yield Response(proposals=[known.proposal(tokens[:1])])
    later = known.proposal(tokens[2:], offset=2)
    later.ClearField("prefix_hash")
    later.chain = known.chain = known.chain - 1
    yield Response(proposals=[later])
    yield Response(proposals=[known.proposal(tokens[1:], offset=1)])
    yield Response(proposals=[known.proposal(tokens[:1], base=len(known.text) + 7)])


def wild_trees(known: Known, rng: random.Random) -> Iterator[Response]:
    """Nodes behind themselves, behind none that was sent, twice the same sibling, more or fewer parents than tokens."""
    far = rng.choice([0, 2, 7, MOST_UINT32])
    right = known.right(2)
    for tokens, parents in (
        (right, [1, far]),
        ([right[0]] * 3 + right[1:], [1, 2, 3, 1]),
        (right, [1] * rng.choice([1, 3, 5000])),
        ([(right[0] + 1) % VOCABULARY, *right], [1, 2, 1]),
    ):
        tree = known.proposal(tokens)
        tree.parents.extend(parents)
        yield Response(proposals=[tree])
    behind = known.proposal(right[:1], offset=rng.choice([1, 3, MOST_UINT32]))
    behind.chain = known.chain = known.chain - 1
    behind.parents.append(rng.choice([1, 2, MOST_UINT32]))
    yield Response(proposals=[behind])


def bushes(known: Known, rng: random.Random) -> Iterator[Response]:
    """Trees all of whose leaves are wrong: as many siblings of each right token as were asked for."""
    (right,) = known.right(1)
    wrong = [token for token in range(VOCABULARY) if token != right][: max(0, known.asked)]
    bush = known.proposal(wrong)
    bush.parents.extend(range(1, len(wrong) + 1))
    yield Response(proposals=[bush])


def right_for_long(known: Known, rng: random.Random) -> Iterator[Response]:
    """Right long enough to be trusted, then wrong at every position."""
    right = known.right(min(8, known.asked))
    trusted = len(known.text) < 60
    yield Response(proposals=[known.proposal(right if trusted else [(t + 1) % VOCABULARY for t in right])])


def flood(known: Known, rng: random.Random) -> Iterator[Response]:
    """Far more than anybody asked for, small messages and large ones."""
    for _ in range(200):
        yield Response(proposals=[known.proposal([rng.randrange(VOCABULARY)])])
    for _ in range(5):
        yield Response(proposals=[known.proposal([rng.randrange(VOCABULARY)] * 2000) for _ in range(20)])


def giant(known: Known, rng: random.Random) -> Iterator[Response]:
    """A message larger than a link takes."""
    yield Response(proposals=[known.proposal([MOST_UINT32] * 4_000_000)])


def refuse(known: Known, rng: random.Random) -> Iterator[Response]:
    """Proposes and refuses in one breath."""
    refused = common_pb2.Refused(handle=known.handle, code=grpc.StatusCode.INTERNAL.value[0], message="no")
    yield Response(proposals=[known.proposal([1])], refused=[refused])


def vanish(known: Known, rng: random.Random) -> Iterator[Response]:
    """Breaks the stream now and then."""
    yield Response(proposals=[known.proposal(known.right(2))])
    if rng.random() < 0.2:
        raise Vanished


class Vanished(Exception):
    """The stream ends here."""


def within(attack: Attack) -> Attack:
    """The part of the attack within what was asked for: a drafter that sends more is cut off."""

    def sparing(known: Known, rng: random.Random) -> Iterator[Response]:
        return (response for response in attack(known, rng) if known.affords(response))

    return sparing


SPARING = (
    garbage,
    last_chain,
    wrong_hash,
    right_once,
    repeated,
    gaps,
    wild_trees,
    bushes,
    right_for_long,
    refuse,
    vanish,
)
ATTACKS: dict[str, Attack] = {**{attack.__name__: within(attack) for attack in SPARING}, "flood": flood, "giant": giant}


class HostileDrafter(draft_pb2_grpc.DraftServiceServicer):
    """Describes itself as the drafter that would fit, then attacks at every open and advance."""

    def __init__(self, attack: Attack, victim: Victim = SCRIPTED) -> None:
        self.address = ""
        self._attack = attack
        self._victim = victim
        self._random = random.Random(SEED)
        self.info = model_info_to_wire(load_model(victim.model, slots=1).info, 16)
        self._sent = threading.Event()

    def attacked(self) -> bool:
        return self._sent.is_set()

    def GetModelInfo(
        self, request: common_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> common_pb2.GetModelInfoResponse:
        return self.info

    def Connect(
        self, requests: Iterator[draft_pb2.ConnectDraftRequest], context: grpc.ServicerContext
    ) -> Iterator[Response]:
        sessions: dict[int, Known] = {}
        heard: queue.SimpleQueue[Known | None] = queue.SimpleQueue()
        reader = threading.Thread(target=self._read, args=(requests, sessions, heard), daemon=True)
        reader.start()
        try:
            while (known := heard.get()) is not None:
                for response in self._attack(known, self._random):
                    self._sent.set()
                    yield response
        except Vanished:
            return

    def _read(
        self,
        requests: Iterator[draft_pb2.ConnectDraftRequest],
        sessions: dict[int, Known],
        heard: queue.SimpleQueue[Known | None],
    ) -> None:
        try:
            for request in requests:
                for opening in request.opens:
                    tokens, run_ahead = list(opening.tokens), opening.pace.run_ahead
                    sessions[opening.handle] = Known(self._victim, opening.handle, tokens, run_ahead)
                    heard.put(sessions[opening.handle])
                for advance in request.advances:
                    sessions[advance.handle].advance(advance.position, list(advance.tokens), advance.pace.run_ahead)
                    heard.put(sessions[advance.handle])
        except grpc.RpcError:
            pass  # the peer has gone
        finally:
            heard.put(None)


@contextmanager
def hostile(attack: Attack, victim: Victim = SCRIPTED) -> Iterator[HostileDrafter]:
    servicer = HostileDrafter(attack, victim)
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.max_send_message_length", -1)])
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(0.0).wait(10.0)


class Joined:
    """A hostile drafter that dialled in; `code` is the status that its stream has ended with."""

    def __init__(self, attack: Attack, channel: grpc.Channel) -> None:
        self.drafter = HostileDrafter(attack)
        self._called = threading.Event()
        self._call = draft_pb2_grpc.DraftHubServiceStub(channel).Join(self._says())
        self._called.set()

    def _says(self) -> Iterator[draft_pb2.JoinRequest]:
        yield draft_pb2.JoinRequest(model=self.drafter.info)
        self._called.wait()
        for response in self.drafter.Connect((message.told for message in self._call), self._call):
            yield draft_pb2.JoinRequest(said=response)

    def code(self) -> grpc.StatusCode:
        """Waits for the end."""
        code: grpc.StatusCode = self._call.code()
        return code

    def leave(self) -> None:
        self._call.cancel()


@contextmanager
def joined(attack: Attack, address: str) -> Iterator[Joined]:
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        hostile_one = Joined(attack, channel)
        try:
            yield hostile_one
        finally:
            hostile_one.leave()
