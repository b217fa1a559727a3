"""Clients that stop reading: the verifier soon stops deciding for them, and goes on when they do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

from specwire.client import Chunk, Client, Event, Started
from tests.faults.stack import PLAIN, Stack
from tests.faults.steps import steps_of
from tests.faults.streams import LIMIT_S, plain

LENGTH = 4000
READ_FIRST, FURTHER = 16, 20
PROMPTS = ((5, 6, 7), (8, 9), (10,))
STILL_S = 2.0


class Lazy:
    """A client that reads when it is told to."""

    def __init__(self, client: Client, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.session_id = ""
        self.tokens: list[int] = []
        self._client = client
        self._events: Iterator[Event] = client.generate(prompt, max_tokens=LENGTH, ignore_eos=True, timeout=4 * LIMIT_S)

    def read(self, length: int) -> None:
        """On to so many tokens, at least."""
        for event in self._events:
            if isinstance(event, Started):
                self.session_id = event.session_id
            elif isinstance(event, Chunk):
                self.tokens += event.tokens
                if len(self.tokens) >= length:
                    return

    def decided(self) -> int:
        """By the log."""
        return len(self._client.get_session(self.session_id).tokens) - len(self.prompt)


def until_still(lazies: list[Lazy]) -> list[int]:
    """How far each is decided once nothing is added any more."""
    deadline = time.monotonic() + LIMIT_S
    before: list[int] = []
    while (now := [one.decided() for one in lazies]) != before:
        assert time.monotonic() < deadline, now
        before = now
        time.sleep(STILL_S)
    return now


def test_what_nobody_reads_is_not_decided(healthy: Stack) -> None:
    with ExitStack() as owned:
        lazies = [Lazy(owned.enter_context(Client(healthy.orchestrator.address)), prompt) for prompt in PROMPTS]
        for one in lazies:
            one.read(READ_FIRST)
        decided = until_still(lazies)
        assert max(decided) < LENGTH
        before = steps_of(healthy.verifier.address)
        time.sleep(STILL_S)
        assert steps_of(healthy.verifier.address) == before + 1  # the one that asking takes
        for one, behind in zip(lazies, decided, strict=True):
            one.read(behind + FURTHER)
            assert one.tokens == plain(PLAIN, len(one.tokens), one.prompt)
