"""The steps of a training: its optimiser and rate, what is measured meanwhile, and the checkpoint it goes on from."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from specwire.core.model import ModelError
from specwire.files import replaced, write_text
from specwire.lm.model_config import first_line
from specwire.lm.pretrained import CPU
from specwire.lm.training.own_answers import ANSWERS, SEED, KeptText, KeptTexts, answers_of, batches
from specwire.progress import LAST_LINE, ProgressBar
from specwire.provenance import commit, cpu_model, versions

# What a step learns of.
Lessons = TypeVar("Lessons")
# Steps that were done, and held-out acceptance by position then.
Curve = list[tuple[int, list[float]]]


class Trained(NamedTuple):
    """How a training went. runs: on what it ran, "from_step" on, a further entry where it went on on something else."""

    curve: Curve
    runs: list[dict[str, Any]]


CHECKPOINT = "training.checkpoint"
OUTPUT_SHARE = 0.25
# Steps.
SAY_EVERY, EVALUATE_EVERY, SAVE_EVERY = 20, 200, 100


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up, constant, then linear decay to zero: the decay can start from any checkpoint of the constant part."""

    peak: float
    warmup: int
    steps: int
    decay: int

    def rate(self, step: int) -> float:
        """Learning rate of 0-based `step`."""
        rising = (step + 1) / self.warmup
        falling = (self.steps - step) / self.decay
        return self.peak * min(1.0, rising, falling)


class Optimiser:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for the rest, one learning rate; OUTPUT_SHARE of it for
    output layers, which begin as the target's.

    The rest: embeddings, norms, biases, and output layers, which are so large that most of a step's time would be
    theirs.

    Invariant: every trainable parameter belongs to exactly one of the two.
    """

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        self.schedule = schedule
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        outputs = [p for name, p in named if name.startswith("lm_head")]
        rest = {name for name, p in named if p.ndim != 2 or "embed" in name}
        others = [p for name, p in named if name in rest]
        matrices = [p for name, p in named if name not in rest and not name.startswith("lm_head")]
        self.parameters = matrices + others + outputs
        groups = [{"params": each, "share": share} for each, share in ((others, 1.0), (outputs, OUTPUT_SHARE)) if each]
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=schedule.peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, lr=schedule.peak, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, index: int) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.schedule.rate(index) * group.get("share", 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, object]]:
        return [o.state_dict() for o in self.optimisers]

    def load(self, state: list[dict[str, object]]) -> None:
        for optimiser, saved in zip(self.optimisers, state, strict=True):
            optimiser.load_state_dict(saved)


class Learnt(NamedTuple):
    """Of a step: the loss, and tokens that were read."""

    loss: torch.Tensor
    tokens: int


def repeat(
    model: nn.Module,
    batches: Iterator[Lessons],
    learn: Callable[[Lessons], Learnt],
    measure: Callable[[], list[float]],
    schedule: Schedule,
    work: Path,
    *,
    course: Mapping[str, str | int | float] = MappingProxyType({}),
    here: Mapping[str, Any] = MappingProxyType({}),
    measured: str = "acceptance by position",
    tell: Callable[[str], None] = LAST_LINE.say,
) -> Trained:
    """Train to the schedule's end, from a checkpoint in `work` if there is one; how what is measured went.

    batches: the same ones in the same order every time. course: what else a checkpoint must be of to be gone on with,
    by names for the user. here: what this part of the training runs on, as JSON has it, for the record. measured: what
    of held-out texts.

    Raises:
        ModelError: the checkpoint is broken, or of another training.
    """
    optimiser, checkpoint = Optimiser(model, schedule), work / CHECKPOINT
    first, (curve, runs) = 0, Trained([], [])
    if checkpoint.exists():
        first, (curve, runs) = _resumed(checkpoint, model, optimiser, course)
    if first < schedule.steps and (not runs or {**runs[-1], **here} != runs[-1]):
        runs.append({"from_step": first, **here})
    told = {"course": dict(course), "schedule": asdict(schedule)}
    began, tokens = time.monotonic(), 0
    with ProgressBar("training", schedule.steps, done=first) as bar:
        for step, batch in zip(range(schedule.steps), batches, strict=False):
            if step < first:
                continue
            learnt = learn(batch)
            learnt.loss.backward()
            optimiser.step(step)
            done, tokens = step + 1, tokens + learnt.tokens
            bar.at(done, f"loss {learnt.loss.item():.3f}")
            if done % SAY_EVERY == 0:
                rate = tokens / (time.monotonic() - began)
                tell(f"step {done}/{schedule.steps} loss {learnt.loss.item():.3f} {rate:.0f} tokens/s")
            if done % EVALUATE_EVERY == 0 or done == schedule.steps:
                curve.append((done, measure()))
                tell(f"step {done} held-out {measured} {' '.join(f'{one:.3f}' for one in curve[-1][1])}")
            if done % SAVE_EVERY == 0:
                state = {"head": model.state_dict(), "optimiser": optimiser.state(), "step": done}
                with replaced(checkpoint) as beside:
                    torch.save(told | state | {"curve": curve, "runs": runs}, beside)
    return Trained(curve, runs)


def _resumed(
    checkpoint: Path, model: nn.Module, optimiser: Optimiser, course: Mapping[str, str | int | float]
) -> tuple[int, Trained]:
    """Take what it holds: the steps that are done, and how it went until there."""
    advice = "train in another folder, or remove it"
    try:
        saved = torch.load(checkpoint, weights_only=True)
        step, was = int(saved["step"]), dict(saved.get("course", {}))
        trained = Trained(list(saved["curve"]), list(saved.get("runs", [])))
        before = Schedule(**saved["schedule"]) if "schedule" in saved else optimiser.schedule
    except Exception as error:  # what a broken file can raise is many things
        raise ModelError(f"{checkpoint}: is no checkpoint that can be read: {first_line(error)}; {advice}") from error
    for key, given in course.items():
        if was.get(key) != given:
            raise ModelError(f"{checkpoint}: {key}: is of {was.get(key)}, not of {given}; {advice}")
    if before.steps != optimiser.schedule.steps and step > before.steps - before.decay:
        raise ModelError(f"{checkpoint}: steps: its rate falls to the end of {before.steps} already; {advice}")
    try:
        model.load_state_dict(saved["head"])
        optimiser.load(saved["optimiser"])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{checkpoint}: is of another head; {advice}") from error
    return step, trained


def draft_ids(counts: torch.Tensor, most: int) -> torch.Tensor:
    """The `most` ids that occur most often, in order. counts: of each id of the target's vocabulary."""
    return counts.argsort(descending=True, stable=True)[:most].sort().values


