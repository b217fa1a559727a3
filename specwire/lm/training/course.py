"""From texts of a user, or a target's own answers, to a head for it, in a directory that it can be served from.

Of a user's texts the target computes a lesson whenever they are learnt; of its own answers (`own_answers`) it has
computed all that is to be learnt when it gave them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig

from specwire.core.model import ModelError
from specwire.corpus import texts_of
from specwire.lm.heads import eagle3, medusa, mtp
from specwire.lm.heads.eagle3 import TAPS, Eagle3, Eagle3Config
from specwire.lm.heads.medusa import HYDRA, Medusa, MedusaConfig
from specwire.lm.heads.mtp import MtpConfig, MtpHead
from specwire.lm.model_config import first_line
from specwire.lm.model_files import weights_fingerprint
from specwire.lm.pretrained import CPU, pretrained, usable_device
from specwire.lm.runners.llama import MODEL_TYPES
from specwire.lm.training.chains import guessed, own_ids_of
from specwire.lm.training.distillation import Learnt, Schedule, Taught, draft_ids, repeat, train
from specwire.lm.training.kept_texts import KeptText, KeptTexts, batches, parted
from specwire.lm.training.own_answers import ANSWERS, DIGEST, SEED, answers_of
from specwire.lm.training.record import this_run, write_record
from specwire.named_models import located

# Every so many-th window is held out, so many at most.
HELD_OUT_EVERY, MOST_HELD_OUT = 50, 64
WARM_UP = 50
# Share of the steps in which the learning rate falls to zero.
DECAYING = 0.4
# Of own answers: tokens of a batch that is measured.
HELD_OUT_TOKENS = 4096
# Weight of each further guess in a row, and how sure a head begins of what its target says.
FURTHER_WEIGHT, SOFT = 0.8, 0.3


@dataclass(frozen=True, slots=True)
class Course:
    """What is to be learnt of which target, and how; see `specwire train-heads`.

    data: texts; none for the target's own answers, so many tokens of them, which are kept in a folder (None: in `out`)
    and share no run with the texts to be apart from. window: tokens; rows: windows a step. depth: guesses in a row.
    rate: the highest learning rate. threads: None for PyTorch's own. Of EAGLE-3: draft_vocabulary; taps: none for
    early, middle and late ones. Of EAGLE-3 and MTP: inner, width of the gated layer, 0 for twice the target's width, or
    for the target's own. Of Medusa and Hydra: layers, of each head.
    """

    target: str
    data: tuple[Path, ...]
    out: Path
    answers: Path | None = None
    tokens: int = 300_000
    apart: tuple[Path, ...] = ()
    kind: str = eagle3.KIND
    steps: int = 2000
    rows: int = 8
    window: int = 512
    depth: int = 4
    rate: float = 3e-3
    draft_vocabulary: int = 32_000
    inner: int = 0
    taps: tuple[int, ...] = ()
    layers: int = 1
    device: str = "cpu"
    threads: int | None = None


def teach(course: Course, tell: Callable[[str], None]) -> list[float]:
    """Train a head and write it; goes on from what an earlier call left. Returns held-out acceptance by position.

    Raises:
        ModelError: the target or a text cannot be read, or they do not fit.
    """
    if course.threads is not None:
        torch.set_num_threads(course.threads)
    if not course.data:
        return _teach_of_answers(course, tell)
    target, tokenizer = _target(course)
    stream = _stream(texts_of(course.data), tokenizer)
    training, held_out = _windows(stream, course)
    torch.manual_seed(SEED)
    head = begun(course, target, stream)
    course.out.mkdir(parents=True, exist_ok=True)
    schedule = schedule_of(course.rate, course.steps)
    windows, told, here = _batches(training, course), _told(course, target, stream), this_run(course.device)
    trained = train(
        head, target, windows, held_out, schedule, course.out, depth=course.depth, course=told, here=here, tell=tell
    )
    write(head, course.out, course.target)
    digests = {"target-digest": told["target"], "data-digest": told["data"]}
    asked = {"target": course.target, "data": [str(path) for path in course.data], "steps": course.steps}
    write_record(course.out, SEED, told | asked | digests, trained)
    return trained.curve[-1][1] if trained.curve else []


def schedule_of(rate: float, steps: int) -> Schedule:
    return Schedule(rate, min(WARM_UP, steps), steps, max(1, round(DECAYING * steps)))


def _teach_of_answers(course: Course, tell: Callable[[str], None]) -> list[float]:
    """As `teach`, an EAGLE-3 head of the target's own answers."""
    spec = located(course.target)
    course.out.mkdir(parents=True, exist_ok=True)
    folder = course.answers or course.out / ANSWERS
    kept = answers_of(spec, folder, course.tokens, course.apart, tell, course.taps)
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

    told = {"answers": kept.digest} | kept.about | _options(course)
    trained = repeat(
        head,
        order,
        learn,
        lambda: held_out_acceptance(head, kept, own_ids, course.depth),
        schedule_of(course.rate, course.steps),
        course.out,
        course=told,
        here=this_run(course.device),
        tell=tell,
    )
    eagle3.save(head.bfloat16(), course.out, course.target)
    asked = {"target": course.target, "steps": course.steps, "apart": [path.name for path in course.apart]}
    of_answers = {"answer-tokens": kept.answers, "target-digest": kept.about["target"]}
    write_record(course.out, SEED, told | asked | of_answers, trained)
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


