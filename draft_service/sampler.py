"""What may follow the places that a drafter extends, drawn as each session's rule has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from draft_service.sessions import Expansion
from draft_service.translation import MOST_VOCABULARIES
from specwire.core.draft import Drawn
from specwire.core.law.acceptance import draw_quantised, quantise
from specwire.core.law.constraint import Mask
from specwire.core.law.noise import seed_behind
from specwire.core.law.sampling import Sampling, Seen
from specwire.core.messages import MOST_KEPT, Weights
from specwire.core.text import extend_hash
from specwire.lm import RowSampling, log_probabilities
from specwire.lm.sampler import DraftRow, draw, draw_candidates
from specwire.text.vocabulary_map import VocabularyMap

# ----------------------------------------------------------------------------------------------------------------------
# How a drafter draws under rules that weigh draft tokens by the probability that they were drawn with. The drafter's
# distribution is first cut and rounded to integers, and the token is drawn from those: so the weights sent with it are
# exactly what it was drawn from. The noise is that of the target's own draw behind the same text, so that a chain often
# survives a token that the target drew itself.


@dataclass(frozen=True, slots=True)
class WeighedPlace:
    """What one row of logits is for: the token at `position`, behind the text of `prefix_hash`.

    seen: that text, where penalties look at it. allowed: see `specwire.core.law.sampling.adjusted`.
    """

    position: int
    sampling: Sampling
    epoch: int
    prefix_hash: int
    seen: Seen | None = None
    allowed: Mask | None = None

    @property
    def seed(self) -> int:
        return seed_behind(self.sampling.seed, self.epoch, self.prefix_hash)


def draw_weighed(logits: torch.Tensor, places: Sequence[WeighedPlace]) -> list[tuple[int, Weights]]:
    """The token of each row of `logits` (rows, vocabulary), and what it was drawn from."""
    rows = [RowSampling(place.position, place.sampling, place.seen, allowed=place.allowed) for place in places]
    log_p = log_probabilities(logits, rows)
    best, ids = log_p.topk(min(MOST_KEPT, log_p.shape[1]), dim=1)
    shares, kept = best.exp().cpu().numpy(), ids.cpu().tolist()
    return [_drawn(quantise(shares[index], kept[index]), place) for index, place in enumerate(places)]


def _drawn(weights: Weights, place: WeighedPlace) -> tuple[int, Weights]:
    return draw_quantised(weights, place.seed, place.sampling.choice, place.position), weights


# ----------------------------------------------------------------------------------------------------------------------
# Draws what may follow the sessions' places, from the rows of one forward.


def guesses(logits: torch.Tensor, rows: Sequence[int], drawing: Sequence[Expansion]) -> list[Drawn]:
    """What may follow each place, from its row of the logits as its session's rule has it."""
    if len(rows) < len(logits):
        logits = logits[list(rows)]
    drawn: dict[int, Drawn] = {}
    for vocabularies in {place.drafting.vocabularies for place in drawing}:
        chosen = [at for at, place in enumerate(drawing) if place.drafting.vocabularies is vocabularies]
        own = logits if len(chosen) == len(drawing) else logits[chosen]
        named = own if vocabularies is None else shared(own, vocabularies)
        drawn |= zip(chosen, _guesses(named, [drawing[at] for at in chosen]), strict=True)
    return [drawn[at] for at in range(len(drawing))]


def shared(logits: torch.Tensor, vocabularies: VocabularyMap) -> torch.Tensor:
    """A drafter's logits (rows, its vocabulary) by the target's ids (rows, its vocabulary): -inf where it has no token.

    So what is drawn from them is one of the target's tokens, with the noise of that one's id.
    """
    none = logits.new_full((len(logits), 1), -torch.inf)
    return torch.cat((logits, none), dim=1).index_select(1, _columns(vocabularies, logits.shape[1], logits.device))


@lru_cache(maxsize=MOST_VOCABULARIES)
def _columns(vocabularies: VocabularyMap, width: int, device: torch.device) -> torch.Tensor:
    """Where each of the target's tokens stands; `width` for nowhere."""
    own = torch.tensor(vocabularies.own_of, device=device)
    return torch.where(own < 0, width, own)


def _guesses(logits: torch.Tensor, drawing: Sequence[Expansion]) -> list[Drawn]:
    """As `guesses`, for logits by the ids of the places' target."""
    drawn: dict[int, Drawn] = {}
    for chosen, draw_all in (
        ([at for at, place in enumerate(drawing) if place.drafting.session.weighed], _weighed),
        ([at for at, place in enumerate(drawing) if _is_chain(place)], _chains),
        ([at for at, place in enumerate(drawing) if place.most > 1], _candidates_of),
    ):
        if chosen:
            own = logits if len(chosen) == len(drawing) else logits[chosen]
            drawn |= zip(chosen, draw_all(own, [drawing[at] for at in chosen]), strict=True)
    return [drawn[at] for at in range(len(drawing))]


def _is_chain(place: Expansion) -> bool:
    return place.most == 1 and not place.drafting.session.weighed


def _weighed(logits: torch.Tensor, drawing: Sequence[Expansion]) -> list[Drawn]:
    return [Drawn((token,), weights=weights) for token, weights in draw_weighed(logits, [_place(it) for it in drawing])]


def _chains(logits: torch.Tensor, drawing: Sequence[Expansion]) -> list[Drawn]:
    return [Drawn((token,), confidence) for token, confidence in draw(logits, [_row(place) for place in drawing])]


def _candidates_of(logits: torch.Tensor, drawing: Sequence[Expansion]) -> list[Drawn]:
    ranked = draw_candidates(logits, [_row(place) for place in drawing], max(place.most for place in drawing))
    return [Drawn(tokens, scores=scores) for tokens, scores in ranked]


def _row(place: Expansion) -> DraftRow:
    drafting = place.drafting
    rate = drafting.session.pace.confidence_floor > 0.0
    return DraftRow(place.position, drafting.sampling, rate, drafting.seen(place.node), drafting.allowed(place.node))


def _place(place: Expansion) -> WeighedPlace:
    drafting, session = place.drafting, place.drafting.session
    prefix = session.text.hash_at(session.decided)
    for token in place.path:
        prefix = extend_hash(prefix, token)
    seen, allowed = drafting.seen(place.node), drafting.allowed(place.node)
    return WeighedPlace(place.position, drafting.sampling, session.epoch, prefix, seen, allowed)
