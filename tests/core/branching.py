"""Trees of draft tokens at the verifier: every small one, whatever arrives of it when, against a set of paths.

The reference knows no tree: a node is the path of tokens that leads to it. What must be live is a function of the nodes
received and the text decided, in whichever order that happened. So the proof goes by induction: from the one state that
belongs to (nodes received, tokens decided), every further event leads to the state that belongs to what is received and
decided then. Every cut into pieces, repetition, loss, lateness and split into verdicts is a sequence of such events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations, product

from specwire.core.draft import DraftNode, DraftSession, Drawn
from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Outcome, Pace, Proposal, Verdict
from specwire.core.policy.tunables import PRIOR_RATES
from specwire.core.text import BEFORE, Ending, Text, Tree, hash_of
from specwire.core.verify.chains import Chains, Offer
from specwire.core.verify.session import Allowance, VerifySession

Path = tuple[int, ...]
# (parent, token) in the order sent.
Nodes = tuple[tuple[int, int], ...]
PROMPT = (1, 0)
SOURCE = 1


def trees(count: int, vocabulary: int) -> Iterator[Nodes]:
    """Every tree of `count` nodes. Siblings may be equal."""
    places = [list(product(range(BEFORE, number), range(vocabulary))) for number in range(count)]
    return product(*places)


def texts(length: int, vocabulary: int) -> Iterator[Path]:
    """Every text, up to the names of the tokens: each new one has the lowest name that is free."""
    for text in product(range(vocabulary), repeat=length):
        if all(token <= max(text[:at], default=-1) + 1 for at, token in enumerate(text)):
            yield text


def paths_of(nodes: Nodes, received: int) -> dict[int, Path]:
    """The path of each of the first `received` nodes. Of equal siblings the first one counts; the others are nowhere,
    and so is all that is behind them.
    """
    paths: dict[int, Path] = {BEFORE: ()}
    taken: set[Path] = set()
    for number, (parent, token) in enumerate(nodes[:received]):
        path = (*paths[parent], token) if parent in paths else ()
        if path and path not in taken:
            paths[number] = path
            taken.add(path)
    return paths


def live(nodes: Nodes, received: int, decided: Path) -> dict[int, Path]:
    """What must be live: the nodes that descend from the decided text, with their paths behind it."""
    depth, paths = len(decided), paths_of(nodes, received)
    return {n: path[depth:] for n, path in paths.items() if len(path) > depth and path[:depth] == decided}


def held(tree: Tree) -> dict[int, Path]:
    """What is live in a tree: the paths from its root."""
    paths: dict[int, Path] = {tree.root: ()}
    for number in sorted(tree.nodes):
        node = tree.nodes[number]
        assert node.number == number
        assert node.parent in paths, "a node without its parent"
        paths[number] = (*paths[node.parent], node.token)
        assert node.position == tree.position + len(paths[number]) - 1
    del paths[tree.root]
    return paths


def piece(
    nodes: Nodes, start: int, stop: int, number: int = 0, source: int = SOURCE, prompt: Path = PROMPT
) -> Proposal:
    """Nodes start .. stop - 1 of a tree behind `prompt`; parents are left out where each is the node before."""
    parents = tuple(parent for parent, _ in nodes[start:stop])
    chained = parents == tuple(range(start - 1, stop - 1))
    return Proposal(
        source,
        number,
        len(prompt),
        start,
        tuple(token for _, token in nodes[start:stop]),
        hash_of(prompt) if start == 0 else None,
        parents=() if chained else parents,
    )


@dataclass
class State:
    """A verifier's chains behind PROMPT. seen: what has happened, for whoever reads a failure."""

    vocabulary: int
    text: Text = field(default_factory=lambda: Text(PROMPT))
    seen: list[object] = field(default_factory=list)

    @cached_property
    def chains(self) -> Chains:
        return Chains(self.vocabulary)

    @property
    def decided(self) -> Path:
        return tuple(self.text.tokens[len(PROMPT) :])

    def offer(self, proposal: Proposal) -> Offer:
        self.seen.append(proposal)
        return self.chains.offer(proposal, self.text)

    def decide(self, tokens: Path) -> None:
        self.seen.append(tokens)
        self.text.extend(tokens)
        self.chains.advance(self.text)

    def check(self, must: Mapping[int, Mapping[int, Path]]) -> None:
        """Hold it against what must be live of each source."""
        position = len(self.text)
        found: dict[int, dict[int, Path]] = {source: {} for source in must}
        for source, tree in self.chains._trees.items():
            assert tree.position == position or not tree.nodes, self.seen
            found[source] = held(tree)
        assert found == must, self.seen
        everywhere = {path for paths in must.values() for path in paths.values()}
        window = self.chains.window(position, 99)
        assert (window in everywhere) if everywhere else window == (), self.seen
        assert self.chains.window(position, 1) == window[:1], self.seen
        if len(must) == 1:
            (paths,) = must.values()
            most = max((expected(paths, path, PRIOR_RATES) for path in everywhere), default=0.0)
            assert expected(paths, window, PRIOR_RATES) >= most - 1e-12, self.seen
        self._check_what_follows(everywhere)

    def _check_what_follows(self, everywhere: set[Path]) -> None:
        """Behind each path stands one of its children, and the one that was chosen where there is that."""
        for path in ((), *everywhere):
            children = {longer[-1] for longer in everywhere if longer[:-1] == path}
            for chosen in (None, *range(self.vocabulary)):
                _, draft = self.chains.behind(len(self.text), path, chosen)
                if draft is None:
                    assert not children, self.seen
                else:
                    assert draft.token in children, self.seen
                    # Of several sources the lowest is asked.
                    assert draft.token == chosen or chosen not in children or len(self.chains._trees) > 1, self.seen


