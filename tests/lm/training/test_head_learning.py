"""A head that learns beside its target: more of its guesses are right, and each version drafts as it was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch

from specwire.core.draft import HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed, ModelError
from specwire.core.policy.tunables import LEAST_BEHIND
from specwire.lm import load_model
from specwire.lm.heads import eagle3
from specwire.lm.heads.eagle3 import Eagle3Config
from specwire.lm.heads.slots import HeadedModel
from specwire.lm.training.online import Learner, LearnerOptions
from specwire.lm.training.students import HEAD_DEPTH, HeadStudent
from specwire.lm.training.texts import DecidedText, session_hash, windows_of
from specwire.versions import HEAD, VersionError, VersionFolder
from tests.lm import models
from tests.lm.heads.by_hand import CONFIG, head_of, nearly_bigram
from tests.lm.training import test_online

CONTEXT, LENGTH = 128, 40
GREEDY = Sampling()
SHAPE = replace(
    CONFIG,
    hidden=32,
    heads=2,
    key_heads=2,
    head_dim=16,
    vocabulary=models.VOCABULARY,
    draft_vocabulary=models.VOCABULARY // 2,
    taps=(0, 1, 1),
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target whose next token hangs on the last one mostly: something to be learnt."""
    return nearly_bigram(tmp_path_factory.mktemp("pair"), CONTEXT, {f"w{id_}": id_ for id_ in range(50)})[0]


@pytest.fixture(scope="module")
def asked(target: str) -> list[DecidedText]:
    """What it says behind prompts by chance."""
    random, lm = Random(1), load_model(target, slots=1)
    found = []
    for number in range(60):
        prompt = [random.randrange(3, models.VOCABULARY) for _ in range(4)]
        line, start = list(prompt), 0
        lm.rollback(0, 0)
        while len(line) < len(prompt) + LENGTH:
            line.append(int(lm.forward([Feed(0, start, line[start:], 1)])[0].argmax()))
            start = len(line) - 1
        found.append(DecidedText(session_hash(f"{number}"), tuple(prompt), tuple(line[len(prompt) :])))
    return found


def options(head: str, out: Path, target: str) -> LearnerOptions:
    return test_online.options(head, out, target=target, rate=3e-2)


def ignorant(folder: Path, target: str, shape: Eagle3Config = SHAPE, with_embedding: bool = True) -> str:
    """A head of random weights, which says every second id."""
    eagle3.save(head_of(shape), folder, target, with_embedding=with_embedding)
    return str(folder)


@pytest.fixture
def learner(target: str, tmp_path: Path) -> Iterator[Learner]:
    found = Learner(options(ignorant(tmp_path / "head", target), tmp_path / "out", target=target), lambda _: None)
    yield found
    found.close()


def served(target: str, heads: Path) -> HeadedModel:
    lm = load_model(target, slots=2, heads=str(heads), threads=1)
    assert isinstance(lm, HeadedModel)
    return lm


def drafts(lm: HeadedModel, text: Sequence[int], slot: int = 0) -> list[int]:
    lm.rollback(slot, 0)
    lm.forward([Feed(slot, 0, text[:-1], 1)])
    (found,) = lm.draft([HeadRequest(slot, list(text), GREEDY, HEAD_DEPTH)])
    return found


def test_it_learns_and_each_version_is_served(
    learner: Learner, asked: list[DecidedText], target: str, tmp_path: Path
) -> None:
    folder, out = VersionFolder(tmp_path / "out"), tmp_path / "out"
    done = learner.round(asked)
    assert done.before is not None
    assert done.candidate is not None
    assert done.candidate.first > done.before.first + 0.1
    assert done.candidate.chain > done.before.chain
    current = folder.current(HEAD)
    assert current is not None
    assert (current.version, current.name, current.why) == (1, "head@1", "learnt")
    assert current.loss_after is not None
    assert current.loss_before is not None
    assert current.loss_after < current.loss_before
    configs = [(folder.version(number) / "config.json").read_text() for number in (0, 1)]
    assert configs[0] == configs[1]
    stored = [eagle3.load(folder.version(number), 2, torch.empty(0)) for number in (0, 1)]
    assert torch.equal(*(each.embed_tokens.weight for each in stored))
    assert not torch.equal(*(each.fc.weight for each in stored))
    lm, text = served(target, out), [*asked[0].prompt, *asked[0].output]
    assert lm.current == current
    assert lm.load_version is not None
    both = [drafts(served(target, folder.version(number)), text) for number in (0, 1)]
    assert both[0] != both[1]
    assert drafts(lm, text) == both[1]
    lm.take(lm.load_version(folder.version(0)), msgspec.structs.replace(current, version=0))
    assert lm.current.version == 0
    assert drafts(lm, text, slot=1) == both[0]


def test_a_text_goes_on_behind_what_the_version_before_has_read(
    learner: Learner, asked: list[DecidedText], target: str, tmp_path: Path
) -> None:
    """It drafts again once it has read enough of the text's end; a new text it reads from the start."""
    learner.round(asked)
    folder, text = VersionFolder(tmp_path / "out"), [*asked[0].prompt, *asked[0].output]
    lm = served(target, tmp_path / "out")
    assert lm.load_version is not None
    assert drafts(lm, text)
    assert lm.current is not None
    lm.take(lm.load_version(folder.version(1)), lm.current)
    assert lm.unread(0) is None
    assert lm.draft([HeadRequest(0, text, GREEDY, 2)]) == [[]]
    more = [*text, *(3 + at % 40 for at in range(LEAST_BEHIND + 1))]
    lm.forward([Feed(0, len(text) - 1, more[len(text) - 1 : -1], 1)])
    assert lm.unread(0) == LEAST_BEHIND + 1
    assert len(lm.draft([HeadRequest(0, more, GREEDY, 2)])[0]) == 2
    lm.copy(0, 1, 20)
    assert lm.cached(1) == 20
    assert drafts(lm, text, slot=1) == drafts(served(target, folder.version(1)), text)