# ----------------------------------------------------------------------------------------------------------------------
# What is kept beside a head or drafter that was trained: by which arguments, on what, and how right it became.

RECORD = "training.json"
PACKAGES = ("specwire", "torch", "transformers", "safetensors", "tokenizers", "numpy")


def this_run() -> dict[str, Any]:
    """What a training runs on here and now."""
    return {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": versions(PACKAGES),
        "commit": commit(),
    }


def write_record(
    folder: Path, seed: int, arguments: Mapping[str, Any], trained: Trained, further: Mapping[str, Any] | None = None
) -> None:
    """Into the folder of what was trained. arguments: by names for the user. further: what else was measured."""
    curve = [{"step": step, "by_position": shares} for step, shares in trained.curve]
    record = {"seed": seed, "arguments": dict(arguments), "runs": trained.runs, "held_out_acceptance": curve}
    record |= further or {}
    write_text(folder / RECORD, json.dumps(record, indent=1) + "\n")


# ----------------------------------------------------------------------------------------------------------------------
# A course: what is to be learnt of a target's own answers, in a directory that it can be served from.

WARM_UP = 50
# Share of the steps in which the learning rate falls to zero.
DECAYING = 0.4
# Tokens of a batch that is measured.
HELD_OUT_TOKENS = 4096
# How sure one begins of what its target says.
SOFT = 0.3


@dataclass(frozen=True, slots=True)
class Course:
    """What is to be learnt of which target, and how.

    answers: the folder that keeps them (None: in `out`), so many tokens, which share no run with the texts to be apart
    from. prompts: what is asked first. rows x window: tokens of a step. rate: the highest learning rate. threads: None
    for PyTorch's own.
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
    rate: float = 3e-3
    threads: int | None = None

    def begin(self, tell: Callable[[str], None], taps: tuple[int, ...] = ()) -> KeptTexts:
        """The target's answers."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self.out.mkdir(parents=True, exist_ok=True)
        folder = self.answers or self.out / ANSWERS
        return answers_of(self.target, folder, self.tokens, self.apart, self.prompts, tell, taps)

    def options(self) -> dict[str, Any]:
        """What a checkpoint is of, by the names of options."""
        return {"rows": self.rows, "window": self.window, "rate": self.rate}

    def taught(
        self,
        model: nn.Module,
        kept: KeptTexts,
        loss: Callable[[list[KeptText]], torch.Tensor],
        measure: Callable[[], list[float]],
        options: dict[str, Any],
        tell: Callable[[str], None],
    ) -> tuple[Trained, Callable[..., None]]:
        """Teach it the texts by batches, and what writes the record of that. options: what a checkpoint is of."""

        def learn(texts: list[KeptText]) -> Learnt:
            with torch.autocast(CPU.type, torch.bfloat16):
                return Learnt(loss(texts), sum(text.length for text in texts))

        schedule = Schedule(self.rate, min(WARM_UP, self.steps), self.steps, max(1, round(DECAYING * self.steps)))
        order, here = batches(kept.learnt, self.rows * self.window, SEED), this_run()
        trained = repeat(model, order, learn, measure, schedule, self.out, course=options, here=here, tell=tell)
        asked = {"target": self.target, "steps": self.steps}
        asked |= {name: [path.name for path in getattr(self, name)] for name in ("apart", "prompts")}
        of_answers = {"answer-tokens": kept.answers, "target-digest": kept.about["target"]}
        told = options | asked | of_answers
        return trained, lambda further=None: write_record(self.out, SEED, told, trained, further)