def write(head: Taught, folder: Path, target: str) -> None:
    """In bfloat16, into a folder that is there or can be made. target: its name."""
    if isinstance(head, Eagle3):
        eagle3.save(head.bfloat16(), folder, target)
    elif isinstance(head, MtpHead):
        mtp.save(head.bfloat16(), folder, target)
    else:
        medusa.save(head.bfloat16(), folder, target)


def _told(course: Course, target: Any, stream: torch.Tensor) -> dict[str, str | int | float]:
    """What a checkpoint is of, by the names of options. target, data: digests of weights and tokens, wherever they are.

    Steps may differ while the rate is constant; devices and threads always.
    """
    return {
        "target": weights_fingerprint(target, target.config, "float32")[:DIGEST],
        "data": hashlib.sha256(stream.numpy().tobytes()).hexdigest()[:DIGEST],
    } | _options(course)


def _options(course: Course) -> dict[str, str | int | float]:
    return {
        "kind": course.kind,
        "rows": course.rows,
        "window": course.window,
        "depth": course.depth,
        "rate": course.rate,
        "draft-vocabulary": course.draft_vocabulary,
        "inner": course.inner,
        "taps": " ".join(str(tap) for tap in course.taps),
        "layers": course.layers,
    }


def _target(course: Course) -> tuple[Any, Any]:
    """The model, and its tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(course.target, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"target {course.target!r}: {first_line(error)}") from error
    return pretrained(course.target, torch.float32, usable_device(course.device)), tokenizer


def begun(course: Course, target: Any, stream: torch.Tensor) -> Taught:
    """The head that is to be taught. target: the model. stream: ids of all texts, whose commonest ones EAGLE-3 says."""
    if course.kind == eagle3.KIND:
        layers, vocabulary = (
            target.config.get_text_config().num_hidden_layers,
            len(target.get_input_embeddings().weight),
        )
        taps = course.taps or (min(1, layers - 1), layers // 2, layers - 1)
        # Behind the last layer transformers tells a stream that is normed, and a verifier one that is not.
        if not all(0 <= tap < layers for tap in taps):
            raise ModelError(f"taps: must be of layers 0 to {layers - 1}, not {', '.join(map(str, taps))}")
        return _eagle3(course, target, torch.bincount(stream, minlength=vocabulary), taps)
    return _mtp(course, target) if course.kind == mtp.KIND else _medusa(course, target)


def _eagle3(course: Course, target: Any, counts: torch.Tensor, taps: tuple[int, ...]) -> Eagle3:
    """It begins from what the target says of a hidden state. counts: of ids, the commonest of which it says."""
    embed = target.get_input_embeddings().weight.detach().clone()
    head = Eagle3(_config(course, target.config.get_text_config(), len(embed), taps), embed).to(course.device)
    head.d2t.copy_(draft_ids(counts, head.config.draft_vocabulary))
    with torch.no_grad():
        own = torch.arange(head.config.draft_vocabulary, device=head.d2t.device)
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[head.target_ids(own)])
        _begin_softly(head, target)
    return head


def _medusa(course: Course, target: Any) -> Medusa:
    """As many heads as guesses; they begin from what the target says of a hidden state."""
    shape: Any = target.config.get_text_config()
    embed = target.get_input_embeddings().weight.detach().clone()
    config = MedusaConfig(
        kind=course.kind,
        heads=course.depth,
        layers=course.layers,
        hidden=shape.hidden_size,
        vocabulary=len(embed),
        draft_vocabulary=len(embed),
        tap=shape.num_hidden_layers,
        grounded=course.kind == HYDRA,
        output_bias=course.kind == HYDRA,
    )
    head = Medusa(config, embed).to(course.device)
    head.begin(target.get_output_embeddings().weight)
    return head


def _mtp(course: Course, target: Any) -> MtpHead:
    """A layer as wide as the target's own; it begins from what the target says of a hidden state."""
    shape: Any = target.config.get_text_config()
    if shape.model_type not in MODEL_TYPES:
        raise ModelError(f"target {course.target!r}: MTP layers are for the Llama family, not for {shape.model_type}")
    heads, rope = shape.num_attention_heads, getattr(shape, "rope_parameters", None) or {}
    size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    embed, output = (part.weight.detach() for part in (target.get_input_embeddings(), target.get_output_embeddings()))
    config = MtpConfig(
        hidden=shape.hidden_size,
        inner=course.inner or shape.intermediate_size,
        heads=heads,
        key_heads=getattr(shape, "num_key_value_heads", None) or heads,
        head_dim=size,
        vocabulary=len(embed),
        layers=shape.num_hidden_layers,
        eps=shape.rms_norm_eps,
        theta=float(rope.get("rope_theta") or 10_000.0),
        turned=size,
        rope=mtp.DEFAULT_ROPE,
        zero_centred=False,
    )
    head = MtpHead(config, embed, output).to(course.device)
    head.begin()
    return head


