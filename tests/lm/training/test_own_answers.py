"""A target's own answers: what is kept is what the target computes, nothing is measured by, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM

from specwire.core.model import ModelError
from specwire.lm.heads.eagle3 import Eagle3, Eagle3Config
from specwire.lm.model_files import ModelText
from specwire.lm.training.head import guessed, own_ids_of, unrolled
from specwire.lm.training.loop import draft_ids
from specwire.lm.training.own_answers import (
    INDEX,
    NONE,
    KeptText,
    KeptTexts,
    OwnAnswers,
    Teacher,
    batches,
    loops,
    parted,
)
from specwire.lm.training.prompts import OPENINGS, PASSAGE, Prompts, functions_of, parts_of, texts_of
from tests.lm.training.answering import TAPS, TEMPLATE, WIDTH, WORDS, answer_shortly, save_target

ABOUT = {"target": "tiny"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("target"))


def answered(teacher: Teacher, folder: Path, tokens: int) -> KeptTexts:
    """A folder with so many tokens of answers."""
    kept = KeptTexts(folder, WIDTH, ABOUT)
    OwnAnswers(teacher, Prompts(teacher.text, teacher.ends, [], seed=3), kept, seed=1, texts=3).write(tokens, print)
    return kept


@pytest.fixture
def answering(target: str, monkeypatch: pytest.MonkeyPatch) -> Teacher:
    answer_shortly(monkeypatch)
    return Teacher(target, TAPS, texts=3)


@torch.no_grad()
def test_what_is_kept_is_what_the_target_says_of_the_text(answering: Teacher, target: str, tmp_path: Path) -> None:
    """Features and best guesses, of texts that were computed beside others; greedy ones are its best tokens."""
    kept = answered(answering, tmp_path, 150)
    assert kept.answers >= 150
    assert {text.kind for text in kept.texts} >= {"turn"}
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    streams: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, given: streams.append(given[0]))
    for text in kept.texts:
        tokens, features, best, logs = kept.rows(text)
        assert tokens[0] == WORDS["user"] or text.kind == "plain"
        told = model(tokens[None], output_hidden_states=True)
        taps = torch.cat([*told.hidden_states[:2], streams.pop()], -1)[0]
        assert torch.allclose(features[:-1].float(), taps[:-1], atol=0.02, rtol=0.01)
        expected = told.logits[0, text.learnt - 1 : -1].log_softmax(-1)
        found = torch.gather(expected, 1, best[text.learnt :])
        assert torch.allclose(found, logs[text.learnt :], atol=0.02)
        assert (logs[: text.learnt] == NONE).all()
        if text.temperature == 0:
            assert torch.equal(best[text.learnt :, 0], tokens[text.learnt :])


def test_more_are_added_to_those_that_are_kept_and_none_twice(answering: Teacher, tmp_path: Path) -> None:
    for tokens in (40, 90):
        answered(answering, tmp_path, tokens)
    again = KeptTexts(tmp_path, WIDTH, ABOUT)
    asked = [tuple(again.rows(text).tokens[: text.learnt].tolist()) for text in again.texts]
    assert again.answers >= 90
    assert len(set(asked)) == len(asked)


def test_a_text_that_was_not_finished_is_cut_off(answering: Teacher, tmp_path: Path) -> None:
    kept = answered(answering, tmp_path, 30)
    before = [kept.rows(text) for text in kept.texts]
    for name in ("tokens", "features", INDEX):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"at": 3')
    held = {path: path.read_bytes() for path in tmp_path.iterdir()}
    again = KeptTexts(tmp_path, WIDTH, ABOUT)
    assert again.texts == kept.texts
    assert torch.equal(again.rows(again.texts[0]).best, before[0].best)
    assert {path: path.read_bytes() for path in held} == held, "who only reads changes nothing: others may be writing"
    again.add(before[0], 2, "turn", 0.0)
    for text, rows in zip(again.texts, [*before, before[0]], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(again.rows(text), rows, strict=True))


@pytest.mark.parametrize(
    ("about", "width", "message"),
    [({"target": "other"}, WIDTH, "target: is tiny, not other"), (ABOUT, 64, "width: is 96, not 64")],
)
def test_texts_of_another_target_are_refused(about: dict[str, str], width: int, message: str, tmp_path: Path) -> None:
    KeptTexts(tmp_path, WIDTH, ABOUT)
    with pytest.raises(ModelError, match=f"about.json: {message}"):
        KeptTexts(tmp_path, width, about)


def test_the_first_texts_are_those_with_so_many_tokens_of_answers(answering: Teacher, tmp_path: Path) -> None:
    kept = answered(answering, tmp_path, 60)
    whole = [*kept.texts]
    kept.first(30)
    assert kept.texts == whole[: len(kept.texts)]
    assert kept.answers >= 30 > kept.answers - kept.texts[-1].answer
    assert KeptTexts(tmp_path, WIDTH, ABOUT).texts == whole


def test_files_that_are_too_short_are_refused(answering: Teacher, tmp_path: Path) -> None:
    answered(answering, tmp_path, 30)
    (tmp_path / "best").write_bytes(b"")
    with pytest.raises(ModelError, match=r"best: has 0 bytes, and index.jsonl tells of \d+"):
        KeptTexts(tmp_path, WIDTH, ABOUT)


def test_nothing_shares_a_run_of_thirteen_tokens_with_what_is_measured_by(tmp_path: Path) -> None:
    teacher_text = ModelText(_tokenizer().to_str().encode(), "", {}, {})
    run = " ".join(f"w{n}" for n in range(13))
    (tmp_path / "bench.jsonl").write_text(json.dumps({"turns": ["w1 w2", f"w40 {run} w41"]}) + "\n")
    prompts = Prompts(teacher_text, [2], [*texts_of([tmp_path / "bench.jsonl"], "apart")], seed=1)
    assert not prompts.new(prompts.encoded(f"w30 w31 {run}"), "given")
    assert not prompts.is_apart(prompts.encoded(f"{run} w9"))
    assert prompts.new(prompts.encoded(f"w30 {run.removesuffix('w12')} w31"), "given")


def test_what_is_given_is_asked_first_and_once(answering: Teacher, tmp_path: Path) -> None:
    """But for what is too long, and what is measured by."""
    (tmp_path / "users.jsonl").write_text("".join(json.dumps({"prompt": f"w1 w{n} w2"}) + "\n" for n in range(9)))
    run = " ".join(f"w{n}" for n in range(13))
    given = [*texts_of([tmp_path / "users.jsonl"], "prompts"), "w1 w3 w2", run, "w7 " * 400]
    prompts = Prompts(answering.text, answering.ends, [f"w40 {run}"], 3, given)
    asked = [prompts.next() for _ in range(12)]
    assert [each.kind for each in asked].count("given") == 9
    assert {each.kind for each in asked[:9]} == {"given"}
    frame = prompts.frame
    said = sorted(tuple(each.ids[len(frame.before) : -len(frame.behind)]) for each in asked[:9])
    assert said == sorted(tuple(prompts.encoded(f"w1 w{n} w2")) for n in range(9))


def test_what_a_template_says_before_each_turn_makes_no_two_the_same() -> None:
    """Nor a beginning that requests have alike; a turn of its own making that begins like another is the same."""
    text = ModelText(_tokenizer().to_str().encode(), "{{ 'w8 ' * 24 }}" + TEMPLATE, {}, {})
    same = " ".join(f"w{n % 7}" for n in range(21))
    given = [f"{same} w{n}" for n in range(9)]
    prompts = Prompts(text, [2], [], 3, given)
    asked = [prompts.next() for _ in range(9)]
    assert [each.kind for each in asked] == ["given"] * 9
    assert not prompts.new(asked[0].ids, "given")
    turn = prompts.encoded(f"w9 {same}")
    assert prompts.new([*prompts.frame.before, *turn, *prompts.frame.behind], "turn")
    assert [prompts.new(each, "turn") for each in (turn, [*turn, *turn], turn[1:] * 2)] == [False, False, True]


def test_a_line_of_prompts_may_have_any_character_and_must_be_texts(tmp_path: Path) -> None:
    file = tmp_path / "users.jsonl"
    told = ["a\u2028b", "c\x85d"]
    file.write_text("".join(json.dumps({"prompt": each}, ensure_ascii=False) + "\n" for each in told), encoding="utf-8")
    assert [*texts_of([file], "prompts")] == told
    file.write_text("{")
    with pytest.raises(ModelError, match=r"apart: .*users.jsonl: cannot be read"):
        [*texts_of([file], "apart")]
    for wrong in ({"turns": "abc"}, {"turns": [{"role": "user", "content": "a"}]}, {"prompt": 5}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ModelError, match=r"prompts: .*users.jsonl: cannot be read: .*must be a list of strings"):
            [*texts_of([file], "prompts")]


def test_functions_with_docstrings_are_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        'class A:\n    def told(self, x: int) -> int:\n        """Tell twice of it, and say so in a sentence.\n\n'
        '        More.\n        """\n        return 2 * x\n\n    def bare(self): ...\n'
    )
    (tmp_path / "broken.py").write_text("def (")
    (found,) = functions_of(tmp_path / "one.py")
    assert (found.name, found.first) == ("told", "Tell twice of it, and say so in a sentence.")
    assert found.head.startswith('def told(self, x: int) -> int:\n    """Tell')
    assert found.head.endswith('    """\n')
    assert [*functions_of(tmp_path / "broken.py")] == []


