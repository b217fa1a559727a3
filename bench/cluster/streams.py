"""Streams over HTTP, all at once, each read by a thread of its own: when each token came."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from bench.runs import BenchError

LIMIT_S = 60.0
PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class HttpRun:
    """A stream. Seconds from its request: until its first token, and until each further event of tokens."""

    tokens: tuple[int, ...]
    arrivals: tuple[float, ...]

    @property
    def first_s(self) -> float:
        return self.arrivals[0]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


def streamed(address: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[HttpRun]:
    """One stream for each prompt. address: HOST:PORT. Raises BenchError."""
    together = threading.Barrier(len(prompts))
    with ThreadPoolExecutor(len(prompts)) as readers:
        return list(readers.map(lambda prompt: _stream(address, prompt, tokens, together), prompts))


def _stream(address: str, prompt: Sequence[int], tokens: int, together: threading.Barrier) -> HttpRun:
    wish = {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0.0,
        "drafting": "off",
        "ignore_eos": True,
        "stream": True,
        "details": True,
    }
    together.wait(LIMIT_S)
    try:
        with closing(http.client.HTTPConnection(address, timeout=LIMIT_S)) as connection:
            began = time.perf_counter()
            connection.request("POST", PATH, json.dumps(wish), {"Content-Type": "application/json"})
            return _read(connection.getresponse(), began)
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(f"{address}: {error!r}") from None


def _read(answer: http.client.HTTPResponse, began: float) -> HttpRun:
    if answer.status != 200:
        raise BenchError(f"{answer.status}: {answer.read().decode(errors='replace')}")
    found: list[int] = []
    arrivals: list[float] = []
    while line := answer.readline():
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name != "data":
            continue
        if value == "[DONE]":
            return HttpRun(tuple(found), tuple(arrivals))
        told = json.loads(value)
        if "error" in told:
            raise BenchError(str(told["error"]))
        if new := (told["choices"][0].get("specwire") or {}).get("tokens"):
            found += new
            arrivals.append(time.perf_counter() - began)
    raise BenchError("a stream ended without its end")