def expected(paths: Mapping[int, Path], path: Path, rates: Sequence[float]) -> float:
    """How many of a path's tokens are expected to be decided; rates: by rank among siblings."""
    numbers = {each: number for number, each in paths.items()}
    total, chance = 0.0, 1.0
    for length in range(1, len(path) + 1):
        siblings = sorted(
            numbers[other] for other in numbers if other[:-1] == path[: length - 1] and len(other) == length
        )
        rank = siblings.index(numbers[path[:length]])
        chance *= rates[min(rank, len(rates) - 1)]
        total += chance
    return total


class Heard:
    """What a verifier took in of each tree, as a record beside it."""

    def __init__(self) -> None:
        self._trees: dict[int, tuple[Tree, list[tuple[int, int]]]] = {}
        self._seen: dict[int, tuple[int, ...]] = {}

    def note(self, chains: Chains, proposal: Proposal) -> None:
        """A proposal was offered."""
        tree = chains._trees.get(proposal.source)
        if tree is None or tree.number != proposal.chain:
            return
        _, nodes = self._trees.setdefault(id(tree), (tree, []))
        if tree.size != len(nodes):
            assert proposal.offset <= len(nodes), "nodes behind a gap are taken in"
            parents = proposal.parents or range(proposal.offset - 1, proposal.offset + len(proposal.tokens) - 1)
            pieces = list(zip(parents, proposal.tokens, strict=True))
            nodes += pieces[len(nodes) - proposal.offset :]
        assert tree.size == len(nodes), "the nodes are not those that were sent"

    def check(self, chains: Chains, text: Text) -> None:
        """Live is what descends from the text, of all that came; what has not changed is not looked at again."""
        for tree in chains._trees.values():
            state = len(text), tree.size, tree.position, len(tree.nodes)
            if self._seen.get(id(tree)) == state:
                continue
            self._seen[id(tree)] = state
            _, nodes = self._trees[id(tree)]
            must = live(tuple(nodes), len(nodes), tuple(text.tokens[tree.base :]))
            assert held(tree) == must, "draft nodes live that do not descend from the text, or others do not"
            path = tuple(node.token for node in tree.path(PRIOR_RATES))
            assert path in (must.values() if must else [()]), "a window is no path"


# ----------------------------------------------------------------------------------------------------------------------
# One tree


def state_of(nodes: Nodes, received: int, decided: Path, vocabulary: int, late: bool) -> State:
    """The state that belongs to them. late: all was decided before anything came."""
    state = State(vocabulary)
    if late:
        state.decide(decided)
    if received:
        state.offer(piece(nodes, 0, received))
        state.chains.window(len(PROMPT), 99)
    if not late:
        state.decide(decided)
    return state


