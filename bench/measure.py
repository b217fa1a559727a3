"""One measurement from start to end: start both sides, warm up, choose the peer's best variant, interleave, judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from bench import machine
from bench.bars import bars
from bench.child import Child
from bench.cores import CoreUse
from bench.gaps import figures
from bench.interleave import interleave
from bench.results import Results, VariantResult, row_result
from bench.rows import PLAIN, VARIANTS, SpecwireRow, TransformersRow, Variant, start_peer, start_stack
from bench.runs import Row, Sample, of_row
from bench.settings import Settings
from bench.texts import Mismatch, Scores, judge, mismatches, tolerance
from demo_pair import held_out_prompts
from deploy.options import cores
from specwire.client import Client
from specwire.rpc.process import say

ASK_LIMIT = 600.0
SELECTION_PROMPTS = 8
WARM_UP_PROMPTS = 2
NOTES = (
    "(e) OpenVINO GenAI was not measured: it reads models in a format of its own, and nothing here converts them.",
)


def measure(settings: Settings) -> Results:
    """Start both sides, warm up, choose the best assisted variant, interleave, judge."""
    with ExitStack() as cleanup:
        peer = cleanup.enter_context(start_peer(settings.target, settings.draft, settings.dtype, cores()))
        prompts = _prompts(peer, settings.prompts)
        stack, address = start_stack(settings.target, settings.draft, settings.dtype, settings.ray)
        cleanup.enter_context(stack)
        client = cleanup.enter_context(Client(address))
        ours = [SpecwireRow(client, drafting=False), SpecwireRow(client, drafting=True)]
        say("bench: warming up")
        _warm_up([TransformersRow(peer), *ours], prompts, settings.tokens)
        variants, best = _select(peer, prompts[:SELECTION_PROMPTS], settings.tokens)
        rows: list[Row] = [TransformersRow(peer), TransformersRow(peer, best), *ours]
        _warm_up([rows[1]], prompts, settings.tokens)
        use = CoreUse({"client": time.process_time, "transformers": peer.cpu_seconds, "specwire": stack.cpu_seconds})
        progress = _progress(rows, settings, use)
        samples = interleave(rows, prompts, settings.tokens, settings.repeats, progress)
        judged = list(judge(mismatches(samples, PLAIN), _scores(peer, prompts, samples), tolerance(settings.dtype)))
    found = figures(samples)
    return Results(
        arguments=settings.shown(),
        machine=machine.describe(),
        commit=machine.commit(),
        rows=[row_result(row, samples) for row in rows],
        variants=variants,
        bars=bars(samples, found, judged),
        figures=found,
        judged=judged,
        cores=use.by_row(),
        samples=samples,
        notes=NOTES,
    )


def _prompts(peer: Child, count: int) -> list[list[int]]:
    """Token ids of the first held-out prompts, made by the target's tokenizer: all rows get the same."""
    texts = [prompt.text for prompt in held_out_prompts()[:count]]
    prompts: list[list[int]] = peer.ask({"do": "encode", "texts": texts}, ASK_LIMIT)["prompts"]
    return prompts


def _warm_up(rows: Sequence[Row], prompts: Sequence[Sequence[int]], tokens: int) -> None:
    for row in rows:
        for prompt in prompts[:WARM_UP_PROMPTS]:
            row.run(prompt, tokens)


def _select(peer: Child, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[VariantResult], Variant]:
    """Run every variant of assisted generation on some prompts; the fastest one takes part."""
    speeds: dict[Variant, tuple[float, float]] = {}
    for variant in VARIANTS:
        row = TransformersRow(peer, variant)
        _warm_up([row], prompts[:1], tokens)
        runs = [row.run(prompt, tokens) for prompt in prompts]
        decided = len(prompts) * tokens
        speeds[variant] = decided / sum(run.seconds for run in runs), decided / sum(run.forwards for run in runs)
        say(f"bench: {row.label}: {speeds[variant][0]:.1f} tokens/s")
    best = max(speeds, key=lambda variant: speeds[variant][0])
    return [VariantResult(variant.name, *speed, variant == best) for variant, speed in speeds.items()], best


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


def _scores(peer: Child, prompts: Sequence[Sequence[int]], samples: Sequence[Sample]) -> Callable[[Mismatch], Scores]:
    """How to ask the target about a mismatch."""
    reference = {sample.prompt: sample.run.tokens for sample in reversed(of_row(samples, PLAIN))}

    def ask(where: Mismatch) -> Scores:
        text = [*prompts[where.prompt], *reference[where.prompt][: where.at]]
        answer = peer.ask({"do": "scores", "text": text, "of": [where.expected, where.got]}, ASK_LIMIT)
        return Scores(tuple(answer["top"]), tuple(answer["top_scores"]), tuple(answer["scores"]))

    return ask
