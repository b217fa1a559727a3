"""What texts' runners-up would gain in windows of several paths: python -m bench.branching.text_windows --help.

The engine's window is one path, so a text source guesses one line. Here the demo target writes the trace of
`make bench-suffix` by its own draws (bench/suffix/run.py), and at each place of its outputs the tenant's sources are
asked: for their line, for the tree of all the occurrences that the line was voted from, by their counts, and for that
tree with what the other source found beside it. A session's own text and the tenant's texts are the two sources.

How often a node is right is known by its source, the class of its match, its depth, its rank among its siblings and
their counts, as learnt in the sessions of the other tenants at this temperature. A window takes the likeliest nodes, as
many as bring most expected tokens for the step's time. Times are virtual: a forward of m rows takes
V(m) = V(1) (1 + slope (m - 1)). What a tree's mask, its sampling and its compaction take is not counted, so gains are
upper references. In hindsight the path that is right is tested, as far as it pays, and nothing else: no choice among
these guesses could do better.

With 24 pieces of code runners-up gain at most 2.0 % over the line, with the other source's 2.8 % (drawn at 0.8, where
some was said before, and rows are free); 1.8, 1.5 and 1.0 % at slopes of 0.02, 0.05 and 0.08, of which the last two are
about what a row costs the demo target here. In hindsight it were 5.6 % where rows are free, 4.2 % at 0.08.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from tokenizers import Tokenizer

from bench.harness.record import refused
from bench.harness.report import table
from bench.suffix.run import SEED, STEPS, TEMPERATURES, kind_of
from bench.suffix.sources import KINDS, Said
from demo_pair import TARGET, held_out_prompts
from specwire.core.law.acceptance import RowSampling
from specwire.core.law.sampling import Sampling
from specwire.core.messages import MOST_WINDOW
from specwire.core.policy.tunables import MOST_NGRAM, OCCURRENCES, PRIOR_RATES, PRIOR_WEIGHT
from specwire.core.verify.shared_texts import ScopeTexts, SharedIndex
from specwire.core.verify.text_sources import LEAST_NGRAM, Match, NgramIndex, NgramSource, Occurrences, TextSource
from specwire.lm import Feed, load_model
from specwire.lm.law.sampler import choose
from specwire.rpc.process import say

# Of the cells in virtual time: shares of V(1) of a further row.
SLOPES = (0.0, 0.02, 0.05, 0.08)
# Depths and ranks from which on nodes count as alike, and classes of the share of its siblings' counts.
DEEP, LAST_RANK, SHARES = 3, 2, 4
TENANTS = 3
NUMBERS = ("prompts", "tokens")
LINE, COUNTS, BOTH = "line", "counts", "both"

# Alike nodes: source, class of its match, depth, rank, share, and how many of the nodes before it are no first ones.
Key = tuple[int, ...]
RANK = 3


class Node(NamedTuple):
    """A guess behind node `parent` of its tree, -1 for the text: parents come before their children."""

    parent: int
    token: int
    key: Key


# ----------------------------------------------------------------------------------------------------------------------
# The trace


def written(codes: Sequence[str], tokens: int, temperature: float) -> list[Said]:
    """What the target says in each step of `make bench-suffix` about each piece of code, in the order of the pieces."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    lm = load_model(str(TARGET), slots=len(codes), dtype="float32")
    answers: list[list[str]] = [[] for _ in codes]
    said: dict[tuple[int, int], Said] = {}
    for number, step in enumerate(STEPS):
        asked = [step(code, so_far) for code, so_far in zip(codes, answers, strict=True)]
        texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in asked]
        lengths = [*map(len, texts)]
        feeds = [Feed(slot, 0, text, 1) for slot, text in enumerate(texts)]
        for _ in range(tokens):
            rows = [RowSampling(len(text), Sampling(temperature=temperature, seed=SEED)) for text in texts]
            for text, token in zip(texts, choose(lm.forward(feeds), rows), strict=True):
                text.append(int(token))
            feeds = [Feed(slot, len(text) - 1, text[-1:], 1) for slot, text in enumerate(texts)]
        for piece, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            output = tuple(text[length:])
            answers[piece].append(tokenizer.decode(output))
            tenant = f"{temperature:g}.{piece % TENANTS}"
            said[piece, number] = Said(tenant, tuple(text[:length]), output, temperature, kind_of(step))
    return [each for _, each in sorted(said.items())]


# ----------------------------------------------------------------------------------------------------------------------
# What the sources know at a place


@dataclass(slots=True)
class Branch:
    """Occurrences that go on alike, by what follows in them. What was added first is the line."""

    count: int = 0
    following: dict[int, Branch] = field(default_factory=dict)

    def add(self, tokens: Iterable[int], count: int = 1) -> None:
        branch = self
        for token in tokens:
            branch = branch.following.setdefault(token, Branch())
            branch.count += count

    def nodes(self, alike: tuple[int, int]) -> list[Node]:
        """All below, of a source and class of match. Those of the line come first, in order."""
        found: list[Node] = []
        _list(self, -1, (*alike, 0, 0), found)
        return found


