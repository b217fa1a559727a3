"""One measurement from start to end: start both sides, warm up, choose the peer's best variant, interleave, judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from bench.harness import machine
from bench.harness.child import BenchChild
from bench.harness.interleave import interleave
from bench.harness.machine import CoreUse, CpuSeconds
from bench.harness.rows import (
    ASSISTED,
    GENAI,
    PLAIN,
    VARIANTS,
    HeadedRow,
    SpecwireRow,
    TransformersRow,
    encoded_prompts,
    start_peer,
    start_stack,
)
from bench.harness.runs import BenchError, Row, Sample, of_row
from bench.harness.texts import judge, mismatches, scores_at, tolerance
from bench.main import box
from bench.main.gaps import figures
from bench.main.judged import bars
from bench.main.results import Results, VariantResult, row_result
from bench.main.settings import Settings
from bench.peers import openvino_rows
from specwire.client import Client
from specwire.options import cores
from specwire.rpc.process import say

# Of the pass that decides which of a peer's settings takes part.
PROMPTS = 8
WARM_UP_PROMPTS = 2


@dataclass
class MainField:
    """Who takes part.

    Attributes:
        peer: transformers, which also encodes the prompts and judges.
        rows: those that are as they are.
        choices: of each the fastest row takes part too.
        clocks: processor time by process.
        notes: what was not measured, and why; what is not as its users run it.
    """

    peer: BenchChild
    rows: list[Row]
    choices: list[Sequence[Row]]
    clocks: dict[str, CpuSeconds]
    notes: list[str]


def measure(settings: Settings) -> Results:
    """Start all sides, warm up, choose the peers' best variants, interleave, judge."""
    with ExitStack() as cleanup:
        field = _start(settings, cleanup)
        prompts = encoded_prompts(field.peer, settings.prompts)
        say("bench: warming up")
        warm_up(field.rows, prompts, settings.tokens)
        chosen = [fastest(choice, prompts, settings.tokens) for choice in field.choices]
        rows = sorted([*field.rows, *(best for _, best in chosen)], key=lambda row: row.key)
        use = CoreUse(field.clocks)
        progress = _progress(rows, settings, use)
        samples = interleave(rows, prompts, settings.tokens, settings.repeats, progress)
        scores = scores_at(field.peer, prompts, samples, PLAIN)
        judged = list(judge(mismatches(samples, PLAIN), scores, tolerance(settings.dtype)))
    found, keys = figures(samples), [row.key for row in rows]
    peers = [key for key in (PLAIN, ASSISTED, GENAI) if key in keys][:2]
    return Results(
        arguments=settings.shown(),
        machine=machine.describe(),
        commit=machine.commit(),
        rows=[row_result(row, samples, peers) for row in rows],
        variants=[variant for variants, _ in chosen for variant in variants],
        bars=bars(samples, found, judged),
        figures=found,
        judged=judged,
        cores=use.by_row(),
        samples=samples,
        notes=field.notes,
    )


def _start(settings: Settings, cleanup: ExitStack) -> MainField:
    """Every process that takes part, ended by `cleanup`."""
    draft = None if settings.box else settings.draft
    peer = cleanup.enter_context(start_peer(settings.target, draft, settings.dtype, cores()))
    clocks = {"client": time.process_time, "transformers": peer.cpu_seconds}
    field = MainField(peer, [TransformersRow(peer)], [], clocks, [])
    if settings.box:
        rows, further = box.start(settings, cleanup)
        field.rows += rows
        field.clocks |= further
    else:
        _add_stacks(field, settings, cleanup)
    _add_openvino(field, settings, cleanup)
    return field


def _add_stacks(field: MainField, settings: Settings, cleanup: ExitStack) -> None:
    """Rows (b) to (d), and (h) with a head."""
    stack, client = _stack(settings, cleanup)
    field.rows += [SpecwireRow(client, drafting=False), SpecwireRow(client, drafting=True)]
    field.choices.append([TransformersRow(field.peer, variant) for variant in VARIANTS])
    field.clocks["specwire"] = stack.cpu_seconds
    if settings.head is not None:
        # Another stack: the one without a head reads nothing from hidden states.
        stack, client = _stack(settings, cleanup, "--heads", str(settings.head))
        field.rows.append(HeadedRow(client, drafting=True))
        field.clocks["specwire, with a head"] = stack.cpu_seconds


def _stack(settings: Settings, cleanup: ExitStack, *options: str) -> tuple[BenchChild, Client]:
    stack, address = start_stack(settings.target, settings.draft, settings.dtype, settings.ray, *options)
    cleanup.enter_context(stack)
    return stack, cleanup.enter_context(Client(address))


def _add_openvino(field: MainField, settings: Settings, cleanup: ExitStack) -> None:
    """Rows (e), or a note why there are none."""
    if not openvino_rows.installed():
        field.notes.append(openvino_rows.NOT_INSTALLED)
        return
    folder = cleanup.enter_context(TemporaryDirectory(prefix="specwire-openvino-"))
    try:
        peer = openvino_rows.start(settings.target, settings.draft, settings.dtype, cores(), folder)
    except BenchError as error:
        field.notes.append(f"(e) OpenVINO GenAI was not measured: {error}")
        return
    cleanup.enter_context(peer)
    field.rows.append(openvino_rows.plain_row(peer))
    field.choices += [openvino_rows.draft_rows(peer), openvino_rows.lookup_rows(peer)]
    field.clocks["OpenVINO GenAI"] = peer.cpu_seconds
    field.notes.append(openvino_rows.SETTINGS_NOTE)


def warm_up(rows: Sequence[Row], prompts: Sequence[Sequence[int]], tokens: int) -> None:
    for row in rows:
        for prompt in prompts[:WARM_UP_PROMPTS]:
            row.run(prompt, tokens)


def fastest(rows: Sequence[Row], prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[VariantResult], Row]:
    """What each row reaches on the first prompts, and the one with the most tokens per second."""
    prompts = prompts[:PROMPTS]
    decided = len(prompts) * tokens
    speeds: list[tuple[float, float]] = []  # tokens per second, per forward
    for row in rows:
        warm_up([row], prompts[:1], tokens)
        runs = [row.run(prompt, tokens) for prompt in prompts]
        speeds.append((decided / sum(run.seconds for run in runs), decided / sum(run.forwards for run in runs)))
        say(f"bench: {row.label}: {speeds[-1][0]:.1f} tokens/s")
    best = max(range(len(rows)), key=lambda index: speeds[index][0])
    found = [VariantResult(row.label, *speeds[index], index == best) for index, row in enumerate(rows)]
    return found, rows[best]


def _progress(rows: Sequence[Row], settings: Settings, use: CoreUse) -> Callable[[Sample], None]:
    """Account for the cores after each run, say how far it is after each repeat."""
    done: list[Sample] = []

    def ran(sample: Sample) -> None:
        use.ran(sample.row)
        done.append(sample)
        if len(done) % (len(rows) * settings.prompts) == 0:
            speeds = (f"({row.key}) {_speed(of_row(done, row.key), sample.repeat):.1f}" for row in rows)
            say(f"bench: repeat {sample.repeat + 1} of {settings.repeats}, tokens/s: {', '.join(speeds)}")

    return ran


def _speed(samples: Sequence[Sample], repeat: int) -> float:
    runs = [sample.run for sample in samples if sample.repeat == repeat]
    return sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)
