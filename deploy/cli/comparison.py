"""Drafting off and on: the same prompts, the figures, and where two texts part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from deploy.cli.terminal import number, table
from specwire.client import Completion, Stats

# ----------------------------------------------------------------------------------------------------------------------
# Where two texts of the same target part: a near-tie of the target's scores, or a defect.
#
# The logits of a position depend a little on how many positions share a forward. Where the best scores are closer than
# that, either token is the target's own choice (ARCHITECTURE.md section 9).

FLOAT32_GAP = 1e-4
BFLOAT16_ULPS = 2
BFLOAT16_FRACTION_BITS = 7


@dataclass(frozen=True, slots=True)
class Parting:
    """Two texts part at `position`: their tokens there, and how far below the best score each token's score is."""

    position: int
    tokens: tuple[int, int]
    gaps: tuple[float, float]
    tolerance: float

    @property
    def near_tie(self) -> bool:
        return max(self.gaps) <= self.tolerance

    def __str__(self) -> str:
        kind = "a near-tie" if self.near_tie else "NO near-tie"
        below = f"{self.gaps[0]:.2g} and {self.gaps[1]:.2g} below the best score, tolerance {self.tolerance:.2g}"
        return f"position {self.position}: tokens {self.tokens[0]} and {self.tokens[1]}, {below}: {kind}"


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which the sequences differ; None if they are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def tolerance(dtype: str, top_score: float) -> float:
    """Return how close to the best score another may be to count as tied: ulps of that score in bfloat16."""
    if dtype == "float32":
        return FLOAT32_GAP
    exponent = math.floor(math.log2(abs(top_score))) if top_score else -126
    return float(BFLOAT16_ULPS * 2.0 ** (exponent - BFLOAT16_FRACTION_BITS))


def examine(model: str, dtype: str, text: Sequence[int], tokens: tuple[int, int]) -> Parting:
    """Return how the target scores two tokens after `text`, by a forward of its own in this process."""
    # torch comes with it; needed only when texts differ
    from specwire.lm import Feed, load_model

    scores = load_model(model, slots=1, dtype=dtype).forward([Feed(0, 0, list(text), 1)])[0]
    top = float(scores.max())
    gaps = (top - float(scores[tokens[0]]), top - float(scores[tokens[1]]))
    return Parting(len(text), tokens, gaps, tolerance(dtype, top))


HEAD = (
    "prompt",
    "tokens",
    "tokens/s off",
    "on",
    "ratio",
    "tokens/forward",
    "acceptance",
    "first token ms off",
    "on",
    "identical",
)
NAME_WIDTH = 36


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt's completions with drafting off and on."""

    name: str
    off: Completion
    on: Completion

    @property
    def identical(self) -> bool:
        return self.off.tokens == self.on.tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """Of some pairs, with drafting off and on.

    acceptance: of the tokens that were tested; None if none was. first_token_ms: the median. identical: all texts are.
    """

    tokens: int
    tokens_per_second_off: float
    tokens_per_second_on: float
    ratio: float
    tokens_per_forward: float
    acceptance: float | None
    first_token_ms_off: float
    first_token_ms_on: float
    identical: bool


def report(pairs: Sequence[Pair], partings: Sequence[Parting]) -> str:
    """Return the table, a row a prompt and one for all, and a sentence on the texts."""
    rows = [HEAD, *(_row(pair.name, [pair]) for pair in pairs), _row("all", pairs)]
    same = sum(pair.identical for pair in pairs)
    verdict = f"texts identical, token for token: {same} of {len(pairs)}"
    return "\n".join([table(rows), "", verdict, *(f"  different from {parting}" for parting in partings)])


def counts(completion: Completion) -> str:
    """Return how the tokens of a completion came to be decided."""
    stats = completion.stats
    return (
        f"{number(stats.output_tokens, 'token')}: {stats.accepted} accepted{by_source(stats)}, "
        f"{stats.recovered} recovered, {stats.bonus} bonus, {stats.direct} direct; {forwards(stats)}"
    )


def forwards(stats: Stats) -> str:
    """Return how many there were, and what was saved: an accepted token that came during a forward saves none."""
    return f"{number(stats.target_forwards, 'target forward')} ({stats.forwards_saved} saved)"


def by_source(stats: Stats) -> str:
    """Return, in brackets, how many of each source's tested draft tokens were accepted; nothing if none was tested."""
    sources = {
        "drafters": (sum(each.accepted for each in stats.drafters), sum(each.tested for each in stats.drafters)),
        "n-grams": (stats.accepted_ngram, stats.tested_ngram),
        "prediction": (stats.accepted_prediction, stats.tested_prediction),
    }
    told = [f"{name} {accepted} of {tested}" for name, (accepted, tested) in sources.items() if tested]
    return f" ({', '.join(told)})" if told else ""


def figures(pairs: Sequence[Pair]) -> Figures:
    """Return what a row of the table tells."""
    off, on = [pair.off for pair in pairs], [pair.on for pair in pairs]
    slow, fast = _speed(off), _speed(on)
    return Figures(
        tokens=_sum(on, "output_tokens"),
        tokens_per_second_off=slow,
        tokens_per_second_on=fast,
        ratio=_ratio(fast, slow),
        tokens_per_forward=_ratio(_sum(on, "output_tokens"), _sum(on, "target_forwards")),
        acceptance=_acceptance(on),
        first_token_ms_off=_first_token_ms(off),
        first_token_ms_on=_first_token_ms(on),
        identical=all(pair.identical for pair in pairs),
    )


def as_object(pairs: Sequence[Pair], partings: Sequence[Parting | None]) -> dict[str, object]:
    """Return the comparison for scripts. partings: of each pair, None where its texts are one."""
    prompts = [
        {
            "name": pair.name,
            "text": pair.on.text,
            **asdict(figures([pair])),
            "parting": None if parting is None else {**asdict(parting), "near_tie": parting.near_tie},
        }
        for pair, parting in zip(pairs, partings, strict=True)
    ]
    return {"prompts": prompts, "all": asdict(figures(pairs))}


def _row(name: str, pairs: Sequence[Pair]) -> tuple[str, ...]:
    found = figures(pairs)
    return (
        name[:NAME_WIDTH],
        str(found.tokens),
        f"{found.tokens_per_second_off:.1f}",
        f"{found.tokens_per_second_on:.1f}",
        f"{found.ratio:.2f}",
        f"{found.tokens_per_forward:.2f}",
        "-" if found.acceptance is None else f"{found.acceptance:.2f}",
        f"{found.first_token_ms_off:.0f}",
        f"{found.first_token_ms_on:.0f}",
        "yes" if found.identical else "NO",
    )


def _speed(completions: Sequence[Completion]) -> float:
    """Output tokens per second, from each request's arrival to its end."""
    return _ratio(_sum(completions, "output_tokens"), _sum(completions, "duration_us") / 1e6)


def _acceptance(completions: Sequence[Completion]) -> float | None:
    """P(accept), given that the position was tested with everything before it accepted; None if none was."""
    tested = _sum(completions, "tested")
    return _sum(completions, "accepted") / tested if tested else None


def _first_token_ms(completions: Sequence[Completion]) -> float:
    return median(one.stats.time_to_first_token_us for one in completions) / 1e3


def _sum(completions: Sequence[Completion], figure: str) -> int:
    return sum(int(getattr(one.stats, figure)) for one in completions)


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