def test_acceptance_is_that_of_chains_that_are_served(
    learner: Learner, asked: list[DecidedText], target: str, tmp_path: Path
) -> None:
    learner.round(asked)
    lm, firsts, chained = served(target, tmp_path / "out"), [], 0
    for text in learner.memory.held_out:
        whole = [*text.prompt, *text.output]
        for at in range(len(text.prompt), len(whole)):
            guesses = drafts(lm, whole[:at])
            said = whole[at : at + HEAD_DEPTH]
            right = next((step for step, each in enumerate(said) if each != guesses[step]), len(said))
            firsts.append(right > 0)
            chained += right
    found = learner.measure()
    assert found.tokens == len(firsts) > 0
    assert found.first == pytest.approx(sum(firsts) / len(firsts))
    assert found.chain == pytest.approx(chained / len(firsts))


def test_windows_of_any_length_are_learnt(target: str, tmp_path: Path) -> None:
    student = HeadStudent(ignorant(tmp_path / "head", target), target, CPU)
    short = [*windows_of(DecidedText("", (), (5, 6)), student.window)]
    assert student.loss(short) is None
    assert student.test(short).tokens == 0
    mixed = [*short, *windows_of(DecidedText("", (3, 4), tuple(range(5, 20))), student.window)]
    loss = student.loss(mixed)
    assert loss is not None
    assert loss.isfinite()
    assert student.test(mixed).tokens == 15


def test_a_head_without_an_embedding_has_the_target_s(target: str, asked: list[DecidedText], tmp_path: Path) -> None:
    head = ignorant(tmp_path / "head", target, with_embedding=False)
    learner = Learner(options(head, tmp_path / "out", target=target), lambda _: None)
    assert learner.round(asked).version == 1
    learner.close()
    current = served(target, tmp_path / "out").current
    assert current is not None
    assert current.version == 1
    again = Learner(options(head, tmp_path / "out", target=target), lambda _: None)
    assert again.version == 1
    again.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocabulary": 40, "draft_vocabulary": 20}, "vocab_size is 40, and .* needs 50"),
        ({"target_hidden": 16}, "target_hidden_size is 16, and .* needs 32"),
        ({"taps": (0, 1, 2)}, "a head that reads what the last layer leaves cannot learn"),
        ({"rope": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "a head with another rotation"),
    ],
)
def test_what_cannot_learn_is_refused(changed: dict[str, object], message: str, target: str, tmp_path: Path) -> None:
    head = ignorant(tmp_path / "head", target, replace(SHAPE, **changed))  # type: ignore[arg-type]  # any field, by name
    with pytest.raises(ModelError, match=f"heads: .*{message}"):
        Learner(options(head, tmp_path / "out", target=target), lambda _: None)


def test_a_folder_of_another_head_is_told_by_what_was_given(learner: Learner, target: str, tmp_path: Path) -> None:
    learner.close()
    other = ignorant(tmp_path / "other", target, replace(SHAPE, inner=40))
    with pytest.raises(VersionError, match=r"out: heads or target: is for \w{12}, not for \w{12}: take another"):
        Learner(options(other, tmp_path / "out", target=target), lambda _: None)


def test_weights_of_something_else_are_not_taken(target: str, tmp_path: Path) -> None:
    student = HeadStudent(ignorant(tmp_path / "head", target), target, CPU)
    state = student.state()
    assert eagle3.EMBEDDING not in state
    student.load(state)
    for changed, name in (
        ({**state, "unknown": torch.zeros(1)}, "unknown"),
        ({each: state[each] for each in state if each != "fc.weight"}, "fc.weight"),
    ):
        with pytest.raises(ModelError, match=f"head: a version has other weights than what learns: {name}$"):
            student.load(changed)


def test_other_kinds_and_targets_are_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "medusa").mkdir()
    (tmp_path / "medusa" / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    for head, beside, message in (
        (str(tmp_path / "medusa"), target, "heads: .*medusa: only EAGLE-3 heads learn"),
        (ignorant(tmp_path / "head", target), "scripted:7", "target: scripted:7: a scripted model .* cannot teach"),
    ):
        with pytest.raises(ModelError, match=message):
            Learner(options(head, tmp_path / "out", target=beside), lambda _: None)


def test_a_verifier_takes_no_folder_without_a_version_and_none_of_drafters(
    learner: Learner, asked: list[DecidedText], target: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    other = ignorant(tmp_path / "other", target, replace(SHAPE, inner=40))
    lm = served(target, out)
    assert lm.load_version is not None
    with pytest.raises(ModelError, match="other: is of another shape than the head in use"):
        lm.load_version(Path(other))
    current = json.loads((out / "current").read_text())
    (out / "current").write_text(json.dumps({**current, "kind": "draft"}))
    with pytest.raises(ModelError, match="heads: .*out: has versions of a draft, not of a head"):
        served(target, out)
    (out / "current").unlink()
    with pytest.raises(ModelError, match="heads: .*out: has no version yet"):
        served(target, out)
