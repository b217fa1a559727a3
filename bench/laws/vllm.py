"""`make statistics-vllm`: the law of many short texts whose verifier is on vLLM's worker, by rule and drafter.

The target is a small model of four ids (`bench.laws.pair`), so that the law of its texts can be computed from its own
logits. Nothing in the engine's process can be made wrong from here; in place of biased engines the control is the law
of another model, which the test must refuse. Under `coupled` a seed's text must be the same whoever drafts for it, and
on our own engine.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import chi2
from transformers import LlamaForCausalLM

from bench.harness import RESULTS, record
from bench.harness.entry import terminable
from bench.harness.interleave import tracked
from bench.harness.report import Bar, at_least, exactly, none_of
from bench.harness.runs import BenchError
from bench.harness.services import ANY_PORT, ServiceProcess
from bench.laws.exact import chi_square
from bench.laws.pair import PROMPT, SEEDS, joint, model, write
from bench.laws.run import FIRSTS, LawTest, tell
from bench.laws.sampling import AT_ONCE, NGRAM, OFF, RULES, LawSample, SeedWay, all_of, sample
from bench.vllm.server import EAGER, MISSING, PYTHON, VLLM, versions
from deploy.stack.processes import environment
from orchestrator import server
from orchestrator.options import OrchestratorOptions
from specwire.client import AsyncClient
from specwire.rpc.process import say

OUT = RESULTS / "laws_vllm.json"
# What the issue of vLLM's engine asks for, of each rule.
WANTED = 5_000
ENGINE = ("--engine", "vllm", "--engine-options", EAGER)
COMPUTED = ("--dtype", "float32", "--threads", "1", "--context", "64")
# Drafters by what they are, and how each is told to draft.
RIGHT, OTHER = "the target itself", "another model"
PLANS = {RIGHT: "stream:2,6", OTHER: "stream:1,5,3"}
ALL, ELSEWHERE = "all of them", "nobody, on our own engine"
BINS = 20
# Of what the test of the later tokens draws.
COINS = 1

Texts = Sequence[tuple[int, ...]]


class LawServices:
    """Addresses of the verifiers, on vLLM and on our engine, and of the drafters, by what they are."""

    def __init__(self, owned: ExitStack) -> None:
        """Start them; they end with `owned`. Raises BenchError."""
        folder = Path(owned.enter_context(TemporaryDirectory(prefix="specwire-laws-vllm-")))
        target, draft = write(folder)
        told = {**environment(), "OMP_NUM_THREADS": "1"}

        def start(name: str, *words: str, python: str = sys.executable) -> ServiceProcess:
            line = (*words, *COMPUTED, "--slots", str(AT_ONCE))
            service = ServiceProcess(line, told, folder / f"{name}.stderr", ANY_PORT, python=python)
            owned.callback(service.kill)
            return service

        started = {
            "vllm": start("vllm", "verify", str(target), *ENGINE, python=PYTHON),
            "ours": start("ours", "verify", str(target)),
            RIGHT: start("right", "draft", str(target)),
            OTHER: start("other", "draft", str(draft)),
        }
        self._addresses = {name: service.ready() for name, service in started.items()}

    @asynccontextmanager
    async def asked(self, verifier: str, drafter: str = "") -> AsyncIterator[AsyncClient]:
        """A client of an orchestrator of their own."""
        drafters = (self._addresses[drafter],) if drafter else ()
        plan = PLANS.get(drafter, "off")
        options = OrchestratorOptions((self._addresses[verifier],), drafters, "memory:", plan=plan)
        async with AsyncExitStack() as parts:
            orchestrator = await server.start(options)
            parts.push_async_callback(orchestrator.stop, 0.0)
            yield await parts.enter_async_context(AsyncClient(orchestrator.address))


class Law:
    """The exact law of a model's texts behind PROMPT."""

    def __init__(self, seed: int) -> None:
        self._model: LlamaForCausalLM = model(seed)
        self._firsts = joint(self._model, FIRSTS)

    def p_of_firsts(self, texts: Texts) -> float:
        """Of the joint law of the first tokens."""
        statistic, freedom = chi_square(Counter(text[:FIRSTS] for text in texts), self._firsts, len(texts))
        return float(chi2.sf(statistic, freedom))

    def p_of_later(self, texts: Texts) -> float:
        """Of each token behind those, given the text before it.

        Put at random into its share of [0, 1], where the ids' probabilities lie side by side, a token of the law is
        uniform there, whatever stands before it.
        """
        shares = self._shares(texts)[:, FIRSTS:]
        ids = np.array(texts)[:, FIRSTS:, None]
        ends = np.take_along_axis(shares.cumsum(axis=2), ids, axis=2)
        widths = np.take_along_axis(shares, ids, axis=2)
        places = (ends - widths * np.random.default_rng(COINS).random(ends.shape)).ravel()
        found = Counter(np.minimum(places * BINS, BINS - 1).astype(int).tolist())
        statistic, freedom = chi_square(found, dict.fromkeys(range(BINS), 1 / BINS), len(places))
        return float(chi2.sf(statistic, freedom))

    @torch.inference_mode()
    def _shares(self, texts: Texts) -> npt.NDArray[np.float64]:
        """Probabilities (texts, tokens, vocabulary) of what may stand at each place."""
        rows = self._model(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, len(PROMPT) - 1 : -1]
        found: npt.NDArray[np.float64] = rows.double().softmax(dim=2).numpy()
        return found

    def judged(self, drafter: str, rule: str, found: LawSample, exact: bool = True) -> LawTest:
        """Hold a sample to it."""
        return LawTest.of(drafter, rule, exact, found, self.p_of_firsts(found.listed), self.p_of_later(found.listed))


