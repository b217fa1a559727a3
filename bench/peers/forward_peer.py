"""The process in which our runtime decodes without a server: the floor that no server is below.

No network, no scheduler, no log. In a loop on all cores, or on one with a pause before each forward, as a service
computes it: weights that nobody reads for a while leave the caches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from transformers.utils import logging as transformers_logging

from bench.peers.answering import Answer, Methods, Request, answer_asker
from specwire.core.law.acceptance import RowSampling
from specwire.core.law.sampling import Sampling
from specwire.core.model import AUTO
from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.law.sampler import choose

PLAIN, PAUSED = "plain", "paused"
# Milliseconds from the end of a forward to the start of the next, about as a service has them.
PAUSE_MS = 0.28


class ForwardPeer:
    """A target on the runtime that is fastest here."""

    def __init__(self) -> None:
        self._lm: LanguageModel | None = None
        self._pause_s = 0.0

    @property
    def methods(self) -> Methods:
        return {"load": self.load, "generate": self.generate}

    def load(self, request: Request) -> Answer:
        """`model`, `mode` (PLAIN, PAUSED), `threads` (of PAUSED one), `dtype`."""
        paused = request["mode"] == PAUSED
        threads = 1 if paused else request["threads"]
        self._lm = load_model(request["model"], slots=1, dtype=request["dtype"], threads=threads, runtime=AUTO)
        self._pause_s = PAUSE_MS / 1e3 if paused else 0.0
        return {}

    def generate(self, request: Request) -> Answer:
        """The only one of `prompts`, `tokens` behind it, at `temperature`: a forward of the prompt, one for each token.

        A pause is waited for busily, as a thread that has something else to do.
        """
        if self._lm is None:
            raise RuntimeError("nothing is loaded")
        lm, (prompt,), fed = self._lm, request["prompts"], 0
        text, ended = list(prompt), list[float]()
        sampling = Sampling(temperature=request["temperature"], seed=request["seed"])
        lm.discard(0)
        began = time.perf_counter()
        for _ in range(request["tokens"]):
            text += _step(lm, fed, text, sampling)
            fed = len(text) - 1
            ended.append(time.perf_counter() - began)
            while time.perf_counter() - began < ended[-1] + self._pause_s:
                pass
        run = {"tokens": text[len(prompt) :], "seconds": ended[-1], "first_token_seconds": ended[0]}
        return {"seconds": ended[-1], "runs": [{**run, "forwards": len(ended)}]}


def _step(lm: LanguageModel, fed: int, text: Sequence[int], sampling: Sampling) -> list[int]:
    """The target's token behind the text, as the verifier takes it."""
    return choose(lm.forward([Feed(0, fed, text[fed:], 1)]), [RowSampling(len(text), sampling)])


def main() -> int:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    answer_asker(ForwardPeer().methods)
    return 0


if __name__ == "__main__":
    sys.exit(main())