def prove_tree(nodes: Nodes, text: Path, vocabulary: int) -> None:
    """Every event in every state of one tree, the text's every split included."""
    for received, decided in product(range(len(nodes) + 1), range(len(text) + 1)):
        must = {SOURCE: live(nodes, received, text[:decided])}
        for late in (False, True):
            state_of(nodes, received, text[:decided], vocabulary, late).check(must)
        for more in range(1, len(text) - decided + 1):
            state = state_of(nodes, received, text[:decided], vocabulary, late=False)
            state.decide(text[decided : decided + more])
            state.check({SOURCE: live(nodes, received, text[: decided + more])})
        for start, stop in combinations(range(len(nodes) + 1), 2):
            _prove_piece(nodes, received, text[:decided], vocabulary, start, stop)


def _prove_piece(nodes: Nodes, received: int, decided: Path, vocabulary: int, start: int, stop: int) -> None:
    """A piece arrives: the next one, an earlier one again, one that overlaps, or one before which others were lost."""
    state = state_of(nodes, received, decided, vocabulary, late=False)
    offer = state.offer(piece(nodes, start, stop))
    if start > received:
        assert offer is Offer.GAP, state.seen
    elif stop <= received:
        assert offer is Offer.DUPLICATE, state.seen
    else:
        received = stop
    state.check({SOURCE: live(nodes, received, decided)})


def prove_unsound_pieces(nodes: Nodes, text: Path, vocabulary: int) -> None:
    """A node whose parent was not drafted before it: the piece is refused, and nothing changes."""
    for received, decided in product(range(len(nodes) + 1), range(len(text) + 1)):
        for parent in (BEFORE - 1, received, received + 1, 99):
            state = state_of(nodes, received, text[:decided], vocabulary, late=False)
            wild = Proposal(SOURCE, 0, len(PROMPT), received, (0,), hash_of(PROMPT), parents=(parent,))
            assert state.offer(wild) is Offer.OUT_OF_RANGE, state.seen
            state.check({SOURCE: live(nodes, received, text[:decided])})


# ----------------------------------------------------------------------------------------------------------------------
# Two trees


def prove_two_sources(first: Nodes, second: Nodes, text: Path, vocabulary: int) -> None:
    """Pieces of two sources interleave, each cut into nodes: neither knows of the other."""
    for order in interleavings(len(first), len(second)):
        for decided in product(range(len(text) + 1), repeat=2):
            if decided[0] > decided[1]:
                continue
            state, received = State(vocabulary), [0, 0]
            for at, source in enumerate(order):
                if at == 1:
                    state.decide(text[: decided[0]])
                nodes = (first, second)[source]
                state.offer(piece(nodes, received[source], received[source] + 1, source=source))
                received[source] += 1
            state.decide(text[decided[0] : decided[1]])
            state.check({s: live(nodes, received[s], state.decided) for s, nodes in enumerate((first, second))})


def interleavings(first: int, second: int) -> Iterator[Path]:
    for order in product((0, 1), repeat=first + second):
        if sum(order) == second:
            yield order


def prove_restart(old: Nodes, new: Nodes, text: Path, vocabulary: int, resumed: bool) -> None:
    """A source begins a new tree, and its node numbers anew; late pieces of the old one are worth nothing.

    resumed: the verifier was taken over meanwhile, and knows of no tree. What it is told of the old one from its
    beginning may then be of use, up to the new one.
    """
    for received, decided, more in product(range(len(old) + 1), range(len(text)), range(2)):
        for start, stop in combinations(range(len(old) + 1), 2):
            state = state_of(old, received, text[:decided], vocabulary, late=False)
            if resumed:
                state.chains.forget()
                state.check({SOURCE: {}})
                state.offer(piece(old, start, stop))
                state.check({SOURCE: live(old, 0 if start else stop, state.decided)})
            prompt = PROMPT + text[:decided]
            state.offer(piece(new, 0, 1, number=1, prompt=prompt))
            assert state.offer(piece(old, start, stop)) is Offer.STALE, state.seen
            state.check({SOURCE: live(new, 1, ())})
            state.decide(text[decided : decided + more])
            state.offer(piece(new, 1, len(new), number=1, prompt=prompt))
            state.check({SOURCE: live(new, len(new), text[decided : decided + more])})


# ----------------------------------------------------------------------------------------------------------------------
# Texts: what a session decides, whatever it tests