def _begin_softly(head: Eagle3, target: Any) -> None:
    """The last tap leads to what it is, and the target's last norm, scaled, to guesses that are far from sure."""
    norm, width = getattr(target.base_model, "norm", None), head.config.hidden
    if isinstance(norm, nn.Module):
        head.norm.weight.copy_(SOFT * norm.get_parameter("weight"))
    if head.config.fused == TAPS * width:
        head.fc.weight.mul_(SOFT)[:, -width:] += SOFT * torch.eye(width, device=head.fc.weight.device)


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


def _stream(texts: Iterator[str], tokenizer: Any) -> torch.Tensor:
    """All texts as one line of ids, each led by the end-of-text id if there is one."""
    ids: list[int] = []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in texts:
        ids += [*end, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    return torch.tensor(ids, dtype=torch.long)


def _windows(stream: torch.Tensor, course: Course) -> tuple[torch.Tensor, torch.Tensor]:
    """Those to learn from, and those held out, which are spread over all texts; (windows, course.window + 1) each."""
    size = course.window + 1
    whole = len(stream) // size
    if whole < course.rows + 1:
        raise ModelError(f"data: {len(stream)} tokens are less than the {course.rows + 1} windows of {size} of a step")
    windows = stream[: whole * size].view(whole, size)
    held = torch.arange(whole) % min(HELD_OUT_EVERY, whole) == 0
    return windows[~held], windows[held][:MOST_HELD_OUT].to(course.device)


def _batches(windows: torch.Tensor, course: Course) -> Iterator[torch.Tensor]:
    """Endless, in an order that is the same every time; each epoch is shuffled anew."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        for part in torch.randperm(len(windows), generator=generator).split(course.rows):
            if len(part) == course.rows:
                yield windows[part].to(course.device)
