"""The clock of the service: the machine's monotonic one, in microseconds, for the event loop and the engine alike."""

from __future__ import annotations

import time


def monotonic_us() -> float:
    return time.monotonic_ns() / 1000