@dataclass(frozen=True)
class Target:
    """A target of few tokens: at every place it says something else."""

    seed: int
    sampling: Sampling
    vocabulary: int

    def next(self, text: Path) -> int:
        return _drawn(self, text)

    def text(self, length: int) -> Path:
        """Plain decoding behind PROMPT."""
        text: Path = PROMPT
        for _ in range(length):
            text = (*text, self.next(text))
        return text


@cache
def _drawn(target: Target, text: Path) -> int:
    mixed = hash_of([target.seed, *text])
    logits = [float(mixed >> 8 * token & 0xFF) / 64.0 for token in range(target.vocabulary)]
    return choose(logits, len(text), target.sampling)


def session_of(target: Target, nodes: Nodes, received: int, decided: int, length: int) -> VerifySession:
    text = target.text(decided)
    end = len(PROMPT) + length
    session = VerifySession.opened(
        text,
        len(PROMPT),
        target.sampling,
        Ending(end, frozenset(), frozenset()),
        Allowance(len(text), end),
        target.vocabulary,
    )
    if received:
        session.offer(piece(nodes, 0, received))
    return session


def prove_text(target: Target, nodes: Nodes, length: int) -> Counter[Outcome]:
    """Every forward in every state: with every width, and with every part that arrives meanwhile.

    Returns which outcomes there were of tokens that are no first children.
    """
    plain, reached = target.text(length), Counter[Outcome]()
    for received, decided, width in product(range(len(nodes) + 1), range(length), range(len(nodes) + 1)):
        for late in range(received, len(nodes) + 1):
            session = session_of(target, nodes, received, decided, length)
            source, window = session.source, session.window(width)
            if late > received:
                session.offer(piece(nodes, 0 if width % 2 else received, late))
            rows = [target.next((*session.text.tokens, *window[:at])) for at in range(len(window) + 1)]
            verdict = session.resolve(rows, window, source=source)
            seen = target, nodes, received, decided, window, late, verdict
            behind = len(PROMPT) + decided
            assert verdict.tokens, seen
            assert tuple(session.text.tokens) == plain[: behind + len(verdict.tokens)], seen
            must = live(nodes, late, plain[len(PROMPT) : len(session.text)])
            assert {SOURCE: must} == {SOURCE: {}} | {s: held(tree) for s, tree in session.chains._trees.items()}, seen
            reached += _siblings_decided(nodes, late, plain[len(PROMPT) :], decided, verdict)
    return reached


def _siblings_decided(nodes: Nodes, received: int, text: Path, decided: int, verdict: Verdict) -> Counter[Outcome]:
    """The outcomes of what was decided where the first child was something else."""
    paths = list(paths_of(nodes, received).values())
    found: Counter[Outcome] = Counter()
    for at, outcome in enumerate(verdict.outcomes, decided):
        children = [path for path in paths if len(path) == at + 1 and path[:-1] == text[:at]]
        if text[: at + 1] in children[1:]:
            found[outcome] += 1
    return found


# ----------------------------------------------------------------------------------------------------------------------
# A drafter's tree, and the verifier that hears of it


@dataclass
class Sent:
    """What a drafter has sent: of each tree the text before it, and its nodes."""

    trees: dict[int, tuple[Path, Nodes]] = field(default_factory=dict)

    def note(self, proposal: Proposal, text: Path) -> None:
        """A proposal goes on where the last one ended, behind what was sent; what it holds descends from `text`, which
        the drafter knows as decided.
        """
        number = proposal.chain
        assert number >= max(self.trees, default=-1), "an older tree goes on"
        if number not in self.trees:
            assert proposal.offset == 0, "a tree begins in its middle"
            assert proposal.prefix_hash == hash_of(text[: proposal.base]), "the tree begins behind another text"
            self.trees[number] = text[: proposal.base], ()
        before, nodes = self.trees[number]
        assert (proposal.base, proposal.offset) == (len(before), len(nodes)), "a piece does not follow the last one"
        assert len(proposal.parents) in (0, len(proposal.tokens))
        parents = proposal.parents or range(proposal.offset - 1, proposal.offset + len(proposal.tokens) - 1)
        nodes += tuple(zip(parents, proposal.tokens, strict=True))
        self.trees[number] = before, nodes
        paths = paths_of(nodes, len(nodes))
        for at in range(proposal.offset, len(nodes)):
            assert BEFORE <= nodes[at][0] < at, "behind what was not sent"
            assert at in paths, "an equal sibling was sent before"
            path = before + paths[at]
            assert path[: len(text)] == text, "it does not descend from the decided text"
            assert len(path) > len(text), "it is decided already"

    def live(self, number: int, text: Path) -> dict[int, Path]:
        """Of a tree that was sent: what descends from `text`."""
        before, nodes = self.trees.get(number, (text, ()))
        assert text[: len(before)] == before
        return live(nodes, len(nodes), text[len(before) :])


