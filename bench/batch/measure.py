"""One measurement of many sessions at once: start both sides, warm up, interleave level by level, judge."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from bench.batch.arrivals import ArrivalLoad, LoadLine, LoadSample, due_times, load_lines, serve
from bench.batch.figures import BatchLine, BatchSample, lines, unknown
from bench.batch.judged import FULL, JudgedText, bars
from bench.batch.rows import (
    AUTOMATIC,
    LABELS,
    OFF,
    ON,
    OURS,
    PEERS,
    SAMPLED_OFF,
    SAMPLES,
    SEED,
    TEMPERATURE,
    WITH_HEAD,
    BatchRow,
    OurRow,
    PeerRow,
    run_in,
    start_peer,
)
from bench.batch.sessions import Asked
from bench.batch.settings import SEEDS, SHARES, BatchSettings
from bench.harness import machine
from bench.harness.child import BenchChild
from bench.harness.interleave import schedule, tracked
from bench.harness.machine import CoreUse, CpuSeconds
from bench.harness.report import Bar
from bench.harness.rows import LOAD_LIMIT, encoded_prompts, up
from bench.harness.runs import BenchError, tokens_per_second
from bench.harness.texts import Judged, judge, mismatches, scores_at, tolerance
from deploy.stack.options import VERIFIER
from specwire.client import AsyncClient
from specwire.options import cores
from specwire.rpc.process import say

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class BatchResults:
    """A measurement. cores: mean number in use, by row that ran and process; notes: what was not measured, and why."""

    arguments: Mapping[str, object]
    machine: Mapping[str, object]
    commit: str | None
    lines: Sequence[BatchLine]
    loads: Sequence[LoadLine]
    bars: Sequence[Bar]
    texts: Sequence[JudgedText]
    cores: Mapping[str, Mapping[str, float]]
    samples: Sequence[BatchSample]
    load_samples: Sequence[LoadSample]
    notes: Sequence[str]

    @property
    def texts_hold(self) -> bool:
        return all(bar.holds for bar in self.bars if bar.name.startswith("texts"))


@dataclass
class BatchField:
    """Who takes part; see `bench.main.measure.MainField`. asked: our rows by key, for requests that arrive."""

    peer: BenchChild
    rows: list[BatchRow]
    asked: dict[str, Asked]
    runner: asyncio.Runner
    clocks: dict[str, CpuSeconds]
    notes: list[str]


def measure(settings: BatchSettings) -> BatchResults:
    with ExitStack() as cleanup:
        peer = cleanup.enter_context(start_peer(settings.target, settings.dtype, cores()))
        prompts = encoded_prompts(peer, settings.prompts)
        field = _start(settings, cleanup, peer, prompts)
        say("bench: warming up")
        _warm_up(field, settings, prompts)
        use = CoreUse(field.clocks)
        samples = [one for level in settings.levels for one in _level(field.rows, settings, level, prompts, use)]
        load_samples = _loads(field, settings, prompts, samples)
        texts = _texts(peer, settings, prompts, samples)
    found = lines(samples)
    return BatchResults(
        arguments=settings.shown(),
        machine=machine.describe(),
        commit=machine.commit(),
        lines=found,
        loads=load_lines(load_samples, settings.in_time),
        bars=bars(samples, found, texts),
        texts=texts,
        cores=use.by_row(),
        samples=samples,
        load_samples=load_samples,
        notes=[*field.notes, *unknown(found)],
    )


def _start(settings: BatchSettings, cleanup: ExitStack, peer: BenchChild, prompts: Prompts) -> BatchField:
    """Every process of ours, ended by `cleanup`.

    The row with drafting on has an orchestrator of its own, with a fixed plan, beside the stack's, because a request
    cannot forbid the controller to switch drafting off. It shares log, verifier and drafter with the other. Rows with a
    head have a stack of their own: the other reads nothing from hidden states.
    """
    own = ["--slots", str(settings.most), "--runtime", settings.runtime]
    if settings.target_threads is not None:
        own += ["--target-threads", str(settings.target_threads)]
    stack, ready = up(settings.target, settings.draft, settings.dtype, settings.ray, *own)
    cleanup.enter_context(stack)
    fixed, address = _start_fixed(settings.plan, ready["services"], ready["redis"])
    cleanup.enter_context(fixed)
    runner = cleanup.enter_context(asyncio.Runner())
    client = client_of(runner, cleanup, ready["address"])
    clocks = {
        "client": time.process_time,
        "transformers": peer.cpu_seconds,
        "specwire": stack.cpu_seconds,
        "specwire, fixed plan": fixed.cpu_seconds,
    }
    clients = dict.fromkeys((*OURS, *SAMPLES), client)
    clients[ON] = client_of(runner, cleanup, address)
    if settings.head is None:
        clients = {key: each for key, each in clients.items() if key not in WITH_HEAD}
    else:
        headed, at = up(
            settings.target, settings.draft, settings.dtype, settings.ray, *own, "--heads", str(settings.head)
        )
        clocks["specwire, with a head"] = cleanup.enter_context(headed).cpu_seconds
        clients |= dict.fromkeys(WITH_HEAD, client_of(runner, cleanup, at["address"]))
    asked = {
        key: Asked(each, LABELS[key], key != SAMPLED_OFF, TEMPERATURE, SEED)
        if key in SAMPLES
        else Asked(each, LABELS[key], key != OFF)
        for key, each in clients.items()
    }
    longest = max(map(len, prompts))
    rows: list[BatchRow] = [OurRow(key, runner, each) for key, each in asked.items()]
    rows += [PeerRow(key, peer, longest, settings.most) for key in PEERS]
    runtime = runtime_of(runner, client)
    note = f"({ON}): the plan {settings.plan} for every session; the verifier still bounds what its windows may cost."
    return BatchField(peer, rows, asked, runner, clocks, [note, f"specwire's forwards are computed by {runtime}."])


def runtime_of(runner: asyncio.Runner, client: AsyncClient) -> str:
    """The runtime of the target's forwards."""
    return runner.run(client.server_info()).target.runtime


