"""A drafter of a target's own layers: it learns the kept answers, and is served in the target's ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.cli.main import main
from specwire.core.draft import DraftRow
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed, ModelError
from specwire.lm import load_model
from specwire.lm.guesses import guesses
from specwire.lm.pretrained import pretrained
from specwire.lm.runners.draft_vocabulary import VOCABULARY, DraftVocabulary
from specwire.lm.training import own_answers
from specwire.lm.training.drafter import DEPTH, DrafterCourse, begun, held_out
from specwire.lm.training.own_answers import KeptTexts, answers_of
from tests.lm import models
from tests.lm.training.answering import keep_answers, save_target

SAID = 30
TOKENS = 7000
SHORT = ["--tokens", str(TOKENS), "--rows", "8", "--window", "32", "--threads", "1", "--draft-vocabulary", str(SAID)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def more_held_out() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_answers, "HELD_OUT_EVERY", 3)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def answers(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    keep_answers(target, folder, texts=300)
    return folder


def kept_of(target: str, answers: Path) -> KeptTexts:
    return answers_of(target, answers, TOKENS, (), (), print)


def command(target: str, answers: Path, out: Path, *more: str) -> list[str]:
    own = ["--target", target, "--answers", str(answers), "--out", str(out), "--layers", "-1"]
    return ["train-drafter", *own, *SHORT, *more]


@pytest.fixture(scope="module")
def trained(target: str, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("drafter")
    assert main(command(target, answers, out, "--steps", "160", "--rate", "0.02")) == 0
    return out


def test_it_learns_what_its_target_says(trained: Path, target: str, answers: Path) -> None:
    course, kept = DrafterCourse(target, trained, layers=(-1,), draft_vocabulary=SAID), kept_of(target, answers)
    before = held_out(begun(course, pretrained(target, torch.float32, CPU), kept), kept)
    record = json.loads((trained / "training.json").read_text())
    (last,) = record["held_out_acceptance"]
    assert last["step"] == 160
    assert len(last["by_position"]) == len(record["expected_at_temperature_1"]) == DEPTH
    assert last["by_position"][0] > before.greedy[0] + 0.1
    assert record["expected_at_temperature_1"][0] > before.drawn[0] + 0.02
    asked = {"layers": "-1", "draft-vocabulary": SAID, "rows": 8, "window": 32, "steps": 160, "rate": 0.02}
    assert asked.items() <= record["arguments"].items()
    assert record["arguments"]["answer-tokens"] >= TOKENS


def test_what_others_kept_is_learnt_and_nothing_is_answered_anew(
    target: str, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_answers, "Teacher", lambda *_: pytest.fail("answers were there"))
    held = {path: path.stat().st_mtime_ns for path in answers.iterdir()}
    assert main(command(target, answers, tmp_path / "drafter", "--steps", "1")) == 0
    head = ["train-heads", "--target", target, "--answers", str(answers), "--out", str(tmp_path / "head"), *SHORT]
    assert main([*head, "--steps", "1", "--depth", "2"]) == 0
    assert {path: path.stat().st_mtime_ns for path in answers.iterdir()} == held


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
def test_it_is_served_in_the_target_s_ids(runtime: str, trained: Path, target: str) -> None:
    """Logits are the model's own at the ids that it says; the others are masked, and all of them are one to it."""
    says = DraftVocabulary.of((trained / VOCABULARY).read_bytes())
    assert (says.size, len(says.ids)) == (models.VOCABULARY, SAID)
    lm = load_model(str(trained), slots=2, runtime=runtime, dtype="float32")
    whole = load_model(target, slots=1)
    assert lm.info.vocabulary_fingerprint == whole.info.vocabulary_fingerprint
    assert lm.info.tokenizer_json == whole.info.tokenizer_json
    assert (lm.info.vocabulary, lm.info.runtime) == (models.VOCABULARY, runtime)
    assert set(lm.info.eos_ids) == set(whole.info.eos_ids) & set(says.ids)
    text = [1, *says.unsaid(), 5, 7][-12:]
    got = lm.forward([Feed(1, 0, text[:5], 0), Feed(0, 0, text, 3)])
    own = pretrained(str(trained), torch.float32, CPU)
    with torch.no_grad():
        wanted = own(torch.tensor([[int(says.own()[token]) for token in text]])).logits[0, -3:]
    assert torch.allclose(got[:, list(says.ids)], wanted[:, :-1], atol=1e-4)
    assert (got[:, sorted(says.unsaid())] == -torch.inf).all()
    lm.rollback(0, 4)
    assert torch.allclose(lm.forward([Feed(0, 4, text[4:], 3)]), got, atol=1e-4)
    lm.copy(0, 1, 6)
    assert torch.allclose(lm.forward([Feed(1, 6, text[6:], 3)]), got, atol=1e-4)