@dataclass
class Line:
    """A drafter and a verifier, with a link that loses and delays. lost: the present verifier lacks some proposal.

    narrowed: the newest tree of which the drafter has kept a chain.
    """

    session: DraftSession
    vocabulary: int
    verifier: State = field(init=False)
    sent: Sent = field(default_factory=Sent)
    under_way: list[Proposal] = field(default_factory=list)
    lost: bool = False
    narrowed: int = -1

    def __post_init__(self) -> None:
        self.verifier = State(self.vocabulary)

    @property
    def decided(self) -> Path:
        """The text that the drafter knows as decided."""
        return tuple(self.session.text.tokens)

    def draft(self, draws: Sequence[Drawn]) -> None:
        """One forward, of as many places as draws are given and the session wants."""
        session = self.session
        nodes: list[DraftNode] = []
        while session.wants_token and len(nodes) < min(len(draws), session.branches):
            nodes.append(session.take())
            assert session.in_flight <= session.allowed
        for node, drawn in zip(nodes, draws, strict=False):
            one = Drawn(drawn.tokens[:1], scores=(0.0,))
            session.extend(node, drawn if session.branches > 1 else one)
        if nodes:
            session.forward_ended()
            assert session.in_flight <= session.allowed
        while proposal := session.take_proposal():
            self.sent.note(proposal, self.decided)
            self.under_way.append(replace(proposal, source=SOURCE))

    def check(self) -> None:
        """The drafter counts what it has, and the verifier has a part of what was sent."""
        session = self.session
        nodes = list(session.root.children.values())
        for node in nodes:
            nodes.extend(node.children.values())
        sent = {node.number: session.path(node) for node in nodes if node.number is not None}
        unsent = [node for node in nodes if node.number is None]
        live = self.sent.live(session.chain, self.decided)
        assert sent.items() <= live.items()
        assert sent == live or session.chain == self.narrowed
        assert sorted(map(id, unsent)) == sorted(map(id, session.unsent))
        assert session.in_flight == len(nodes)
        assert len(session.line) <= len(self.decided) + len(nodes)
        self._check_verifier()

    def _check_verifier(self) -> None:
        text = tuple(self.verifier.text.tokens)
        for tree in self.verifier.chains._trees.values():
            before, nodes = self.sent.trees[tree.number]
            assert before == text[: tree.base]
            assert held(tree) == live(nodes, tree.size, text[len(before) :])
            if tree.number == self.session.chain and not self.lost and not self.under_way and text == self.decided:
                assert held(tree) == self.sent.live(tree.number, text), "sent, and not there"

    def deliver(self, lost: bool) -> None:
        if self.under_way:
            proposal = self.under_way.pop(0)
            self.lost = self.lost or lost
            if not lost:
                self.verifier.offer(proposal)

    def decide(self, count: int, wild: int) -> None:
        """The verifier decides its window's first `count` tokens and another one, `wild` where that is left to it."""
        window = self.verifier.chains.window(len(self.verifier.text), count)
        self.verifier.decide((*window, wild))

    def tell(self, pace: Pace, behind: int, repeated: int) -> None:
        """The drafter hears of the verifier's text, all but the last `behind` tokens, and of some tokens again."""
        text = self.verifier.text.tokens
        start = max(0, self.session.text.common_prefix(0, text) - repeated)
        branched = self.session.branches > 1
        self.session.advance(start, tuple(text[start : max(start, len(text) - behind)]), pace)
        if branched and self.session.branches == 1:
            self.narrowed = self.session.chain

    def replace_verifier(self, kept: int) -> None:
        """Another verifier goes on behind the text's first tokens, and knows of no tree."""
        text = self.verifier.text.tokens
        self.verifier = State(self.vocabulary)
        self.verifier.text.extend(text[len(PROMPT) : max(len(PROMPT), kept)])
        self.lost = True
