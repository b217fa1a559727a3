"""The acceptance rules by name, and what tells them apart (ARCHITECTURE.md section 4, PROTOCOL.md section 7)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum


class Rule(StrEnum):
    """How a draft token is judged."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"
    THRESHOLD = "threshold"
    TYPICAL = "typical"


# What of a text does not depend on proposals at all: which guesses come, from whom, and when.
GUESSING_RULES = frozenset({Rule.GREEDY, Rule.COUPLED})
# Weigh a draft token by the probability that it was drawn with; exact in law if that is what it was drawn with.
WEIGHING_RULES = frozenset({Rule.REJECTION, Rule.BLOCK})
LOSSY_RULES = frozenset({Rule.THRESHOLD, Rule.TYPICAL})

PARAMETERS = {Rule.THRESHOLD: ("t",), Rule.TYPICAL: ("epsilon", "delta")}
KNOWN = ", ".join(f"{rule}({','.join(PARAMETERS[rule])})" if rule in PARAMETERS else str(rule) for rule in Rule)

_CALL = re.compile(r"([a-z]+)(?:\(([^()]*)\))?")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A rule that is not one of the defaults, with its numbers, each above 0 and at most 1.

    threshold(t)             accept a draft token of probability t or more
    typical(epsilon, delta)  accept one of more than min(epsilon, delta * exp(-entropy)): arXiv 2401.10774, section 3.3
    """

    rule: Rule
    numbers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        names = PARAMETERS.get(self.rule, ())
        if len(self.numbers) != len(names):
            wanted = f"takes {' and '.join(names)}" if names else "takes no number"
            raise ValueError(f"{self.rule} {wanted}, not {len(self.numbers)} numbers")
        for name, number in zip(names, self.numbers, strict=True):
            if not (math.isfinite(number) and 0.0 < number <= 1.0):
                raise ValueError(f"{name} of {self.rule} must be above 0 and at most 1, not {number}")

    @classmethod
    def parse(cls, name: str) -> Acceptance:
        """Read "rejection" or "typical(0.3,0.09)"; ValueError says what is wrong with another."""
        call = _CALL.fullmatch(name)
        if call is None or call[1] not in Rule.__members__.values():
            raise ValueError(f"must be one of {KNOWN}, not {name!r:.80}")
        try:
            numbers = tuple(float(number) for number in call[2].split(",")) if call[2] else ()
        except ValueError:
            raise ValueError(f"{name!r:.80} holds what is no number") from None
        return cls(Rule(call[1]), numbers)

    def __str__(self) -> str:
        return f"{self.rule}({','.join(map(repr, self.numbers))})" if self.numbers else str(self.rule)
