"""A drafter that learns: acceptance rises where texts change, what is no better is not used, what fell back is left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from specwire.core.model import Feed, ModelError
from specwire.lm import load_model
from specwire.lm.training import online
from specwire.lm.training import texts as texts_module
from specwire.lm.training.online import Learner, LearnerOptions, LearningStopped
from specwire.lm.training.students import CHAIN
from specwire.lm.training.texts import DecidedText, TextMemory, TrainingWindow, session_hash, windows_of
from specwire.versions import VersionError, VersionFolder
from tests.lm import models

# Ids from FIRST on are said, one behind another by a rule.
FIRST, SYMBOLS = 3, 47
ONE_KIND, ANOTHER = (5, 2), (7, 11)
LENGTH = 40
ANYBODY = ("*",)


def following(token: int, rule: tuple[int, int]) -> int:
    return FIRST + ((token - FIRST) * rule[0] + rule[1]) % SYMBOLS


def texts(rule: tuple[int, int], count: int, seed: int) -> list[DecidedText]:
    """Behind two tokens by chance the rule's: a target that always says the same."""
    random, found = Random(seed), []
    for number in range(count):
        line = [random.randrange(FIRST, FIRST + SYMBOLS) for _ in range(2)]
        while len(line) < 2 + LENGTH:
            line.append(following(line[-1], rule))
        found.append(DecidedText(session_hash(f"{rule}{seed}{number}"), tuple(line[:2]), tuple(line[2:])))
    return found


def noise(count: int, seed: int) -> list[DecidedText]:
    """Nothing in it can be known."""
    random = Random(seed)
    lines = [[random.randrange(FIRST, FIRST + SYMBOLS) for _ in range(2 + LENGTH)] for _ in range(count)]
    return [DecidedText(session_hash(f"{seed}{at}"), tuple(line[:2]), tuple(line[2:])) for at, line in enumerate(lines)]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = models.build(LlamaConfig(**{**models.ROTARY, "initializer_range": 0.05}))
    return models.save(made, tmp_path_factory.mktemp("draft"), {f"w{index}": index for index in range(50)})


def options(draft: str, out: Path, **changed: object) -> LearnerOptions:
    return LearnerOptions(**{"draft": draft, "out": out, "tenants": ANYBODY, "rate": 1e-2, "threads": 1, **changed})  # type: ignore[arg-type]  # any field, by name


@pytest.fixture
def learner(draft: str, tmp_path: Path) -> Iterator[Learner]:
    """Give one that remembers no more than a round brings: what it says then depends on the latest texts."""
    found = Learner(options(draft, tmp_path / "out", memory=60 * (LENGTH + 2)), lambda _: None)
    yield found
    found.close()


def greedy(model: str, text: Sequence[int], count: int) -> list[int]:
    lm, line = load_model(model, slots=1), list(text)
    for _ in range(count):
        lm.rollback(0, 0)
        line.append(int(lm.forward([Feed(0, 0, line, 1)])[0].argmax()))
    return line[len(text) :]


def learnt(learner: Learner, rule: tuple[int, int], rounds: int, seed: int) -> None:
    for number in range(rounds):
        learner.round(texts(rule, 75, seed + number))


# What is learnt


def test_acceptance_rises_and_falls_and_rises_as_texts_change(learner: Learner, tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path / "out")
    first = learner.round(texts(ONE_KIND, 75, 1))
    assert first.before is not None
    assert first.candidate is not None
    assert first.candidate.first >= first.before.first + 0.01
    assert (first.version, first.why) == (1, "better")
    learnt(learner, ONE_KIND, 2, 2)
    known = learner.measure()
    shifted = learner.round(texts(ANOTHER, 75, 5))
    assert shifted.before is not None
    assert shifted.before.first < known.first
    learnt(learner, ANOTHER, 3, 6)
    current = folder.current()
    assert current is not None
    assert current.version == learner.version > first.version
    assert current.after is not None
    assert current.after >= 1.15 * shifted.before.first
    assert current.tenants == ANYBODY