class Place:
    """Of what a drafter draws."""

    def __init__(self, row: DraftRow) -> None:
        self._row = row

    def row(self) -> DraftRow:
        return self._row


def test_what_it_draws_from_has_no_share_of_ids_that_it_does_not_say(trained: Path) -> None:
    """Under rejection q is sent as it was drawn from; greedily and coupled nothing else is drafted either."""
    says = DraftVocabulary.of((trained / VOCABULARY).read_bytes())
    lm = load_model(str(trained), slots=1, dtype="float32")
    rows = lm.forward([Feed(0, 0, [1, 2, 3, 4, 5, 6, 7, 8], 8)])
    for sampling, prefix in (
        (Sampling(temperature=1.0, seed=3), 77),
        (Sampling(temperature=1.0, seed=3), None),
        (Sampling(), None),
    ):
        places = [Place(DraftRow(at, sampling, prefix_hash=prefix, most=4)) for at in range(8)]
        for drawn in guesses(rows, range(8), places):
            assert set(drawn.tokens) <= set(says.ids)
            if prefix is not None:
                assert drawn.weights is not None
                assert set(drawn.weights.ids) <= set(says.ids)


def test_a_whole_vocabulary_makes_a_drafter_of_all_layers_its_target(target: str, answers: Path) -> None:
    """But for the scale of its last norm, which the temperature is."""
    course = DrafterCourse(target, answers, layers=(0, 1), draft_vocabulary=models.VOCABULARY)
    model: Any = pretrained(target, torch.float32, CPU)
    drafter = begun(course, model, kept_of(target, answers))
    with torch.no_grad():
        drafter.body.get_parameter("norm.weight").copy_(model.base_model.norm.weight)
        text = torch.tensor([[1, 4, 9, 16, 25, 36]])
        assert torch.allclose(drafter.lm_head(drafter.states(text))[:, :, :-1], model(text).logits, atol=1e-5)
    reached = held_out(drafter, kept_of(target, answers))
    assert min(reached.greedy) > 0.95
    assert min(reached.drawn) > 0.9


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--draft-vocabulary", "0"], 2, "draft-vocabulary: must be at least 1, not 0"),
        (["--apart", "/nowhere"], 2, "apart: there is no /nowhere"),
        (["--layers", "0", "2"], 1, "layers: must be of layers 0 to 1, not 0, 2"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(
    more: list[str],
    code: int,
    message: str,
    target: str,
    answers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(target, answers, tmp_path / "drafter", *more)) == code
    assert message in capsys.readouterr().err


def test_a_target_of_another_family_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(save_target(tmp_path / "target", "gpt2"), tmp_path / "none", tmp_path / "out")) == 1
    assert "drafters are made of the Llama family, not of gpt2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"size": 0, "ids": [1]}, "size: must be a number from 1 to"),
        ({"size": 50, "ids": []}, "ids: must be a list of ids"),
        ({"size": 50, "ids": [3, 3]}, "ids: must rise, from 0 to 49"),
        ({"size": 50, "ids": [3, 50]}, "ids: must rise, from 0 to 49"),
        ({"size": 50, "ids": [3, 4]}, "ids: are 2, and of 50 rows of the embedding one is of all others"),
        ([], "size: must be a number"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_named(told: object, message: str, tmp_path: Path) -> None:
    models.save(models.build(models.config("llama")), tmp_path)
    (tmp_path / VOCABULARY).write_text(json.dumps(told))
    with pytest.raises(ModelError, match=rf"{VOCABULARY} cannot be read: {message}"):
        load_model(str(tmp_path), slots=1)