def _start_fixed(plan: str, services: Mapping[str, str], redis_url: str) -> tuple[BenchChild, str]:
    drafters = [word for role, each in services.items() if role != VERIFIER for word in ("--drafter", each)]
    words = ["--verifier", services[VERIFIER], *drafters, "--redis-url", redis_url, "--plan", plan, "--json"]
    orchestrator = BenchChild("orchestrator", [sys.executable, "-m", "orchestrator", *words])
    try:
        return orchestrator, str(orchestrator.answer(LOAD_LIMIT)["address"])
    except BaseException:
        orchestrator.stop()
        raise


def client_of(runner: asyncio.Runner, cleanup: ExitStack, address: str, token: str = "") -> AsyncClient:
    async def made() -> AsyncClient:
        return AsyncClient(address, token=token)

    client = runner.run(made())
    cleanup.callback(lambda: runner.run(client.close()))
    return client


def _warm_up(field: BatchField, settings: BatchSettings, prompts: Prompts) -> None:
    """Each row at the lowest and the highest level. A peer's row that cannot run here is left out, with a note."""
    asked_of_us = (*OURS, *SAMPLES)
    for row in list(field.rows):
        try:
            for level in (settings.levels[0], settings.most):
                row.run(prompts[:level], settings.tokens)
        except BenchError as error:
            if row.key in asked_of_us:
                raise
            field.notes.append(f"{LABELS[row.key]} was not measured: {error}")
            field.rows.remove(row)


def _level(
    rows: Sequence[BatchRow], settings: BatchSettings, level: int, prompts: Prompts, use: CoreUse
) -> list[BatchSample]:
    """All rows with so many sessions at once, interleaved group by group."""
    groups = settings.groups(level)
    samples = []
    turns = schedule(settings.repeats, len(groups), len(rows))
    for repeat, group, index in tracked(turns, settings.repeats * len(groups) * len(rows), f"{level} at once"):
        first, row = groups[group], rows[index]
        together = row.run(prompts[first : first + level], settings.tokens)
        samples.append(BatchSample(level, repeat, first, row.key, together))
        use.ran(f"{row.key}, {level} at once")
    speeds = ", ".join(f"{row.key} {_speed(samples, row.key):.0f}" for row in rows)
    say(f"bench: {level} at once, tokens/s: {speeds}")
    return samples


def _speed(samples: Sequence[BatchSample], row: str) -> float:
    return tokens_per_second([sample.whole for sample in samples], row).value


def _loads(
    field: BatchField, settings: BatchSettings, prompts: Prompts, samples: Sequence[BatchSample]
) -> list[LoadSample]:
    """Requests that arrive, at shares of what drafting off reached: off and automatic by turns, alike for both."""
    if not settings.requests:
        return []
    level = FULL if FULL in settings.levels else settings.most
    most = _speed([sample for sample in samples if sample.level == level], OFF) / settings.tokens
    loads = [ArrivalLoad(share, share * most, seed) for share in SHARES for seed in SEEDS[: settings.repeats]]
    rows = (OFF, AUTOMATIC)
    found = []
    for turn, load in enumerate(tracked(loads, len(loads), "arrivals")):
        times = due_times(load, settings.requests)
        for row in rows if turn % 2 else reversed(rows):
            say(f"bench: {load.per_second:.1f} requests/s, {row}")
            served = run_in(field.runner, row, serve(field.asked[row], prompts, settings.tokens, times))
            found.append(LoadSample(load, row, tuple(served)))
    return found


def _texts(
    peer: BenchChild, settings: BatchSettings, prompts: Prompts, samples: Sequence[BatchSample]
) -> list[JudgedText]:
    """Where a row's text differs from drafting off at the same level, and whether that is a near-tie."""
    return [
        JudgedText(level, each)
        for level in settings.levels
        for each in _judged(peer, settings.dtype, prompts, [sample for sample in samples if sample.level == level])
    ]


def _judged(peer: BenchChild, dtype: str, prompts: Prompts, samples: Sequence[BatchSample]) -> list[Judged]:
    """Greedy rows only: drawn tokens may differ at a near-tie of probabilities and noise, which scores do not show."""
    sessions = [session for sample in samples if sample.row not in SAMPLES for session in sample.sessions]
    return list(judge(mismatches(sessions, OFF), scores_at(peer, prompts, sessions, OFF), tolerance(dtype)))
