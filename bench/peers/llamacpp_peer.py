"""The process in which llama.cpp's server runs (package `xllamacpp`), asked over HTTP as its users do.

It has its own defaults, but for threads and for the cache of prompts, which is off: every row computes every prompt.
It runs in an environment of its own (`make setup-peers`) and imports nothing that is not there.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import xllamacpp

from bench.peers.answering import Answer, Methods, Request, answer_asker

PLAIN, DRAFT = "plain", "draft"
# llama.cpp's kinds of speculation.
KINDS = {
    DRAFT: "DRAFT_SIMPLE",
    "ngram-simple": "NGRAM_SIMPLE",
    "ngram-map": "NGRAM_MAP_K",
    "ngram-mod": "NGRAM_MOD",
    "ngram-cache": "NGRAM_CACHE",
}
# These keep what earlier texts said for as long as the server lives; each text is to begin without.
REMEMBER = ("ngram-mod", "ngram-cache")
RUN_LIMIT_S = 600.0


class LlamacppPeer:
    """One server with one kind of speculation."""

    def __init__(self) -> None:
        self._asked: Request = {}
        self._server: Any = None

    @property
    def methods(self) -> Methods:
        return {"load": self.load, "generate": self.generate}

    def load(self, request: Request) -> Answer:
        """`model`, `draft` (a file, for DRAFT), `mode` (PLAIN or one of KINDS), `threads`, `sessions`, `context`."""
        self._asked = request
        self._start()
        return {}

    def _start(self) -> None:
        asked, params = self._asked, xllamacpp.CommonParams()
        params.model.path = asked["model"]
        params.n_parallel = asked["sessions"]
        params.n_ctx = asked["sessions"] * asked["context"]
        params.port, params.verbosity = 0, 0
        for pool in (params.cpuparams, params.cpuparams_batch, params.speculative.draft.cpuparams):
            pool.n_threads = asked["threads"]
        if asked["mode"] != PLAIN:
            kind = getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{KINDS[asked['mode']]}")
            params.speculative.types = [kind]
        if asked["mode"] == DRAFT:
            params.speculative.draft.mparams.path = asked["draft"]
        self._server = xllamacpp.Server(params)

    def generate(self, request: Request) -> Answer:
        """All `prompts` at once, `tokens` behind each, at `temperature` with `seed`."""
        if self._asked["mode"] in REMEMBER:
            self._server = None  # ended before its successor takes memory
            self._start()
        found: list[Answer] = [{} for _ in request["prompts"]]
        began = time.perf_counter()
        threads = [
            threading.Thread(target=self._one, args=(request, prompt, found, at, began), daemon=True)
            for at, prompt in enumerate(request["prompts"])
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        seconds = time.perf_counter() - began
        failed = next((run for run in found if "error" in run), None)
        return failed or {"seconds": seconds, "runs": found}

    def _one(self, request: Request, prompt: Sequence[int], found: list[Answer], at: int, began: float) -> None:
        try:
            completion = self._completion(request, prompt)
            found[at] = run_of(completion, time.perf_counter() - began)
        except Exception as error:  # told to the asker, whatever the library says
            found[at] = {"error": f"{type(error).__name__}: {error}"}

    def _completion(self, request: Request, prompt: Sequence[int]) -> dict[str, Any]:
        """In one piece: of a stream the tokens within a character are left out."""
        body = {
            "prompt": list(prompt),
            "n_predict": request["tokens"],
            "temperature": request["temperature"],
            "seed": request["seed"],
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        address = f"{self._server.listening_address}/completion"
        asked = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=RUN_LIMIT_S) as answer:
            completion: dict[str, Any] = json.load(answer)
            return completion


def run_of(completion: dict[str, Any], seconds: float) -> Answer:
    """What a completion took. A forward decides one token beside the draft tokens that it accepts."""
    tokens, timings = completion["tokens"], completion["timings"]
    accepted = timings.get("draft_n_accepted", 0)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "first_token_seconds": timings["prompt_ms"] / 1e3,
        "forwards": len(tokens) - accepted,
        "tested": timings.get("draft_n", 0),
        "accepted": accepted,
    }


def main() -> int:
    answer_asker(LlamacppPeer().methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