def test_turns_are_begun_for_the_target_and_passages_are_asked_about(target: str) -> None:
    """Openings by real words and the end of a request for the target's answer, by a tokenizer that knows them."""
    words = [*dict.fromkeys(["user", "<end>", "answer", *" ".join(OPENINGS).split()])]
    known = Tokenizer(WordLevel({word: at for at, word in enumerate(["?", *words])}, unk_token="?"))
    known.pre_tokenizer = WhitespaceSplit()
    prompts = Prompts(ModelText(known.to_str().encode(), TEMPLATE, {}, {}), [2], [], seed=1)
    asked = [prompts.next() for _ in range(60)]
    turns = {known.decode(one.ids) for one in asked if one.kind == "turn"}
    assert turns <= {f"user {opening}".strip() for opening in ["", *(" ".join(each.split()) for each in OPENINGS)]}
    assert len(turns) > 10
    passages = [one for one in asked if one.kind == "passage"]
    assert passages
    assert all(one.complete and known.decode(one.ids[-1:]) == "answer" for one in passages)


def test_a_passage_is_paragraphs_of_prose() -> None:
    prose = "It tells what was done, by whom, and why it was done so and not in another way, at length. " * 3
    table = "| a | b |\n| - | - |\n| 1 | 2 |\n" * 20
    (found,) = parts_of(f"{prose}\n\n{table}\n\n* a list\n\n{prose}")
    assert found == f"{prose.strip()}\n\n{prose.strip()}"
    assert [*parts_of(prose)] == []
    many = [*parts_of("\n\n".join([prose] * 40))]
    assert len(many) > 2
    assert all(len(each) in PASSAGE for each in many)


