"""The demo pair over a long line: real forwards, the drafter on a core of its own; only the line is emulated."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tokenizers import Tokenizer

from bench.harness.interleave import tracked
from bench.harness.runs import Sample
from bench.wan.disciplines import (
    AUTOMATIC,
    PLAIN,
    STREAM_WAIT,
    TEXTBOOK,
    DisciplineRow,
    orchestration,
    repeats_of,
    take_turns,
)
from bench.wan.places import places
from bench.wan.rig import AUTO_CHAIN, Orchestration, WanPair, WanRig, can_be_apart, rig
from demo_pair import DRAFT, TARGET, held_out_prompts
from deploy.stack.options import cores
from specwire.client import Client
from specwire.core.model import AUTO

# Settings that the baselines choose from, at every round trip anew.
CHOICES = {
    TEXTBOOK: ("textbook:2", "textbook:4", "textbook:8"),
    STREAM_WAIT: ("stream-wait:2,16", "stream-wait:4,32"),
}
SELECTION_TOKENS = 48
WARM_UP_TOKENS = 128
# Of each baseline at each round trip, of which there are seven.
MOST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """One round trip. settings: what the baselines chose."""

    rtt_ms: float
    settings: dict[str, str]
    samples: Sequence[Sample]
    isolated: bool

    @property
    def texts_equal(self) -> bool:
        """Whether sessions of one prompt said the same. Near-ties of a target in bfloat16 may tell them apart."""
        texts: dict[int, set[tuple[int, ...]]] = {}
        for sample in self.samples:
            texts.setdefault(sample.prompt, set()).add(sample.run.tokens)
        return all(len(said) == 1 for said in texts.values())


def measure_pair(
    rtts_ms: Sequence[float],
    repeats: int,
    tokens: int,
    progress: Callable[[MeasuredPair], None],
    pair: WanPair | None = None,
) -> list[MeasuredPair]:
    """Every round trip in turn with the same processes, each repeat on another held-out prompt."""
    pair = pair or demo_pair()
    policies = [policy for choices in CHOICES.values() for policy in choices]
    plans = [Orchestration(), *(orchestration(policy) for policy in (*policies, AUTO_CHAIN))]
    found = []
    with ExitStack() as owned:
        where = owned.enter_context(places())
        started = owned.enter_context(rig(where, pair, plans))
        clients = {plan: owned.enter_context(Client(address)) for plan, address in started.addresses.items()}
        prompts = _prompts(repeats)
        for rtt_ms in tracked(rtts_ms, len(rtts_ms), "demo pair"):
            found.append(_measure(started, clients, prompts, rtt_ms, repeats, tokens, where.isolated))
            progress(found[-1])
    return found


def demo_pair() -> WanPair:
    """The target has as many threads as `specwire up` gives it. A drafter elsewhere has a processor to itself."""
    return WanPair(str(TARGET), str(DRAFT), AUTO, max(1, cores() // 2), ngram=True, apart=can_be_apart())


def _prompts(count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return [tokenizer.encode(prompt.text, add_special_tokens=False).ids for prompt in held_out_prompts()[:count]]


def _measure(
    started: WanRig,
    clients: dict[Orchestration, Client],
    prompts: Sequence[Sequence[int]],
    rtt_ms: float,
    repeats: int,
    tokens: int,
    isolated: bool,
) -> MeasuredPair:
    started.shape(rtt_ms)
    settings = {name: _fastest(name, clients, prompts[0], min(tokens, SELECTION_TOKENS)) for name in CHOICES}
    rows = [DisciplineRow(clients[Orchestration()], False, PLAIN)]
    rows += [DisciplineRow(clients[orchestration(policy)], True, name) for name, policy in settings.items()]
    rows += [DisciplineRow(clients[orchestration(policy)], True, name) for name, policy in AUTOMATIC.items()]
    seconds = {row.key: row.run(prompts[0], min(tokens, WARM_UP_TOKENS)).seconds for row in rows}
    longer = tokens / min(tokens, WARM_UP_TOKENS)
    counts = {row.key: repeats for row in rows}
    counts |= {name: repeats_of(longer * seconds[name], repeats, MOST_SECONDS) for name in CHOICES}
    return MeasuredPair(rtt_ms, settings, take_turns(rows, prompts, tokens, counts), isolated)


def _fastest(name: str, clients: dict[Orchestration, Client], prompt: Sequence[int], tokens: int) -> str:
    """The setting of a baseline that is fastest on one prompt, median of two turns."""
    rows = {policy: DisciplineRow(clients[orchestration(policy)], True, name) for policy in CHOICES[name]}
    seconds: dict[str, list[float]] = {policy: [] for policy in rows}
    for _ in range(2):
        for policy, row in rows.items():
            seconds[policy].append(row.run(prompt, tokens).seconds)
    return min(seconds, key=lambda policy: statistics.median(seconds[policy]))