def test_a_version_is_a_model_as_it_was_but_for_its_weights(learner: Learner, draft: str, tmp_path: Path) -> None:
    learnt(learner, ONE_KIND, 3, 1)
    folder = VersionFolder(tmp_path / "out")
    for number in (0, learner.version):
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            assert (folder.version(number) / name).read_bytes() == (Path(draft) / name).read_bytes()
    assert greedy(str(folder.version(0)), [5, 6], 8) == greedy(draft, [5, 6], 8)
    said = greedy(str(folder.version(learner.version)), [5, 6, following(6, ONE_KIND)], 8)
    line = [following(6, ONE_KIND)]
    for _ in range(8):
        line.append(following(line[-1], ONE_KIND))
    right = sum(one == other for one, other in zip(said, line[1:], strict=True))
    wrong = sum(one == other for one, other in zip(greedy(draft, [5, 6, line[0]], 8), line[1:], strict=True))
    assert right > wrong
    fingerprints = {load_model(str(folder.version(each)), slots=1).info.weights_fingerprint for each in (0, 1)}
    assert len(fingerprints) == 2


def test_what_is_no_better_is_not_used(draft: str, tmp_path: Path) -> None:
    learner = Learner(options(draft, tmp_path / "out", margin=0.05), lambda _: None)
    rounds = [learner.round(noise(75, seed)) for seed in range(3)]
    assert all(each.steps > 0 and each.version == 0 for each in rounds)
    assert [each.name for each in (tmp_path / "out" / "versions").iterdir()] == ["0000"]
    learner.close()


