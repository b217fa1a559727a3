"""Measure proposals from what was said before, on a trace like an agent's: python -m bench.suffix.run --help.

Tenants have code written, edit it, run it, read a part of it, and repeat the first request as it was, seed included:
five sessions for each piece of held-out code, each prompt made of the code and of what the target wrote. The first one
is cold, the next ones (warm) have much of what the tenant said before, and the last one is told by itself. The rows
differ in what the verifier may propose: nothing, from the session's own text only, from the tenant's texts too, and in
cold sessions only from a table of n-grams, made before from what the demo pair learnt from. They take turns, the table
on a stack of its own which has nothing else to propose from; each row has tenants of its own, so that none begins from
another's keys and values.

What was said is then told again to each source by itself, to arctic-inference's if it is there, and to the better
guess of the text's and the tenant's, in hindsight: no choice between the two could do better (`bench.suffix.sources`).
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer

from bench.harness import RESULTS, record
from bench.harness.entry import terminable
from bench.harness.interleave import schedule
from bench.harness.interval import Estimate
from bench.harness.machine import dtype_of
from bench.harness.report import Bar, at_least, at_most, table
from bench.harness.rows import RUN_LIMIT, exactly, up
from bench.harness.runs import BenchError, Run, Sample, of_row, speed_ratio, tokens_per_forward, tokens_per_second
from bench.suffix.sources import (
    AGAIN,
    COLD,
    KINDS,
    MILLION,
    OWN_TOKENS,
    WARM,
    LookUp,
    Replayed,
    Said,
    build_table,
    look_up,
    replays,
)
from demo_pair import TARGET, held_out_prompts
from specwire.client import Client, SpecwireError
from specwire.core.model import AUTO
from specwire.progress import ProgressBar
from specwire.rpc.process import say
from specwire.rpc.server_options import SERVED_DTYPES
from specwire.text.table_file import load_table

OUT = RESULTS / "suffix.json"
OFF, OWN, SHARED, TABLE = "off", "own", "shared", "table"
LABELS = {
    OFF: "nothing proposed",
    OWN: "the session's own text",
    SHARED: "the tenant's texts",
    TABLE: "a table of n-grams alone",
}
TEMPERATURES = (0.0, 0.8)
SEED = 7
NUMBERS = ("prompts", "tokens", "tenants", "repeats", "others")


# ----------------------------------------------------------------------------------------------------------------------
# The trace: what a tenant asks about a piece of code, given what was written so far.


def write(code: str, _: Sequence[str]) -> str:
    return code


def edit(code: str, _: Sequence[str]) -> str:
    """The first line is another one."""
    return "# edited\n" + code.partition("\n")[2]


def run(code: str, written: Sequence[str]) -> str:
    """What was written, and the end of the code again: a failure is to be mended."""
    return f"{code}{written[0]}\n\n# failed, once more:\n{_end(code)}"


def reread(code: str, _: Sequence[str]) -> str:
    """Only the end of the code is shown."""
    return _end(code)


def repeat(code: str, _: Sequence[str]) -> str:
    """The first request again: with its seed, the text is the same."""
    return code


def _end(code: str) -> str:
    lines = code.splitlines(keepends=True)
    return "".join(lines[len(lines) // 2 :])


Step = Callable[[str, Sequence[str]], str]
STEPS: tuple[Step, ...] = (write, edit, run, reread, repeat)


def kind_of(step: Step) -> str:
    """Cold: nothing was said before; again: the text is the first one's to the last token. Else it is partly new."""
    if step is write:
        return COLD
    return AGAIN if step is repeat else WARM


def steps_of(row: str) -> tuple[Step, ...]:
    """A table knows nothing of what was said before, so it has cold sessions only."""
    return STEPS[:1] if row == TABLE else STEPS


@dataclass(frozen=True, slots=True)
class Tenants:
    """A client for each row, temperature, repeat and tenant: nobody finds what another one left.

    addresses: of the stacks, by row. tokens: by tenant.
    """

    addresses: dict[str, str]
    tokens: dict[str, str]
    cleanup: ExitStack
    clients: dict[str, Client]

    def client(self, row: str, tenant: str) -> Client:
        if tenant not in self.clients:
            client = Client(self.addresses[row], token=self.tokens[tenant])
            self.clients[tenant] = self.cleanup.enter_context(client)
        return self.clients[tenant]


def tenant_names(args: argparse.Namespace) -> Iterator[str]:
    for repeat_number in range(-1, args.repeats):  # -1 warms up
        for key in keys():
            for tenant in range(args.tenants):
                yield tenant_of(key, repeat_number, tenant)


def tenant_of(key: str, repeat_number: int, tenant: int) -> str:
    return f"{key}.{repeat_number + 1}.{tenant}"


def keys() -> list[str]:
    """Rows and temperatures, as samples name them."""
    return [row_key(row, temperature) for temperature in TEMPERATURES for row in LABELS]


def row_key(row: str, temperature: float) -> str:
    return f"{row}_{temperature:g}"


