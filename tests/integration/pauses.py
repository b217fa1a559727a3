"""How long text paused in each fault of the cluster tests: told in the report, and written where RECORD says."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import machine
from tests.faults.streams import Stream

# A file: `make test-cluster RECORD=bench/results/cluster_faults.json`.
VARIABLE = "RECORD"


@dataclass(frozen=True, slots=True)
class Pause:
    """What happened to a stream, and its longest wait for a chunk before that, and from then on, in seconds."""

    fault: str
    usual_s: float
    pause_s: float

    @classmethod
    def of(cls, fault: str, stream: Stream, moment: float) -> Pause:
        """moment: of the fault, on the monotonic clock."""
        return cls(fault, round(stream.pause_before(moment), 3), round(stream.pause_since(moment), 3))

    def __str__(self) -> str:
        return f"{self.fault}: text paused for {self.pause_s:.2f} s at most, before it {self.usual_s:.2f} s"


def record(pauses: Sequence[Pause]) -> None:
    """Write them down, if that is asked for."""
    path = os.environ.get(VARIABLE)
    if path and pauses:
        file = Path(path)
        head = {"name": file.stem, "machine": machine.describe(), "commit": machine.commit()}
        file.write_text(json.dumps({**head, "faults": [asdict(pause) for pause in pauses]}, indent=1) + "\n")
