"""ScriptedLM: a model whose logits are a known hash of the text it holds; and one with a head that is another script.

For tests and demonstrations of everything around a model. The hash runs over the tokens that were fed to the slot and
not rolled back, so a wrong rollback or a skipped token changes every later row.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from specwire.core.draft import DraftingModel, HeadRequest
from specwire.core.messages import MOST_WINDOW
from specwire.core.model import Feed, ModelError, ModelInfo, SlotTable
from specwire.lm.guesses import draft_behind
from specwire.text.tokenizer import vocabulary_fingerprint

PREFIX = "scripted:"
USAGE = (
    "scripted:SEED[:vocab=N][:agree=A|:trace=FILE|:ranks=FILE][:eos=P][:delay_ms=D][:row_cost=S]"
    "[:memory=M][:spread=L][:device=NAME][:end=ID]"
)
CONTEXT = 4096
EOS_ID = 0
UNKNOWN = "1"

Row = npt.NDArray[np.float32]

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
# Logits lie in [0, SPREAD) unless said otherwise: at temperature 1 the best of 64 tokens has a probability near 0.2.
SPREAD = 16.0
NEVER = -64.0
# Independent streams of coins and logits.
AGREE_STREAM, EOS_STREAM, OTHER_STREAM, ELSEWHERE_STREAM = 1, 2, 3, 4
# At most one of these may be given.
EITHER = {"agree", "trace", "ranks"}
# A sleep's lateness counts up to this many seconds, and is averaged over this many sleeps.
MOST_LATE_S, LATE_SPAN = 2e-4, 8
# What a model with a memory remembers fits in 64 bits.
TOKEN_BITS, MOST_MEMORY = 21, 3
# Ids whose scores are equal in a file still have an order.
TIE = 1e-3


@dataclass(frozen=True, slots=True)
class ScriptedRanks:
    """What a drafter thinks of its best ids at each output position, recorded.

    right[i]: where the target's token of output position i stands among them; None: nowhere. scores[i]: of the best
    ids, falling from 0, in nats. Both begin anew where they end. prompt: length of the text before the output.
    """

    prompt: int
    right: tuple[int | None, ...]
    scores: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.right or len(self.right) != len(self.scores) or not all(self.scores):
            raise ModelError("ranks: must hold a place and scores for each of one or more positions")
        places = zip(self.right, self.scores, strict=True)
        if any(rank is not None and not 0 <= rank < len(found) for rank, found in places):
            raise ModelError("ranks: a place is beyond its scores")
        if any(list(found) != sorted(found, reverse=True) for found in self.scores):
            raise ModelError("ranks: scores must fall")

    @property
    def most(self) -> int:
        """Ids of a position, at most."""
        return max(map(len, self.scores))


class Place(NamedTuple):
    """Where logits are asked for; see `Script.logits`."""

    prefix: int
    position: int
    right: bool


@dataclass(frozen=True, slots=True)
class Script:
    """What "scripted:..." says.

    Attributes:
        agree: probability, by prefix, that the logits are those of the plain script of this seed; otherwise its best
            token comes last, so `agree` is the rate of greedy agreement.
        eos: probability, by prefix, that the end-of-sequence token is the best one; it is never drawn otherwise.
        delay_ms: time of a forward, on average; it sleeps for what computing leaves of it. An emulation of a slower
            model, to be called so wherever it is used.
        row_cost: share of delay_ms that each further position of a forward adds, all slots together:
            V(m) = delay_ms (1 + row_cost (m - 1)).
        trace: "0" and "1" by position, in place of `agree`: whether the logits that choose the token at p agree;
            it begins anew where it ends.
        ranks: likewise, of several ids with scores: see `ScriptedRanks`. Behind a text that is not the plain script's
            own greedy one, what was recorded at another position is said, by the text's hash.
        memory: the logits depend on so many last tokens only, 1 to 3, so that greedy texts end in loops; 0: on all.
        spread: logits lie in [0, spread); a small one gives every token a chance at temperature 1.
        device: what the model says it computes on. One that sleeps shares no cores, and may say so by another name.
        end: the end-of-sequence id that the model names, as a generation_config.json does; the weights are the same.
    """

    seed: int
    vocab: int = 64
    agree: float = 1.0
    eos: float = 0.0
    delay_ms: float = 0.0
    row_cost: float = 0.0
    trace: str = ""
    ranks: ScriptedRanks | None = None
    device: str = "cpu"
    memory: int = 0
    spread: float = SPREAD
    end: int = EOS_ID

    def __post_init__(self) -> None:
        if not 2 <= self.vocab <= 1 << 20:
            raise ModelError(f"vocab: must be from 2 to {1 << 20}, not {self.vocab}")
        for name in ("agree", "eos", "row_cost"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ModelError(f"{name}: must be from 0 to 1, not {getattr(self, name)}")
        if not (math.isfinite(self.delay_ms) and 0.0 <= self.delay_ms <= 60_000.0):
            raise ModelError(f"delay_ms: must be from 0 to 60000, not {self.delay_ms}")
        if not 0.0 < self.spread <= SPREAD:
            raise ModelError(f"spread: must be above 0 and at most {SPREAD:g}, not {self.spread}")
        if not 0 <= self.memory <= MOST_MEMORY:
            raise ModelError(f"memory: must be from 0 to {MOST_MEMORY}, not {self.memory}")
        if set(self.trace) - set("01"):
            raise ModelError("trace: must hold 0 and 1 only")
        if self.ranks is not None and self.ranks.most + 2 > self.vocab:
            raise ModelError(f"vocab: {self.vocab} ids are too few for {self.ranks.most} with scores")
        if not self.device:
            raise ModelError("device: must not be empty")
        if not 0 <= self.end < self.vocab:
            raise ModelError(f"end: must be from 0 to {self.vocab - 1}, not {self.end}")

    @classmethod
    def parse(cls, spec: str) -> Script:
        """Read `USAGE`."""
        seed, *options = spec.removeprefix(PREFIX).split(":")
        pairs = dict(option.partition("=")[::2] for option in options)
        if pairs.keys() - READ_BY.keys() or len(pairs) < len(options) or len(EITHER & pairs.keys()) > 1:
            raise ModelError(f"model {spec!r}: expected {USAGE}")
        try:
            values = {name: READ_BY[name](value) for name, value in pairs.items()}
            return cls(int(seed) & WORD, **values)
        except ModelError:
            raise
        except ValueError as error:
            raise ModelError(f"model {spec!r}: not a number: {error}") from error

    def duration(self, rows: int) -> float:
        """Least seconds of a forward of `rows` positions, all slots together."""
        return self.delay_ms / 1000 * (1 + self.row_cost * max(0, rows - 1))

    def extend(self, prefix: int, token: int) -> int:
        """64-bit hash of a text, from the hash of the text before its last token (0 for the empty text).

        With a memory: its last tokens themselves.
        """
        if self.memory:
            return (prefix << TOKEN_BITS | token + 1) & ((1 << TOKEN_BITS * self.memory) - 1)
        return _mix((prefix + GOLDEN * (token + 1)) & WORD)

    def logits(self, prefix: int, position: int = 0, right: bool = True) -> Row:
        """float32 (vocab,) after the text of this hash.

        Of interest to traces only: the `position` of the token that is chosen, and whether the text's output is
        `right`: the target's own.
        """
        row: Row = self.rows([Place(prefix, position, right)])[0]
        return row

    def rows(self, places: Sequence[Place]) -> Row:
        """float32 (places, vocab): the logits after each of several texts, computed at once."""
        prefixes = [place.prefix for place in places]
        plain = self._plain(prefixes)
        if self.ranks is not None:
            return self._ranked(self.ranks, places, plain.argmax(1))
        wrong = [at for at, place in enumerate(places) if not self._agrees(place.prefix, place.position)]
        if wrong:
            best = plain[wrong].argmax(1)
            plain[wrong] = self._scores([prefixes[at] for at in wrong], OTHER_STREAM)
            plain[wrong, EOS_ID] = NEVER
            plain[wrong, best] = 2 * NEVER
        return plain

    def _plain(self, prefixes: Sequence[int]) -> Row:
        plain = self._scores(prefixes, 0)
        plain[:, EOS_ID] = NEVER
        if self.eos:
            ends = [at for at, prefix in enumerate(prefixes) if self._coin(prefix, EOS_STREAM) < self.eos]
            plain[ends, EOS_ID] = self.spread
        return plain

    def _ranked(self, ranks: ScriptedRanks, places: Sequence[Place], targets: npt.NDArray[np.intp]) -> Row:
        """Each place's best ids have the scores recorded there; its target has its recorded place among them."""
        others = self._scores([place.prefix for place in places], OTHER_STREAM)
        others[:, EOS_ID] = others[np.arange(len(places)), targets] = NEVER
        ordered = np.argsort(-others, axis=1, kind="stable").tolist()
        rows: Row = np.full((len(places), self.vocab), NEVER, np.float32)
        for row, place, best, target in zip(rows, places, ordered, targets.tolist(), strict=True):
            at = place.position - ranks.prompt if place.right else self._hash(place.prefix, ELSEWHERE_STREAM)
            rank, scores = ranks.right[at % len(ranks.right)], ranks.scores[at % len(ranks.right)]
            if rank is not None:
                best.insert(rank, target)
            row[best[: len(scores)]] = [score - TIE * index for index, score in enumerate(scores)]
        return rows

    def chosen(self, prefix: int, token: int, position: int) -> bool:
        """Whether a token of the output, at `position`, is the target's own; of interest to `ranks` only."""
        return self.ranks is None or position < self.ranks.prompt or token == int(self._plain([prefix]).argmax())

    def _agrees(self, prefix: int, position: int) -> bool:
        if self.trace:
            return self.trace[position % len(self.trace)] == "1"
        return self._coin(prefix, AGREE_STREAM) < self.agree

    def _coin(self, prefix: int, stream: int) -> float:
        return self._hash(prefix, stream) / 2.0**64

    def _hash(self, prefix: int, stream: int) -> int:
        return _mix(prefix ^ _mix((self.seed + GOLDEN * (stream + 1)) & WORD))

    def _scores(self, prefixes: Sequence[int], stream: int) -> Row:
        """(prefixes, vocab)."""
        begun = np.array([self._hash(prefix, stream) for prefix in prefixes], np.uint64)
        state = np.arange(1, self.vocab + 1, dtype=np.uint64) * np.uint64(GOLDEN) + begun[:, None]
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        # 24 bits: exact in float32.
        scores: Row = ((state ^ (state >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) * np.float32(
            self.spread / 2**24
        )
        return scores


def _read_trace(name: str) -> str:
    """The zeros and ones of a file; blanks and line ends are skipped."""
    try:
        trace = "".join(Path(name).read_text(encoding="ascii").split())
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"trace: cannot read {name}: {type(error).__name__}") from error
    if not trace:
        raise ModelError(f"trace: {name} is empty")
    return trace


def _read_ranks(name: str) -> ScriptedRanks:
    """See `ScriptedRanks`: a JSON object of its fields."""
    try:
        found = json.loads(Path(name).read_text(encoding="ascii"))
        right, scores = found["right"], found["scores"]
        return ScriptedRanks(int(found["prompt"]), tuple(right), tuple(tuple(map(float, each)) for each in scores))
    except OSError as error:
        raise ModelError(f"ranks: cannot read {name}: {type(error).__name__}") from error
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"ranks: {name} is no object of prompt, right and scores: {error!r}") from error