@dataclass(frozen=True, slots=True)
class SuffixConversation:
    """A tenant and its code under one row: asked step by step. said: what was asked and answered is added there."""

    client: Client
    code: str
    row: str
    temperature: float
    tokens: int
    tenant: str
    said: list[Said]

    def steps(self, tokenizer: Tokenizer) -> Iterator[Run]:
        written: list[str] = []
        for step in steps_of(self.row):
            prompt = tokenizer.encode(step(self.code, written), add_special_tokens=False).ids
            done, text = self._ask(prompt, kind_of(step))
            written.append(text)
            yield done

    def _ask(self, prompt: Sequence[int], kind: str) -> tuple[Run, str]:
        began_ns = time.monotonic_ns()
        try:
            done = self.client.complete(
                prompt,
                max_tokens=self.tokens,
                ignore_eos=True,
                temperature=self.temperature,
                seed=SEED,
                drafting=False,
                ngram=self.row != OFF,
                private=self.row != SHARED,
                timeout=RUN_LIMIT,
            )
        except SpecwireError as error:
            raise BenchError(f"{LABELS[self.row]}: {error}") from error
        seconds, stats = (time.monotonic_ns() - began_ns) / 1e9, done.stats
        taken = exactly(self.tokens, done.tokens, LABELS[self.row])
        self.said.append(Said(self.tenant, tuple(prompt), taken, self.temperature, kind))
        first = stats.time_to_first_token_us / 1e6
        return Run(taken, seconds, first, stats.target_forwards, stats.tested, stats.accepted), done.text


def trace(args: argparse.Namespace, tenants: Tenants, tokenizer: Tokenizer) -> tuple[list[Sample], list[Said]]:
    """Every row on every piece of code, `repeats` times. A sample's prompt is the piece and the step.

    Beside the samples what tenants were told, in order, under SHARED in the first repeat.
    """
    codes = [prompt.text for prompt in held_out_prompts()[: args.prompts]]
    rows = [(row, temperature) for temperature in TEMPERATURES for row in LABELS]

    said: list[Said] = []

    def conversation(place: int, index: int, repeat_number: int) -> Iterator[Run]:
        row, temperature = rows[index]
        tenant = tenant_of(row_key(row, temperature), repeat_number, place % args.tenants)
        kept = said if row == SHARED and repeat_number == 0 else []
        client = tenants.client(row, tenant)
        return SuffixConversation(client, codes[place], row, temperature, args.tokens, tenant, kept).steps(tokenizer)

    say("bench: warming up")
    for index in range(len(rows)):
        for _ in conversation(0, index, -1):
            pass
    samples = []
    with ProgressBar("measuring", args.repeats * len(codes) * len(rows)) as bar:
        for repeat_number, place, index in schedule(args.repeats, len(codes), len(rows)):
            for step, done in enumerate(conversation(place, index, repeat_number)):
                samples.append(Sample(repeat_number, place * len(STEPS) + step, row_key(*rows[index]), done))
            bar.update(note=f"repeat {repeat_number + 1} of {args.repeats}")
    return samples, said


def of_kind(samples: Sequence[Sample], kind: str) -> list[Sample]:
    return [sample for sample in samples if kind_of(STEPS[sample.prompt % len(STEPS)]) == kind]


# ----------------------------------------------------------------------------------------------------------------------
# The measurement and its report.


def measure(args: argparse.Namespace) -> tuple[list[Sample], LookUp, list[Replayed]]:
    tokenizer = Tokenizer.from_file(str(Path(args.target) / "tokenizer.json"))
    found = look_up(args.others)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(TemporaryDirectory(prefix="specwire-suffix-")))
        table_file = build_table(args.target, args.corpus, folder / "table")
        tokens = {name: secrets.token_urlsafe(24) for name in tenant_names(args)}
        key_file = folder / "keys"
        key_file.touch(0o600)
        key_file.write_text("".join(f"{name} {token}\n" for name, token in tokens.items()))
        addresses: dict[str, str] = {}
        for rows, own in (((OFF, OWN, SHARED), ()), ((TABLE,), ("--no-ngram", "--table", str(table_file)))):
            stack, ready = up(args.target, None, args.dtype, not args.no_ray, "--api-keys", str(key_file), *own)
            cleanup.enter_context(stack)
            addresses |= dict.fromkeys(rows, str(ready["address"]))
        samples, said = trace(args, Tenants(addresses, tokens, cleanup, {}), tokenizer)
        return samples, found, replays(said, load_table(table_file))


def bars(samples: Sequence[Sample], found: LookUp) -> list[Bar]:
    judged = []
    for temperature in TEMPERATURES:
        shared, own = row_key(SHARED, temperature), row_key(OWN, temperature)
        for kind, needed in ((WARM, 1.2), (COLD, 1.0)):
            title = f"speed, {LABELS[SHARED]} / {LABELS[OWN]}, {kind}, T = {temperature:g}"
            judged.append(at_least(title, speed_ratio(of_kind(samples, kind), shared, own), needed))
        title = f"speed, {LABELS[TABLE]} / {LABELS[OFF]}, cold, T = {temperature:g}"
        ratio = speed_ratio(of_kind(samples, COLD), row_key(TABLE, temperature), row_key(OFF, temperature))
        judged.append(at_least(title, ratio, 1.1))
    title = f"us per proposal at {OWN_TOKENS} tokens and {found.others / MILLION:g} M of others"
    return [*judged, at_most(title, found.shared_us, 50.0)]


