"""Measure a drafter that learns while what is asked for changes: python -m bench.learn --help.

Code of one kind is completed, then code of another, in one order on two stacks of the same pair, request by request in
turns: in one the drafter stays as it is, in the other it follows what `specwire learn` makes of that stack's texts. The
learner runs all the time, beside both, so that its processor time costs both alike; it is told by itself. Both draft by
one fixed plan, and their verifiers test all that is drafted: drafting costs the same, and is not given up where it does
not pay. A verifier that tests only what promises something would flatter who is often wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.harness import RESULTS, machine
from bench.harness.child import BenchChild
from bench.harness.entry import terminable
from bench.harness.interval import resampled
from bench.harness.machine import dtype_of
from bench.harness.report import Bar, at_least, table
from bench.harness.rows import LOAD_LIMIT, RUN_LIMIT, run_of, service, start_peer
from bench.harness.runs import BenchError, Run, Sample
from bench.harness.texts import judge, mismatches, scores_at, tolerance
from demo_pair import DRAFT, TARGET
from specwire.client import Client, SpecwireError
from specwire.core.model import AUTO
from specwire.progress import ProgressBar
from specwire.rpc.process import say
from specwire.rpc.server_options import SERVED_DTYPES
from specwire.versions import VersionFolder

OUT = RESULTS / "learn.json"
STATIC, LEARNING = ROWS = ("static", "learning")
SUFFIXES = (".py", ".h")
# Parts of equal length that each kind's requests are told in.
PARTS = 8
PROMPT_TOKENS = 96
# Over the files of a folder, in search of prompts.
MOST_PASSES = 50
SEED = 7
PAUSE_S = 0.05


def libraries() -> tuple[Path, Path]:
    """Python of the standard library, and C++ of PyTorch's headers: what every checkout has."""
    torch = importlib.util.find_spec("torch")
    places = torch.submodule_search_locations if torch is not None else None
    return Path(sysconfig.get_path("stdlib")), Path(next(iter(places or ["."]))) / "include"


# ----------------------------------------------------------------------------------------------------------------------
# What is asked for.


@dataclass(frozen=True, slots=True)
class Request:
    """kind: 0 before the change, 1 behind it."""

    kind: int
    prompt: tuple[int, ...]


def requests(folders: Sequence[Path], count: int, tokenizer: Tokenizer) -> list[Request]:
    """So many of each folder's code. Raises BenchError."""
    return [
        Request(kind, prompt)
        for kind, folder in enumerate(folders)
        for prompt in _prompts(folder, count, tokenizer, random.Random(SEED))
    ]


def _prompts(folder: Path, count: int, tokenizer: Tokenizer, chance: random.Random) -> list[tuple[int, ...]]:
    files = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES)
    files = [file for file in files if "site-packages" not in file.relative_to(folder).parts]
    chance.shuffle(files)
    found: list[tuple[int, ...]] = []
    for _ in range(MOST_PASSES):
        for file in files:
            lines = file.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
            first = chance.randrange(max(1, len(lines)))
            ids = tokenizer.encode("".join(lines[first : first + PROMPT_TOKENS]), add_special_tokens=False).ids
            if len(ids) >= PROMPT_TOKENS:
                found.append(tuple(ids[:PROMPT_TOKENS]))
            if len(found) == count:
                return found
    raise BenchError(f"{folder}: has code for {len(found)} prompts, not {count}")


# ----------------------------------------------------------------------------------------------------------------------
# The stacks and the learner.


@dataclass(frozen=True, slots=True)
class Answer:
    """A request on a stack. version: in use when it was asked. cpu_s, wall_s: the learner's and the clock's by then."""

    place: int
    kind: int
    row: str
    run: Run
    version: int
    cpu_s: float
    wall_s: float


def stack(cleanup: ExitStack, args: argparse.Namespace, *drafting: str) -> Client:
    """A verifier, a drafter and an orchestrator, each on a thread."""
    settings = ("--dtype", args.dtype, "--runtime", "torch")
    verifier = service(cleanup, "verify", args.target, "--patient", *settings)
    drafter = service(cleanup, "draft", *drafting, *settings)
    address = service(cleanup, "orchestrate", "--verifier", verifier, "--drafter", drafter, "--plan", args.plan)
    return cleanup.enter_context(Client(address))


