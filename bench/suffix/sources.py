"""Text sources by themselves, without a model: what they would have proposed on texts that are known, and in what time.

Sessions are told again in their order: what a source guesses is compared with what was said, and it goes on behind the
first difference. Each guess is tested whole, so policy, windows and forwards have no part in it.

arctic-inference (Apache-2.0) has suffix decoding's own tree, in C++, which vLLM proposes from. `make setup-arctic`
compiles it, alone, into a folder of its own. It runs here as it does in vLLM, with the defaults that it has there: a
tree for the session's prompt and output, and one for the outputs of all.
"""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.harness import ROOT
from bench.harness.interval import Estimate, estimate
from bench.harness.runs import BenchError
from demo_pair import held_out_prompts
from demo_pair.train.corpus import MANIFEST, is_test
from deploy.stack.processes import environment
from specwire.core.messages import MOST_WINDOW
from specwire.core.verify.shared_texts import ScopeTexts, SharedIndex
from specwire.core.verify.table import KnownTexts, NgramTable
from specwire.core.verify.text_sources import NgramSource, TextSource

PACKAGE = ROOT / ".venv" / "arctic" / "package"
# vLLM's defaults.
TREE_DEPTH, MOST_CACHED, SPEC_FACTOR, LEAST_PROBABILITY = 24, 10_000, 1.0, 0.1
# A look-up: tokens of the session's own text, and how many proposals are timed.
OWN_TOKENS, PROPOSALS, LOOKUP_REPEATS = 8000, 1000, 9
SESSION_TOKENS, POOL_TOKENS = 8000, 50_000
MILLION = 1_000_000
# Kinds of sessions: nothing of theirs was said before, some was, and the first one again to the last token.
KINDS = COLD, WARM, AGAIN = "cold", "warm", "again"
# Seconds that a table may take to build.
BUILD_LIMIT = 600.0

# ----------------------------------------------------------------------------------------------------------------------
# A table of n-grams, of what the demo pair learnt from.


def training_files() -> list[Path]:
    """The demo pair's corpus, but for tests, and for files in which a held-out prompt stands, too: some are copies."""
    root, rows = Path(sysconfig.get_path("stdlib")), json.loads(MANIFEST.read_text())["rows"]
    named = [path for path, _, split in rows if split == "train" and not is_test(Path(path))]
    files, asked = [root / path for path in named], [prompt.text for prompt in held_out_prompts()]
    return [file for file in files if file.is_file() and not _says(file.read_text(encoding="utf-8"), asked)]


def _says(text: str, asked: Sequence[str]) -> bool:
    return any(prompt in text for prompt in asked)


def build_table(target: str, corpus: Sequence[Path], out: Path) -> Path:
    """Have `specwire table build` count a corpus; () for what the demo pair learnt from. Raises BenchError."""
    words = ["table", "build", *map(str, corpus or training_files()), "--tokenizer", target, "--out", str(out)]
    try:
        subprocess.run([sys.executable, "-m", "deploy", *words], env=environment(), check=True, timeout=BUILD_LIMIT)
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(f"specwire table build: {type(error).__name__}; its last words are above") from error
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Sessions told again.


@dataclass(frozen=True, slots=True)
class Said:
    """A session of one tenant. temperature: of all its tenant's. steps: one of KINDS."""

    tenant: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    temperature: float = 0.0
    steps: str = COLD


@dataclass(frozen=True, slots=True)
class Replayed:
    """Of one source in sessions of one kind. us: from a guess's end to the next guess, with all that is noted between.
    Others: on average.

    tokens_a_guess: that are right, and the one behind them, which a target decides in any case.
    """

    label: str
    temperature: float
    steps: str
    tokens_a_guess: float
    accepted: float | None
    us: float


class GuessSource(Protocol):
    """A tenant's guesses: one session after the other. Of several behind one text the best counts, in hindsight."""

    def begin(self, prompt: Sequence[int]) -> None: ...
    def guesses(self) -> Sequence[Sequence[int]]: ...
    def grow(self, tokens: Sequence[int]) -> None: ...
    def end(self) -> None: ...


