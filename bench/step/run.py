"""Measure a step of the target on each runtime, beside OpenVINO GenAI's token: python -m bench.step.run --help.

A step is a forward of the windows of all sessions and the choice of their tokens: what the verifier repeats, without
network, scheduler or drafter. V(m) is the time of a step of one session with m positions. Cells take turns, prompt by
prompt; all walk over the same texts, so each window length meets the same lengths of text.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tokenizers import Tokenizer

from bench.harness import RESULTS
from bench.harness.child import BenchChild
from bench.harness.entry import terminable
from bench.harness.interleave import schedule, tracked
from bench.harness.machine import dtype_of
from bench.harness.rows import LOAD_LIMIT, RUN_LIMIT
from bench.harness.runs import BenchError
from bench.peers import openvino_rows
from bench.peers.openvino_rows import OpenvinoRow
from bench.step import results
from bench.step.results import PEER, StepCell, StepSample
from demo_pair import TARGET, held_out_prompts
from specwire.core.model import AUTO
from specwire.options import cores
from specwire.rpc.process import say
from specwire.rpc.server_options import SERVED_DTYPES

OUT = RESULTS / "step.json"
RUNTIMES = ("torch", "openvino")
# (sessions, positions of each): V(1) to V(16); windows that change from step to step, as drafting makes them; then
# several sessions with and without windows.
SHAPES = (
    *((1, (window,)) for window in (1, 2, 4, 8, 16)),
    (1, (1, 5)),
    *((sessions, (1,)) for sessions in (4, 8, 16)),
    *((sessions, (window,)) for sessions, window in ((4, 2), (4, 3), (8, 4), (16, 2), (16, 3))),
)
SLOTS = max(sessions for sessions, _ in SHAPES)
LONGEST = max(window for _, windows in SHAPES for window in windows)
NO_RUNTIME = "openvino was not measured: the extra of that name is not installed (pip install -e '.[openvino]')."


class StepText(NamedTuple):
    """Ids of a prompt, and what the target says after it."""

    prompt: list[int]
    continued: list[int]


@dataclass(frozen=True, slots=True)
class OurCell:
    """One shape of step on one runtime."""

    peer: BenchChild
    cell: StepCell

    def run(self, text: StepText) -> tuple[float, int]:
        """Seconds, and the number of steps that took them."""
        request = {"sessions": self.cell.sessions, "windows": self.cell.windows}
        answer = self.peer.ask({"do": "steps", "prompt": text.prompt, "text": text.continued, **request}, RUN_LIMIT)
        return sum(answer["seconds"]), len(answer["seconds"])


@dataclass(frozen=True, slots=True)
class PeerCell:
    """OpenVINO GenAI decoding plainly, from its first token to its last."""

    row: OpenvinoRow
    cell: StepCell = PEER

    def run(self, text: StepText) -> tuple[float, int]:
        run = self.row.run(text.prompt, len(text.continued))
        return run.seconds - run.first_token_seconds, len(run.tokens) - 1


def measure(args: argparse.Namespace) -> tuple[list[StepSample], list[str]]:
    """Load each runtime in a process of its own, warm up, interleave; the samples, and notes on what was left out."""
    with ExitStack() as cleanup:
        notes: list[str] = []
        peers = _start_runtimes(args, cleanup, notes)
        cells: list[OurCell | PeerCell] = [
            OurCell(peer, StepCell(runtime, *shape)) for runtime, peer in peers.items() for shape in SHAPES
        ]
        cells += _start_peer(args, cleanup, notes)
        texts = _texts(args, next(iter(peers.values())))
        say("bench: warming up")
        for cell in cells:
            cell.run(texts[0])
        return list(_interleaved(args.repeats, cells, texts)), notes


def _interleaved(repeats: int, cells: Sequence[OurCell | PeerCell], texts: Sequence[StepText]) -> list[StepSample]:
    samples = []
    turns = schedule(repeats, len(texts), len(cells))
    for repeat, number, index in tracked(turns, repeats * len(texts) * len(cells)):
        samples.append(StepSample(repeat, number, cells[index].cell, *cells[index].run(texts[number])))
        if len(samples) % (len(texts) * len(cells)) == 0:
            say(f"bench: repeat {repeat + 1} of {repeats}")
    return samples


def _start_runtimes(args: argparse.Namespace, cleanup: ExitStack, notes: list[str]) -> Mapping[str, BenchChild]:
    installed = [runtime for runtime in RUNTIMES if runtime == "torch" or find_spec(runtime)]
    if len(installed) < len(RUNTIMES):
        notes.append(NO_RUNTIME)
    peers = {}
    for runtime in installed:
        peers[runtime] = cleanup.enter_context(BenchChild(runtime, [sys.executable, "-m", "bench.step.peer"]))
        options = {"target": str(args.target), "dtype": args.dtype, "threads": args.threads, "slots": SLOTS}
        peers[runtime].ask({"do": "load", "runtime": runtime, **options}, LOAD_LIMIT)
    return peers


def _start_peer(args: argparse.Namespace, cleanup: ExitStack, notes: list[str]) -> list[PeerCell]:
    if not openvino_rows.installed():
        notes.append(openvino_rows.NOT_INSTALLED)
        return []
    folder = cleanup.enter_context(TemporaryDirectory(prefix="specwire-openvino-"))
    target = str(args.target)
    peer = cleanup.enter_context(openvino_rows.start(target, target, args.dtype, args.threads, folder))
    notes.append(openvino_rows.SETTINGS_NOTE)
    return [PeerCell(openvino_rows.plain_row(peer))]


def _texts(args: argparse.Namespace, decoder: BenchChild) -> list[StepText]:
    """Held-out prompts, each with the target's own continuation."""
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    texts = []
    for prompt in held_out_prompts()[: args.prompts]:
        ids = tokenizer.encode(prompt.text, add_special_tokens=False).ids
        answer = decoder.ask({"do": "decode", "prompt": ids, "tokens": args.tokens}, RUN_LIMIT)
        texts.append(StepText(ids, answer["tokens"]))
    return texts


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.step.run", description=(__doc__ or "").partition(":")[0])
    line.add_argument(
        "--target", type=Path, default=TARGET, metavar="DIR", help="with its tokenizer.json (default: the pair's)"
    )
    line.add_argument("--prompts", type=int, default=8, metavar="N", help="(default: %(default)s)")
    line.add_argument("--tokens", type=int, default=128, metavar="N", help="of each text (default: %(default)s)")
    line.add_argument("--repeats", type=int, default=7, metavar="N", help="(default: %(default)s)")
    line.add_argument("--dtype", default=AUTO, choices=SERVED_DTYPES, help="(default: %(default)s)")
    line.add_argument(
        "--threads",
        type=int,
        default=cores(),
        metavar="N",
        help="of each process; they take turns, each with the machine to itself (default: all cores)",
    )
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON; a PNG beside it")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    for name, least in (("prompts", 1), ("tokens", LONGEST), ("repeats", 1), ("threads", 1)):
        if getattr(args, name) < least:
            say(f"bench: error: {name}: must be at least {least}, not {getattr(args, name)}")
            return 2
    args.dtype = dtype_of(args.dtype)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with terminable():
            samples, notes = measure(args)
    except (BenchError, OSError) as error:
        say(f"bench: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    names = ("prompts", "tokens", "repeats", "dtype", "threads")
    found = results.find(samples, {name: getattr(args, name) for name in names}, notes)
    results.write(found, args.out)
    results.draw(found, args.out.with_suffix(".png"))
    print(results.report(found))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
