"""What a session's text may be, whatever happened on the way: plain decoding's, or what the session's rule allows.

Under greedy and coupled there is one text (`Plain`). Under the other rules proposals have a say: each token must be
one that the rule can have decided behind the text before it (`Lawful`), and what was shown must stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import LogprobsOf, Rule, Sampling, Seen, log_probabilities, report, seen_in
from specwire.core.messages import FinishReason, TokenLogprobs
from specwire.core.text import Stopping
from specwire.lm.scripted import Script
from tests.simulation.services import USUAL, TargetConfig

# float32 on the wire, and logarithms of another library.
LOGPROB_TOLERANCE = 1e-4
# What is less probable is never drawn.
IMPOSSIBLE = 1e-9

Tokens = Sequence[int]
End = tuple[tuple[int, ...], str, FinishReason | None]


def is_prefix(part: Sequence[Any], whole: Sequence[Any]) -> bool:
    return len(part) <= len(whole) and tuple(whole[: len(part)]) == tuple(part)


@dataclass(frozen=True)
class Wish:
    """Everything that a text is a function of, beside the model."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    stop: tuple[str, ...]
    config: TargetConfig = USUAL


class Expected(ABC):
    """`text` is prompt and output, `tokens` the output alone."""

    def __init__(self, wish: Wish, script: Script, tokenizer: Tokenizer) -> None:
        self.wish = wish
        self._script = script
        self._tokenizer = tokenizer
        self._hashed: tuple[tuple[int, ...], int] = (), 0
        self._eos_ids = frozenset(() if wish.stopping.ignore_eos else wish.config.eos_ids)
        self._ends = self._eos_ids | wish.stopping.stop_ids

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.wish.prompt

    def __repr__(self) -> str:
        return f"[{self.wish.sampling.rule} from {self.prompt}]"

    def decoded(self, tokens: Tokens) -> str:
        return self._tokenizer.decode(list(tokens))

    @abstractmethod
    def decided(self, text: Tokens) -> bool:
        """Whether a verifier, which knows nothing of stop strings, may have decided it."""

    @abstractmethod
    def shown(self, tokens: Tokens) -> bool:
        """Whether the log may hold it, and readers see it."""

    @abstractmethod
    def readable(self, tokens: Tokens, text: str) -> bool:
        """Whether `text` is what `tokens` may have released by now."""

    @abstractmethod
    def ended(self, tokens: Tokens) -> End | None:
        """Output, text and reason, if the session ends with these tokens of its own."""

    def hash_of(self, text: Tokens) -> int:
        """The script's. Of a text that goes on behind the last one only what is new is looked at."""
        known, value = self._hashed if is_prefix(self._hashed[0], text) else ((), 0)
        for token in text[len(known) :]:
            value = self._script.extend(value, token)
        self._hashed = tuple(text), value
        return value

    def reports(self, text: Tokens, reported: TokenLogprobs) -> bool:
        """Whether this is what is reported of the text's last token."""
        before, sampling = text[:-1], self.wish.sampling
        if sampling.logprobs_of is LogprobsOf.PROCESSED:
            log_p = self._log_p(before)
        else:
            log_p = log_probabilities(self._logits(before), Sampling())
        known = report(log_p, text[-1], sampling.logprobs or 0)
        pairs = [(known.logprob, reported.logprob), *zip(*(_values(each) for each in (known, reported)), strict=False)]
        near = all(abs(one - other) <= LOGPROB_TOLERANCE for one, other in pairs)
        return near and [token for token, _ in known.top] == [token for token, _ in reported.top]

    # The target

    def _logits(self, before: Tokens) -> np.ndarray[Any, Any]:
        return self._script.logits(self.hash_of(before), len(before)).astype(np.float64)

    def _log_p(self, before: Tokens) -> np.ndarray[Any, Any]:
        return log_probabilities(self._logits(before), self.wish.sampling, self._seen(before), self._banned(before))

    def _choose(self, before: Tokens) -> int:
        """The target's own token."""
        sampling = self.wish.sampling
        return choose(self._logits(before), len(before), sampling, self._seen(before), self._banned(before))

    def _seen(self, before: Tokens) -> Seen | None:
        return seen_in(before, len(self.prompt)) if self.wish.sampling.penalised else None

    def _banned(self, before: Tokens) -> tuple[int, ...]:
        return tuple(self._ends) if len(before) - len(self.prompt) < self.wish.stopping.min_tokens else ()

    def _reason(self, text: Tokens) -> FinishReason | None:
        """Why a verifier ends the text there."""
        if len(text) == len(self.prompt):
            return None
        if text[-1] in self._eos_ids:
            return FinishReason.EOS
        if text[-1] in self.wish.stopping.stop_ids:
            return FinishReason.STOP_ID
        full = len(text) - len(self.prompt) >= self.wish.stopping.max_tokens
        return FinishReason.LENGTH if full else None

    def _cut(self, tokens: Tokens, reason: FinishReason | None) -> End:
        """At the stop string that is completed first behind `min_tokens`; of two by the same character, the longer."""
        stops, decoded = self.wish.stop, self.decoded
        whole = decoded(tokens)

        def count(end: int) -> int:
            """Of the tokens that complete so much of the text."""
            return next(n for n in range(1, len(tokens) + 1) if len(decoded(tokens[:n])) >= end)

        completed = [end for end in range(1, len(whole) + 1) if whole[:end].endswith(stops)] if stops else []
        ends = [end for end in completed if count(end) > self.wish.stopping.min_tokens]
        if not ends:
            return tuple(tokens), whole, reason
        cut = min(ends[0] - len(stop) for stop in stops if whole[: ends[0]].endswith(stop))
        return tuple(tokens[: count(ends[0])]), whole[:cut], FinishReason.STOP_STRING


