"""The law that texts must have, from the model's logits, and how far samples are from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

from specwire.core.law.sampling import Sampling, log_probabilities
from specwire.lm.scripted import EOS_ID, Script

Text = tuple[int, ...]
Thing = TypeVar("Thing", bound=Hashable)
Floats = npt.NDArray[np.float64]
# Outcomes that are expected less often are counted together.
LEAST_EXPECTED = 8.0


@cache
def following(script: Script, text: Text, temperature: float = 1.0) -> Floats:
    """The target's probabilities (vocabulary,) behind `text`."""
    prefix = 0
    for token in text:
        prefix = script.extend(prefix, token)
    found: Floats = np.exp(log_probabilities(script.logits(prefix, len(text)), Sampling(temperature)))
    return found


def joint(script: Script, prompt: Text, length: int) -> dict[Text, float]:
    """Of the first `length` tokens behind the prompt; a text that ends before is shorter."""
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        grown: dict[Text, float] = {}
        for text, mass in texts.items():
            if text and text[-1] == EOS_ID:
                grown[text] = grown.get(text, 0.0) + mass
                continue
            for token, share in enumerate(following(script, prompt + text)):
                grown[*text, token] = mass * float(share)
        texts = grown
    return {text: mass for text, mass in texts.items() if mass > 0.0}


def p_of_firsts(script: Script, prompt: Text, texts: Sequence[Text], length: int) -> float:
    """The p-value of the joint law of the first `length` tokens."""
    counts = Counter(text[:length] for text in texts)
    statistic, freedom = chi_square(counts, joint(script, prompt, length), len(texts))
    return float(chi2.sf(statistic, freedom))


def p_of_steps(script: Script, prompt: Text, texts: Sequence[Text], skipped: int) -> float:
    """The p-value of every token behind the first `skipped`, given what the model sees of the text before it.

    For a model whose memory is one token: where each stands far from the beginning, chains have caught up, windows are
    wide, and drafts are tested that were drawn long ago.
    """
    counts: dict[int, Counter[int]] = {}
    for text in texts:
        for before, token in zip((*prompt, *text)[len(prompt) + skipped - 1 :], text[skipped:], strict=False):
            counts.setdefault(before, Counter())[token] += 1
    statistic, freedom = 0.0, 0
    for before, found in counts.items():
        law = dict(enumerate(map(float, following(script, (before,)))))
        more, degrees = chi_square(found, law, found.total())
        statistic, freedom = statistic + more, freedom + degrees
    return float(chi2.sf(statistic, freedom))


def chi_square(counts: Mapping[Thing, int], law: Mapping[Thing, float], total: int) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom. What the law forbids must not occur."""
    found, expected = dict(counts), {outcome: mass * total for outcome, mass in law.items() if mass > 1e-12}
    forbidden = [outcome for outcome in found if outcome not in expected]
    if forbidden:
        return float("inf"), 1
    common = [outcome for outcome, number in expected.items() if number >= LEAST_EXPECTED]
    pairs = [(found.get(outcome, 0), expected[outcome]) for outcome in common]
    rest = sum(expected.values()) - sum(number for _, number in pairs)
    if rest >= LEAST_EXPECTED:
        pairs.append((total - sum(count for count, _ in pairs), rest))
    statistic = sum((count - number) ** 2 / number for count, number in pairs)
    return statistic, max(1, len(pairs) - 1)
