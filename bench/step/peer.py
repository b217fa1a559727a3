"""The process in which one runtime computes the target's steps: a forward of several sessions' windows, and the choice.

No network and no scheduler: what a step costs before anybody waits for it. The end of its standard input ends it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import cycle

from transformers.utils import logging as transformers_logging

from bench.peers.answering import Answer, Methods, Request, answer_asker
from specwire.core.law.acceptance import RowSampling
from specwire.core.law.sampling import Sampling
from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.law.sampler import choose

GREEDY = Sampling(temperature=0.0)


class StepPeer:
    """A target on one runtime. Every slot holds the same text."""

    def __init__(self) -> None:
        self._lm: LanguageModel | None = None
        self._held: list[Sequence[int]] = []

    @property
    def methods(self) -> Methods:
        return {"load": self.load, "decode": self.decode, "generate": self.generate, "steps": self.steps}

    def load(self, request: Request) -> Answer:
        """Load the target with so many `slots`; which runtime it runs on."""
        names = ("slots", "dtype", "threads", "runtime")
        self._lm = load_model(request["target"], **{name: request[name] for name in names})
        self._held = [()] * request["slots"]
        return {"runtime": self._lm.info.runtime}

    def decode(self, request: Request) -> Answer:
        """What the target says after a prompt, greedily."""
        lm, text = self._loaded(), list(request["prompt"])
        self._prefill(1, text[:-1])
        for at in range(len(text) - 1, len(text) - 1 + request["tokens"]):
            text += _step(lm, [Feed(0, at, text[at:], 1)])
        return {"tokens": text[len(request["prompt"]) :]}

    def generate(self, request: Request) -> Answer:
        """The forward alone: greedily, a forward of the prompt, then one for each token, with nothing around them.

        pause_ms: to wait before each, busily, as a thread that has something else to do.
        """
        lm, text, fed, pause = self._loaded(), list(request["prompt"]), 0, request.get("pause_ms", 0.0) / 1e3
        lm.discard(0)
        self._held[0] = ()
        began, ended = time.perf_counter(), []
        for _ in range(request["tokens"]):
            text += _step(lm, [Feed(0, fed, text[fed:], 1)])
            fed = len(text) - 1
            ended.append(time.perf_counter() - began)
            while time.perf_counter() - began < ended[-1] + pause:
                pass
        tokens = text[len(request["prompt"]) :]
        return {"tokens": tokens, "seconds": ended[-1], "first_token_seconds": ended[0]}

    def steps(self, request: Request) -> Answer:
        """Feed `text` behind a prompt to each of `sessions`, in `windows` that take turns; the seconds of all steps."""
        lm, prompt, text = self._loaded(), request["prompt"], request["text"]
        sessions = request["sessions"]
        self._prefill(sessions, prompt)
        seconds, begin = [], 0
        for window in cycle(request["windows"]):
            if begin + window > len(text):
                break
            tokens = text[begin : begin + window]
            feeds = [Feed(slot, len(prompt) + begin, tokens, window) for slot in range(sessions)]
            began = time.perf_counter()
            _step(lm, feeds)
            seconds.append(time.perf_counter() - began)
            begin += window
        return {"seconds": seconds}

    def _prefill(self, sessions: int, prompt: Sequence[int]) -> None:
        """Let the first slots hold the prompt and nothing else."""
        lm = self._loaded()
        for slot in range(sessions):
            if self._held[slot] != prompt:
                lm.discard(slot)
                lm.forward([Feed(slot, 0, prompt, 0)])
                self._held[slot] = list(prompt)
            lm.rollback(slot, len(prompt))

    def _loaded(self) -> LanguageModel:
        if self._lm is None:
            raise RuntimeError("nothing is loaded")
        return self._lm


def _step(lm: LanguageModel, feeds: Sequence[Feed]) -> list[int]:
    """The target's token behind each token fed, as the verifier takes it."""
    rows = [RowSampling(feed.stop - feed.wanted + row + 1, GREEDY) for feed in feeds for row in range(feed.wanted)]
    return choose(lm.forward(feeds), rows)


def main() -> int:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    answer_asker(StepPeer().methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