def test_where_the_version_in_use_is_worse_by_now_the_one_before_it_is_used(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(options(draft, tmp_path / "out", memory=60 * (LENGTH + 2), margin=0.1), lambda _: None)
    monkeypatch.setattr(texts_module, "HELD_OUT_TOKENS", 300)
    monkeypatch.setattr(texts_module, "RECENT_ROUNDS", 1)
    learnt(learner, ONE_KIND, 1, 1)
    settled = learner.version
    learnt(learner, ANOTHER, 1, 20)
    newer = learner.version
    monkeypatch.setattr(learner, "_step", lambda _: 1.0)  # texts are as before, and nothing is learnt of them
    back = learner.round(texts(ONE_KIND, 75, 30))
    assert back.before is not None
    assert back.former is not None
    assert back.former.first >= back.before.first + 0.1
    assert (back.version, newer) == (settled, settled + 1)
    assert back.why.startswith(f"version {newer} is worse than the one before it")
    current = VersionFolder(tmp_path / "out").current()
    assert current is not None
    assert (current.version, current.why) == (settled, "fell back")
    assert learner.measure().first == pytest.approx(back.former.first)
    learner.close()


def test_a_candidate_that_begins_takes_small_steps_first(learner: Learner) -> None:
    def rate() -> float:
        return float(learner._optimiser.param_groups[0]["lr"])

    first = rate()
    learnt(learner, ONE_KIND, 2, 1)
    assert first == pytest.approx(1e-2 / online.WARM_UP)
    assert rate() == pytest.approx(1e-2)
    learner._begin_again(0, learner._read(0))
    assert rate() == first


def test_a_short_round_sees_each_text_as_often(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []

    def noted(batch: Sequence[TrainingWindow]) -> float:
        batches.append(len(batch))
        return 1.0

    monkeypatch.setattr(learner, "_step", noted)
    few = [text for text in texts(ONE_KIND, 75, 1) if not text.held_out][:3]
    learner.round(few)
    windows = sum(len(list(windows_of(text, learner._student.window))) for text in few)
    assert windows < online.ROWS
    assert batches == [windows] * online.PASSES


def test_too_few_held_out_texts_judge_nothing(learner: Learner) -> None:
    done = learner.round(texts(ONE_KIND, 10, 1))
    assert done.steps > 0
    assert (done.version, done.before) == (0, None)
    assert done.why.startswith("not judged: ")
    assert learner.round([]).why == "no new texts"


def test_the_same_texts_make_the_same_version(draft: str, tmp_path: Path) -> None:
    shares = []
    for name in ("one", "other"):
        learner = Learner(options(draft, tmp_path / name), lambda _: None)
        learnt(learner, ONE_KIND, 2, 1)
        shares.append(learner.measure())
        learner.close()
    assert shares[0] == shares[1]


# What is measured, and of which texts


def test_acceptance_is_that_of_greedy_chains(learner: Learner, draft: str) -> None:
    learner.memory.add(texts(ONE_KIND, 30, 4))
    lm, firsts, chains = load_model(draft, slots=1), [], []
    for text in learner.memory.held_out:
        for window in windows_of(text, models.CONTEXT):
            lm.rollback(0, 0)
            rows = lm.forward([Feed(0, 0, window.tokens[:-1], len(window.tokens) - 1)]).argmax(-1).tolist()
            same = [rows[at - 1] == window.tokens[at] for at in range(window.learnt, len(window.tokens))]
            for at in range(len(same)):
                run = next((steps for steps, each in enumerate(same[at:]) if not each), len(same) - at)
                chains.append(min(run, CHAIN))
            firsts += same
    found = learner.measure()
    assert found.tokens == len(firsts) > 0
    assert found.first == pytest.approx(sum(firsts) / len(firsts))
    assert found.chain == pytest.approx(sum(chains) / len(chains))


@given(st.lists(st.integers(0, 9), max_size=20), st.lists(st.integers(0, 9), max_size=50), st.integers(2, 16))
def test_each_token_of_an_output_is_learnt_once_behind_its_own_text(
    prompt: list[int], output: list[int], size: int
) -> None:
    whole, learnt_at = [*prompt, *output], list[int]()
    for tokens, first in windows_of(DecidedText("", tuple(prompt), tuple(output)), size):
        assert 0 < first < len(tokens) <= size
        start = max(1, len(prompt)) + len(learnt_at) - first
        assert tuple(whole[start : start + len(tokens)]) == tokens
        learnt_at += range(start + first, start + len(tokens))
    assert learnt_at == list(range(max(1, len(prompt)), len(whole)))


def test_what_was_asked_twice_is_on_one_side_of_the_split() -> None:
    asked = texts(ONE_KIND, 200, 1)
    again = [DecidedText(session_hash(f"again{at}"), text.prompt, text.output) for at, text in enumerate(asked)]
    memory = TextMemory(1 << 20)
    memory.add([*asked, *again])
    held_out, fresh = ({text.prompt for text in side} for side in (memory.held_out, memory.fresh))
    assert held_out
    assert not held_out & fresh
    assert 0.1 < len(held_out) / (len(held_out) + len(fresh)) < 0.3


def test_the_memory_is_bounded_and_the_oldest_go_first() -> None:
    memory, all_texts = TextMemory(10 * (LENGTH + 2)), texts(ONE_KIND, 60, 1)
    memory.add(all_texts[:30])
    memory.settle()
    memory.add(all_texts[30:])
    memory.settle()
    kept = [*memory.older, *memory.fresh]
    assert kept == [text for text in all_texts if not text.held_out][-10:]


def test_deleted_texts_that_are_still_remembered_go() -> None:
    memory, all_texts = TextMemory(1 << 20), texts(ONE_KIND, 60, 1)
    memory.add(all_texts)
    gone = {text.session for text in all_texts[::2]}
    assert memory.drop(gone) == 30
    assert {text.session for text in (*memory.fresh, *memory.held_out)} == {text.session for text in all_texts[1::2]}


def test_the_history_says_which_version_saw_which_session(learner: Learner, tmp_path: Path) -> None:
    first, second = texts(ONE_KIND, 75, 1), texts(ANOTHER, 75, 2)
    learner.round(first)
    assert learner.version == 1
    for _ in range(2):  # held out are those of two rounds
        if learner.version == 1:
            learner.round(second)
    assert learner.version == 2
    entries = {entry.version: entry for entry in VersionFolder(tmp_path / "out").history()}
    for number, seen in ((1, first), (2, second)):
        assert set(entries[number].sessions) == {text.session for text in seen if not text.held_out}
        assert entries[number].acceptance_after is not None
    assert (entries[2].since, entries[2].before) == (1, 1)


# Its folder


def test_it_goes_on_from_the_version_in_use(draft: str, tmp_path: Path) -> None:
    said: list[str] = []
    learner = Learner(options(draft, tmp_path / "out"), said.append)
    learnt(learner, ONE_KIND, 2, 1)
    version = learner.version
    assert version > 0
    with pytest.raises(VersionError, match="another `specwire learn` writes there"):
        Learner(options(draft, tmp_path / "out"), said.append)
    learner.close()
    again = Learner(options(draft, tmp_path / "out"), said.append)
    assert again.version == version
    assert said[-1] == f"version {version} is in use"
    saved = load_model(str(VersionFolder(tmp_path / "out").version(version)), slots=1)
    again.memory.add(texts(ONE_KIND, 30, 4))
    assert again.measure().first > 0.0
    assert saved.info.vocabulary == again.vocabulary
    again.close()


def test_a_folder_of_another_draft_or_of_others_is_refused(draft: str, tmp_path: Path) -> None:
    Learner(options(draft, tmp_path / "out"), lambda _: None).close()
    with pytest.raises(VersionError, match=r"tenants: is for \*, not for alice"):
        Learner(options(draft, tmp_path / "out", tenants=("alice",)), lambda _: None)
    other = models.save(models.build(models.config("llama"), seed=3), tmp_path / "other", {"?": 0})
    with pytest.raises(VersionError, match="draft: is for "):
        Learner(options(other, tmp_path / "out"), lambda _: None)


def test_a_session_may_be_forgotten_with_every_version_that_saw_it(draft: str, tmp_path: Path) -> None:
    learner = Learner(options(draft, tmp_path / "out"), lambda _: None)
    named = [
        DecidedText(session_hash(f"id{at}"), text.prompt, text.output) for at, text in enumerate(texts(ONE_KIND, 75, 1))
    ]
    learner.round(named)
    assert learner.version == 1
    learner.close()
    seen = next(f"id{at}" for at, text in enumerate(named) if not text.held_out)
    unseen = next(f"id{at}" for at, text in enumerate(named) if text.held_out)
    said: list[str] = []
    again = Learner(options(draft, tmp_path / "out", forgotten=(unseen, seen)), said.append)
    assert again.version == 0
    assert said == [f"session {unseen}: no version saw it", f"session {seen}: versions [1] are removed", said[-1]]
    assert not VersionFolder(tmp_path / "out").has(1)
    again.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"draft": "scripted:7"}, "draft: scripted:7: a scripted model or .gguf file cannot learn"),
        ({"draft": "/no/such/folder"}, "there is no such directory"),
        ({"device": "nowhere"}, "device: 'nowhere' cannot be used here"),
    ],
)
def test_what_cannot_learn_is_refused(changed: dict[str, object], message: str, draft: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        Learner(options(**{"draft": draft, "out": tmp_path / "out", **changed}), lambda _: None)  # type: ignore[arg-type]  # as above


def test_it_may_be_stopped_between_two_steps(learner: Learner, tmp_path: Path) -> None:
    learner.stop()
    with pytest.raises(LearningStopped):
        learner.round(texts(ONE_KIND, 30, 1))
    assert json.loads((tmp_path / "out" / "current").read_text())["version"] == 0


def test_weights_are_written_in_the_numbers_that_they_were_in(tmp_path: Path) -> None:
    made = models.build(LlamaConfig(**{**models.ROTARY, "initializer_range": 0.05}))
    torch.nn.Module.to(made, torch.bfloat16)
    learner = Learner(options(models.save(made, tmp_path / "draft", {"?": 0}), tmp_path / "out"), lambda _: None)
    learnt(learner, ONE_KIND, 2, 1)
    assert learner.version > 0
    written = load_model(str(VersionFolder(tmp_path / "out").version(learner.version)), slots=1, dtype="bfloat16")
    source = load_model(str(tmp_path / "draft"), slots=1, dtype="bfloat16")
    size = [
        sum(file.stat().st_size for file in Path(each).glob("*.safetensors"))
        for each in (tmp_path / "draft", VersionFolder(tmp_path / "out").version(learner.version))
    ]
    assert size[0] == pytest.approx(size[1], rel=0.05)
    assert written.info.weights_fingerprint != source.info.weights_fingerprint
    learner.close()
