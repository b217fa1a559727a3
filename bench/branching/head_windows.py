"""What a head's runners-up would gain in windows of several paths: python -m bench.branching.head_windows --help.

The engine's window is one path, so a head drafts one chain. Here the demo target writes texts by its own draws. At each
place of these it is noted where the token that was drawn stands among what the demo pair's head would draft there, by
the head's probabilities and the target's noise; so at each depth, behind right guesses, since a deeper one counts
nowhere else (as in training-time test). From such ranks follows what any window decides. Times are virtual: a forward
of the target takes V(m) = V(1) (1 + slope (m - 1)), one of the head a share of V(1), whatever it extends. What a tree's
mask, its sampling and its compaction take is not counted, so gains are upper references.

At temperature 0.8 (32 prompts x 128 tokens) the token is the head's best guess 0.67 of the time, its first runner-up
0.11. Two forwards of the head decide 2.09 tokens as a chain, 2.21 with a runner-up at depth 1, 2.34 with two there and
one at depth 2; a chain of as many rows decides 2.41 and 2.72 with three and five forwards. Over the best chain the best
window with runners-up at depth 1 (and 2) gains 9 % (14 to 15 %) where rows are free, 4 to 5 % (6 to 7 %) at a slope of
0.02, and nothing at 0.08, which is about what a row costs the demo target here.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.harness.record import prompts_of, refused
from bench.harness.report import table
from demo_pair import HEAD, TARGET
from specwire.core.draft import DraftRow
from specwire.core.law.acceptance import RowSampling
from specwire.core.law.sampling import Sampling
from specwire.lm import Feed, load_model
from specwire.lm.guesses import draw_candidates
from specwire.lm.heads import eagle3
from specwire.lm.heads.eagle3 import Eagle3
from specwire.lm.law.sampler import choose
from specwire.lm.training.head import unrolled
from specwire.rpc.process import say

# Candidates of a place that are ranked, and the rank of what is not among them.
RANKED, MISSED = 8, 99
# Head's forwards at most, and runners-up of a depth.
DEPTH, RUNNERS_UP = 5, 4
# Of the cells in virtual time: shares of V(1) of a further row, and of a forward of the head.
SLOPES, HEADS = (0.0, 0.02, 0.08), (0.05, 0.1, 0.2)
NUMBERS = ("prompts", "tokens")

# Ranks from the root on: (0, 0, 1) is the runner-up behind the two best guesses.
Path = tuple[int, ...]
# What a window tests; with a path all that begin it.
Window = frozenset[Path]
# Of each place of a text the ranks of the DEPTH tokens that stand there.
Places = Sequence[Path]


def window(forwards: int, first: int = 0, second: int = 0) -> Window:
    """The best guess of so many forwards of the head, with so many runners-up of the first, and of the second."""
    best = {(0,) * depth for depth in range(1, forwards + 1)}
    return frozenset(best | {(rank,) for rank in range(1, first + 1)} | {(0, rank) for rank in range(1, second + 1)})


def likeliest(texts: Sequence[Places], forwards: int, rows: int) -> Window:
    """The paths that were right most often in these texts, at most so deep: no window of so many rows is better."""
    seen = Counter(
        ranks[:depth]
        for places in texts
        for ranks in places
        for depth in range(1, forwards + 1)
        if MISSED not in ranks[:depth]
    )
    # Of paths that were right as often those that begin others come first.
    ordered = sorted(seen, key=lambda path: (-seen[path], len(path), path))
    return frozenset(ordered[:rows])


def accepted(tested: Window, ranks: Path) -> int:
    depth = 0
    while depth < len(ranks) and ranks[: depth + 1] in tested:
        depth += 1
    return depth


def tokens_per_forward(tested: Window, texts: Sequence[Places]) -> float:
    """Decided by a forward that tests such a window, on average: each begins where the one before has ended."""
    tokens = forwards = 0
    for places in texts:
        at = 0
        while at < len(places):
            decided = accepted(tested, places[at]) + 1
            at, tokens, forwards = at + decided, tokens + decided, forwards + 1
    return tokens / forwards


# ----------------------------------------------------------------------------------------------------------------------
# Texts, and where their tokens stand


def written(prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> list[list[int]]:
    """Prompts with so many tokens of the target behind them, fewer where a text ends."""
    lm = load_model(str(TARGET), slots=len(prompts), dtype="float32")
    texts = [list(prompt) for prompt in prompts]
    feeds = [Feed(slot, 0, prompt, 1) for slot, prompt in enumerate(prompts)]
    for _ in range(tokens):
        rows = [RowSampling(len(texts[feed.slot]), sampling_of(feed.slot, temperature)) for feed in feeds]
        for feed, token in zip(feeds, choose(lm.forward(feeds), rows), strict=True):
            texts[feed.slot].append(token)
        going = [feed.slot for feed in feeds if texts[feed.slot][-1] not in lm.info.eos_ids]
        feeds = [Feed(slot, len(texts[slot]) - 1, texts[slot][-1:], 1) for slot in going]
        if not feeds:
            break
    return texts


def sampling_of(number: int, temperature: float) -> Sampling:
    """Each text's seed is its number."""
    return Sampling(temperature=temperature, seed=number)


def ranked(texts: Sequence[Sequence[int]], lengths: Sequence[int], temperature: float) -> list[Places]:
    """Of each text the places behind its prompt, whose lengths are given, and behind its first token."""
    target: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    embedding = target.get_input_embeddings().weight.detach()
    head = eagle3.load(HEAD, target.config.num_hidden_layers, embedding).float().eval()
    samplings = (sampling_of(number, temperature) for number in range(len(texts)))
    return [
        _places(target, head, text, length, sampling)
        for text, length, sampling in zip(texts, lengths, samplings, strict=True)
    ]


