"""A relay process as its owner sees it."""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass

from bench.harness.child import BenchChild, Message
from bench.relay.frames import Count

LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sums by direction; up is from who dialled."""

    up: Count
    down: Count


class RelayLink:
    """A relay between whoever dials `address` and the server at `to`; close it, or use it as a context manager."""

    def __init__(self, to: str, listen: str = "127.0.0.1:0") -> None:
        self._child = BenchChild("relay", [sys.executable, "-m", "bench.relay.relay", "--listen", listen, "--to", to])
        try:
            self.address = str(self._child.answer(LIMIT_S)["address"])
        except BaseException:
            self._child.stop()
            raise

    def shape(self, rtt_ms: float, jitter_ms: float = 0.0, mbit: float = 0.0) -> None:
        self._ask({"do": "shape", "rtt_ms": rtt_ms, "jitter_ms": jitter_ms, "mbit": mbit})

    def stall(self, seconds: float) -> None:
        """Hold everything back; connections live on."""
        self._ask({"do": "stall", "seconds": seconds})

    def cut(self, seconds: float) -> None:
        """Reset all connections, and new ones for so long."""
        self._ask({"do": "cut", "seconds": seconds})

    def traffic(self) -> Traffic:
        answer = self._ask({"do": "count"})
        return Traffic(_count(answer["up"]), _count(answer["down"]))

    def late_ms(self) -> dict[str, float]:
        """Quantiles (0.5, 0.9, 0.99) of how late deliveries were."""
        late: dict[str, float] = self._ask({"do": "count"})["late_ms"]
        return late

    def capture(self) -> None:
        """Keep the payload of DATA frames of the connections that are open."""
        self._ask({"do": "capture"})

    def captured(self) -> tuple[list[bytes], list[bytes]]:
        """The payload of the oldest stream of each connection, (up, down); capturing ends.

        That is the Connect stream: calls that were made before it are over, and later ones are not what is counted. A
        connection that was idle has none.
        """
        connections = self._ask({"do": "captured"})["connections"]
        up, down = ([_oldest(one[name]) for one in connections if one[name]] for name in ("up", "down"))
        return up, down

    def close(self) -> None:
        self._child.stop()

    def __enter__(self) -> RelayLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Message) -> Message:
        return self._child.ask(request, LIMIT_S)


def _count(fields: dict[str, int]) -> Count:
    return Count(fields["bytes"], fields["frames"], fields["data_frames"], fields["data_bytes"])


def _oldest(streams: dict[str, str]) -> bytes:
    """The payload of the stream of the lowest number."""
    return base64.b64decode(streams[min(streams, key=int)])
