"""Whether a drafter's own probabilities foretell what is accepted, so that they may end a chain."""

from __future__ import annotations

from dataclasses import dataclass

from specwire.core.speed import DECAY

# Accepted over foretold tokens: within these bounds the estimates are trusted, once so many windows were held against.
CALIBRATED = (0.7, 1.4)
LEAST_WINDOWS = 8.0


@dataclass(slots=True)
class Calibration:
    """How well a drafter's own estimates foretell acceptance: decayed sums over tested windows.

    windows: those counted. expected, accepted: draft tokens, foretold and real. announced: foretold since the last one.
    """

    windows: float = 0.0
    expected: float = 0.0
    accepted: float = 0.0
    announced: float = 0.0

    def announce(self, expected: float) -> None:
        """A proposal came with its estimate; 0 is none."""
        self.announced += expected

    def settle(self, accepted: int) -> None:
        """The window that held what was announced had `accepted` tokens accepted."""
        if self.announced:
            self.windows = DECAY * self.windows + 1.0
            self.expected = DECAY * self.expected + self.announced
            self.accepted = DECAY * self.accepted + accepted
        self.announced = 0.0

    @property
    def trusted(self) -> bool:
        low, high = CALIBRATED
        return self.windows >= LEAST_WINDOWS and low * self.expected <= self.accepted <= high * self.expected
