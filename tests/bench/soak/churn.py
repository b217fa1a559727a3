"""A program to be weighed: python -m tests.bench.soak.churn KEPT.

Each line on stdin is a number of sessions that come and go: objects and buffers of many sizes, some in cycles, some
hundred living at a time, so that its memory moves by far more than it keeps. It keeps KEPT bytes of each session for
ever.
"""

from __future__ import annotations

import sys
from collections import deque
from itertools import pairwise
from random import Random

LIVING = 200
LONGEST = 400


class Session:
    """Text, an index over it, a buffer, and a cycle, so that it is freed when it is collected."""

    def __init__(self, random: Random) -> None:
        tokens = [random.getrandbits(40) for _ in range(random.randint(1, LONGEST))]
        self.index = {(first, second): first for first, second in pairwise(tokens)}
        self.buffer = bytearray(random.randrange(1 << 16))
        self.itself = self


def main() -> None:
    kept, random = int(sys.argv[1]), Random(1)
    living: deque[Session] = deque(maxlen=LIVING)
    leak = []
    for line in sys.stdin:
        for _ in range(int(line)):
            living.append(Session(random))
            leak.append(bytes(kept))
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