def _list(branch: Branch, parent: int, at: tuple[int, int, int, int], found: list[Node]) -> None:
    source, match, depth, aside = at
    first, *others = branch.following.items()
    total = max(1, sum(each.count for each in branch.following.values()))
    for rank, (token, child) in enumerate([first, *sorted(others, key=lambda each: -each[1].count)]):
        share = min(SHARES - 1, SHARES * child.count // total)
        found.append(Node(parent, token, (source, match, min(depth, DEEP), min(rank, LAST_RANK), share, aside)))
        if child.following:
            further = (source, match, depth + 1, min(LAST_RANK, aside + (rank > 0)))
            _list(child, len(found) - 1, further, found)


class Sources:
    """A session's text sources at its verifier, and what each of them found besides its guess."""

    def __init__(self, texts: ScopeTexts, said: Said, number: int) -> None:
        drawn = said.temperature > 0.0
        self.text = list(said.prompt)
        self._texts = texts
        index = SharedIndex(texts, self.text, str(number))
        shared = NgramSource(self.text, index=index, learnt=texts.learnt[drawn])
        self.source = TextSource(self.text, others=[shared], learnt=texts.learnt_own[drawn])
        self._index = NgramIndex(self.text)
        self._lengths = [Occurrences(n) for n in range(MOST_NGRAM, LEAST_NGRAM - 1, -1)]

    def trees(self) -> dict[str, list[Node]]:
        """By what a window may test; none without a guess."""
        guess = self.source.look()
        if guess is None:
            return {LINE: [], COUNTS: [], BOTH: []}
        named = [source.guess is guess for source in self.source.sources].index(True)
        classes = self.source.sources[named].acceptance
        alike = (named, [each is guess.acceptance for each in classes].index(True))
        branch = Branch()
        branch.add(guess.tokens, 0)
        found = (self._own(), self._shared())
        for tokens in found[named]:
            branch.add(tokens)
        counted = branch.nodes(alike)
        other = self.source.sources[1 - named].guess
        for tokens in (*found[1 - named], *([] if other is None else [other.tokens])):
            branch.add(tokens)
        return {LINE: counted[: len(guess.tokens)], COUNTS: counted, BOTH: branch.nodes(alike)}

    def _own(self) -> list[tuple[int, ...]]:
        """What followed in the session's own text, as `NgramIndex` finds it."""
        for occurrences in self._lengths:
            occurrences.read(self.text, len(self.text) - 1)
            ends = occurrences.find(self.text, OCCURRENCES) if len(self.text) > occurrences.n else []
            if ends:
                return [self._index.following(Match(end, occurrences.n), MOST_WINDOW) for end in ends]
        return []

    def _shared(self) -> list[tuple[int, ...]]:
        _, occurrences = self._texts.occurrences(self.text)
        return [tuple(each.tokens[each.end : each.end + MOST_WINDOW]) for each in occurrences]

    def grow(self, token: int) -> None:
        self.text.append(token)
        self.source.text_grew()


class Place(NamedTuple):
    """A tree behind a place of a text. right: whether the text says so, by node."""

    nodes: Sequence[Node]
    right: Sequence[bool]


def place_of(nodes: Sequence[Node], rest: Sequence[int]) -> Place:
    right: list[bool] = []
    depths: list[int] = []
    for node in nodes:
        depth = 0 if node.parent < 0 else depths[node.parent] + 1
        depths.append(depth)
        right.append((node.parent < 0 or right[node.parent]) and depth < len(rest) and rest[depth] == node.token)
    return Place(nodes, right)


@dataclass(frozen=True, slots=True)
class Session:
    """What was said, and by what a window may test its output's places."""

    said: Said
    places: dict[str, list[Place]]


def told(sessions: Sequence[Said]) -> list[Session]:
    """Sessions told again, token by token, in order."""
    tenants: defaultdict[str, ScopeTexts] = defaultdict(lambda: ScopeTexts(lambda _: True))
    return [_told(said, tenants[said.tenant], number) for number, said in enumerate(sessions)]


def _told(said: Said, texts: ScopeTexts, number: int) -> Session:
    sources = Sources(texts, said, number)
    places: dict[str, list[Place]] = {LINE: [], COUNTS: [], BOTH: []}
    for at, token in enumerate(said.output):
        for name, nodes in sources.trees().items():
            places[name].append(place_of(nodes, said.output[at:]))
        sources.grow(token)
    sources.source.text_ended()
    return Session(said, places)


# ----------------------------------------------------------------------------------------------------------------------
# Windows


def rates(sessions: Sequence[Session], name: str) -> dict[Key, float]:
    """How often alike nodes are right behind right ones; like a drafter's before anything was seen."""
    tested, right = Counter[Key](), Counter[Key]()
    for session in sessions:
        for nodes, decided in session.places[name]:
            for node, is_right in zip(nodes, decided, strict=True):
                if node.parent < 0 or decided[node.parent]:
                    tested[node.key] += 1
                    right[node.key] += is_right
    return {
        key: (right[key] + PRIOR_WEIGHT * PRIOR_RATES[key[RANK]]) / (count + PRIOR_WEIGHT)
        for key, count in tested.items()
    }


def window(nodes: Sequence[Node], known: dict[Key, float], slope: float) -> list[int]:
    """The likeliest nodes, by number, as many as bring most expected tokens for the time."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        children[node.parent].append(number)
    heap: list[tuple[float, int]] = []
    taken: list[int] = []
    tokens = best = 1.0
    kept, above, chance = 0, -1, 1.0
    while True:
        for number in children[above]:
            key = nodes[number].key
            heappush(heap, (-chance * known.get(key, PRIOR_RATES[key[RANK]]), number))
        if not heap or len(taken) == MOST_WINDOW:
            return taken[:kept]
        less, above = heappop(heap)
        chance = -less
        taken.append(above)
        tokens += chance
        speed = tokens / (1 + slope * len(taken))
        if speed > best:
            best, kept = speed, len(taken)


def in_hindsight(place: Place, slope: float) -> list[int]:
    """What is right of a tree, as far as it pays."""
    right = [number for number, is_right in enumerate(place.right) if is_right][:MOST_WINDOW]
    width = max(range(len(right) + 1), key=lambda rows: (rows + 1) / (1 + slope * rows))
    return right[:width]


class Speed(NamedTuple):
    """tokens, rows: of a forward, draft tokens only; speed: tokens in V(1)."""

    speed: float
    tokens: float
    rows: float


def speed_of(texts: Iterable[tuple[Sequence[Place], Callable[[Place], Sequence[int]]]], slope: float) -> Speed:
    """Of windows, as they are chosen in each text; each begins where the one before has ended."""
    tokens = forwards = rows = 0
    for places, chosen in texts:
        at = 0
        while at < len(places):
            tested = chosen(places[at])
            decided = min(1 + sum(places[at].right[number] for number in tested), len(places) - at)
            at, tokens, forwards, rows = at + decided, tokens + decided, forwards + 1, rows + len(tested)
    return Speed(tokens / (forwards + slope * rows), tokens / forwards, rows / forwards)


# ----------------------------------------------------------------------------------------------------------------------
# The table


def lines(sessions: Sequence[Session]) -> list[str]:
    head = (
        *("temperature", "steps", "slope", "line: tokens in V(1)", "a forward", "rows"),
        *("x, runners-up", "a forward", "x, both sources'", "x in hindsight, runners-up", "both sources'"),
    )
    return table(head, [row for part in _parts(sessions) for row in part])


def _parts(sessions: Sequence[Session]) -> Iterator[list[tuple[str, ...]]]:
    temperatures = sorted({session.said.temperature for session in sessions})
    for temperature in temperatures:
        alike = [session for session in sessions if session.said.temperature == temperature]
        known = {tenant: _elsewhere(alike, tenant) for tenant in {session.said.tenant for session in alike}}
        for kind in KINDS:
            part = [session for session in alike if session.said.steps == kind]
            yield [_row(part, known, slope) for slope in SLOPES if part]


def _elsewhere(sessions: Sequence[Session], tenant: str) -> dict[str, dict[Key, float]]:
    """What was learnt in the sessions of all other tenants, by what a window may test."""
    others = [session for session in sessions if session.said.tenant != tenant]
    return {name: rates(others, name) for name in (LINE, COUNTS, BOTH)}


def _row(part: Sequence[Session], known: dict[str, dict[str, dict[Key, float]]], slope: float) -> tuple[str, ...]:
    def learnt(session: Session, name: str) -> Callable[[Place], Sequence[int]]:
        return lambda place: window(place.nodes, known[session.said.tenant][name], slope)

    line, counts, both = (
        speed_of(((session.places[name], learnt(session, name)) for session in part), slope)
        for name in (LINE, COUNTS, BOTH)
    )
    best_line, *best = (
        speed_of(((session.places[name], lambda place: in_hindsight(place, slope)) for session in part), slope)
        for name in (LINE, COUNTS, BOTH)
    )
    return (
        *(f"{part[0].said.temperature:g}", part[0].said.steps, f"{slope:g}"),
        *(f"{line.speed:.3f}", f"{line.tokens:.2f}", f"{line.rows:.2f}"),
        *(f"{counts.speed / line.speed:.3f}", f"{counts.tokens:.2f}", f"{both.speed / line.speed:.3f}"),
        *(f"{each.speed / best_line.speed:.3f}" for each in best),
    )


def main(argv: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(
        prog="python -m bench.branching.text_windows",
        description="What runners-up of texts' guesses would gain in windows of several paths, in virtual time.",
    )
    line.add_argument("--prompts", type=int, default=24, metavar="N", help="pieces of code (default: %(default)s)")
    line.add_argument("--tokens", type=int, default=128, metavar="N", help="new ones a session (default: %(default)s)")
    args = line.parse_args(argv)
    if refused(args, NUMBERS):
        return 2
    if args.prompts == 1:
        say("bench: error: prompts: must be at least 2, not 1: rates are learnt in the other tenants' sessions")
        return 2
    codes = [prompt.text for prompt in held_out_prompts()[: args.prompts]]
    said = [each for temperature in TEMPERATURES for each in written(codes, args.tokens, temperature)]
    print("\n".join(lines(told(said))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
