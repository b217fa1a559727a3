"""Measure proposals from the text itself on prompts that ask for a copy: python -m bench.copy --help.

A prompt holds a piece of held-out code and begins the same piece again. The rows differ in who may propose: nobody, the
drafter, the text, both. They take turns on one stack, as in `make bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.harness import RESULTS, machine
from bench.harness.entry import terminable
from bench.harness.interleave import interleave
from bench.harness.interval import estimate
from bench.harness.machine import dtype_of
from bench.harness.report import Bar, at_least, at_most, table
from bench.harness.rows import RUN_LIMIT, exactly, start_stack
from bench.harness.runs import BenchError, Run, Sample, of_row, speed_ratio, tokens_per_forward, tokens_per_second
from bench.suffix.sources import proposal_us, repeating
from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.client import Client, SpecwireError
from specwire.core.model import AUTO
from specwire.core.verify.text_sources import NgramSource
from specwire.rpc.process import say
from specwire.rpc.server_options import SERVED_DTYPES

OUT = RESULTS / "copy.json"
BEGUN_LINES = 5
WARM_UP_PROMPTS = 2
INDEX_TOKENS, INDEX_PROPOSALS, INDEX_REPEATS = 8000, 1000, 9

PLAIN, DRAFTER, NGRAM, BOTH = "plain", "drafter", "ngram", "both"
LABELS = {PLAIN: "plain decoding", DRAFTER: "drafter only", NGRAM: "n-gram only", BOTH: "both"}


@dataclass(frozen=True, slots=True)
class CopyRun(Run):
    """Draft tokens tested and accepted, in all and from the text itself."""

    tested_all: int = 0
    accepted_all: int = 0
    tested_ngram: int = 0
    accepted_ngram: int = 0


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Our stack, asked for text with some sources of proposals allowed."""

    client: Client
    key: str

    @property
    def label(self) -> str:
        return LABELS[self.key]

    def run(self, prompt: Sequence[int], tokens: int) -> CopyRun:
        began_ns = time.monotonic_ns()
        try:
            done = self.client.complete(
                prompt,
                max_tokens=tokens,
                ignore_eos=True,
                drafting=self.key in (DRAFTER, BOTH),
                ngram=self.key in (NGRAM, BOTH),
                timeout=RUN_LIMIT,
            )
        except SpecwireError as error:
            raise BenchError(f"{self.label}: {error}") from error
        seconds, stats = (time.monotonic_ns() - began_ns) / 1e9, done.stats
        return CopyRun(
            tokens=exactly(tokens, done.tokens, self.label),
            seconds=seconds,
            first_token_seconds=stats.time_to_first_token_us / 1e6,
            forwards=stats.target_forwards,
            tested_all=stats.tested,
            accepted_all=stats.accepted,
            tested_ngram=stats.tested_ngram,
            accepted_ngram=stats.accepted_ngram,
        )


def copy_prompt(code: str) -> str:
    """The code in whole lines, and its first lines again."""
    lines = code.splitlines(keepends=True)[:-1]
    return "".join([*lines, "\n\n", *lines[:BEGUN_LINES]])


def own_proposal_us(tokens: int = INDEX_TOKENS, proposals: int = INDEX_PROPOSALS) -> float:
    """Microseconds from a token's arrival to the next proposal, behind a text of so many tokens that repeats itself."""
    chance = random.Random(1)
    pool = np.array([chance.randrange(200) for _ in range(1000)], np.uint32)
    whole = repeating(pool, tokens + proposals, chance)
    text = whole[:tokens]
    return proposal_us(text, NgramSource(text), whole[tokens:])


def measure(args: argparse.Namespace) -> tuple[list[Sample], list[Bar]]:
    """Warm up, then interleave the rows on one stack."""
    tokenizer = Tokenizer.from_file(str(Path(args.target) / "tokenizer.json"))
    texts = [copy_prompt(prompt.text) for prompt in held_out_prompts()[: args.prompts]]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    proposal = estimate([own_proposal_us() for _ in range(INDEX_REPEATS)])
    with ExitStack() as cleanup:
        stack, address = start_stack(args.target, args.draft, args.dtype, not args.no_ray)
        cleanup.enter_context(stack)
        client = cleanup.enter_context(Client(address))
        rows = [CopyRow(client, key) for key in LABELS]
        say("bench: warming up")
        for row in rows:
            for prompt in prompts[:WARM_UP_PROMPTS]:
                row.run(prompt, args.tokens)
        samples = interleave(rows, prompts, args.tokens, args.repeats, lambda _: None)
    bars = [
        at_least("speed, n-gram only / plain", speed_ratio(samples, NGRAM, PLAIN), 1.0),
        at_least("speed, both / plain", speed_ratio(samples, BOTH, PLAIN), 1.0),
        at_most(f"us per proposal at {INDEX_TOKENS} tokens", proposal, 50.0),
    ]
    return samples, bars