READ_BY: dict[str, Callable[[str], Any]] = {
    "vocab": int,
    "agree": float,
    "eos": float,
    "delay_ms": float,
    "row_cost": float,
    "trace": _read_trace,
    "ranks": _read_ranks,
    "device": str,
    "memory": int,
    "spread": float,
    "end": int,
}


def _mix(word: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


class Metronome:
    """Waits that end at their time on average.

    A sleeping thread wakes some 60 us late, which is 6 % of a draft token of 1 ms and would be charged to the emulated
    device. So each sleep is shortened by the recent lateness.
    """

    def __init__(self) -> None:
        self._late = 0.0

    def wait_until(self, due: float) -> None:
        """Sleep until `due`, by `time.perf_counter`; seconds."""
        left = due - time.perf_counter()
        if left <= 0:
            return
        time.sleep(max(0.0, left - self._late))
        # An occasional delay of a busy machine is no property of sleeping.
        over = min(MOST_LATE_S, time.perf_counter() - due)
        self._late = min(MOST_LATE_S, max(0.0, self._late + over / LATE_SPAN))


class HeldToken(NamedTuple):
    """A token in a slot. prefix: hash of the text up to it, along its ancestors. behind: of the text before it.

    right: the text's output is the target's own (of interest to `ranks` only).
    """

    token: int
    prefix: int
    behind: int
    right: bool


EMPTY = HeldToken(-1, 0, 0, True)


class ScriptedLM:
    """A `LanguageModel` that plays a `Script`."""

    failed: frozenset[int] = frozenset()
    kv_bytes = state_bytes = 0
    most_window = MOST_WINDOW
    branches = True

    def __init__(self, script: Script, slots: int, context: int = CONTEXT) -> None:
        self.script = script
        self.info = _info(script, context)
        self._table = SlotTable(slots, context, script.vocab)
        self._rows: list[list[HeldToken]] = [[] for _ in range(slots)]
        self._clock = Metronome()

    @classmethod
    def parse(cls, spec: str, *, slots: int, context: int | None = None) -> ScriptedLM:
        if context is not None and not 2 <= context <= CONTEXT:
            raise ModelError(f"context: a scripted model has from 2 to {CONTEXT} positions, not {context}")
        return cls(Script.parse(spec), slots, context or CONTEXT)

    @property
    def slots(self) -> int:
        return len(self._table)

    def cached(self, slot: int) -> int:
        return self._table.cached(slot)

    def rollback(self, slot: int, length: int) -> None:
        self._table.rollback(slot, length)
        del self._rows[slot][length:]

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self._table.keep(slot, start, rows)
        held = self._rows[slot]
        held[start:] = [held[row] for row in rows]

    def discard(self, slot: int) -> None:
        self._table.clear(slot)
        self._rows[slot].clear()

    def copy(self, source: int, target: int, length: int) -> None:
        self._table.copy(source, target, length)
        self._rows[target] = self._rows[source][:length]

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self._table.check(feeds)
        began = time.perf_counter()
        places = [place for feed in feeds for place in self._feed(feed)]
        rows = self.script.rows(places) if places else np.empty((0, self.script.vocab), np.float32)
        if self.script.delay_ms:
            width = sum(len(feed.tokens) for feed in feeds)
            self._clock.wait_until(began + self.script.duration(width))
        self._table.commit(feeds)
        return torch.from_numpy(rows)

    def _feed(self, feed: Feed) -> list[Place]:
        rows = self._rows[feed.slot]
        del rows[feed.start :]
        positions = []
        for index, token in enumerate(feed.tokens):
            if feed.tree is None:
                before, position = (rows[-1] if rows else EMPTY), len(rows)
            else:
                ancestors = feed.tree.ancestors[index]
                before, position = self._behind(rows, feed.tree.trunk, ancestors), feed.tree.trunk + len(ancestors)
            rows.append(self._held(before, token, position))
            positions.append(position)
        first = len(rows) - feed.wanted
        wanted = positions[len(positions) - feed.wanted :]
        return [
            Place(held.prefix, position + 1, held.right) for held, position in zip(rows[first:], wanted, strict=True)
        ]

    def _held(self, before: HeldToken, token: int, position: int) -> HeldToken:
        right = before.right and self.script.chosen(before.prefix, token, position)
        return HeldToken(token, self.script.extend(before.prefix, token), before.prefix, right)

    @staticmethod
    def _behind(rows: Sequence[HeldToken], trunk: int, ancestors: Sequence[int]) -> HeldToken:
        """What a node stands behind: the text, then its ancestors.

        A row that was computed behind others than these spoils all that see it, as wrong keys and values would.
        """
        before = rows[trunk - 1] if trunk else EMPTY
        for row in ancestors:
            held = rows[row]
            spoilt = held.behind != before.prefix
            before = HeldToken(held.token, _mix(held.prefix ^ before.prefix), before.prefix, False) if spoilt else held
        return before


class HeadedScript(ScriptedLM, DraftingModel):
    """A scripted target, behind whose texts another script drafts: `head`, or its own, which is always right.

    As a head does, it reads what its slots hold before it drafts behind it. A forward takes as long as a drafter's that
    plays the same script.
    """

    def __init__(self, script: Script, slots: int, context: int = CONTEXT, head: Script | None = None) -> None:
        super().__init__(script, slots, context)
        self.head = script if head is None else head
        if self.head.vocab != script.vocab:
            raise ModelError(f"heads: of {self.head.vocab} ids, beside a target of {script.vocab}")
        self._read = [0] * slots
        self._stopped = False
        self._head_clock = Metronome()

    @classmethod
    def beside(cls, spec: str, head: str, *, slots: int, context: int | None = None) -> HeadedScript:
        """Of what `Script.parse` reads."""
        lone = ScriptedLM.parse(spec, slots=slots, context=context)
        return cls(lone.script, slots, lone.info.context, Script.parse(head))

    # The target's slots

    def rollback(self, slot: int, length: int) -> None:
        super().rollback(slot, length)
        self._cut(slot, length)

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        super().keep(slot, start, rows)
        self._cut(slot, start)

    def discard(self, slot: int) -> None:
        super().discard(slot)
        self._cut(slot, 0)

    def copy(self, source: int, target: int, length: int) -> None:
        super().copy(source, target, length)
        self._read[target] = min(self._read[source], length)

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        rows = super().forward(feeds)
        for feed in feeds:
            self._cut(feed.slot, feed.start)
        return rows

    def _cut(self, slot: int, length: int) -> None:
        self._read[slot] = min(self._read[slot], length)

    # The head's

    def unread(self, slot: int) -> int | None:
        return None if self._stopped else self.cached(slot) - self._read[slot]

    def heed(self, slots: Collection[int] | None) -> None:
        """It reads what the slots hold; nothing is kept for it."""

    def skip(self, slot: int, left: int) -> None:
        """To read is free, so that all is read."""

    def catch_up(self, requests: Sequence[HeadRequest]) -> None:
        for request in requests:
            self._read[request.slot] = self.cached(request.slot)

    def stop(self) -> None:
        self._stopped = True

    def draft(self, requests: Sequence[HeadRequest]) -> list[list[int]]:
        """See `draft_behind`."""
        prefixes: dict[int, int] = {}

        def forward(going: Sequence[int], drafted: Sequence[Sequence[int]]) -> torch.Tensor:
            began, places = time.perf_counter(), list[Place]()
            for at in going:
                request, said = requests[at], drafted[at]
                prefixes[at] = self.head.extend(prefixes[at], said[-1]) if said else self._prefix(request)
                places.append(Place(prefixes[at], len(request.tokens) + len(said), True))
            logits = torch.from_numpy(self.head.rows(places))
            self.spend(began, len(going))
            return logits

        self.catch_up(requests)
        return draft_behind(self, requests, forward)

    def spend(self, began: float, sessions: int) -> None:
        """Let the head's forward take its time. began: by `time.perf_counter`."""
        if self.head.delay_ms:
            self._head_clock.wait_until(began + self.head.duration(sessions))

    def _prefix(self, request: HeadRequest) -> int:
        """The hash of its text, from what the slot holds: wrong where that is of another text."""
        held = self._rows[request.slot]
        return self.head.extend(held[-1].prefix if held else 0, request.tokens[-1])


def _info(script: Script, context: int) -> ModelInfo:
    vocabulary = {index: str(index) for index in range(script.vocab)}
    identity = f"scripted {script.seed} {script.vocab} {script.agree} {script.eos} {script.trace} {script.memory}"
    if script.spread != SPREAD:
        identity += f" {script.spread}"
    if script.ranks is not None:
        identity += f" {script.ranks}"
    return ModelInfo(
        name=f"{PREFIX}{script.seed}",
        architecture="Scripted",
        vocabulary=script.vocab,
        context=context,
        eos_ids=(script.end,),
        dtype="float32",
        device=script.device,
        weights_fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        vocabulary_fingerprint=vocabulary_fingerprint(vocabulary),
        runtime="scripted",
        tokenizer_json=_tokenizer(vocabulary),
    )


def _tokenizer(vocabulary: dict[int, str]) -> bytes:
    """Tokens are numbers between spaces; any other word is read as UNKNOWN."""
    tokenizer = Tokenizer(WordLevel({token: index for index, token in vocabulary.items()}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return str(tokenizer.to_str()).encode()
