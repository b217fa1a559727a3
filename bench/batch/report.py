"""The report of many sessions at once, and its form on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.batch.arrivals import LoadLine, LoadSample
from bench.batch.figures import BatchLine, BatchSample, pauses_ms
from bench.batch.judged import JudgedText
from bench.batch.measure import BatchResults
from bench.batch.rows import LABELS
from bench.harness.record import write_object
from bench.harness.report import bar_lines, table


def report(results: BatchResults) -> str:
    sections = (
        _lines(results.lines),
        _outside(results.lines),
        _loads(results.loads),
        _texts(results.texts),
        bar_lines(results.bars),
        list(results.notes),
    )
    return "\n\n".join("\n".join(each) for each in sections if each)


def _lines(lines: Sequence[BatchLine]) -> list[str]:
    head = (
        *("at once", "row", "tokens/s", "x off", "x off while full"),
        *("pause p50 ms", "p95", "first token ms", "tokens/forward"),
    )
    return table(
        head,
        [
            (
                str(line.level),
                LABELS[line.row],
                f"{line.tokens_per_second.value:.0f}",
                f"{line.to_off:.2f}",
                f"{line.full_to_off:.2f}" if line.full_to_off is not None else "",
                f"{line.pause_p50_ms:.1f}",
                f"{line.pause_p95_ms:.1f}",
                f"{line.first_token_ms:.0f}",
                f"{line.tokens_per_forward:.2f}",
            )
            for line in lines
        ],
    )


def _outside(lines: Sequence[BatchLine]) -> list[str]:
    head = (
        "at once",
        "between forwards, p50 of",
        "step us",
        "session us",
        "choosing us",
        "forward us",
        "share",
        "steps",
    )
    body = [
        (
            str(line.level),
            LABELS[line.row],
            f"{line.outside.step_us.value:.0f}",
            f"{line.outside.session_us:.1f}",
            f"{line.outside.choosing_us:.0f}",
            f"{line.outside.forward_us:.0f}",
            f"{line.outside.share:.2f}",
            str(line.outside.steps),
        )
        for line in lines
        if line.outside is not None
    ]
    return table(head, body) if body else []


def _loads(loads: Sequence[LoadLine]) -> list[str]:
    if not loads:
        return []
    head = (
        *("requests arriving", "row", "tokens/s", "in time, tokens/s", "requests in time", "refused"),
        *("first token p50 ms", "p95", "pause p95 ms"),
    )
    body = [
        (
            f"{load.requests_per_second:.1f}/s, {load.share:.0%} of off",
            LABELS[load.row],
            f"{load.tokens_per_second:.2f}",
            f"{load.goodput:.2f}",
            f"{load.in_time:.0%}",
            str(load.refused),
            f"{load.first_p50_ms:.0f}",
            f"{load.first_p95_ms:.0f}",
            f"{load.pause_p95_ms:.1f}",
        )
        for load in loads
    ]
    return table(head, body)


def _texts(texts: Sequence[JudgedText]) -> list[str]:
    """How many differ, by row and level; the file has each."""
    if not texts:
        return ["texts: all rows as with drafting off at the same level, token for token"]
    kinds = Counter((one.level, one.judged.mismatch.row, one.judged.near_tie) for one in texts)
    return [
        "texts: different from drafting off at",
        *(
            f"  {level} at once, {row}: {count} first differences, {'near-ties' if near else 'NOT near-ties'}"
            for (level, row, near), count in sorted(kinds.items())
        ),
    ]


def write(results: BatchResults, path: Path) -> None:
    head = {
        "name": path.stem,
        "bars": [asdict(bar) for bar in results.bars],
        "rows": [{"label": LABELS[line.row], **asdict(line)} for line in results.lines],
        "loads": [{"label": LABELS[load.row], **asdict(load)} for load in results.loads],
        "mismatches": [{"level": one.level, **asdict(one.judged)} for one in results.texts],
        "cores_in_use": results.cores,
        "notes": list(results.notes),
        "machine": results.machine,
        "commit": results.commit,
        "arguments": results.arguments,
        "raw_loads": [_raw_load(sample) for sample in results.load_samples],
    }
    write_object(head, [_raw(sample) for sample in results.samples], path)


def _raw(sample: BatchSample) -> dict[str, object]:
    return {
        "level": sample.level,
        "repeat": sample.repeat,
        "first_prompt": sample.first,
        "row": sample.row,
        "seconds": round(sample.together.seconds, 6),
        "sessions": [
            {
                "seconds": round(run.seconds, 6),
                "first_token_seconds": round(run.first_token_seconds, 6),
                "forwards": run.forwards,
                "plan": run.plan,
                "longest_pause_ms": round(max(pauses_ms(run), default=0.0), 3),
            }
            for run in sample.together.runs
        ],
    }


def _raw_load(sample: LoadSample) -> dict[str, object]:
    requests = [
        {
            "due": round(each.due, 4),
            "ended": round(each.ended, 4),
            "first_ms": round(each.first_ms, 2) if each.run else None,
            "pause_p95_ms": round(each.pause_ms, 2) if each.run else None,
        }
        for each in sample.served
    ]
    return {"load": asdict(sample.load), "row": sample.row, "requests": requests}