def test_an_answer_that_repeats_itself_has_ended() -> None:
    assert loops([*range(20), *[1, 2, 3] * 16])
    assert not loops([*range(20), *[1, 2, 3] * 8])
    assert not loops([*range(100)])


def test_batches_hold_all_texts_of_about_one_length_in_the_same_order_every_time() -> None:
    texts = [KeptText(0, length, 1, "turn", 0.0) for length in (30, 7, 9, 31, 8, 90, 10)]
    order, again = batches(texts, 64, seed=2), batches(texts, 64, seed=2)
    epoch = [next(order) for _ in range(len(parted(sorted(texts, key=lambda text: text.length), 64)))]
    assert epoch == [next(again) for _ in epoch]
    assert sorted(text.length for batch in epoch for text in batch) == [7, 8, 9, 10, 30, 31, 90]
    assert all(len(batch) * max(text.length for text in batch) <= 64 for batch in epoch if len(batch) > 1)


def _tokenizer() -> Tokenizer:
    made = Tokenizer(WordLevel(WORDS, unk_token="?"))
    made.pre_tokenizer = WhitespaceSplit()
    return made


@pytest.fixture
def head(target: str) -> Eagle3:
    torch.manual_seed(5)
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = Eagle3Config(
        hidden=32,
        inner=48,
        heads=4,
        key_heads=2,
        head_dim=8,
        vocabulary=50,
        draft_vocabulary=40,
        taps=TAPS,
        norm_before_residual=True,
    )
    made = Eagle3(config, model.get_parameter("model.embed_tokens.weight").detach().clone())
    made.d2t.copy_(draft_ids(torch.arange(50), 40) - torch.arange(40))
    with torch.no_grad():
        for parameter in (made.lm_head.weight, made.o_proj.weight, made.down_proj.weight):
            parameter.mul_(3)
    return made


