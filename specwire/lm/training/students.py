"""What learns: a drafter, from tokens that were decided, or a head, from what its target makes of them.

A drafter's labels are the decided tokens (Liu et al. 2023, arXiv 2310.07177): where a text was sampled they are draws
from the target's distribution, so that their cross-entropy teaches that distribution. A head reads the target's
features, which are in no log: the target computes them anew, and its distribution with them, which the head learns
(`specwire.lm.training.distillation`).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from specwire.core.model import GGUF, ModelError, is_gguf
from specwire.files import replaced_in
from specwire.lm.heads import eagle3, medusa
from specwire.lm.heads.eagle3 import Eagle3, Eagle3Config
from specwire.lm.heads.files import read_config, tensor_names
from specwire.lm.model_files import CONFIG, GENERATION, copy_beside, weights_fingerprint
from specwire.lm.pretrained import Outline, outline, pretrained
from specwire.lm.scripted import PREFIX
from specwire.lm.training.distillation import Lesson, at_predicted, lesson, loss_of, unrolled
from specwire.lm.training.texts import TrainingWindow
from specwire.named_models import located
from specwire.text.tokenizer import vocabulary_fingerprint
from specwire.versions import DRAFT, HEAD, Kind

# Tokens of a window at most.
WINDOW = 256
# The longest chain that counts.
CHAIN = 8
# Guesses in a row that a head learns, and what each further one weighs.
HEAD_DEPTH, FURTHER_WEIGHT = 4, 0.8
IGNORED = -100
# Names of weights in a message.
SHOWN = 3
# Of a batch: a head says the third token of a text first.
LEAST_LENGTH = 3
CPU = torch.device("cpu")

State = dict[str, torch.Tensor]


class Tested(NamedTuple):
    """Greedily: how many tokens were compared and were right, and of the chains from each on how many were right."""

    tokens: int
    right: int
    chained: int


class Student(ABC):
    """`model`: what is trained; its parameters that need no gradient stay as they are.

    kind: of what there will be versions. fingerprint: of what the learning begins with. vocabulary: ids of texts are
    below that; vocabulary_fingerprint, tokenizer: of these ids. window: tokens at most.

    Args:
        option: that named `known`, the model whose texts these are. vocabulary: ids that it has logits for.
        dtype: of the files of `model`, which is trained in float32.
    """

    kind: Kind

    def __init__(
        self, model: nn.Module, known: Outline, vocabulary: int, option: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        tokens = known.text.vocabulary(vocabulary)
        self.model, self.option, self.location = model, option, known.location
        self.vocabulary, self.vocabulary_fingerprint = max(tokens) + 1, vocabulary_fingerprint(tokens)
        self.tokenizer = known.text.tokenizer_json
        self.window = min(WINDOW, known.context)
        self.device = device
        self._dtype = dtype

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    @abstractmethod
    def loss(self, batch: Sequence[TrainingWindow]) -> torch.Tensor | None:
        """Nats a token; None where there is none to learn from."""

    @abstractmethod
    def test(self, batch: Sequence[TrainingWindow]) -> Tested:
        """Hold what it would say against what was decided."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """As services take it; everything but the weights as it was."""

    @abstractmethod
    def read(self, folder: Path) -> State:
        """Of a version, on the CPU in float32."""

    def state(self) -> State:
        """A copy of what is trained, on the CPU."""
        still, found = self._still(), self.model.state_dict()
        return {name: tensor.detach().cpu().clone() for name, tensor in found.items() if name not in still}

    def _still(self) -> set[str]:
        """Names of the parameters that are not trained."""
        return {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}

    def rounded(self) -> State:
        """As it would be written."""
        return {
            name: tensor.to(self._dtype).float() if tensor.is_floating_point() else tensor
            for name, tensor in self.state().items()
        }

    def load(self, state: State) -> None:
        """Take what `state` or `read` returned. ModelError where it lacks something trained, or has something else."""
        lacking, unknown = self.model.load_state_dict(state, strict=False)
        wrong = sorted({*unknown, *lacking} - self._still())
        if wrong:
            raise ModelError(f"{self.kind}: a version has other weights than what learns: {', '.join(wrong[:SHOWN])}")

    @property
    def _in_bfloat16(self) -> bool:
        """Whether it is computed in bfloat16, where autocast has it so."""
        return self.device.type != "cpu"

    def _on_cpu(self) -> nn.Module:
        """A copy in the dtype of the files."""
        return nn.Module.to(copy.deepcopy(self.model), device="cpu", dtype=self._dtype)


class DraftStudent(Student):
    """A drafter. Raises ModelError."""

    kind = DRAFT

    def __init__(self, spec: str, device: torch.device) -> None:
        known, model = _loaded("draft", spec, "learn", device)
        width = model.get_output_embeddings().weight.shape[0]
        super().__init__(model, known, width, "draft", _dtype_of(known.config), device)
        self._config = known.config

    @property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.model, self._config, "float32")

    def loss(self, batch: Sequence[TrainingWindow]) -> torch.Tensor | None:
        ids, scored = padded(batch, self.device)
        labels = ids.masked_fill(~scored, IGNORED)[:, 1:]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._in_bfloat16):
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    @torch.no_grad()
    def test(self, batch: Sequence[TrainingWindow]) -> Tested:
        ids, scored = padded(batch, self.device)
        best = self.model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
        same = (best == ids[:, 1:]) & scored[:, 1:]
        chained, alive = 0, same
        for further in range(1, CHAIN + 1):
            chained += int(alive.sum())
            alive = alive[:, :-1] & same[:, further:]
        return Tested(int(scored[:, 1:].sum()), int(same.sum()), chained)

    def write(self, folder: Path) -> None:
        whole: Any = self._on_cpu()
        with replaced_in(folder) as beside:
            whole.save_pretrained(beside)
            for made in (CONFIG, GENERATION):
                (beside / made).unlink(missing_ok=True)
            copy_beside(self.location, beside)

    def read(self, folder: Path) -> State:
        return dict(pretrained(str(folder), torch.float32, CPU).state_dict())


class HeadStudent(Student):
    """An EAGLE-3 head beside its target, which computes in this process. Its embedding stays as it is.

    Raises ModelError.
    """

    kind = HEAD

    def __init__(self, spec: str, target: str, device: torch.device) -> None:
        known, model = _loaded("target", target, "teach", device)
        folder, shape = Path(spec).expanduser(), known.config.get_text_config()
        config = _head_config(folder, target, shape)
        self._layers = shape.num_hidden_layers
        self._embedding = model.get_input_embeddings().get_parameter("weight").detach().cpu()
        head = eagle3.load(folder, self._layers, self._embedding)
        dtype = head.fc.weight.dtype
        self._head = head.float().to(device)
        self._head.embed_tokens.weight.requires_grad_(False)
        self._own_embedding = eagle3.EMBEDDING in tensor_names(folder / eagle3.WEIGHTS)
        self._taps, self._target_name = config.taps, target
        super().__init__(self._head, known, model.get_output_embeddings().weight.shape[0], "target", dtype, device)
        # further positions for the last guess in a row
        self.window = max(2, min(WINDOW, known.context - HEAD_DEPTH + 1))
        taught = weights_fingerprint(model, known.config, "float32")
        self._fingerprint = weights_fingerprint(self._head, known.config, f"beside {taught}")
        self._target = model.requires_grad_(False)
        if self._in_bfloat16:
            nn.Module.to(self._target, dtype=torch.bfloat16)

    @property
    def fingerprint(self) -> str:
        """Of the head and its target."""
        return self._fingerprint

    def loss(self, batch: Sequence[TrainingWindow]) -> torch.Tensor | None:
        given = self._lesson(*padded(batch, self.device, HEAD_DEPTH - 1))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._in_bfloat16):
            found = loss_of(self._head, given, HEAD_DEPTH, FURTHER_WEIGHT)
        return found if found.requires_grad else None

    @torch.no_grad()
    def test(self, batch: Sequence[TrainingWindow]) -> Tested:
        ids, scored = padded(batch, self.device, HEAD_DEPTH - 1)
        tokens = right = chained = 0
        alive: torch.Tensor | None = None
        for step, (own, _) in enumerate(unrolled(self._head, self._lesson(ids, scored), HEAD_DEPTH)):
            best, counted = self._head.target_ids(own.argmax(-1)), at_predicted(scored, step, own.shape[1])
            same = (best == at_predicted(ids, step, own.shape[1])) & counted
            if alive is None:
                tokens, right, alive = int(counted.sum()), int(same.sum()), torch.ones_like(same)
            alive = alive & same
            chained += int(alive.sum())
        return Tested(tokens, right, chained)

    def _lesson(self, ids: torch.Tensor, scored: torch.Tensor) -> Lesson:
        return lesson(self._target, ids, self._taps, scored, in_bfloat16=self._in_bfloat16)

    def write(self, folder: Path) -> None:
        whole = self._on_cpu()
        if not isinstance(whole, Eagle3):
            raise AssertionError("a copy of a head is a head")
        eagle3.save(whole, folder, self._target_name, with_embedding=self._own_embedding)

    def read(self, folder: Path) -> State:
        found = eagle3.load(folder, self._layers, self._embedding).float().state_dict()
        return {name: tensor for name, tensor in found.items() if name != eagle3.EMBEDDING}


def padded(
    batch: Sequence[TrainingWindow], device: torch.device, further: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and which of them are scored: (windows, the longest one and `further`, at least).

    What stands behind a window's end is seen by nothing before it.
    """
    longest = max(LEAST_LENGTH, *(len(window.tokens) for window in batch)) + further
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    scored = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, (tokens, first) in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        scored[row, first : len(tokens)] = True
    return ids.to(device), scored.to(device)


