"""From texts of a user to a head for a target, in a directory that it can be served from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig

from specwire.core.model import ModelError
from specwire.corpus import texts_of
from specwire.lm.heads import eagle3, medusa, mtp
from specwire.lm.heads.eagle3 import Eagle3, Eagle3Config
from specwire.lm.heads.medusa import HYDRA, Medusa, MedusaConfig
from specwire.lm.heads.mtp import MtpConfig, MtpHead
from specwire.lm.model_config import first_line
from specwire.lm.model_files import weights_fingerprint
from specwire.lm.pretrained import pretrained, usable_device
from specwire.lm.runners.llama import MODEL_TYPES
from specwire.lm.training.distillation import Schedule, Taught, draft_ids, train
from specwire.lm.training.record import this_run, write_record

# Every so many-th window is held out, so many at most.
HELD_OUT_EVERY, MOST_HELD_OUT = 50, 64
WARM_UP = 50
# Share of the steps in which the learning rate falls to zero.
DECAYING = 0.4
SEED = 20261123
# Hexadecimal digits by which weights and tokens are known again.
DIGEST = 16


@dataclass(frozen=True, slots=True)
class Course:
    """What is to be learnt of which target, and how; see `specwire train-heads`.

    window: tokens; rows: windows a step. depth: guesses in a row. rate: the highest learning rate. threads: None for
    PyTorch's own. Of EAGLE-3: draft_vocabulary; taps: none for early, middle and late ones. Of EAGLE-3 and MTP: inner,
    width of the gated layer, 0 for twice the target's width, or for the target's own. Of Medusa and Hydra: layers, of
    each head.
    """

    target: str
    data: tuple[Path, ...]
    out: Path
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
    target, tokenizer = _target(course)
    stream = _stream(texts_of(course.data), tokenizer)
    training, held_out = _windows(stream, course)
    torch.manual_seed(SEED)
    head = begun(course, target, stream)
    course.out.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(course.rate, min(WARM_UP, course.steps), course.steps, max(1, round(DECAYING * course.steps)))
    windows, told, here = _batches(training, course), _told(course, target, stream), this_run(course.device)
    trained = train(
        head, target, windows, held_out, schedule, course.out, depth=course.depth, course=told, here=here, tell=tell
    )
    write(head, course.out, course.target)
    digests = {"target-digest": told["target"], "data-digest": told["data"]}
    asked = {"target": course.target, "data": [str(path) for path in course.data], "steps": course.steps}
    write_record(course.out, SEED, told | asked | digests, trained)
    return trained.curve[-1][1] if trained.curve else []


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
        return _eagle3(course, target, stream)
    return _mtp(course, target) if course.kind == mtp.KIND else _medusa(course, target)


def _eagle3(course: Course, target: Any, stream: torch.Tensor) -> Eagle3:
    """It begins from what the target says of a hidden state."""
    embed = target.get_input_embeddings().weight.detach().clone()
    head = Eagle3(_config(course, target.config.get_text_config(), len(embed)), embed).to(course.device)
    head.d2t.copy_(draft_ids(torch.bincount(stream, minlength=len(embed)), head.config.draft_vocabulary))
    with torch.no_grad():
        own = torch.arange(head.config.draft_vocabulary, device=head.d2t.device)
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[head.target_ids(own)])
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


def _config(course: Course, config: PreTrainedConfig, vocabulary: int) -> Eagle3Config:
    """A layer like the target's own."""
    shape: Any = config
    layers, heads = shape.num_hidden_layers, shape.num_attention_heads
    early, middle, late = course.taps or (min(1, layers - 1), layers // 2, layers - 1)
    # Behind the last layer transformers tells a stream that is normed, and a verifier one that is not.
    if not all(0 <= tap < layers for tap in (early, middle, late)):
        raise ModelError(f"taps: must be of layers 0 to {layers - 1}, not {early}, {middle}, {late}")
    return Eagle3Config(
        hidden=shape.hidden_size,
        inner=course.inner or 2 * shape.hidden_size,
        heads=heads,
        key_heads=getattr(shape, "num_key_value_heads", None) or heads,
        head_dim=getattr(shape, "head_dim", None) or shape.hidden_size // heads,
        vocabulary=vocabulary,
        draft_vocabulary=min(course.draft_vocabulary, vocabulary),
        taps=(early, middle, late),
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