@dataclass(frozen=True, slots=True)
class SuffixFigures:
    """A row at a temperature, in steps of one kind. acceptance: None where nothing was tested."""

    key: str
    label: str
    temperature: float
    steps: str
    tokens_per_second: Estimate
    to_off: Estimate
    tokens_per_forward: float
    acceptance: float | None


def row_figures(samples: Sequence[Sample]) -> list[SuffixFigures]:
    rows = []
    for temperature in TEMPERATURES:
        for row, label in LABELS.items():
            key, off = row_key(row, temperature), row_key(OFF, temperature)
            for name in KINDS:
                part = of_kind(samples, name)
                runs = [sample.run for sample in of_row(part, key)]
                if not runs:
                    continue
                tested = sum(done.tested or 0 for done in runs)
                accepted = sum(done.accepted or 0 for done in runs) / tested if tested else None
                speed, ratio = tokens_per_second(part, key), speed_ratio(part, key, off)
                forwards = tokens_per_forward(part, key)
                rows.append(SuffixFigures(key, label, temperature, name, speed, ratio, forwards, accepted))
    return rows


def replay_lines(replayed: Sequence[Replayed]) -> list[str]:
    head = ("temperature", "steps", "told again, guessed from", "tokens/guess", "accepted", "us a guess")
    rows = [
        (
            f"{each.temperature:g}",
            each.steps,
            each.label,
            f"{each.tokens_a_guess:.2f}",
            "-" if each.accepted is None else f"{each.accepted:.3f}",
            f"{each.us:.1f}",
        )
        for each in replayed
    ]
    return table(head, rows)


def report(samples: Sequence[Sample], found: LookUp, replayed: Sequence[Replayed]) -> str:
    head = ("temperature", "steps", "proposed from", "tokens/s", "x nothing", "tokens/forward", "accepted")
    rows = []
    for each in row_figures(samples):
        rows.append(
            (
                f"{each.temperature:g}",
                each.steps,
                each.label,
                f"{each.tokens_per_second.value:.1f}",
                f"{each.to_off:.2f}",
                f"{each.tokens_per_forward:.2f}",
                "-" if each.acceptance is None else f"{each.acceptance:.3f}",
            )
        )
    judged = [
        (bar.name, f"{bar.value:.3g}", f"{bar.sense} {bar.needed:g}", "holds" if bar.holds else "MISSED")
        for bar in bars(samples, found)
    ]
    kept = (
        f"A look-up takes {found.own_us.value:.1f} us in the own text, {found.shared_us.value:.1f} us with others."
        f" A million tokens take {found.bytes_a_token:.0f} MB and {found.read_us_a_token:.2f} s to take in."
    )
    judged_lines = table(("bar", "value", "needed", ""), judged)
    return "\n".join([*table(head, rows), "", *replay_lines(replayed), "", *judged_lines, "", kept])


def save(args: argparse.Namespace, samples: Sequence[Sample], found: LookUp, replayed: Sequence[Replayed]) -> None:
    written = {
        "bars": [asdict(bar) for bar in bars(samples, found)],
        "rows": [asdict(each) for each in row_figures(samples)],
        "look_up": asdict(found),
        "replayed": [asdict(each) for each in replayed],
        "raw": [
            {**asdict(each.run), "tokens": None, "repeat": each.repeat, "prompt": each.prompt, "row": each.row}
            for each in samples
        ],
    }
    record.write(args.out, written, args, (*NUMBERS, "dtype"))


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.suffix.run", description=(__doc__ or "").partition(":")[0])
    line.add_argument(
        "--target", default=str(TARGET), metavar="DIR", help="with its tokenizer.json (default: the pair's)"
    )
    line.add_argument("--prompts", type=int, default=8, metavar="N", help="pieces of code (default: %(default)s)")
    line.add_argument("--tokens", type=int, default=128, metavar="N", help="new ones a session (default: %(default)s)")
    line.add_argument("--tenants", type=int, default=3, metavar="N", help="(default: %(default)s)")
    line.add_argument("--repeats", type=int, default=7, metavar="N", help="(default: %(default)s)")
    line.add_argument(
        "--others", type=int, default=10 * MILLION, metavar="N", help="tokens beside a look-up (default: %(default)s)"
    )
    own = "texts to make the table from (default: the demo pair's, without what is held out)"
    line.add_argument("--corpus", nargs="+", default=[], type=Path, metavar="PATH", help=own)
    line.add_argument("--dtype", default=AUTO, choices=SERVED_DTYPES, help="(default: %(default)s)")
    line.add_argument("--no-ray", action="store_true", help="services as plain processes")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if record.refused(args, NUMBERS):
        return 2
    args.dtype = dtype_of(args.dtype)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with terminable():
            samples, found, replayed = measure(args)
    except (BenchError, OSError) as error:
        say(f"bench: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    save(args, samples, found, replayed)
    print(report(samples, found, replayed))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