async def laws(services: LawServices, sessions: int) -> list[LawTest]:
    """So many of each rule, over both drafters."""
    law, samples = Law(SEEDS[0]), dict[str, dict[str, LawSample]]()
    each = -(-sessions // len(PLANS))
    for place, name in enumerate(PLANS):
        seeds = range(place * each, (place + 1) * each)
        async with services.asked("vllm", name) as client:
            samples[name] = {
                rule: await sample(client, rule, tracked(seeds, each, f"{name}, {rule}")) for rule in RULES
            }
    verdicts = [law.judged(name, rule, found) for name, of in samples.items() for rule, found in of.items()]
    pooled = {rule: all_of([of[rule] for of in samples.values()]) for rule in RULES}
    verdicts += [law.judged(ALL, rule, found) for rule, found in pooled.items()]
    other = Law(SEEDS[1])
    return verdicts + [other.judged("held to another model's law", rule, pooled[rule], False) for rule in RULES]


async def same_seed(services: LawServices, sessions: int) -> list[SeedWay]:
    """So many seeds, drafted for in each way, and on our own engine."""
    found = {}
    async with services.asked("vllm") as client:
        found[OFF] = await sample(client, "coupled", iter(range(sessions)), drafting=False)
        found[NGRAM] = await sample(client, "coupled", iter(range(sessions)), drafting=False, ngram=True)
    for name in PLANS:
        async with services.asked("vllm", name) as client:
            found[name] = await sample(client, "coupled", iter(range(sessions)))
    async with services.asked("ours") as client:
        found[ELSEWHERE] = await sample(client, "coupled", iter(range(sessions)), drafting=False)
    return [SeedWay.of(name, each, found[OFF]) for name, each in found.items()]


def bars(verdicts: Sequence[LawTest], ways: Sequence[SeedWay]) -> list[Bar]:
    least = [verdict for verdict in verdicts if verdict.drafter == ALL]
    return [
        none_of("exact laws that are refused", sum(v.exact and v.refused for v in verdicts)),
        none_of("another model's law, not refused", sum(not v.exact and not v.right for v in verdicts)),
        none_of("coupled texts that depend on drafts or engine", sum(way.differing for way in ways)),
        at_least("draft tokens tested under each rule", exactly(min(verdict.tested for verdict in least)), 1),
        at_least("sessions of each exact rule", exactly(min(verdict.sessions for verdict in least)), WANTED),
    ]


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m bench.laws.vllm", description=(__doc__ or "").partition("\n")[0])
    line.add_argument("--sessions", type=int, default=WANTED, metavar="N", help="for each rule (default: %(default)s)")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if record.refused(args, ("sessions",)):
        return 2
    if not VLLM.exists():
        say(f"bench: error: {MISSING}")
        return 2
    torch.set_num_threads(1)
    try:
        with terminable(), ExitStack() as owned:
            services = LawServices(owned)
            verdicts = asyncio.run(laws(services, args.sessions))
            ways = asyncio.run(same_seed(services, max(100, args.sessions // 10)))
    except BenchError as error:
        say(f"bench: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    held = bars(verdicts, ways)
    tell(args.out, verdicts, ways, held, {"sessions": args.sessions}, vllm=versions())
    return 0 if all(bar.holds for bar in held[:-1]) else 1


if __name__ == "__main__":
    sys.exit(main())