def _loaded(option: str, spec: str, does: str, device: torch.device) -> tuple[Outline, PreTrainedModel]:
    """Outline and model in float32. does: what it is to do, for people."""
    if spec.startswith(PREFIX) or is_gguf(located(spec)):
        raise ModelError(f"{option}: {spec}: a scripted model or {GGUF} file cannot {does}")
    known = outline(spec)
    if known.says is not None:
        raise ModelError(f"{option}: {spec}: a drafter that says some of its target's ids only cannot {does}")
    return known, pretrained(spec, torch.float32, device)


def _head_config(folder: Path, target: str, shape: Any) -> Eagle3Config:
    """Of a head that may learn beside a target of this shape. Raises ModelError."""
    whole = read_config(folder)
    if medusa.kind_of(whole) is not None or not eagle3.described(whole):
        raise ModelError(f"heads: {folder}: only EAGLE-3 heads learn")
    config = Eagle3Config.read(folder, shape.num_hidden_layers)
    for name, given, needed in (
        ("vocab_size", config.vocabulary, shape.vocab_size),
        ("target_hidden_size", config.target_hidden or config.hidden, shape.hidden_size),
    ):
        if given != needed:
            raise ModelError(f"heads: {folder}: {name} is {given}, and {target} needs {needed}")
    if config.rope is not None:
        raise ModelError(f"heads: {folder}: a head with another rotation than the default one cannot learn")
    # Behind the last layer transformers tells a stream that is normed, and a verifier one that is not.
    if max(config.taps) >= shape.num_hidden_layers:
        raise ModelError(f"heads: {folder}: a head that reads what the last layer leaves cannot learn")
    return config


def _dtype_of(config: Any) -> torch.dtype:
    """Of the weights' files."""
    found = getattr(config, "dtype", None)
    known = getattr(torch, found) if isinstance(found, str) else found
    return known if isinstance(known, torch.dtype) else torch.float32