def test_chains_are_those_of_the_head_unrolled(
    answering: Teacher, head: Eagle3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, tested and right guesses of each step are as by the whole head at all places, masked by hand."""
    kept = answered(answering, tmp_path, 150)
    monkeypatch.setattr("specwire.lm.training.head.LIKELY", -2.5)
    batch, ids, depth = kept.batch(kept.texts), own_ids_of(head), 3
    rows = batch.rows._replace(features=batch.rows.features.float())
    for row, text in enumerate(kept.texts):  # Texts of which each first guess is right, and so some later ones.
        for place in range(text.learnt - 2, text.length - 2):
            first = next(unrolled(head, rows.tokens[row : row + 1], rows.features[row : row + 1], 1))
            guess = head.target_ids(first[0, place].argmax())
            rows.tokens[row, place + 2] = rows.best[row, place + 2, 0] = guess
    found = guessed(head, batch._replace(rows=rows), ids, depth, 0.5, learns=False)
    loss, tested, right = torch.zeros(()), [0] * depth, [0] * depth
    starts = int(batch.scored[:, 2:].sum())
    for row, text in enumerate(kept.texts):
        padded = torch.zeros(1, text.length + depth + 1, dtype=torch.long)
        padded[:, : text.length] = rows.tokens[row, : text.length]
        features = torch.zeros(1, text.length + depth + 1, WIDTH)
        features[:, : text.length] = rows.features[row, : text.length]
        alive = {place for place in range(text.length - 2) if place + 2 >= text.learnt}
        for step, logits in enumerate(unrolled(head, padded, features, depth)):
            log_q = logits[0].log_softmax(-1)
            for place in sorted(alive):
                at = place + step + 2
                shares = rows.logs[row, at].exp() * (ids[rows.best[row, at]] < 40)
                wanted = shares / shares.sum() + 0.5 * torch.eye(32)[shares.argmax()]
                own = ids[rows.best[row, at]].clamp(max=39)
                loss = loss - 0.5**step / starts * (wanted * log_q[place, own]).sum()
                said = int(head.target_ids(log_q[place].argmax()))
                same = said == int(rows.best[row, at, 0])
                tested[step], right[step] = tested[step] + 1, right[step] + int(same)
                if not same or said != int(rows.tokens[row, at]) or at + 1 >= text.length:
                    alive.discard(place)
    assert (found.tested, found.right) == (tested, right)
    assert found.right[-1] > 0
    assert torch.allclose(found.loss, loss, rtol=1e-3)
    learning = guessed(head, batch, ids, depth, 0.5, learns=True)
    assert learning.tested[0] == tested[0]
    slopes = torch.autograd.grad(found.loss, [head.lm_head.weight, head.fc.weight])
    expected = torch.autograd.grad(loss, [head.lm_head.weight, head.fc.weight])
    for slope, other in zip(slopes, expected, strict=True):
        assert torch.allclose(slope, other, atol=1e-4, rtol=1e-2)
