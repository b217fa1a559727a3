"""Count the texts of a real model that change: python -m bench.exact --help.

Two verifiers and an orchestrator write each prompt's text greedily and at 0.8: alone without drafting, which is what
the others are held to; alone once more; alone with guesses from the text; with guesses, sixteen at once; and so while
one of the verifiers is killed, whose texts the other one goes on with. Every token is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from bench.harness.entry import line_of_texts, run, texts_asked
from bench.harness.interleave import tracked
from bench.harness.record import save
from bench.harness.report import Bar, bar_lines, none_of
from bench.harness.services import ANY_PORT, RedisLog, ServiceProcess
from bench.harness.sessions import RUN_LIMIT, client_of, exactly, run_in
from bench.reference import ReferenceSettings, prompts_of
from scripts.figures.exact import changed_table
from specwire.client import Chunk, Finished
from specwire.lm.gguf_file import read_gguf
from specwire.rpc.process import say

AT_ONCE = 16
TEMPERATURES = (0.0, 0.8)
SEED = 57
# How the model is computed, by the words of `specwire verify`.
WAYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "openvino, bfloat16": ("--runtime", "openvino", "--dtype", "bfloat16"),
    "openvino, float32": ("--runtime", "openvino", "--dtype", "float32"),
    "openvino, int8": ("--runtime", "openvino", "--quantization", "int8"),
    "torch, float32": ("--runtime", "torch", "--dtype", "float32"),
    "torch, float32, deterministic": ("--runtime", "torch", "--dtype", "float32", "--deterministic"),
    "torch, bfloat16": ("--runtime", "torch", "--dtype", "bfloat16"),
    "torch, bfloat16, deterministic": ("--runtime", "torch", "--dtype", "bfloat16", "--deterministic"),
    "llamacpp": ("--runtime", "llamacpp"),
    "llamacpp, deterministic": ("--runtime", "llamacpp", "--deterministic"),
}
# Those of which no text may change.
EXACT = ("default", "openvino, bfloat16", "openvino, float32", *(way for way in WAYS if way.endswith("deterministic")))
AGAIN, DRAFTED, IN_COMPANY, KILLED = "asked again", "with guesses", f"{AT_ONCE} at once", "verifier killed"
Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExactSettings:
    """exact: ways of which no text may change."""

    reference: ReferenceSettings
    ways: tuple[str, ...]
    exact: tuple[str, ...]


class ChangedTexts(NamedTuple):
    """Of one way and temperature: how many of so many texts differ from those alone without drafting."""

    way: str
    temperature: float
    texts: int
    changed: dict[str, int]
    accepted: int


@dataclass(frozen=True, slots=True)
class ExactResults:
    settings: ExactSettings
    rows: Sequence[ChangedTexts]

    @property
    def bars(self) -> list[Bar]:
        rows = [row for row in self.rows if row.way in self.settings.exact]
        return [
            none_of(f"{row.way}, at {row.temperature:g}, {how}: texts that changed", count)
            for row in rows
            for how, count in row.changed.items()
        ]


class Written(NamedTuple):
    """A text, and how many of its tokens were guessed."""

    tokens: Text
    accepted: int


class Rig:
    """Two verifiers on one log, and what orchestrates them. Raises BenchError."""

    def __init__(self, settings: ExactSettings, way: str, cleanup: ExitStack, runner: asyncio.Runner) -> None:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="specwire-exact-")))
        self._runner, asked = runner, settings.reference
        log = RedisLog(folder)
        cleanup.callback(log.kill)
        log.ready()
        words = ("--slots", str(AT_ONCE), "--threads", str(asked.threads), *WAYS[way])
        self.verifiers = [
            self._started(("verify", str(asked.target), *words), folder / f"verifier{number}", cleanup)
            for number in range(2)
        ]
        named = [word for each in self.verifiers for word in ("--verifier", each.address)]
        orchestrator = self._started(
            ("orchestrate", *named, "--redis-url", f"redis://{log.address}"), folder / "orchestrator", cleanup
        )
        self._client = client_of(runner, cleanup, orchestrator.address)
        self._tokens = asked.tokens

    def _started(self, words: Sequence[str], said: Path, cleanup: ExitStack) -> ServiceProcess:
        service = ServiceProcess(words, {**os.environ, "OMP_NUM_THREADS": "1"}, said, ANY_PORT)
        cleanup.callback(service.kill)
        service.ready()
        return service

    def alone(self, prompt: Sequence[int], temperature: float, *, drafting: bool) -> Written:
        return self.together([prompt], temperature, drafting=drafting)[0]

    def together(
        self, prompts: Sequence[Sequence[int]], temperature: float, *, drafting: bool = True, kill: bool = False
    ) -> list[Written]:
        """All at once. kill: the first verifier, once each text has a quarter of its tokens; it is there again then."""
        found = run_in(self._runner, "texts", self._all(prompts, temperature, drafting, kill))
        if kill:
            self.verifiers[0].restart()
            self.verifiers[0].ready()
        return found

    async def _all(
        self, prompts: Sequence[Sequence[int]], temperature: float, drafting: bool, kill: bool
    ) -> list[Written]:
        begun = asyncio.Semaphore(0)
        async with asyncio.TaskGroup() as group:
            texts = [group.create_task(self._text(prompt, temperature, drafting, begun)) for prompt in prompts]
            for _ in prompts if kill else ():
                await begun.acquire()
            if kill:
                self.verifiers[0].send(signal.SIGKILL)
        return [text.result() for text in texts]

    async def _text(
        self, prompt: Sequence[int], temperature: float, drafting: bool, begun: asyncio.Semaphore
    ) -> Written:
        """begun: is released once a quarter is there."""
        told, tokens, accepted = False, list[int](), 0
        async for event in self._client.generate(
            prompt,
            max_tokens=self._tokens,
            ignore_eos=True,
            temperature=temperature,
            seed=SEED,
            drafting=drafting,
            timeout=RUN_LIMIT,
        ):
            if isinstance(event, Chunk):
                tokens += event.tokens
            if isinstance(event, Finished):
                accepted = sum(event.stats.accepted_at)
            if not told and len(tokens) >= self._tokens // 4:
                told = True
                begun.release()
        return Written(exactly(self._tokens, tokens, "a text"), accepted)


def measure(settings: ExactSettings) -> ExactResults:
    """BenchError."""
    prompts, rows = prompts_of(settings.reference), list[ChangedTexts]()
    for way in settings.ways:
        with ExitStack() as cleanup:
            runner = cleanup.enter_context(asyncio.Runner())
            rig = Rig(settings, way, cleanup, runner)
            for temperature in TEMPERATURES:
                rows.append(_changed(rig, way, prompts, temperature))
                counts = ", ".join(f"{how} {count}" for how, count in rows[-1].changed.items())
                say(f"{way}, at {temperature:g}: of {len(prompts)} texts changed: {counts}")
    return ExactResults(settings, rows)


def _changed(rig: Rig, way: str, prompts: Sequence[Sequence[int]], temperature: float) -> ChangedTexts:
    plain, changed, accepted = list[Text](), dict.fromkeys((AGAIN, DRAFTED, IN_COMPANY, KILLED), 0), 0
    for prompt in tracked(prompts, len(prompts), f"{way}, alone"):
        plain.append(rig.alone(prompt, temperature, drafting=False).tokens)
        drafted = rig.alone(prompt, temperature, drafting=True)
        accepted += drafted.accepted
        changed[DRAFTED] += drafted.tokens != plain[-1]
        changed[AGAIN] += rig.alone(prompt, temperature, drafting=False).tokens != plain[-1]
    for how in (IN_COMPANY, KILLED):
        for first in tracked(range(0, len(prompts), AT_ONCE), -(-len(prompts) // AT_ONCE), f"{way}, {how}"):
            some = slice(first, first + AT_ONCE)
            found = rig.together(prompts[some], temperature, kill=how == KILLED)
            changed[how] += sum(one.tokens != own for one, own in zip(found, plain[some], strict=True))
    return ChangedTexts(way, temperature, len(prompts), changed, accepted)


def tell(found: ExactResults, path: Path) -> bool:
    """Write and print; whether no text changed where none may."""
    settings = found.settings
    target = settings.reference.target
    arguments = {each: getattr(settings.reference, each) for each in ("prompts", "tokens", "threads")}
    record = {
        "model": {"name": target.stem, "sha256": read_gguf(str(target)).fingerprint()},
        "rows": [row._asdict() for row in found.rows],
        "bars": [asdict(bar) for bar in found.bars],
    }
    print(changed_table(save(path, record, arguments | {"exact": list(settings.exact)})))
    print("\n".join(bar_lines(found.bars)))
    return all(bar.holds for bar in found.bars)


def settings_of(args: argparse.Namespace) -> ExactSettings:
    return ExactSettings(ReferenceSettings(**texts_asked("exact", args)), tuple(args.ways), EXACT)


def main(argv: Sequence[str] | None = None) -> int:
    line = line_of_texts("exact", __doc__, prompts=200, tokens=128, threads=2)
    ways = f"of {', '.join(WAYS)} (default: all)"
    line.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY", help=ways)
    return run(line.parse_args(argv), settings_of, measure, tell)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
