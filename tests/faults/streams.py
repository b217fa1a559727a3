"""A client's stream, read by a thread of its own, and the text that it must bring."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from types import TracebackType
from typing import Self, Unpack

import grpc

from orchestrator.store import StoredSession
from specwire.client import Chunk, Client, Event, Finished, SpecwireError, Started
from specwire.client.requests import RequestOptions
from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason, Outcome
from specwire.lm import Feed, load_model

LIMIT_S = 120.0
PROMPT = (5, 6, 7)
# Where the client library says that a stream broke.
RESUMING = logging.getLogger("specwire.client.stream")


@cache
def plain(model: str, length: int, prompt: Sequence[int] = PROMPT, sampling: Sampling | None = None) -> list[int]:
    """`length` tokens of plain decoding by `model`."""
    lm, text = load_model(model, slots=1), list(prompt)
    for _ in range(length):
        cached = lm.cached(0)
        logits = lm.forward([Feed(0, cached, text[cached:], 1)])[0].numpy()
        text.append(choose(logits, len(text), sampling or Sampling()))
    return text[len(prompt) :]


class Quiet(Exception):
    """Nothing came in time."""


class Stream:
    """A generation under way. Checks that no token is missing and none comes twice.

    `error` is the status that it ended with, `finished` its regular end. `arrivals`: when each chunk came, on the
    monotonic clock, whenever it was read. `breaks`: when the client found its connection lost, by the wall's clock.
    `patience`: the client's; 0 has the stream end with its connection.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        prompt: Sequence[int] = PROMPT,
        patience: float = 0.0,
        **options: Unpack[RequestOptions],
    ) -> None:
        self.tokens: list[int] = []
        self.outcomes: list[Outcome] = []
        self.arrivals: list[float] = []
        self.breaks: list[float] = []
        self.text = ""
        self.session_id = ""
        self.finished: Finished | None = None
        self.error: SpecwireError | None = None
        self._prompt_length = len(prompt)
        self._events: queue.SimpleQueue[tuple[float, Event | SpecwireError]] = queue.SimpleQueue()
        self._call(address, patience)
        self._thread = threading.Thread(target=self._read, args=(tuple(prompt), options), daemon=True)
        self._thread.start()

    def _call(self, address: str | Sequence[str], patience: float) -> None:
        """Be ready to generate."""
        self._client = Client(address, patience=patience)

    def _generate(self, prompt: Sequence[int], options: RequestOptions) -> Iterator[Event]:
        """All events of the stream, wherever they come from; in the stream's own thread."""
        with Noting(self.breaks):
            yield from self._client.generate(prompt, timeout=2 * LIMIT_S, **options)

    def _hang_up(self) -> None:
        """Have `_generate` end."""
        self._client.close()

    def _read(self, prompt: Sequence[int], options: RequestOptions) -> None:
        asked: RequestOptions = {**options, "ignore_eos": True}
        try:
            for event in self._generate(prompt, asked):
                self._events.put((time.monotonic(), event))
        except SpecwireError as error:
            self._events.put((time.monotonic(), error))

    @property
    def under_way(self) -> bool:
        """More may come than has come, whether that was read or not."""
        return self._thread.is_alive()

    @property
    def over(self) -> bool:
        return self.finished is not None or self.error is not None

    def take(self, limit: float = LIMIT_S) -> Event | SpecwireError:
        """The next event. Raises Quiet if none comes within `limit` seconds."""
        try:
            arrived, event = self._events.get(timeout=limit)
        except queue.Empty:
            raise Quiet(f"nothing within {limit:g} s after {len(self.tokens)} tokens") from None
        match event:
            case Started():
                self.session_id = event.session_id
            case Chunk():
                assert event.position == self._prompt_length + len(self.tokens)
                self.arrivals.append(arrived)
                self.tokens += event.tokens
                self.outcomes += event.outcomes
                self.text += event.text
            case Finished():
                self.text += event.text
                self.finished = event
            case SpecwireError():
                self.error = event
        return event

    def until(self, length: int) -> None:
        """Read on until at least `length` tokens are here."""
        while len(self.tokens) < length:
            self.take()
            assert not self.over, (self.error, self.finished)

    def until_arrived(self, moment: float) -> None:
        """Read on until a chunk is here that came after `moment`, on the monotonic clock."""
        while not self.arrivals or self.arrivals[-1] < moment:
            self.until(len(self.tokens) + 1)

    def until_accepted(self) -> None:
        """Read on until a draft token is accepted that was not read before."""
        seen = len(self.outcomes)
        while Outcome.ACCEPTED not in self.outcomes[seen:]:
            self.until(len(self.tokens) + 1)

    def until_quiet(self, seconds: float) -> None:
        """Read on until nothing comes for `seconds`."""
        try:
            while True:
                self.take(seconds)
                assert not self.over, (self.error, self.finished)
        except Quiet:
            return

    def rest(self) -> list[int]:
        """Read to the end; all tokens."""
        while not self.over:
            self.take()
        return self.tokens

    def check_whole(self, expected: list[int]) -> None:
        """Read to its end, which is as asked: a scripted model's tokens, each once, and the text that they make."""
        assert self.rest() == expected
        assert self.error is None
        assert self.text == " ".join(map(str, expected))
        assert self.finished is not None
        assert self.finished.reason is FinishReason.LENGTH
        assert self.finished.stats.output_tokens == len(expected)

    def failure(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> str:
        """Read to its end, which is this status; its message."""
        self.rest()
        assert self.error is not None
        assert self.error.code is code
        return self.error.message

    def check_logged(self, log: StoredSession | None) -> None:
        """The log says no less and no more than what was read to its end."""
        assert log is not None
        assert self.finished is not None
        assert (list(log.tokens), list(log.outcomes)) == (self.tokens, self.outcomes)
        assert log.reason is self.finished.reason

    def pause_since(self, moment: float) -> float:
        """Seconds of the longest wait for a chunk among those that came after `moment`."""
        return max((wait for end, wait in self._waits() if end >= moment), default=0.0)

    def pause_before(self, moment: float) -> float:
        """Seconds of the longest wait for a chunk among those that came before `moment`."""
        return max((wait for end, wait in self._waits() if end < moment), default=0.0)

    def _waits(self) -> Iterator[tuple[float, float]]:
        """When each chunk but the first came, and how long after the one before."""
        for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False):
            yield later, later - earlier

    def close(self) -> None:
        self._hang_up()
        self._thread.join(LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Noting(logging.Handler):
    """As a context: notes when the client library says, in this thread, that a stream broke."""

    def __init__(self, moments: list[float]) -> None:
        super().__init__(logging.INFO)
        self._moments = moments
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self._moments.append(record.created)

    def __enter__(self) -> Self:
        RESUMING.setLevel(logging.INFO)
        RESUMING.addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        RESUMING.removeHandler(self)
