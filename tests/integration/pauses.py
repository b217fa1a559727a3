"""How long text paused in each fault of the cluster tests: told in the report, and written where RECORD says."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness import machine
from tests.faults.streams import Stream

# A file: `make test-cluster RECORD=bench/results/cluster_faults.json`.
VARIABLE = "RECORD"


@dataclass(frozen=True, slots=True)
class Pause:
    """What happened to streams, and the longest wait for a chunk before that, and from then on, in seconds.

    ray_s: until Ray knew, where it was watched.
    """

    fault: str
    usual_s: float
    pause_s: float
    ray_s: float | None = None

    @classmethod
    def of(cls, fault: str, moment: float, *streams: Stream, ray_s: float | None = None) -> Pause:
        """moment: of the fault, on the monotonic clock."""
        usual_s = max(stream.pause_before(moment) for stream in streams)
        pause_s = max(stream.pause_since(moment) for stream in streams)
        return cls(fault, round(usual_s, 3), round(pause_s, 3), None if ray_s is None else round(ray_s, 3))

    def __str__(self) -> str:
        knew = "" if self.ray_s is None else f" (Ray knew after {self.ray_s:.2f} s)"
        return f"{self.fault}: text paused for {self.pause_s:.2f} s at most{knew}, before it {self.usual_s:.2f} s"


def record(pauses: Sequence[Pause]) -> None:
    """Write them down, if that is asked for."""
    path = os.environ.get(VARIABLE)
    if path and pauses:
        file = Path(path)
        head = {"name": file.stem, "machine": machine.describe(), "commit": machine.commit()}
        file.write_text(json.dumps({**head, "faults": [asdict(pause) for pause in pauses]}, indent=1) + "\n")
