"""A drafter made of a few of its target's own layers, which learns the target's own answers.

It reads nothing of the target but tokens, so it drafts wherever it is. Its embedding has a row for each id that answers
say most often, and one for all others (`specwire.lm.runners.draft_vocabulary`). What it learns is what heads learn, and
the same answers (`own_answers`): of each token the target's best ids with their log-probabilities.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from specwire.core.model import ModelError
from specwire.files import replaced_in, write_text
from specwire.lm.model_files import TOKENIZER, WEIGHTS
from specwire.lm.pretrained import CPU, outline, pretrained
from specwire.lm.runners.draft_vocabulary import DraftVocabulary
from specwire.lm.runners.llama import MODEL_TYPES
from specwire.lm.training.head import distilled
from specwire.lm.training.loop import HELD_OUT_TOKENS, SOFT, Course, draft_ids
from specwire.lm.training.own_answers import SEED, KeptTexts, TextBatch, parted
from specwire.named_models import located

# Positions of a chain that are measured.
DEPTH = 5


@dataclass(frozen=True, slots=True)
class DrafterCourse(Course):
    """See `specwire train-drafter`. layers: of the target, in this order. draft_vocabulary: ids that it says."""

    layers: tuple[int, ...] = (0, 1, -1)
    draft_vocabulary: int = 8192


class Reached(NamedTuple):
    """Held-out acceptance by position: greedily, and expected where target and drafter draw at temperature 1."""

    greedy: list[float]
    drawn: list[float]


class LearningDrafter(nn.Module):
    """A causal model of few layers. lm_head: its output layer, which may be its embedding, too; of that name it begins
    as the target's, and learns slowly.
    """

    def __init__(self, model: PreTrainedModel, says: DraftVocabulary) -> None:
        super().__init__()
        self.lm_head = model.get_output_embeddings()
        self.body: nn.Module = model.base_model
        self.model, self.says = [model], says  # in a list: its parts have their names already
        self._own = says.own()

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """(texts, length, hidden), of the target's ids. What fills texts up stands behind them, and is not seen."""
        found: torch.Tensor = self.body(input_ids=self._own[tokens], use_cache=False).last_hidden_state
        return found

    def said(self, batch: TextBatch) -> _Said:
        """Of all answers in a batch, places one behind the other."""
        rows, scored = batch
        texts, places = scored[:, 1:].nonzero(as_tuple=True)
        at = texts, places + 1
        states = self.states(rows.tokens)[texts, places]
        ids = self._own[rows.best[at]]
        shares = rows.logs[at].exp() * (ids < self.says.others)
        weights = self.lm_head.weight[: self.says.others].to(torch.bfloat16)
        total = shares.sum(-1, keepdim=True).clamp(min=1e-6)
        loss, best, logs = distilled(states.to(torch.bfloat16), weights, ids, shares / total, 1 / max(1, len(ids)))
        return _Said(at, loss, torch.tensor(self.says.ids)[best], logs.exp() * (ids < self.says.others))


class _Said(NamedTuple):
    """at: texts and places of what was predicted. best: the drafter's id. q: its shares of the target's best ids."""

    at: tuple[torch.Tensor, torch.Tensor]
    loss: torch.Tensor
    best: torch.Tensor
    q: torch.Tensor


def teach_drafter(course: DrafterCourse, tell: Callable[[str], None]) -> Reached:
    """Train a drafter and write it; goes on from what an earlier call left.

    Raises:
        ModelError: the target cannot be read, or is of no family that this is for, or the options do not fit it.
    """
    spec = located(course.target)
    target: Any = pretrained(spec, torch.float32, CPU)
    check(course, target)
    kept = course.begin(tell)
    torch.manual_seed(SEED)
    drafter = begun(course, target, kept)
    del target
    own: dict[str, Any] = {"layers": " ".join(map(str, course.layers)), "draft-vocabulary": course.draft_vocabulary}
    _, record = course.taught(
        drafter,
        kept,
        lambda texts: drafter.said(kept.batch(texts, features=False)).loss,
        lambda: held_out(drafter, kept).greedy,
        {"answers": kept.digest} | own | course.options() | {"target": kept.about["target"]},
        tell,
    )
    reached = held_out(drafter, kept)
    write(drafter, spec, course.out)
    record({"expected_at_temperature_1": reached.drawn})
    return reached


def check(course: DrafterCourse, target: Any) -> None:
    """Whether a drafter can be made so of the target. Raises ModelError."""
    shape: Any = target.config.get_text_config()
    if shape.model_type not in MODEL_TYPES:
        raise ModelError(f"target {course.target!r}: drafters are made of the Llama family, not of {shape.model_type}")
    count = shape.num_hidden_layers
    if not all(-count <= layer < count for layer in course.layers):
        raise ModelError(f"layers: must be of layers 0 to {count - 1}, not {', '.join(map(str, course.layers))}")