def learner(cleanup: ExitStack, args: argparse.Namespace, out: Path, texts: Path) -> BenchChild:
    """It has begun once this returns. Raises BenchError."""
    words = ["learn", "--draft", args.draft, "--out", str(out), "--learn-from", "*", "--texts", str(texts)]
    told = ["--every", f"{args.every:g}", "--rate", f"{args.rate:g}", "--margin", f"{args.margin:g}", "--threads", "1"]
    child = BenchChild("specwire learn", ["nice", sys.executable, "-m", "deploy", *words, *told])
    cleanup.callback(child.stop)
    end = time.monotonic() + LOAD_LIMIT
    while VersionFolder(out).current() is None:
        if time.monotonic() > end:
            raise BenchError("specwire learn: wrote no version")
        time.sleep(PAUSE_S)
    return child


def ask(client: Client, request: Request, args: argparse.Namespace, row: str) -> Run:
    began_ns = time.monotonic_ns()
    try:
        events = list(
            client.generate(
                request.prompt,
                max_tokens=args.tokens,
                ignore_eos=True,
                temperature=args.temperature,
                seed=SEED,
                ngram=False,
                timeout=RUN_LIMIT,
            )
        )
    except SpecwireError as error:
        raise BenchError(f"{row}: {error}") from error
    return run_of(events, began_ns, time.monotonic_ns(), args.tokens, row, True)


def measure(args: argparse.Namespace) -> list[Answer]:
    tokenizer = Tokenizer.from_file(str(Path(args.target) / "tokenizer.json"))
    asked = requests((args.first, args.then), args.requests, tokenizer)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(TemporaryDirectory(prefix="specwire-learn-")))
        texts, out = folder / "texts.jsonl", folder / "versions"
        texts.touch()
        learning = learner(cleanup, args, out, texts)
        clients = {STATIC: stack(cleanup, args, args.draft), LEARNING: stack(cleanup, args, "--follow", str(out))}
        say("bench: warming up")
        for row, client in clients.items():
            ask(client, Request(0, asked[0].prompt[:8]), args, row)
        began, answers = time.monotonic(), []
        with ProgressBar("measuring", len(asked)) as bar, texts.open("a") as file:
            for place, request in enumerate(asked):
                current = VersionFolder(out).current()
                newest = 0 if current is None else current.version
                for row in ROWS if place % 2 else reversed(ROWS):
                    version = newest if row == LEARNING else 0
                    done = ask(clients[row], request, args, row)
                    times = learning.cpu_seconds(), time.monotonic() - began
                    answers.append(Answer(place, request.kind, row, done, version, *times))
                    if row == LEARNING:
                        file.write(json.dumps({"prompt": request.prompt, "output": done.tokens}) + "\n")
                        file.flush()
                bar.update(note=f"version {newest}")
    _same_texts(answers, asked, args)
    return answers


def _same_texts(answers: Sequence[Answer], asked: Sequence[Request], args: argparse.Namespace) -> None:
    """BenchError where the two stacks wrote something else: near-ties aside, what drafts must not change texts.

    At a temperature noise decides as well, and what a near-tie is cannot be told from the target's scores.
    """
    samples = [Sample(0, answer.place, answer.row, answer.run) for answer in answers]
    found = mismatches(samples, STATIC)
    if not found:
        return
    if args.temperature > 0:
        wrong = found
    else:
        peer = start_peer(args.target, None, args.dtype, 1)
        try:
            scores = scores_at(peer, [request.prompt for request in asked], samples, STATIC)
            wrong = [each.mismatch for each in judge(found, scores, tolerance(args.dtype)) if not each.near_tie]
        finally:
            peer.stop()
    say(f"bench: {len(found)} of {len(asked)} texts differ between the stacks, {len(wrong)} of them at no near-tie")
    if wrong:
        raise BenchError(f"texts differ between the stacks at no near-tie, the first at request {wrong[0].prompt}")


# ----------------------------------------------------------------------------------------------------------------------
# What it comes to.


