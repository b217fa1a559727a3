"""Custom classes for vLLM that `bench.vllm.profile` compares: one that does nothing, and ours with a clock."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specwire.vllm.proposer import Proposer

# Seconds in `propose`, in the server's own HOME.
SPENT = "proposing"
FORM = struct.Struct("d")


class EmptyProposer:
    """What vLLM needs of a class, and no more: the loss beside it is vLLM's own. vllm_config: vLLM's VllmConfig."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, target: Any) -> None:
        """Load nothing."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Nothing, for each request."""
        return [[] for _ in sampled_token_ids]


class TimedProposer(Proposer):
    """Writes down how long vLLM has waited for it."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._spent = 0.0
        self._file = os.open(Path.home() / SPENT, os.O_WRONLY | os.O_CREAT, 0o600)

    def propose(self, *asked: Any, **named: Any) -> list[list[int]]:
        """As `Proposer.propose`."""
        began = time.perf_counter()
        proposed = super().propose(*asked, **named)
        self._spent += time.perf_counter() - began
        os.pwrite(self._file, FORM.pack(self._spent), 0)
        return proposed


def seconds_spent(home: Path) -> float:
    """What a `TimedProposer` of the server with this HOME has written down by now."""
    written: tuple[float] = FORM.unpack((home / SPENT).read_bytes())
    return written[0]
