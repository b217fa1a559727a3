"""From a target's own answers to an EAGLE-3 head for it, in a directory that it can be served from.

All that is to be learnt of an answer the target has computed when it gave it (`own_answers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from specwire.lm.heads import eagle3
from specwire.lm.heads.eagle3 import TAPS, Eagle3, Eagle3Config
from specwire.lm.pretrained import CPU, pretrained
from specwire.lm.training.chains import guessed, own_ids_of
from specwire.lm.training.kept_texts import KeptText, KeptTexts, batches, parted
from specwire.lm.training.loop import Learnt, Schedule, draft_ids, repeat, this_run, write_record
from specwire.lm.training.own_answers import ANSWERS, SEED, answers_of
from specwire.named_models import located

WARM_UP = 50
# Share of the steps in which the learning rate falls to zero.
DECAYING = 0.4
# Tokens of a batch that is measured.
HELD_OUT_TOKENS = 4096
# Weight of each further guess in a row, and how sure a head begins of what its target says.
FURTHER_WEIGHT, SOFT = 0.8, 0.3


@dataclass(frozen=True, slots=True)
class Course:
    """What is to be learnt of which target, and how; see `specwire train-heads`.

    answers: the folder that keeps them (None: in `out`), so many tokens, which share no run with the texts to be apart
    from. prompts: what is asked first. rows x window: tokens of a step. depth: guesses in a row. rate: the highest
    learning rate. inner: width of the gated layer, 0 for twice the target's. taps: none for those of the folder.
    threads: None for PyTorch's own.
    """

    target: str
    out: Path
    answers: Path | None = None
    tokens: int = 300_000
    apart: tuple[Path, ...] = ()
    prompts: tuple[Path, ...] = ()
    steps: int = 2000
    rows: int = 8
    window: int = 512
    depth: int = 4
    rate: float = 3e-3
    draft_vocabulary: int = 32_000
    inner: int = 0
    taps: tuple[int, ...] = ()
    threads: int | None = None


def teach(course: Course, tell: Callable[[str], None]) -> list[float]:
    """Train a head and write it; goes on from what an earlier call left. Returns held-out acceptance by position.

    Raises:
        ModelError: the target cannot be read, or the answers that are kept do not fit.
    """
    if course.threads is not None:
        torch.set_num_threads(course.threads)
    spec = located(course.target)
    course.out.mkdir(parents=True, exist_ok=True)
    folder = course.answers or course.out / ANSWERS
    kept = answers_of(spec, folder, course.tokens, course.apart, course.prompts, tell, course.taps)
    taps = tuple(map(int, kept.about["taps"].split()))
    target: Any = pretrained(spec, torch.float32, CPU)
    torch.manual_seed(SEED)
    head = _eagle3(course, target, kept.counts(len(target.get_input_embeddings().weight)), taps)
    del target
    head.embed_tokens.weight.requires_grad_(False)
    own_ids, order = own_ids_of(head), batches(kept.learnt, course.rows * course.window, SEED)

    def learn(texts: list[KeptText]) -> Learnt:
        with torch.autocast(CPU.type, torch.bfloat16):
            found = guessed(head, kept.batch(texts), own_ids, course.depth, FURTHER_WEIGHT, learns=True)
        return Learnt(found.loss, sum(text.length for text in texts))

    told = _options(course) | {"answers": kept.digest} | kept.about
    trained = repeat(
        head,
        order,
        learn,
        lambda: held_out_acceptance(head, kept, own_ids, course.depth),
        schedule_of(course.rate, course.steps),
        course.out,
        course=told,
        here=this_run(),
        tell=tell,
    )
    eagle3.save(head.bfloat16(), course.out, course.target)
    asked = {"target": course.target, "steps": course.steps}
    asked |= {name: [path.name for path in getattr(course, name)] for name in ("apart", "prompts")}
    of_answers = {"answer-tokens": kept.answers, "target-digest": kept.about["target"]}
    write_record(course.out, SEED, told | asked | of_answers, trained)
    return trained.curve[-1][1] if trained.curve else []


def schedule_of(rate: float, steps: int) -> Schedule:
    return Schedule(rate, min(WARM_UP, steps), steps, max(1, round(DECAYING * steps)))


@torch.no_grad()
def held_out_acceptance(head: Eagle3, kept: KeptTexts, own_ids: torch.Tensor, depth: int) -> list[float]:
    """By position, on held-out answers."""
    tested, right = [0] * depth, [0] * depth
    for texts in parted(sorted(kept.held_out, key=lambda text: text.length), HELD_OUT_TOKENS):
        found = guessed(head, kept.batch(texts), own_ids, depth, 1.0, learns=False)
        tested = [sum(pair) for pair in zip(tested, found.tested, strict=True)]
        right = [sum(pair) for pair in zip(right, found.right, strict=True)]
    return [one / max(1, of) for one, of in zip(right, tested, strict=True)]


def _options(course: Course) -> dict[str, str | int | float]:
    """What a checkpoint is of, by the names of options."""
    return {
        "rows": course.rows,
        "window": course.window,
        "depth": course.depth,
        "rate": course.rate,
        "draft-vocabulary": course.draft_vocabulary,
        "inner": course.inner,
        "taps": " ".join(str(tap) for tap in course.taps),
    }


def _eagle3(course: Course, target: Any, counts: torch.Tensor, taps: tuple[int, ...]) -> Eagle3:
    """It begins from what the target says of a hidden state. counts: of ids, the commonest of which it says."""
    embed = target.get_input_embeddings().weight.detach().clone()
    head = Eagle3(_config(course, target.config.get_text_config(), len(embed), taps), embed)
    head.d2t.copy_(draft_ids(counts, head.config.draft_vocabulary))
    with torch.no_grad():
        own = torch.arange(head.config.draft_vocabulary)
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


def _config(course: Course, config: PreTrainedConfig, vocabulary: int, taps: tuple[int, ...]) -> Eagle3Config:
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