def acceptances(samples: Sequence[Sample], key: str) -> dict[str, float | None]:
    """Accepted draft tokens among those tested, by source."""
    runs = [sample.run for sample in of_row(samples, key) if isinstance(sample.run, CopyRun)]
    ngram = sum(run.tested_ngram for run in runs), sum(run.accepted_ngram for run in runs)
    both = sum(run.tested_all for run in runs), sum(run.accepted_all for run in runs)
    return {"drafter": _share(both[0] - ngram[0], both[1] - ngram[1]), "ngram": _share(*ngram)}


def _share(tested: int, accepted: int) -> float | None:
    return accepted / tested if tested else None


def different(samples: Sequence[Sample], key: str) -> int:
    """Prompts whose text ever differed from the plain row's first one: near-ties, where arithmetic differs."""
    expected = {sample.prompt: sample.run.tokens for sample in reversed(of_row(samples, PLAIN))}
    return len({s.prompt for s in of_row(samples, key) if s.run.tokens != expected[s.prompt]})


def row_results(samples: Sequence[Sample]) -> list[dict[str, object]]:
    return [
        {
            "key": key,
            "label": label,
            "tokens_per_second": asdict(tokens_per_second(samples, key)),
            "to_plain": asdict(speed_ratio(samples, key, PLAIN)),
            "tokens_per_forward": tokens_per_forward(samples, key),
            "acceptance": acceptances(samples, key),
            "different_texts": different(samples, key),
        }
        for key, label in LABELS.items()
    ]


def report(samples: Sequence[Sample], bars: Sequence[Bar]) -> str:
    head = ("row", "tokens/s", "x plain", "tokens/forward", "accepted: drafter", "n-gram", "texts unlike plain")
    rows = []
    for key, label in LABELS.items():
        ratio, accepted = speed_ratio(samples, key, PLAIN), acceptances(samples, key)
        rows.append(
            (
                label,
                f"{tokens_per_second(samples, key).value:.1f}",
                f"{ratio:.2f}",
                f"{tokens_per_forward(samples, key):.2f}",
                *("-" if share is None else f"{share:.3f}" for share in accepted.values()),
                str(different(samples, key)),
            )
        )
    judged = [
        (bar.name, f"{bar.value:.3g}", f"{bar.sense} {bar.needed:g}", "holds" if bar.holds else "MISSED")
        for bar in bars
    ]
    return "\n".join([*table(head, rows), "", *table(("bar", "value", "needed", ""), judged)])


def write(args: argparse.Namespace, samples: Sequence[Sample], bars: Sequence[Bar]) -> None:
    found = {
        "name": args.out.stem,
        "bars": [asdict(bar) for bar in bars],
        "rows": row_results(samples),
        "machine": machine.describe(),
        "commit": machine.commit(),
        "arguments": {name: getattr(args, name) for name in ("prompts", "tokens", "repeats", "dtype")},
        "raw": [{**asdict(sample.run), "tokens": None, "arrivals": None, **_place(sample)} for sample in samples],
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")


def _place(sample: Sample) -> dict[str, object]:
    return {"repeat": sample.repeat, "prompt": sample.prompt, "row": sample.row}


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.copy", description=(__doc__ or "").partition(":")[0])
    line.add_argument(
        "--target", default=str(TARGET), metavar="DIR", help="with its tokenizer.json (default: the pair)"
    )
    line.add_argument("--draft", default=str(DRAFT), metavar="DIR", help="(default: the demo pair's)")
    line.add_argument("--prompts", type=int, default=16, metavar="N", help="(default: %(default)s)")
    line.add_argument("--tokens", type=int, default=128, metavar="N", help="new ones for each (default: %(default)s)")
    line.add_argument("--repeats", type=int, default=7, metavar="N", help="(default: %(default)s)")
    line.add_argument("--dtype", default=AUTO, choices=SERVED_DTYPES, help="of both models (default: %(default)s)")
    line.add_argument("--no-ray", action="store_true", help="services as plain processes")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    for name in ("prompts", "tokens", "repeats"):
        if getattr(args, name) < 1:
            say(f"bench: error: {name}: must be at least 1, not {getattr(args, name)}")
            return 2
    args.dtype = dtype_of(args.dtype)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with terminable():
            samples, bars = measure(args)
    except (BenchError, OSError) as error:
        say(f"bench: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    write(args, samples, bars)
    print(report(samples, bars))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
