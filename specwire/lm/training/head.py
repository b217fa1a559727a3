"""From a target's own answers to an EAGLE-3 head for it: chains of guesses, as long as they go on (training-time test).

A later guess is only of use where those before it were right, so only there is it computed and learnt: behind a guess
that is the text's token, or, while it learns, one that the head finds likely (LIKELY). Of a text's prompt only keys and
values are computed. The target's distribution is that of its best guesses, over the ids that the head can say; the
gradient of the cross-entropy to it is made along with the logits, in pieces, so that these are never kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig

from specwire.lm.heads import eagle3
from specwire.lm.heads.eagle3 import TAPS, Eagle3, Eagle3Config, KeysValues, rotated
from specwire.lm.pretrained import CPU, pretrained
from specwire.lm.training.loop import HELD_OUT_TOKENS, SOFT, Course, draft_ids
from specwire.lm.training.own_answers import SEED, KeptTexts, TextBatch, TokenRows, parted
from specwire.named_models import located

LIKELY = math.log(0.15)
# Weight of the cross-entropy to the target's best id, beside that to its distribution; rows of logits at once.
TO_BEST, PIECE = 0.5, 1024


class Guessed(NamedTuple):
    """loss: of all steps, summed, 0 where nothing was tested. tested, right: guesses of each step, where all before
    were right.
    """

    loss: torch.Tensor
    tested: list[int]
    right: list[int]


class Distilled(torch.autograd.Function):
    """Cross-entropy of rows to distributions over few ids, weighted and summed; also best ids, and log q of those few.

    states: (rows, hidden). weights: (vocabulary, hidden). ids, shares: (rows, few); an id that is the vocabulary's size
    stands for none, and has no share.
    """

    @staticmethod
    def forward(
        context: Any,
        states: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        shares: torch.Tensor,
        weight: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        to_states, to_weights = torch.empty_like(states), torch.zeros_like(weights, dtype=torch.float32)
        loss, best, logs = torch.zeros(()), list[torch.Tensor](), list[torch.Tensor]()
        wanted = shares + TO_BEST * functional.one_hot(shares.argmax(-1), shares.shape[1]) * (
            shares.amax(-1)[:, None] > 0
        )
        ids = ids.clamp(max=len(weights) - 1)
        for first in range(0, len(states), PIECE):
            part = slice(first, first + PIECE)
            logits = (states[part] @ weights.t()).float()
            best.append(logits.argmax(-1))
            log_q = logits.sub_(logits.logsumexp(-1, keepdim=True))
            logs.append(log_q.gather(1, ids[part]))
            loss -= weight * (wanted[part] * logs[-1]).sum()
            slope = log_q.exp_().mul_(wanted[part].sum(-1, keepdim=True))
            slope.scatter_add_(1, ids[part], -wanted[part])
            rounded = slope.mul_(weight).to(states.dtype)
            to_states[part] = rounded @ weights
            to_weights += (rounded.t() @ states[part]).float()
        context.save_for_backward(to_states, to_weights)
        told = torch.cat(best), torch.cat(logs)
        context.mark_non_differentiable(*told)
        return loss, *told

    @staticmethod
    def backward(context: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        to_states, to_weights = context.saved_tensors
        return slopes[0] * to_states, slopes[0] * to_weights, None, None, None


distilled: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = Distilled.apply


class _Text(NamedTuple):
    """Keys and values of all places of the texts, for all heads, (texts, heads, places, head_dim), and the mask."""

    kept: KeysValues
    later: torch.Tensor


class _Chains(NamedTuple):
    """Chains that go on. at: the text and the place of each. reads: what the next step's attention reads. stream: the
    residual stream it begins with. own: keys and values of their steps so far. right: whether all guesses were.
    """

    at: tuple[torch.Tensor, torch.Tensor]
    reads: torch.Tensor
    stream: torch.Tensor
    own: list[KeysValues]
    right: torch.Tensor

    def kept(self, rows: torch.Tensor) -> _Chains:
        texts, places = self.at
        own = [KeysValues(each.keys[rows], each.values[rows]) for each in self.own]
        return _Chains((texts[rows], places[rows]), self.reads[rows], self.stream[rows], own, self.right[rows])


def guessed(
    head: Eagle3, batch: TextBatch, own_ids: torch.Tensor, depth: int, decay: float, *, learns: bool
) -> Guessed:
    """Have the head guess in chains of up to `depth` at all answers of a batch.

    own_ids: of each id of the target the head's, or the size of its vocabulary for one that it cannot say. learns: go
    on behind likely guesses, too.
    """
    rows, scored = batch
    size, length = head.config.draft_vocabulary, rows.tokens.shape[1]
    text, chains = _begun(head, batch)
    loss, tested, right = torch.zeros(()), [0] * depth, [0] * depth
    weight = 1 / max(1, len(chains.right))
    for step in range(depth):
        if not len(chains.right):
            break
        out, own = _step(head, text, chains, step)
        texts, places = chains.at
        predicted = places + step + 2
        best = rows.best[texts, predicted]
        ids = own_ids[best]
        shares = rows.logs[texts, predicted].exp() * (ids < size)
        shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-6)
        last = head.norm(out).to(torch.bfloat16) if learns else head.norm(out)
        weights = head.lm_head.weight.to(last.dtype)
        part, said, logs = distilled(last, weights, ids, shares, weight * decay**step)
        loss = loss + part
        said, stands = head.target_ids(said), rows.tokens[texts, predicted]
        same = (said == best[:, 0]) & chains.right
        tested[step], right[step] = int(chains.right.sum()), int(same.sum())
        going = said == stands
        if learns:
            going = going | ((best == stands[:, None]) & (logs > LIKELY)).any(-1)
        following = (predicted + 1).clamp(max=length - 1)
        going = going & (predicted + 1 < length) & scored[texts, following]
        going = going if learns else going & same
        kept = going.nonzero()[:, 0]
        on = chains._replace(own=[*chains.own, own] if step else [], right=same).kept(kept)
        chains = _following(head, on, out[kept], stands[kept])
    return Guessed(loss, tested, right)


def unrolled(head: Eagle3, tokens: torch.Tensor, taps: torch.Tensor, depth: int) -> Iterator[torch.Tensor]:
    """Logits of each step, (rows, places, draft vocabulary): place t reads taps at t and tokens from t + 1 on.

    tokens: (rows, length). taps: (rows, length, 3 target_hidden). Places are those of which all steps are within.
    """
    count, last = len(tokens), tokens.shape[1] - depth - 1
    scored, none = torch.zeros_like(tokens, dtype=torch.bool), torch.empty(0)
    scored[:, 2 : last + 2] = True
    text, chains = _begun(head, TextBatch(TokenRows(tokens, taps, none, none), scored))
    texts, places = chains.at
    for step in range(depth):
        out, own = _step(head, text, chains, step)
        yield head.lm_head(head.norm(out)).view(count, last, -1)
        chains = chains._replace(own=[*chains.own, own] if step else [])
        chains = _following(head, chains, out, tokens[texts, places + step + 2]) if step + 1 < depth else chains


def _begun(head: Eagle3, batch: TextBatch) -> tuple[_Text, _Chains]:
    """A place reads the features at it and the token behind, and says what stands behind that."""
    (tokens, features, *_), scored = batch
    places = tokens.shape[1] - 1
    fused = head.fuse(features[:, :places].to(head.fc.weight.dtype))
    reads, stream = head.reads(fused, tokens[:, 1:])
    positions = torch.arange(places)
    keys = head.split(head.k_proj(reads), head.config.key_heads, head.k_norm)
    values = head.split(head.v_proj(reads), head.config.key_heads)
    share = head.config.heads // head.config.key_heads
    wide = (part.repeat_interleave(share, 1) for part in (rotated(keys, positions, head.config.theta), values))
    later = torch.ones(places, places, dtype=torch.bool).triu(1)
    begin = torch.zeros_like(scored[:, :places])
    begin[:, : places - 1] = scored[:, 2:]
    texts, at = begin.nonzero(as_tuple=True)
    right = torch.ones(len(at), dtype=torch.bool)
    return _Text(KeysValues(*wide), later), _Chains((texts, at), reads[texts, at], stream[texts, at], [], right)


def _following(head: Eagle3, chains: _Chains, out: torch.Tensor, tokens: torch.Tensor) -> _Chains:
    """The next step reads what this one returned, and the token that it guessed."""
    reads, stream = head.reads(head.norm(out) if head.config.norm_output else out, tokens)
    return chains._replace(reads=reads, stream=stream)


def _step(head: Eagle3, text: _Text, chains: _Chains, step: int) -> tuple[torch.Tensor, KeysValues]:
    """What the layer makes of the chains, (chains, hidden), and their keys and values, (chains, heads, head_dim)."""
    config, reads, (texts, places) = head.config, chains.reads, chains.at

    def turned(made: torch.Tensor, heads: int, norm: nn.Module | None) -> torch.Tensor:
        # One row of a batch, whose places are the chains.
        return rotated(head.split(made[None], heads, norm), places + step, config.theta)[0].transpose(0, 1)

    queries = turned(head.q_proj(reads), config.heads, head.q_norm)
    share = config.heads // config.key_heads
    own = KeysValues(
        turned(head.k_proj(reads), config.key_heads, head.k_norm).repeat_interleave(share, 1),
        head.v_proj(reads).unflatten(-1, (config.key_heads, -1)).repeat_interleave(share, 1),
    )
    grid = queries.new_zeros(text.kept.keys.shape[0], text.kept.keys.shape[2], config.heads, config.head_dim)
    grid = grid.index_put((texts, places), queries).transpose(1, 2)
    scores = (grid @ text.kept.keys.transpose(-1, -2)).float() * config.head_dim**-0.5
    scores = scores.masked_fill(text.later, float("-inf"))
    seen = (scores.softmax(-1).to(queries.dtype) @ text.kept.values).transpose(1, 2)[texts, places]
    if step:
        sums = scores.logsumexp(-1).transpose(1, 2)[texts, places]
        seen = _with_own(queries, sums, seen, [*chains.own, own])
    return head.fed_forward(chains.stream + head.o_proj(seen.flatten(1))), own


def _with_own(queries: torch.Tensor, sums: torch.Tensor, seen: torch.Tensor, own: Sequence[KeysValues]) -> torch.Tensor:
    """Attention over a text, and over a chain's own steps. sums: log of the weights' sum over the text."""
    scores = [(queries * each.keys).sum(-1).float() * queries.shape[-1] ** -0.5 for each in own]
    weights = torch.stack([sums, *scores], -1).softmax(-1).to(queries.dtype)
    for number, each in enumerate(own, 1):
        part = weights[..., number : number + 1] * each.values
        seen = part + (seen * weights[..., :1] if number == 1 else seen)
    return seen


def own_ids_of(head: Eagle3) -> torch.Tensor:
    """See `guessed`."""
    size = head.config.draft_vocabulary
    found = torch.full((head.config.vocabulary,), size)
    found[head.target_ids(torch.arange(size))] = torch.arange(size)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The course.

# Weight of each further guess in a row.
FURTHER_WEIGHT = 0.8


@dataclass(frozen=True, slots=True)
class HeadCourse(Course):
    """See `specwire train-heads`. depth: guesses in a row. inner: width of the gated layer, 0 for twice the target's.

    taps: none for those of the folder of answers.
    """

    depth: int = 4
    draft_vocabulary: int = 32_000
    inner: int = 0
    taps: tuple[int, ...] = ()


def teach(course: HeadCourse, tell: Callable[[str], None]) -> list[float]:
    """Train a head and write it; goes on from what an earlier call left. Returns held-out acceptance by position.

    Raises:
        ModelError: the target cannot be read, or the answers that are kept do not fit.
    """
    kept = course.begin(tell, course.taps)
    taps = tuple(map(int, kept.about["taps"].split()))
    target: Any = pretrained(located(course.target), torch.float32, CPU)
    torch.manual_seed(SEED)
    head = _eagle3(course, target, kept.counts(len(target.get_input_embeddings().weight)), taps)
    del target
    head.embed_tokens.weight.requires_grad_(False)
    own_ids = own_ids_of(head)
    options = course.options() | {
        "depth": course.depth,
        "draft-vocabulary": course.draft_vocabulary,
        "inner": course.inner,
        "taps": " ".join(map(str, course.taps)),
    }
    trained, record = course.taught(
        head,
        kept,
        lambda texts: guessed(head, kept.batch(texts), own_ids, course.depth, FURTHER_WEIGHT, learns=True).loss,
        lambda: held_out_acceptance(head, kept, own_ids, course.depth),
        options | {"answers": kept.digest} | kept.about,
        tell,
    )
    eagle3.save(head.bfloat16(), course.out, course.target)
    record()
    return trained.curve[-1][1] if trained.curve else []


@torch.no_grad()
def held_out_acceptance(head: Eagle3, kept: KeptTexts, own_ids: torch.Tensor, depth: int) -> list[float]:
    """By position, on held-out answers."""
    tested, right = [0] * depth, [0] * depth
    for texts in parted(sorted(kept.held_out, key=lambda text: text.length), HELD_OUT_TOKENS):
        found = guessed(head, kept.batch(texts), own_ids, depth, 1.0, learns=False)
        tested = [sum(pair) for pair in zip(tested, found.tested, strict=True)]
        right = [sum(pair) for pair in zip(right, found.right, strict=True)]
    return [one / max(1, of) for one, of in zip(right, tested, strict=True)]


def _eagle3(course: HeadCourse, target: Any, counts: torch.Tensor, taps: tuple[int, ...]) -> Eagle3:
    """It begins from what the target says of a hidden state. counts: of ids, the commonest of which it says."""
    embed = target.get_input_embeddings().weight.detach().clone()
    head = Eagle3(_config(course, target.config.get_text_config(), len(embed), taps), embed)
    own = torch.arange(head.config.draft_vocabulary)
    head.d2t.copy_(draft_ids(counts, len(own)) - own)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[head.target_ids(own)])
        _begin_softly(head, target)
    return head


def _begin_softly(head: Eagle3, target: Any) -> None:
    """The last tap leads to what it is, and the target's last norm, scaled, to guesses that are far from sure."""
    norm, width = getattr(target.base_model, "norm", None), head.config.hidden
    if isinstance(norm, nn.Module):
        head.norm.weight.copy_(SOFT * norm.get_parameter("weight"))
    if head.config.fused == TAPS * width:
        head.fc.weight.mul_(SOFT)[:, -width:] += SOFT * torch.eye(width)


def _config(course: HeadCourse, config: PreTrainedConfig, vocabulary: int, taps: tuple[int, ...]) -> Eagle3Config:
    """A layer like the target's own."""
    shape: Any = config
    heads, rope = shape.num_attention_heads, getattr(shape, "rope_parameters", None) or {}
    early, middle, late = taps
    return Eagle3Config(
        hidden=shape.hidden_size,
        inner=course.inner or 2 * shape.hidden_size,
        heads=heads,
        key_heads=getattr(shape, "num_key_value_heads", None) or heads,
        head_dim=getattr(shape, "head_dim", None) or shape.hidden_size // heads,
        vocabulary=vocabulary,
        draft_vocabulary=min(course.draft_vocabulary, vocabulary),
        taps=(early, middle, late),
        eps=shape.rms_norm_eps,
        theta=float(rope.get("rope_theta") or 10_000.0),
        norm_before_residual=True,
    )