class OwnGuesses:
    """The session's own text; with `texts`, what the tenant's others said, too.

    drawn: at a temperature above zero. hindsight: guess from both, not from what promises more.
    """

    def __init__(self, texts: ScopeTexts | None = None, drawn: bool = False, hindsight: bool = False) -> None:
        self._texts, self._drawn, self._hindsight = texts, drawn, hindsight
        self._sessions = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._text, self._others, learnt = list(prompt), [], None
        if self._texts is not None:
            self._sessions += 1
            learnt = self._texts.learnt_own[self._drawn]
            index = SharedIndex(self._texts, self._text, str(self._sessions))
            self._others.append(NgramSource(self._text, index=index, learnt=self._texts.learnt[self._drawn]))
        self._source = TextSource(self._text, others=self._others, learnt=learnt)

    def guesses(self) -> Sequence[Sequence[int]]:
        found = [self._source.look()]
        if self._hindsight:
            found = [source.guess for source in self._source.sources]
        return [guess.tokens for guess in found if guess is not None]

    def grow(self, tokens: Sequence[int]) -> None:
        self._text += tokens
        self._source.text_grew()

    def end(self) -> None:
        """What was said stays."""
        self._source.text_ended()


class TableGuesses(OwnGuesses):
    """What a table says behind the session's text, which has no say."""

    def __init__(self, table: NgramTable) -> None:
        super().__init__()
        self._known = KnownTexts(sys.maxsize, table=table)

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._source = TextSource(self._text, others=self._known.sources(self._text), own=False)


def shared_texts(drawn: bool = False, hindsight: bool = False) -> OwnGuesses:
    return OwnGuesses(ScopeTexts(lambda _: True), drawn, hindsight)


class Arctic:
    """See the module's text. module: what `arctic` returns."""

    def __init__(self, module: Any) -> None:
        self._cache = module.SuffixDecodingCache(max_tree_depth=TREE_DEPTH, max_cached_requests=MOST_CACHED)
        self._sessions = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._sessions += 1
        self._cache.start_request(self._sessions, self._text)

    def guesses(self) -> Sequence[Sequence[int]]:
        found = self._cache.speculate(
            self._sessions,
            self._text[-TREE_DEPTH:],
            max_spec_tokens=MOST_WINDOW,
            max_spec_factor=SPEC_FACTOR,
            min_token_prob=LEAST_PROBABILITY,
        )
        tokens: Sequence[int] = found.token_ids
        return [tokens]

    def grow(self, tokens: Sequence[int]) -> None:
        self._text += tokens
        self._cache.add_active_response(self._sessions, list(tokens))

    def end(self) -> None:
        self._cache.stop_request(self._sessions)


def arctic() -> Any | None:
    """The module of arctic-inference's suffix decoding; None where `make setup-arctic` has not run."""
    if not PACKAGE.is_dir():
        return None
    if str(PACKAGE) not in sys.path:
        sys.path.append(str(PACKAGE))
    return importlib.import_module("arctic_inference.suffix_decoding")


def replay(label: str, sessions: Sequence[Said], sources: Mapping[str, GuessSource]) -> list[Replayed]:
    """sources: by tenant. One for each temperature and kind of steps, in order."""
    found: dict[tuple[float, str], Tally] = {}
    for said in sessions:
        _tell(said, sources[said.tenant], found.setdefault((said.temperature, said.steps), Tally()))
    return [tally.replayed(label, *key) for key, tally in sorted(found.items(), key=_order)]


def _order(part: tuple[tuple[float, str], Tally]) -> tuple[float, int]:
    (temperature, steps), _ = part
    return temperature, KINDS.index(steps)


@dataclass(slots=True)
class Tally:
    guesses: int = 0
    tested: int = 0
    accepted: int = 0
    tokens: int = 0
    spent_ns: int = 0

    def replayed(self, label: str, temperature: float, steps: str) -> Replayed:
        share = self.accepted / self.tested if self.tested else None
        guesses = max(1, self.guesses)
        return Replayed(label, temperature, steps, self.tokens / guesses, share, self.spent_ns / 1000 / guesses)


def _tell(said: Said, source: GuessSource, tally: Tally) -> None:
    """One session, from its prompt to its end."""
    done = 0
    source.begin(said.prompt)
    while done < len(said.output):
        began_ns = time.perf_counter_ns()
        guesses = source.guesses()
        tally.spent_ns += time.perf_counter_ns() - began_ns
        rest = said.output[done:]
        right, tested = max(((_right(guess, rest), len(guess)) for guess in guesses), default=(0, 0))
        decided = rest[: right + 1]
        began_ns = time.perf_counter_ns()
        source.grow(decided)
        tally.spent_ns += time.perf_counter_ns() - began_ns
        tally.guesses, tally.tested, tally.accepted = tally.guesses + 1, tally.tested + tested, tally.accepted + right
        tally.tokens, done = tally.tokens + len(decided), done + len(decided)
    source.end()


