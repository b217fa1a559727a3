"""What rank 0 has the other ranks of a split model do, as integers: its runner's calls, in its order."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from specwire.lm.cached import Runner
from specwire.lm.interface import Feed

RUN, ZERO, COPY = range(3)
# int64, for this machine only.
WIDE = "q"


def to_run(feeds: Sequence[Feed]) -> bytes:
    numbers = [RUN]
    for feed in feeds:
        numbers += [feed.slot, feed.start, feed.wanted, len(feed.tokens), *feed.tokens]
    return _packed(numbers)


def to_zero(slot: int, stop: int) -> bytes:
    return _packed([ZERO, slot, stop])


def to_copy(source: int, target: int, stop: int) -> bytes:
    return _packed([COPY, source, target, stop])


def obey(runner: Runner, order: bytes) -> None:
    """Do it on this rank's share; what comes out is rank 0's to use."""
    kind, *numbers = array(WIDE, order)
    if kind == RUN:
        runner.run(list(_feeds(iter(numbers))))
    elif kind == ZERO:
        runner.zero(*numbers)
    else:
        runner.copy(*numbers)


def _packed(numbers: Sequence[int]) -> bytes:
    return array(WIDE, numbers).tobytes()


def _feeds(numbers: Iterator[int]) -> Iterator[Feed]:
    for slot in numbers:
        start, wanted, count = (next(numbers) for _ in range(3))
        yield Feed(slot, start, [next(numbers) for _ in range(count)], wanted)
