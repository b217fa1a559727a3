"""Clients that stop reading: the verifier soon stops deciding for them, nothing piles up; it goes on when they do."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from bench.harness.services import ANY_PORT
from orchestrator.options import OrchestratorOptions
from specwire.client import Chunk, Client, Event, Started
from specwire.client.requests import RequestOptions
from specwire.rpc.channel import READ_AHEAD_BYTES
from tests.faults.http_streams import HttpReader
from tests.faults.parts import Parts, parts, steps_of
from tests.faults.stack import PLAIN, TARGET
from tests.faults.streams import LIMIT_S, plain
from tests.ports import free_address

LENGTH = 4000
READ_FIRST, FURTHER = 16, 20
OVER_GRPC, OVER_HTTP = ((5, 6, 7), (8, 9), (10,)), ((11, 12), (13,))
STILL_S = 2.0
BUFFER = OrchestratorOptions(("x:1",)).buffer
# A chunk of one token takes more than so many bytes either way, with its position, outcome, text and times.
LEAST_BYTES = 32
# What is on its way to a client may fill the client's window or buffer, the server's, and the system's at both ends.
ON_THE_WAY = 4 * READ_AHEAD_BYTES // LEAST_BYTES


class Lazy:
    """A client that reads when it is told to."""

    def __init__(self, events: Iterator[Event], prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.session_id = ""
        self.tokens: list[int] = []
        self._events = events

    def read(self, length: int) -> None:
        """On to so many tokens, at least."""
        for event in self._events:
            if isinstance(event, Started):
                self.session_id = event.session_id
            elif isinstance(event, Chunk):
                self.tokens += event.tokens
                if len(self.tokens) >= length:
                    return


class Served:
    """A verifier and an orchestrator that tell their figures."""

    def __init__(self, owned: Parts) -> None:
        self._figures = {name: free_address() for name in ("verifier", "orchestrator")}
        self.verifier = owned.start("verify", TARGET, "--metrics", self._figures["verifier"])
        more = ("--http", ANY_PORT, "--metrics", self._figures["orchestrator"])
        self.orchestrator = owned.start("orchestrate", "--verifier", self.verifier.ready(), *more)
        self.orchestrator.ready()

    def sum_of(self, service: str, figure: str) -> int:
        """Over all of its labels."""
        with urllib.request.urlopen(f"http://{self._figures[service]}/metrics", timeout=LIMIT_S) as page:
            lines = page.read().decode().splitlines()
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(f"specwire:{figure}"))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Give the processes, which are gone afterwards."""
    with parts() as owned:
        yield Served(owned)


def lazies(served: Served, stack: ExitStack) -> list[Lazy]:
    """Over gRPC and over HTTP."""
    options = RequestOptions(max_tokens=LENGTH, ignore_eos=True)
    client = stack.enter_context(Client(served.orchestrator.address))
    called = [Lazy(client.generate(each, timeout=4 * LIMIT_S, **options), each) for each in OVER_GRPC]
    over_http = [HttpReader([served.orchestrator.http], 0.0, []) for _ in OVER_HTTP]
    posted = [Lazy(one.generate(each, options), each) for one, each in zip(over_http, OVER_HTTP, strict=True)]
    return [*called, *posted]


def until_still(served: Served, all_lazies: list[Lazy]) -> list[int]:
    """How far each is decided, by the log, once nothing is added any more."""
    deadline = time.monotonic() + LIMIT_S
    before: list[int] = []
    with Client(served.orchestrator.address) as client:
        while (now := [decided(client, one) for one in all_lazies]) != before:
            assert time.monotonic() < deadline, now
            before = now
            time.sleep(STILL_S)
    return now


def decided(client: Client, one: Lazy) -> int:
    return len(client.get_session(one.session_id).tokens) - len(one.prompt)


def test_what_nobody_reads_is_not_decided(served: Served) -> None:
    with ExitStack() as owned:
        all_lazies = lazies(served, owned)
        for one in all_lazies:
            one.read(READ_FIRST)
        logged = until_still(served, all_lazies)
        ahead = [length - len(one.tokens) for length, one in zip(logged, all_lazies, strict=True)]
        assert max(ahead) <= BUFFER + ON_THE_WAY
        assert max(logged) < LENGTH
        # The verifier holds nothing that is not in the log, and the orchestrator nothing that was not shown.
        assert served.sum_of("verifier", "decided_tokens_total") == sum(logged)
        assert served.sum_of("orchestrator", "generation_tokens_total") == sum(logged)
        before = steps_of(served.verifier.address)
        time.sleep(STILL_S)
        assert steps_of(served.verifier.address) == before + 1  # the one that asking takes
        for one, behind in zip(all_lazies, logged, strict=True):
            one.read(behind + FURTHER)
            assert one.tokens == plain(PLAIN, len(one.tokens), one.prompt)
