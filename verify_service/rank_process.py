"""Another rank of a split target: ``python -m verify_service.rank_process``, started by `verify_service.ranks`.

It loads its share, carries out the orders on its stdin, and ends when that does. Only rank 0 heeds signals that are
meant for the verifier as a whole.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NoReturn

import torch

from specwire.lm import load_model
from specwire.lm.kv_cache import CachedLM
from specwire.lm.runners.vllm import obey
from specwire.rpc.process import one_line
from specwire.telemetry.options import inherited
from verify_service.ranks import LENGTH_BYTES


class RankFollower:
    """The `RankGroup` as another rank than 0 sees it."""

    def __init__(self) -> None:
        # Keep what libraries print out of the answers.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        told = json.loads(_message() or b"{}")
        if not told:  # the verifier ended before this began
            os._exit(0)
        self.rank: int = told["rank"]
        self.size: int = told["size"]
        self.load: dict[str, Any] = told["load"]
        self._meeting: str = told["meeting"]
        self._orders: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._hear, name="orders", daemon=True).start()

    def meet(self) -> str:
        self._say({"rank": self.rank})
        return self._meeting

    def tell(self, order: bytes) -> None:
        raise RuntimeError("only rank 0 tells others what to do")

    def loss(self) -> str:
        return ""

    def next(self) -> bytes:
        """Wait for the next order; the end of orders ends the process."""
        return self._orders.get()

    def give_up(self, error: BaseException) -> NoReturn:
        self._say({"error": one_line(error)})
        os._exit(1)

    def _hear(self) -> None:
        while order := _message():
            self._orders.put(order)
        os._exit(0)  # at once, also from the middle of a forward that waits for the others

    def _say(self, answer: dict[str, object]) -> None:
        try:
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()
        except OSError:
            os._exit(1)  # nobody hears it


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ranks = RankFollower()
    replace(inherited(), traces="").start(f"verifier-rank-{ranks.rank}")
    try:
        lm = load_model(**{**ranks.load, "ranks": ranks})
        if isinstance(lm, CachedLM):
            _follow(lm, ranks)
    except BaseException as error:
        ranks.give_up(error)


@torch.inference_mode()
def _follow(lm: CachedLM, ranks: RankFollower) -> NoReturn:
    while True:
        obey(lm.runner, ranks.next())


def _message() -> bytes:
    """The next message; empty at the end."""
    stream = sys.stdin.buffer
    length = int.from_bytes(stream.read(LENGTH_BYTES))
    return stream.read(length)


if __name__ == "__main__":
    main()
