"""A generation over HTTP, read by a client that keeps to docs/HTTP.md: it comes back with its place in the stream."""

from __future__ import annotations

import http.client
import json
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import grpc

from specwire.client import Chunk, Event, Finished, SpecwireError, Started
from specwire.client.events import SamplingInForce, Stats
from specwire.client.requests import RequestOptions
from specwire.core.messages import FinishReason, Outcome
from tests.faults.matrix import HTTP_SILENT_S
from tests.faults.streams import LIMIT_S, Stream

PATH = "/v1/completions"
RETRY_S = 0.1
REASONS = {"length": FinishReason.LENGTH, "stop": FinishReason.EOS}
# Ask again; every other answer that is no stream is the end.
COME_AGAIN = (429, 503)
UNAVAILABLE = "unavailable"


class Broke(Exception):
    """The connection broke, or its server was lost."""


class HttpReader:
    """Generates over HTTP, and comes back. A connection that is read and brings nothing for HTTP_SILENT_S is left.

    breaks: takes note of when a connection was lost, by the wall's clock. patience: seconds without news after which it
    is given up. `over`: set it to have it end.
    """

    def __init__(self, addresses: Sequence[str], patience: float, breaks: list[float]) -> None:
        self.over = threading.Event()
        self._addresses = addresses
        self._patience = patience
        self._breaks = breaks
        self._place: str | None = None
        self._begun = False
        self._withheld = ""

    def generate(self, prompt: Sequence[int], options: RequestOptions) -> Iterator[Event]:
        """As the client library's. Raises SpecwireError."""
        body, at, broken_since = json.dumps(_wish(prompt, options)), 0, None
        while not self.over.is_set():
            try:
                for event in self._answer(self._addresses[at % len(self._addresses)], body, len(prompt)):
                    broken_since = None
                    yield event
                    if isinstance(event, Finished):
                        return
                raise Broke("the stream ended without its end")
            except (Broke, OSError, http.client.HTTPException) as error:
                self._breaks.append(time.time())
                at += 1
                broken_since = broken_since or time.monotonic()
                if time.monotonic() - broken_since >= self._patience:
                    raise SpecwireError(grpc.StatusCode.UNAVAILABLE, repr(error)) from error
                self.over.wait(0.0 if at % len(self._addresses) else RETRY_S)

    def _answer(self, address: str, body: str, prompt_length: int) -> Iterator[Event]:
        """One connection's events. Raises Broke, or what http.client raises; SpecwireError for a status."""
        with closing(http.client.HTTPConnection(address, timeout=HTTP_SILENT_S)) as connection:
            place = {} if self._place is None else {"Last-Event-ID": self._place}
            connection.request("POST", PATH, body, {"Content-Type": "application/json", **place})
            answer = connection.getresponse()
            if answer.status in COME_AGAIN:
                raise Broke(answer.read().decode(errors="replace"))
            if answer.status != 200:
                raise SpecwireError(grpc.StatusCode.ABORTED, f"{answer.status}: {answer.read()!r}")
            for place_of, data in _parsed(answer):
                if self.over.is_set():
                    return
                yield from self._events_of(data, prompt_length)
                self._place = place_of or self._place

    def _events_of(self, data: dict[str, Any], prompt_length: int) -> Iterator[Event]:
        if "error" in data:
            if data["error"]["code"] == UNAVAILABLE:
                raise Broke(str(data["error"]))
            raise SpecwireError(grpc.StatusCode.ABORTED, str(data["error"]))
        (choice,) = data["choices"]
        more = choice.get("specwire") or {}
        if "session_id" in more and not self._begun:
            self._begun = True
            sampling = SamplingInForce(0.0, 0, 1.0, more["seed"], more["rule"])
            yield Started(more["session_id"], prompt_length, sampling, time.monotonic_ns())
        elif "tokens" in more:
            outcomes = tuple(Outcome[name.upper()] for name in more["outcomes"])
            ends = tuple(more["text_ends"])
            tokens = tuple(more["tokens"])
            yield Chunk(more["position"], tokens, outcomes, choice["text"], ends, None, time.monotonic_ns())
        elif choice["finish_reason"] is not None:
            stats = Stats(output_tokens=more["stats"]["output_tokens"], accepted=more["stats"]["accepted"])
            reason, text = REASONS[choice["finish_reason"]], self._withheld
            yield Finished(reason, "", text, len(text), stats, time.monotonic_ns())
        else:
            self._withheld += choice["text"]  # the end releases it


def _wish(prompt: Sequence[int], options: RequestOptions) -> dict[str, Any]:
    """The request's body. The request id is what makes it one session, however often it is asked for."""
    return {
        "prompt": list(prompt),
        "max_tokens": options["max_tokens"],
        "temperature": options.get("temperature", 0.0),
        "seed": options.get("seed", 0),
        "drafting": "auto" if options.get("ngram", True) else "drafters",
        "ignore_eos": options.get("ignore_eos", False),
        "stream": True,
        "details": True,
        "timeout": 2 * LIMIT_S,
        "request_id": secrets.token_hex(16),
    }


def _parsed(answer: http.client.HTTPResponse) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """(id, data) of each event up to [DONE]. Raises Broke where the stream ends before that."""
    place: str | None = None
    while line := answer.readline():
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            place = value
        elif name == "data":
            if value == "[DONE]":
                return
            yield place, json.loads(value)
            place = None
    raise Broke("the connection ended in the middle of the stream")


class HttpStream(Stream):
    """As a Stream, but over HTTP."""

    def _call(self, address: str | Sequence[str], patience: float) -> None:
        self._reader = HttpReader([address] if isinstance(address, str) else address, patience, self.breaks)

    def _generate(self, prompt: Sequence[int], options: RequestOptions) -> Iterator[Event]:
        return self._reader.generate(prompt, options)

    def _hang_up(self) -> None:
        self._reader.over.set()