def begun(course: DrafterCourse, target: Any, kept: KeptTexts) -> LearningDrafter:
    """Layers and rows of the embedding as they are in the target; the row of other ids is the mean of theirs. The last
    norm is scaled, so that guesses are far from sure.
    """
    counts = kept.counts(len(target.get_input_embeddings().weight))
    ids = draft_ids(counts, course.draft_vocabulary)
    says = DraftVocabulary(len(target.get_input_embeddings().weight), tuple(ids.tolist()))
    config = copy.deepcopy(target.config)
    config.num_hidden_layers, config.vocab_size = len(course.layers), says.rows
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in course.layers]
    own = says.own()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, _own_ends(getattr(config, name, None), own, says))
    model = type(target)(config).float()
    with torch.no_grad():
        for mine, layer in zip(model.base_model.layers, course.layers, strict=True):
            mine.load_state_dict(target.base_model.layers[layer].state_dict())
        model.base_model.norm.weight.copy_(SOFT * target.base_model.norm.weight)
        rest = torch.tensor(sorted(says.unsaid()))
        for mine, theirs in (
            (model.get_input_embeddings(), target.get_input_embeddings()),
            (model.get_output_embeddings(), target.get_output_embeddings()),
        ):
            mine.weight[:-1] = theirs.weight[ids]
            mine.weight[-1] = theirs.weight[rest].mean(0) if len(rest) else 0.0
    return LearningDrafter(model, says)


def _own_ends(stated: Any, own: torch.Tensor, says: DraftVocabulary) -> Any:
    """Ids of a configuration as rows of the drafter's; of ids that it does not say there are none."""
    ids = [stated] if isinstance(stated, int) else [*(stated or ())]
    rows = [int(own[id_]) for id_ in ids if own[id_] != says.others]
    return rows[0] if len(rows) == 1 else rows or None


@torch.no_grad()
def held_out(drafter: LearningDrafter, kept: KeptTexts) -> Reached:
    """On held-out answers. A chain is tested at a position where all before were accepted, and are the text's tokens.

    What is expected at temperature 1 is of texts that were drawn: the sum of min(p, q), over the target's best ids
    alone, where tokens before are accepted with min(1, q / p); so it is a little less than it is.
    """
    greedy, drawn = (torch.zeros(2, DEPTH, dtype=torch.float64) for _ in range(2))
    for texts in parted(sorted(kept.held_out, key=lambda text: text.length), HELD_OUT_TOKENS):
        batch = kept.batch(texts, features=False)
        with torch.autocast(CPU.type, torch.bfloat16):
            said = drafter.said(batch)
        rows, at, size = batch.rows, said.at, batch.scored.shape
        best, tokens = rows.best[at], rows.tokens[at]
        same = said.best == best[:, 0]
        greedy += _by_position(_placed(size, at, same), _placed(size, at, same & (said.best == tokens)), batch.scored)
        p = rows.logs[at].exp()
        ratios = ((said.q / p.clamp(min=1e-9)).clamp(max=1.0) * (best == tokens[:, None])).sum(-1)
        warm = batch.scored & torch.tensor([text.temperature > 0 for text in texts])[:, None]
        drawn += _by_position(_placed(size, at, torch.minimum(said.q, p).sum(-1)), _placed(size, at, ratios), warm)
    return Reached(*(list(_shares(*each)) for each in (greedy, drawn)))


def _placed(size: torch.Size, at: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.float64).index_put(at, values.double())


def _by_position(accepted: torch.Tensor, goes_on: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """(2, DEPTH): what was accepted, and what was tested, of chains that begin at each scored token."""
    found, alive = torch.zeros(2, DEPTH, dtype=torch.float64), scored.double()
    for position in range(DEPTH):
        here = alive * scored[:, position:]
        found[0, position], found[1, position] = (here * accepted[:, position:]).sum(), here.sum()
        alive = (here * goes_on[:, position:])[:, :-1]
    return found


def _shares(accepted: torch.Tensor, tested: torch.Tensor) -> Iterator[float]:
    return (round(float(one / of), 4) if of else 0.0 for one, of in zip(accepted, tested, strict=True))


def write(drafter: LearningDrafter, target: str, folder: Path) -> None:
    """As any model is, in bfloat16, with the target's tokenizer; nothing else is touched."""
    model: Any = drafter.model[0]
    weights = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("lm_head")}
    model.config.architectures, model.config.dtype = [type(model).__name__], torch.bfloat16
    text = outline(target).text
    with replaced_in(folder) as beside:
        save_file(weights, beside / WEIGHTS, {"format": "pt"})
        model.config.save_pretrained(beside)
        drafter.says.write(beside)
        if text.tokenizer_json:
            write_text(beside / TOKENIZER, text.tokenizer_json.decode())
