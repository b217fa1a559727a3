"""The bars for many sessions at once, and whether they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from bench.batch.figures import BatchLine, BatchSample
from bench.batch.rows import AUTOMATIC, HEADED, OFF, OURS, PEERS, SAMPLED, SAMPLED_HEADED, TEMPERATURE
from bench.harness.interval import Estimate
from bench.harness.report import Bar, at_least, at_most
from bench.harness.runs import speed_ratio
from bench.harness.texts import Judged

# Automatic drafting as a multiple of drafting off: at every level, and for a session alone.
NEVER_SLOWER, ALONE = 0.98, 1.3
# At this level, as multiples of the better peer.
FULL, OFF_TO_PEER, AUTOMATIC_TO_PEER = 16, 0.9, 1.0
# Between the forwards, as a share of the forward, at that level.
OUTSIDE = 0.2


@dataclass(frozen=True, slots=True)
class JudgedText:
    """A text that differs from drafting off at the same level."""

    level: int
    judged: Judged


def bars(samples: Sequence[BatchSample], lines: Sequence[BatchLine], texts: Sequence[JudgedText]) -> list[Bar]:
    by_place = {(line.level, line.row): line for line in lines}
    return [
        *_to_off(by_place),
        *_to_peers(samples, by_place),
        *_outside(by_place),
        *_texts(texts, {line.row for line in lines}),
    ]


def _to_off(lines: Mapping[tuple[int, str], BatchLine]) -> Iterator[Bar]:
    for (level, row), line in lines.items():
        if row == AUTOMATIC:
            name = f"{level} at once, automatic / off"
            yield at_least(name, line.to_off, NEVER_SLOWER)
            if level == 1:
                yield at_least(f"{name}, alone", line.to_off, ALONE)
        if row == HEADED:
            yield at_least(f"{level} at once, automatic with a head / off", line.to_off, NEVER_SLOWER)
        if row in (SAMPLED, SAMPLED_HEADED):
            what = "automatic" if row == SAMPLED else "automatic with a head"
            yield at_least(f"{level} at once, temperature {TEMPERATURE:g}, {what} / off", line.to_off, NEVER_SLOWER)


def _to_peers(samples: Sequence[BatchSample], lines: Mapping[tuple[int, str], BatchLine]) -> Iterator[Bar]:
    peers = [lines[FULL, peer] for peer in PEERS if (FULL, peer) in lines]
    if not peers:
        return
    better = max(peers, key=lambda line: line.tokens_per_second.value).row
    wholes = [sample.whole for sample in samples if sample.level == FULL]
    for row, needed in ((OFF, OFF_TO_PEER), (AUTOMATIC, AUTOMATIC_TO_PEER)):
        name = f"{FULL} at once, {row} / the better peer ({better})"
        yield at_least(name, speed_ratio(wholes, row, better), needed)


def _outside(lines: Mapping[tuple[int, str], BatchLine]) -> Iterator[Bar]:
    for row in (OFF, AUTOMATIC):
        line = lines.get((FULL, row))
        if line is not None and line.outside is not None:
            yield at_most(f"{FULL} at once, {row}: between forwards / forward, p50", line.outside.share, OUTSIDE)


def _texts(texts: Sequence[JudgedText], measured: Set[str]) -> Iterator[Bar]:
    for row in OURS:
        if row not in measured:
            continue
        wrong = sum(one.judged.mismatch.row == row and not one.judged.near_tie for one in texts)
        yield at_most(f"texts of row {row} that differ from drafting off", Estimate(wrong, wrong, wrong, 1.0), 0)