def _right(guess: Sequence[int], rest: Sequence[int]) -> int:
    """How many tokens of a guess are right before its first error."""
    return next((at for at, token in enumerate(guess) if at >= len(rest) or token != rest[at]), len(guess))


def replays(sessions: Sequence[Said], known: NgramTable) -> list[Replayed]:
    """Of every source that there is. known: a table."""
    drawn = {said.tenant: said.temperature > 0.0 for said in sessions}
    both = {tenant: shared_texts(drawn[tenant], hindsight=True) for tenant in drawn}
    found = [
        *replay("the session's own text", sessions, {tenant: OwnGuesses() for tenant in drawn}),
        *replay("the tenant's texts", sessions, {tenant: shared_texts(drawn[tenant]) for tenant in drawn}),
        *replay("the better of both in hindsight", sessions, both),
    ]
    label = f"a table of {known.contexts} contexts, order {known.order}"
    found += replay(label, sessions, {tenant: TableGuesses(known) for tenant in drawn})
    module = arctic()
    if module is not None:
        found += replay("arctic-inference", sessions, {tenant: Arctic(module) for tenant in drawn})
    return found


# ----------------------------------------------------------------------------------------------------------------------
# What a look-up takes, and what a million tokens do: in this process.


@dataclass(frozen=True, slots=True)
class LookUp:
    """us: from a token's arrival to the next proposal. bytes_a_token: of the arrays, room for more included."""

    others: int
    own_us: Estimate
    shared_us: Estimate
    bytes_a_token: float
    read_us_a_token: float


def pool_of(tokens: int, chance: random.Random) -> NDArray[np.uint32]:
    """Tokens to put texts together from: a few are frequent, as in most texts."""
    return np.array([int(200 * chance.paretovariate(0.7)) % 50000 for _ in range(tokens)], np.uint32)


def filled(others: int, pool: NDArray[np.uint32], chance: random.Random) -> tuple[ScopeTexts, float, float]:
    """Texts of so many tokens, which repeat each other; bytes and microseconds that a token took."""
    texts, spent_ns = ScopeTexts(lambda _: True), 0
    for number in range(max(1, others // SESSION_TOKENS)):
        text = repeating(pool, SESSION_TOKENS, chance)
        index = SharedIndex(texts, text, str(number), grows=False)
        began_ns = time.perf_counter_ns()
        while not index.complete:
            index.read()
        spent_ns += time.perf_counter_ns() - began_ns
    count = texts.tokens
    return texts, texts.size / count, spent_ns / 1000 / count


def repeating(pool: NDArray[np.uint32], tokens: int, chance: random.Random) -> list[int]:
    """A text put together from pieces of `pool`, of 5 to 80 tokens."""
    text: list[int] = []
    while len(text) < tokens:
        start = chance.randrange(len(pool) - 80)
        text += pool[start : start + chance.randrange(5, 80)].tolist()
    return text[:tokens]


def proposal_us(text: list[int], source: NgramSource | TextSource, following: Sequence[int]) -> float:
    """Microseconds from a token's arrival to the next proposal, with what is noted of the last one.

    text: what the source is of. It grows by `following`, token by token.
    """
    for _ in range(len(text) // 1000):  # all of it is read
        source.look()
    began_ns = time.perf_counter_ns()
    for token in following:
        source.look()
        text.append(token)
        source.text_grew()
    return (time.perf_counter_ns() - began_ns) / 1000 / len(following)


def look_up(others: int) -> LookUp:
    """Time proposals behind a text of OWN_TOKENS, beside `others` tokens of other sessions, which it repeats.

    So what is looked up is there hundreds of times, except where two of its pieces meet.
    """
    chance = random.Random(1)
    pool = pool_of(POOL_TOKENS, chance)
    texts, size, read_us = filled(others, pool, chance)
    own_us, shared_us = [], []
    for number in range(LOOKUP_REPEATS):
        whole = repeating(pool, OWN_TOKENS + PROPOSALS, chance)
        text, following = whole[:OWN_TOKENS], whole[OWN_TOKENS:]
        own_us.append(proposal_us(text, TextSource(text), following))
        text = whole[:OWN_TOKENS]
        index = SharedIndex(texts, text, f"own-{number}")
        other = NgramSource(text, index=index, learnt=texts.learnt[False])
        shared_us.append(proposal_us(text, TextSource(text, others=[other]), following))
    return LookUp(others, estimate(own_us), estimate(shared_us), size, read_us)