@torch.inference_mode()
def _places(target: Any, head: Eagle3, text: Sequence[int], prompt: int, sampling: Sampling) -> Places:
    """Place t of the head is of the target's features at t and the token at t + 1, and says what stands at t + 2."""
    first = prompt - 1
    if len(text) - DEPTH - 1 <= first:
        return []
    tokens = torch.tensor([text])
    states = target(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    taps = torch.cat([states[tap] for tap in head.config.taps], -1)
    ids = head.target_ids(torch.arange(head.config.draft_vocabulary))
    by_depth = []
    for depth, logits in enumerate(unrolled(head, tokens, taps, DEPTH)):
        own = logits[0, first:]
        whole = torch.full((len(own), head.config.vocabulary), float("-inf"))
        whole[:, ids] = own
        begin = prompt + 1 + depth
        rows = [DraftRow(begin + at, sampling) for at in range(len(own))]
        found = draw_candidates(whole, rows, RANKED)
        by_depth.append([_rank(named, text[row.position]) for (named, _), row in zip(found, rows, strict=True)])
    return list(zip(*by_depth, strict=True))


def _rank(candidates: Sequence[int], token: int) -> int:
    return candidates.index(token) if token in candidates else MISSED


# ----------------------------------------------------------------------------------------------------------------------
# Tables


def window_lines(texts: Sequence[Places]) -> list[str]:
    """Tokens a forward, by forwards of the head and rows of the window."""
    head = (
        *("head's forwards, rows", "chain of as many forwards", "runners-up at depth 1", "at depths 1 and 2"),
        *("likeliest", "chain of as many rows"),
    )
    rows = []
    for forwards, more in product(range(1, DEPTH), range(1, RUNNERS_UP + 1)):
        second = more // 2 if forwards > 1 else 0
        tested = [window(forwards), window(forwards, more), window(forwards, more - second, second)]
        tested.append(likeliest(texts, forwards, forwards + more))
        longer = f"{tokens_per_forward(window(forwards + more), texts):.3f}" if forwards + more <= DEPTH else ""
        found = (f"{tokens_per_forward(each, texts):.3f}" for each in tested)
        rows.append((f"{forwards}, {forwards + more}", *found, longer))
    return table(head, rows)


def gain_lines(texts: Sequence[Places]) -> list[str]:
    """The best window with runners-up over the best chain, in virtual time."""
    depths, more = range(1, DEPTH + 1), range(RUNNERS_UP + 1)
    # By forwards of the head, and what else they have.
    kinds: list[dict[Path, Window]] = [
        {(depth, one): window(depth, one) for depth, one in product(depths, more)},
        {(depth, one, two): window(depth, one, two) for depth, one, two in product(depths, more, more)},
        {
            (depth, rows): likeliest(texts, depth, rows)
            for depth in depths
            for rows in range(depth, depth + 2 * RUNNERS_UP + 1)
        },
    ]
    chains: dict[Path, Window] = {(depth,): window(depth) for depth in depths}
    every = {tested for windows in (chains, *kinds) for tested in windows.values()}
    tokens = {tested: tokens_per_forward(tested, texts) for tested in every}
    rows = []
    for slope, head in product(SLOPES, HEADS):

        def speed(of: tuple[Path, Window], slope: float = slope, head: float = head) -> float:
            """Tokens in V(1)."""
            (forwards, *_), tested = of
            return tokens[tested] / (1 + slope * len(tested) + head * forwards)

        chain = max(chains.items(), key=speed)
        gains = [max(map(speed, windows.items())) / speed(chain) for windows in kinds]
        rows.append((f"{slope:g}, {head:g}", str(len(chain[1])), f"{speed(chain):.3f}", *(f"{x:.3f}" for x in gains)))
    named = ("slope, head", "best chain", "its tokens in V(1)", "x, runners-up at depth 1", "at 1 and 2", "likeliest")
    return table(named, rows)


def rank_line(texts: Iterable[Places]) -> str:
    """How often the token that was drawn is a candidate of a rank, at the first depth."""
    counts = Counter(ranks[0] for places in texts for ranks in places)
    shares = " ".join(f"{counts[rank] / counts.total():.3f}" for rank in range(RANKED))
    return f"first guesses of {counts.total()} places right by rank: {shares}"


def main(argv: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(
        prog="python -m bench.branching.head_windows",
        description="What runners-up of the demo pair's head would gain in windows of several paths, in virtual time.",
    )
    line.add_argument("--prompts", type=int, default=32, metavar="N", help="held-out prompts (default: 32)")
    line.add_argument("--tokens", type=int, default=128, metavar="N", help="new tokens for each (default: 128)")
    line.add_argument("--temperature", type=float, default=0.8, metavar="T", help="(default: %(default)s)")
    args = line.parse_args(argv)
    if refused(args, NUMBERS):
        return 2
    if not 0 <= args.temperature < float("inf"):
        say(f"bench: error: temperature: must be 0 or more, not {args.temperature:g}")
        return 2
    prompts = prompts_of(TARGET)[: args.prompts]
    texts = ranked(written(prompts, args.tokens, args.temperature), [*map(len, prompts)], args.temperature)
    if not any(texts):
        say(f"bench: error: tokens: must be more than {DEPTH}, not {args.tokens}, or all texts end before")
        return 2
    print("\n".join([rank_line(texts), "", *window_lines(texts), "", *gain_lines(texts)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
