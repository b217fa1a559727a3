"""Another rank, `verify_service.rank_process`, over a runner that writes into the file `spec` what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from specwire.core.model import Feed, ModelInfo, RankGroup
from specwire.lm.kv_cache import CachedLM, Runner
from verify_service import rank_process


class NotingRunner(Runner):
    kv_bytes = 8

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self._note(f"run {[*feeds]}")
        return torch.zeros(1)

    def zero(self, slot: int, stop: int) -> None:
        self._note(f"zero {slot} {stop}")

    def copy(self, source: int, target: int, stop: int) -> None:
        self._note(f"copy {source} {target} {stop}")

    def _note(self, done: str) -> None:
        with self._notes.open("a") as file:
            file.write(f"{done}\n")


def load_noting(spec: str, ranks: RankGroup) -> CachedLM:
    ranks.meet()
    return CachedLM(NotingRunner(Path(spec)), ModelInfo("", "", 97, 64, (), "float32", "cpu", "", ""), 4)


if __name__ == "__main__":
    with patch.object(rank_process, "load_model", load_noting):
        rank_process.main()