def _values(reported: TokenLogprobs) -> list[float]:
    return [value for _, value in reported.top]


class Plain(Expected):
    """One text. raw: prompt and all that a verifier decides."""

    def __repr__(self) -> str:
        return f"[{self.wish.sampling.rule} from {self.prompt}: {self.end}]"

    @cached_property
    def raw(self) -> tuple[int, ...]:
        text = list(self.prompt)
        while self._reason(text) is None:
            text.append(self._choose(text))
        return tuple(text)

    @cached_property
    def end(self) -> End:
        return self._cut(self.raw[len(self.prompt) :], self._reason(self.raw))

    def decided(self, text: Tokens) -> bool:
        return is_prefix(text, self.raw)

    def shown(self, tokens: Tokens) -> bool:
        return is_prefix(tokens, self.end[0])

    def readable(self, tokens: Tokens, text: str) -> bool:
        return is_prefix(text, self.end[1])

    def ended(self, tokens: Tokens) -> End | None:
        return self.end


class Lawful(Expected):
    """Any text of which each token is one that its rule may decide behind those before it."""

    def __init__(self, wish: Wish, script: Script, tokenizer: Tokenizer) -> None:
        super().__init__(wish, script, tokenizer)
        self._known: set[int] = set()
        self._ended: dict[tuple[int, ...], End] = {}

    def decided(self, text: Tokens) -> bool:
        if not is_prefix(self.prompt, text):
            return is_prefix(text, self.prompt)
        value = self.hash_of(self.prompt)
        for index in range(len(self.prompt), len(text)):
            value = self._script.extend(value, text[index])
            if value not in self._known:
                if self._reason(text[:index]) is not None or not self._possible(text[:index], text[index]):
                    return False
                self._known.add(value)
        return True

    def _possible(self, before: Tokens, token: int) -> bool:
        sampling, p = self.wish.sampling, np.exp(self._log_p(before))
        match sampling.rule:
            case Rule.REJECTION | Rule.BLOCK:
                return bool(p[token] > IMPOSSIBLE)
            case Rule.THRESHOLD:
                assert sampling.acceptance is not None
                likely = bool(p[token] >= sampling.acceptance.numbers[0] - IMPOSSIBLE)
            case _:
                assert sampling.acceptance is not None
                epsilon, delta = sampling.acceptance.numbers
                positive = p[p > 0.0]
                entropy = float(-(positive * np.log(positive)).sum())
                likely = bool(p[token] > min(epsilon, delta * exp(-entropy)) - IMPOSSIBLE)
        return likely or token == self._choose(before)

    def shown(self, tokens: Tokens) -> bool:
        return self.decided([*self.prompt, *tokens]) and self._whole(tokens)[0] == tuple(tokens)

    def readable(self, tokens: Tokens, text: str) -> bool:
        return is_prefix(text, self._whole(tokens)[1])

    def ended(self, tokens: Tokens) -> End | None:
        end = self._whole(tokens)
        return None if end[2] is None else end

    def _whole(self, tokens: Tokens) -> End:
        key = tuple(tokens)
        if key not in self._ended:
            self._ended[key] = self._cut(tokens, self._reason([*self.prompt, *tokens]))
        return self._ended[key]


def expected(wish: Wish, script: Script, tokenizer: Tokenizer) -> Expected:
    kind = Plain if wish.sampling.guessed else Lawful
    return kind(wish, script, tokenizer)