@dataclass(frozen=True, slots=True)
class PartFigures:
    """Some requests in a row, of one kind. version: the last one in use."""

    kind: int
    first: int
    requests: int
    acceptance: dict[str, float]
    tokens_per_second: dict[str, float]
    tokens_per_forward: dict[str, float]
    version: int


def parts(answers: Sequence[Answer]) -> list[PartFigures]:
    found = []
    for kind in (0, 1):
        places = sorted({answer.place for answer in answers if answer.kind == kind})
        for number in range(PARTS):
            chosen = places[number * len(places) // PARTS : (number + 1) * len(places) // PARTS]
            if chosen:
                found.append(_figures([answer for answer in answers if answer.place in set(chosen)]))
    return found


def _figures(some: Sequence[Answer]) -> PartFigures:
    runs = {row: [answer.run for answer in some if answer.row == row] for row in ROWS}
    return PartFigures(
        kind=some[0].kind,
        first=some[0].place,
        requests=len(some) // len(ROWS),
        acceptance={row: _share(runs[row]) for row in ROWS},
        tokens_per_second={row: _tokens(runs[row]) / sum(run.seconds for run in runs[row]) for row in ROWS},
        tokens_per_forward={row: _tokens(runs[row]) / sum(run.forwards for run in runs[row]) for row in ROWS},
        version=max(answer.version for answer in some),
    )


def _tokens(runs: Sequence[Run]) -> int:
    return sum(len(run.tokens) for run in runs)


def _share(runs: Sequence[Run]) -> float:
    """Accepted draft tokens among those tested; 0 where none was."""
    return sum(run.accepted or 0 for run in runs) / max(1, sum(run.tested or 0 for run in runs))


def bars(answers: Sequence[Answer]) -> list[Bar]:
    """Of all requests behind the change, those among them that came before anything was learnt of their kind.

    Requests are no repeats of each other, so intervals are those of a ratio of sums over them.
    """
    behind = {row: [answer.run for answer in answers if answer.kind == 1 and answer.row == row] for row in ROWS}
    tested = {row: np.array([run.tested or 0 for run in runs], np.float64) for row, runs in behind.items()}
    accepted = {row: np.array([run.accepted or 0 for run in runs], np.float64) for row, runs in behind.items()}
    seconds = {row: np.array([run.seconds for run in runs], np.float64) for row, runs in behind.items()}

    def acceptance(places: NDArray[np.int64]) -> float:
        shares = [accepted[row][places].sum() / max(1.0, tested[row][places].sum()) for row in (LEARNING, STATIC)]
        return float(shares[0] / max(1e-9, shares[1]))

    def speed(places: NDArray[np.int64]) -> float:
        return float(seconds[STATIC][places].sum() / seconds[LEARNING][places].sum())

    count = len(behind[STATIC])
    return [
        at_least("acceptance behind the change, learning / static", resampled(count, acceptance), 1.15),
        at_least("speed behind the change, learning / static", resampled(count, speed), 1.0),
    ]


@dataclass(frozen=True, slots=True)
class LearnerCost:
    """cpu_s: processor time of the learner, in wall_s seconds, while `tokens` were decided on its stack."""

    cpu_s: float
    wall_s: float
    tokens: int


def cost(answers: Sequence[Answer]) -> LearnerCost:
    own = [answer.run for answer in answers if answer.row == LEARNING]
    return LearnerCost(answers[-1].cpu_s - answers[0].cpu_s, answers[-1].wall_s, _tokens(own))


def report(answers: Sequence[Answer]) -> str:
    head = ("requests", "kind", "version", "accepted, static", "learning", "tokens/s, static", "learning")
    rows = [
        (
            f"{each.first + 1}-{each.first + each.requests}",
            ("first", "then")[each.kind],
            str(each.version),
            *(f"{each.acceptance[row]:.3f}" for row in ROWS),
            *(f"{each.tokens_per_second[row]:.1f}" for row in ROWS),
        )
        for each in parts(answers)
    ]
    judged = [
        (bar.name, f"{bar.value:.3f} [{bar.low:.3f}, {bar.high:.3f}]", f"{bar.sense} {bar.needed:g}", _held(bar))
        for bar in bars(answers)
    ]
    spent = cost(answers)
    told = (
        f"The learner took {spent.cpu_s:.0f} s of a processor in {spent.wall_s:.0f} s, "
        f"{1000 * spent.cpu_s / spent.tokens:.2f} ms a token that was decided on its stack."
    )
    return "\n".join([*table(head, rows), "", *table(("bar", "value", "needed", ""), judged), "", told])


def _held(bar: Bar) -> str:
    return "holds" if bar.holds else "MISSED"


def draw(answers: Sequence[Answer], path: Path) -> None:
    """Acceptance and speed over the requests."""
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    canvas = Figure(figsize=(11, 4), layout="constrained")
    found = parts(answers)
    for axes, title, figures in zip(
        canvas.subplots(1, 2),
        ("draft tokens accepted", "tokens per second"),
        ([each.acceptance for each in found], [each.tokens_per_second for each in found]),
        strict=True,
    ):
        axes.set_title(title)
        axes.set_xlabel("request")
        for row, colour in zip(ROWS, ("#9aa5b1", "#1f6fb2"), strict=True):
            axes.plot([each.first for each in found], [each[row] for each in figures], "o-", color=colour, label=row)
        axes.axvline(next(each.first for each in found if each.kind == 1), color="#b03a2e", linestyle=":")
        axes.set_ylim(bottom=0)
    canvas.axes[0].legend(frameon=False)
    canvas.savefig(path, dpi=110)


def save(args: argparse.Namespace, answers: Sequence[Answer]) -> None:
    names = ("requests", "tokens", "temperature", "plan", "every", "rate", "margin", "dtype")
    written = {
        "name": args.out.stem,
        "bars": [asdict(bar) for bar in bars(answers)],
        "parts": [asdict(each) for each in parts(answers)],
        "learner": asdict(cost(answers)),
        "machine": machine.describe(),
        "commit": machine.commit(),
        "arguments": {name: getattr(args, name) for name in names},
        "raw": list(_raw(answers)),
    }
    args.out.write_text(json.dumps(written, indent=1) + "\n")


def _raw(answers: Sequence[Answer]) -> Iterator[dict[str, object]]:
    for answer in answers:
        run = answer.run
        yield {
            "place": answer.place,
            "kind": answer.kind,
            "row": answer.row,
            "version": answer.version,
            "seconds": run.seconds,
            "forwards": run.forwards,
            "tested": run.tested,
            "accepted": run.accepted,
            "learner_cpu_s": answer.cpu_s,
        }


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.learn", description=(__doc__ or "").partition(":")[0])
    first, then = libraries()
    line.add_argument(
        "--target", default=str(TARGET), metavar="DIR", help="with its tokenizer.json (default: the pair's)"
    )
    line.add_argument("--draft", default=str(DRAFT), metavar="DIR", help="(default: the pair's)")
    line.add_argument("--first", type=Path, default=first, metavar="DIR", help="code (default: the standard library)")
    line.add_argument("--then", type=Path, default=then, metavar="DIR", help="other code (default: PyTorch's headers)")
    line.add_argument("--requests", type=int, default=240, metavar="N", help="of each kind (default: %(default)s)")
    line.add_argument("--tokens", type=int, default=96, metavar="N", help="of an answer (default: %(default)s)")
    line.add_argument("--plan", default="lockstep:4", metavar="PLAN", help="of both drafters (default: %(default)s)")
    line.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: %(default)g)")
    line.add_argument(
        "--every", type=float, default=30.0, metavar="S", help="the learner's rounds (default: %(default)g)"
    )
    line.add_argument("--rate", type=float, default=3e-4, metavar="X", help="learning rate (default: %(default)g)")
    line.add_argument("--margin", type=float, default=0.01, metavar="X", help="the learner's (default: %(default)g)")
    line.add_argument("--dtype", default=AUTO, choices=SERVED_DTYPES, help="(default: %(default)s)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON, and a picture beside it")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    for name in ("requests", "tokens"):
        if getattr(args, name) < 1:
            say(f"bench: error: {name}: must be at least 1, not {getattr(args, name)}")
            return 2
    args.dtype = dtype_of(args.dtype)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with terminable():
            answers = measure(args)
    except (BenchError, OSError) as error:
        say(f"bench: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    save(args, answers)
    draw(answers, args.out.with_suffix(".png"))
    print(report(answers))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
