"""A head beside its target: it drafts what a plain loop does, whatever was rolled back, copied or fed before."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specwire.core.draft import HeadRequest
from specwire.core.law.noise import gumbel
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed, ModelError
from specwire.core.policy.tunables import LEAST_BEHIND
from specwire.lm import load_model
from specwire.lm.heads import slots
from specwire.lm.heads.eagle3 import Eagle3, Eagle3Config, Eagle3Runner, save
from specwire.lm.heads.openvino_heads import Eagle3Openvino
from specwire.lm.heads.slots import HeadedModel, HeadFailed, HeadStep
from specwire.lm.runners.compiled import Bucket, CompiledRunner
from tests.lm import models
from tests.lm.heads.by_hand import CONFIG, head_of, reader_of
from tests.lm.heads.walk import walk

FAMILIES = ("llama", "qwen2", "qwen3", "llama-biased-tied")
NORMS = ("norm_before_fc", "fc_norm")
HEAD = replace(CONFIG, hidden=32, heads=2, key_heads=1, head_dim=16, vocabulary=models.VOCABULARY, taps=(0, 1, 2))
GREEDY = Sampling()
SLOTS = 3
RUNTIMES = pytest.mark.parametrize("runtime", ["torch", "openvino"])


def built(
    folder: Path, kind: str = "llama", seed: int = 0, head_config: Eagle3Config = HEAD
) -> tuple[PreTrainedModel, Eagle3, str, str]:
    """A target and its head, and where they are."""
    target, head = models.build(models.config(kind), seed), head_of(head_config, seed)
    where = models.save(target, folder / "target")
    save(head, folder / "head", where, with_embedding=True)
    return target, head, where, str(folder / "head")


def headed(target: str, head: str, runtime: str = "torch") -> HeadedModel:
    lm = load_model(target, slots=SLOTS, runtime=runtime, heads=head, threads=1)
    assert isinstance(lm, HeadedModel)
    assert isinstance(lm._head, Eagle3Openvino if runtime == "openvino" else Eagle3Runner)
    return lm


@torch.no_grad()
def expected(target: PreTrainedModel, head: Eagle3, text: list[int], depth: int, origin: int = 0) -> list[int]:
    """origin: the position from which on the head knows the text."""
    return reader_of(head).draft(features_of(target, text)[origin:], text[origin:], depth)[0]


@torch.no_grad()
def features_of(target: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """Of all tokens but the last. The last layer's is tapped before the norm; transformers tells it normed."""
    held: list[torch.Tensor] = []
    hook = target.get_submodule("model.norm").register_forward_pre_hook(lambda _, inputs: held.append(inputs[0][0]))
    told = target(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    streams = [*(state[0] for state in told[:-1]), held[0]]
    return torch.cat([streams[tap] for tap in HEAD.taps], dim=-1)


@RUNTIMES
@pytest.mark.parametrize(("kind", "norm"), [*((kind, "") for kind in FAMILIES), *(("llama", norm) for norm in NORMS)])
def test_it_drafts_what_a_plain_loop_does(kind: str, norm: str, runtime: str, tmp_path: Path) -> None:
    """norm: one that readers have, beside all others."""
    flags = (norm, "head_norms", "norm_output", "norm_before_residual") if norm else ()
    more: dict[str, Any] = dict.fromkeys(flags, True)
    target, head, where, beside = built(tmp_path, kind, head_config=replace(HEAD, **more))
    lm, text = headed(where, beside, runtime), [3, 17, 8, 29, 11, 5, 23]
    lm.forward([Feed(1, 0, text[:4], 1), Feed(0, 0, text[:2], 1)])
    asked = [HeadRequest(1, text[:5], GREEDY, 3), HeadRequest(0, text[:3], GREEDY, 2)]
    assert lm.draft(asked) == [expected(target, head, text[:5], 3), expected(target, head, text[:3], 2)]


@RUNTIMES
@pytest.mark.parametrize("fits", [True, False])
def test_a_rotation_of_another_kind_is_served_where_it_is_the_target_s(
    fits: bool, runtime: str, tmp_path: Path
) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    config = models.config("llama")
    config.rope_parameters = dict(rope)
    target, head = (
        models.build(config),
        head_of(replace(HEAD, heads=4, head_dim=8, rope=rope if fits else {**rope, "factor": 2.0})),
    )
    where = models.save(target, tmp_path / "target")
    save(head, tmp_path / "head", where, with_embedding=True)
    if not fits:
        with pytest.raises(ModelError, match="config.json: rope_type: linear is served only where it is the target's"):
            headed(where, str(tmp_path / "head"), runtime)
        return
    lm, text = headed(where, str(tmp_path / "head"), runtime), [3, 17, 8, 29, 11, 5, 23]
    lm.forward([Feed(0, 0, text[:-1], 1)])
    slowly = reader_of(head)
    slowly.slower = 4
    assert lm.draft([HeadRequest(0, text, GREEDY, 3)]) == [slowly.draft(features_of(target, text), text, 3)[0]]


@RUNTIMES
def test_it_does_so_after_any_windows_rollbacks_copies_and_other_texts(runtime: str, tmp_path: Path) -> None:
    """What is stale by a row is told where it may be."""
    target, head, where, beside = built(tmp_path, seed=2)
    walk(headed(where, beside, runtime), lambda *given: expected(target, head, *given), steps=120)


def test_it_does_so_beside_a_compiled_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose graphs write their results to the same place again, as CUDA graphs do."""
    models.capture_alone(monkeypatch)
    target, head, where, beside = built(tmp_path, seed=2)
    lm = load_model(where, slots=SLOTS, heads=beside, compiled=True, threads=1)
    assert isinstance(lm, HeadedModel)
    assert isinstance(lm.runner, CompiledRunner)
    forward, returned = lm.runner._forward, dict[Bucket, list[torch.Tensor]]()

    def replayed(fed: torch.Tensor, bucket: Bucket, compiled: bool) -> list[torch.Tensor]:
        found = forward(fed, bucket, compiled)
        if bucket not in returned:
            returned[bucket] = [part.clone() for part in found if part is not None]
        for static in returned.values():
            for part in static:
                part.fill_(torch.nan)
        for part, new in zip(returned[bucket], [part for part in found if part is not None], strict=True):
            part.copy_(new)
        return returned[bucket]

    monkeypatch.setattr(lm.runner, "_forward", replayed)
    walk(lm, lambda *given: expected(target, head, *given), steps=120)
    assert len(returned) > 1


@RUNTIMES
def test_asked_again_it_drafts_the_same_and_for_another_successor_something_else(runtime: str, tmp_path: Path) -> None:
    target, head, where, beside = built(tmp_path, seed=1)
    lm, text = headed(where, beside, runtime), [3, 17, 8, 29]
    lm.forward([Feed(0, 0, text[:3], 1)])
    for last in (29, 29, 31, 6):
        asked = HeadRequest(0, [*text[:3], last], GREEDY, 3)
        assert lm.draft([asked]) == [expected(target, head, [*text[:3], last], 3)]


@RUNTIMES
def test_under_coupled_it_draws_with_the_target_s_noise(runtime: str, tmp_path: Path) -> None:
    target, head, where, beside = built(tmp_path)
    lm, text = headed(where, beside, runtime), [3, 17, 8, 29]
    lm.forward([Feed(0, 0, text[:3], 1)])
    with torch.no_grad():
        logits = reader_of(head).draft(features_of(target, text), text, 1)[1][0].double().numpy()
    ids = head.target_ids(torch.arange(HEAD.draft_vocabulary)).numpy()
    found = set()
    for seed in range(12):
        sampling = Sampling(temperature=3.0, seed=seed)
        (drafted,) = lm.draft([HeadRequest(0, text, sampling, 1)])
        assert drafted == [int(ids[(logits / 3.0 + gumbel(seed, 0, len(text), ids)).argmax()])]
        found.update(drafted)
    assert len(found) > 3


@RUNTIMES
def test_nothing_is_drafted_beyond_the_context_or_behind_one_token(runtime: str, tmp_path: Path) -> None:
    _, _, where, beside = built(tmp_path)
    lm = headed(where, beside, runtime)
    text = [3 + index % 40 for index in range(models.CONTEXT - 1)]
    lm.forward([Feed(0, 0, text[:-1], 1)])
    assert len(lm.draft([HeadRequest(0, text, GREEDY, 8)])[0]) == 1
    assert lm.draft([HeadRequest(1, [5], GREEDY, 8)]) == [[]]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=3.0, seed=1)], ids=["greedy", "coupled"])
def test_ids_that_are_no_tokens_are_not_said(sampling: Sampling, tmp_path: Path) -> None:
    """Behind the words of the tokenizer the output layer goes on, and the head would rather say what is there."""
    target, head = models.build(models.config("llama")), head_of(HEAD)
    where = models.save(target, tmp_path / "target", {f"w{index}": index for index in range(31)})
    ids = head.target_ids(torch.arange(HEAD.draft_vocabulary))
    save(head, tmp_path / "unspoilt", where, with_embedding=True)
    with torch.no_grad():
        head.lm_head.weight[ids >= 31] *= 100.0
    save(head, tmp_path / "head", where, with_embedding=True)
    text, drafted = [3, 17, 8, 29, 11], []
    for folder in ("unspoilt", "head"):
        lm = headed(where, str(tmp_path / folder))
        assert lm.info.vocabulary == 31
        lm.forward([Feed(0, 0, text[:-1], 1)])
        drafted += lm.draft([HeadRequest(0, text, sampling, 6)])
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) == 6
    assert all(token in ids and token < 31 for token in drafted[0])


def test_auto_means_openvino_beside_it_and_torch_where_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head, where, beside = built(tmp_path)
    text, kinds = [3, 17, 8, 29], list[type]()
    for _ in range(2):
        lm = load_model(where, slots=1, runtime="auto", heads=beside, threads=1)
        assert isinstance(lm, HeadedModel)
        kinds.append(type(lm._head))
        lm.forward([Feed(0, 0, text[:3], 1)])
        assert lm.draft([HeadRequest(0, text, GREEDY, 3)]) == [expected(target, head, text, 3)]
        monkeypatch.setitem(sys.modules, "specwire.lm.runners.openvino.runner", None)
    assert kinds == [Eagle3Openvino, Eagle3Runner]


def test_a_head_that_says_no_tokens_is_refused(tmp_path: Path) -> None:
    words = {f"w{index}": index for index in range(31)}
    where = models.save(models.build(models.config("llama")), tmp_path / "target", words)
    head, own = head_of(HEAD), torch.arange(HEAD.draft_vocabulary)
    head.d2t.copy_(31 + own % 19 - own)
    save(head, tmp_path / "head", where, with_embedding=True)
    with pytest.raises(ModelError, match="head: says none of the 31 tokens of target"):
        headed(where, str(tmp_path / "head"))


def test_a_head_of_another_target_is_refused_in_a_sentence(tmp_path: Path) -> None:
    _, _, where, _ = built(tmp_path)
    for name, changed, message in (
        ("wide", replace(HEAD, hidden=16, target_hidden=16), "target_hidden_size is 16, and target needs 32"),
        ("other", replace(HEAD, vocabulary=60), "vocab_size is 60, and target needs 50"),
        ("deep", replace(HEAD, taps=(0, 1, 7)), "must be 3 of the target's layers 0 to 2"),
    ):
        save(head_of(changed), tmp_path / name, where, with_embedding=True)
        with pytest.raises(ModelError, match=message):
            headed(where, str(tmp_path / name))


def test_where_heads_are_not_served_it_is_said(tmp_path: Path) -> None:
    _, _, where, beside = built(tmp_path)
    with pytest.raises(ModelError, match="heads: are not served with deterministic on torch"):
        load_model(where, slots=1, heads=beside, deterministic=True)
    other = models.save(models.build(models.config("gpt2")), tmp_path / "gpt2")
    with pytest.raises(ModelError, match="a GPT2LMHeadModel is not computed by a runner that tells its features"):
        load_model(other, slots=1, heads=beside)


def test_a_long_text_is_read_in_parts_while_it_is_fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head, where, beside = built(tmp_path, seed=3)
    monkeypatch.setattr(slots, "MOST_UNREAD", 4)
    lm, text = headed(where, beside), [3 + (7 * index) % 40 for index in range(30)]
    reads = list[int]()
    read = lm._head.read

    def watched(feeds: Sequence[Feed], features: torch.Tensor) -> object:
        reads.append(len(feeds[0].tokens))
        return read(feeds, features)

    monkeypatch.setattr(lm._head, "read", watched)
    for start in range(0, 28, 4):
        lm.forward([Feed(0, start, text[start : start + 4], 1)])
        assert lm.unread(0) == 4
        lm.catch_up([HeadRequest(0, text[:29], GREEDY, 0)])
    assert reads == [4, 4, 4, 4, 4, 4, 3], "of the last position the draft's first row is"
    assert lm.draft([HeadRequest(0, text[:29], GREEDY, 2)]) == [expected(target, head, text[:29], 2)]
    assert reads[7:] == [1]


def test_what_nobody_reads_is_not_kept_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head begins anew there, also behind texts that take it over; of a new one in the slot it knows all."""
    target, head, where, beside = built(tmp_path, seed=3)
    monkeypatch.setattr(slots, "MOST_UNREAD", 8)
    lm, text = headed(where, beside), [3 + (7 * index) % 40 for index in range(30)]
    for start in range(0, 28, 4):
        lm.forward([Feed(0, start, text[start : start + 4], 1)])
    assert lm.unread(0) is None
    assert lm.draft([HeadRequest(0, text[:29], GREEDY, 2)]) == [[]]
    lm.copy(0, 1, 12)
    assert lm.unread(1) is None
    lm.discard(0)
    lm.forward([Feed(0, 0, text[:4], 1)])
    assert lm.draft([HeadRequest(0, text[:5], GREEDY, 2)]) == [expected(target, head, text[:5], 2)]


@RUNTIMES
def test_nothing_is_tapped_or_kept_for_texts_that_take_no_head(runtime: str, tmp_path: Path) -> None:
    target, head, where, beside = built(tmp_path)
    lm, text = headed(where, beside, runtime), [3, 17, 8, 29]
    told = lm.runner.tapped
    lm.heed([1])
    lm.forward([Feed(0, 0, text[:3], 1), Feed(2, 0, text[:2], 1)])
    assert not lm.runner.tapping
    assert lm.runner.tapped is told or lm.runner.tapped.numel() == 0
    assert [lm._slots[slot].features.nbytes for slot in range(SLOTS)] == [0, 0, 0]
    assert (lm.unread(0), lm.draft([HeadRequest(0, text, GREEDY, 3)])) == (None, [[]])
    lm.forward([Feed(0, 3, [5], 1), Feed(1, 0, text[:3], 1)])
    assert lm.runner.tapping
    assert (lm.unread(0), lm.unread(1)) == (None, 3)
    assert lm._slots[0].features.nbytes == 0
    assert lm.draft([HeadRequest(1, text, GREEDY, 3)]) == [expected(target, head, text, 3)]
    lm.discard(0)
    lm.heed(None)
    lm.forward([Feed(0, 0, text[:3], 1)])
    assert lm.draft([HeadRequest(0, text, GREEDY, 3)]) == [expected(target, head, text, 3)]
    lm.stop()
    lm.forward([Feed(0, 3, text[3:], 1)])
    assert lm.unread(0) is None


@RUNTIMES
def test_the_target_s_rows_are_the_same_bits_whether_it_is_tapped_or_not(runtime: str, tmp_path: Path) -> None:
    _, _, where, beside = built(tmp_path, "qwen3")
    lm, random, rows = headed(where, beside, runtime), Random(5), list[torch.Tensor]()
    feeds = [[random.randrange(3, models.VOCABULARY) for _ in range(count)] for count in (9, 1, 1, 4, 1, 2)]
    for heeded in (None, ()):
        lm.discard(0)
        lm.heed(heeded)
        for tokens in feeds:
            rows.append(lm.forward([Feed(0, lm.cached(0), tokens, len(tokens))]).clone())
    assert torch.equal(torch.cat(rows[: len(feeds)]), torch.cat(rows[len(feeds) :]))


@pytest.mark.parametrize("read_before", [False, True])
@RUNTIMES
def test_of_what_is_unread_only_the_end_may_be_read(runtime: str, read_before: bool, tmp_path: Path) -> None:
    """The head then drafts as behind that end, also where it had read the beginning."""
    target, head, where, beside = built(tmp_path, seed=1)
    lm, text = headed(where, beside, runtime), [3 + (7 * index) % 40 for index in range(LEAST_BEHIND + 12)]
    end = len(text) - 1
    lm.forward([Feed(0, 0, text[:4], 1)])
    if read_before:
        lm.draft([HeadRequest(0, text[:5], GREEDY, 2)])
    lm.forward([Feed(0, 4, text[4:end], 1)])
    lm.skip(0, end + 5)
    assert lm.unread(0) == (end - 4 if read_before else end), "it has no more than that"
    lm.skip(0, LEAST_BEHIND)
    assert lm.unread(0) == LEAST_BEHIND
    request, drafted = HeadRequest(0, text, GREEDY, 3), expected(target, head, text, 3, end - LEAST_BEHIND)
    lm.catch_up([request])
    assert lm.draft([request]) == [drafted]


def test_it_does_so_whatever_was_kept_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts take no head for a while. Its very rows are compared, too, where it knows a text from its beginning:
    two rollbacks to the same place left a row of the old successor.
    """
    monkeypatch.setattr(slots, "LEAST_BEHIND", 2)
    target, head, where, beside = built(tmp_path, seed=2)
    lm, fresh, compared = headed(where, beside), headed(where, beside), list[int]()

    def check(slot: int, text: list[int]) -> None:
        if lm._slots[slot].origin == 0:
            fresh.discard(0)
            fresh.forward([Feed(0, 0, text[:-1], 1)])
            fresh.draft([HeadRequest(0, text, GREEDY, 1)])
            torch.testing.assert_close(rows_of(lm, slot, len(text) - 1), rows_of(fresh, 0, len(text) - 1))
            compared.append(slot)

    anew = walk(lm, lambda *given: expected(target, head, *given), 600, 9, heeding=True, check=check)
    assert anew > 20
    assert len(compared) > 60


def rows_of(lm: HeadedModel, slot: int, stop: int) -> torch.Tensor:
    """The head's keys and values."""
    assert isinstance(lm._head, Eagle3Runner)
    return lm._head.cache[0, slot, :, :stop]


def test_nothing_of_a_text_stays_in_the_head(tmp_path: Path) -> None:
    """Draft rows lie behind the text."""
    _, _, where, beside = built(tmp_path)
    lm = headed(where, beside)
    lm.forward([Feed(0, 0, [3, 17, 8], 1)])
    lm.draft([HeadRequest(0, [3, 17, 8, 29], GREEDY, 6)])
    assert bool(rows_of(lm, 0, 9).any())
    lm.discard(0)
    assert not bool(rows_of(lm, 0, models.CONTEXT).any())


def test_a_text_whose_values_are_not_finite_is_lost_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head, where, beside = built(tmp_path, seed=4)
    lm, text = headed(where, beside), [3, 17, 8, 29, 11]
    lm.forward([Feed(slot, 0, text[:4], 1) for slot in range(2)])
    asked = [HeadRequest(slot, text, GREEDY, 3) for slot in range(2)]
    own = expected(target, head, text, 3)
    assert lm.draft(asked) == [own, own]
    assert isinstance(lm._head, Eagle3Runner)
    follow = lm._head.follow

    def broken(feeds: Sequence[Feed], states: torch.Tensor, depth: int) -> HeadStep:
        step = follow(feeds, states, depth)
        for row, feed in enumerate(feeds):
            if feed.slot == 0:
                step.logits[row, 3] = torch.nan
        return step

    monkeypatch.setattr(lm._head, "follow", broken)
    assert lm.draft(asked) == [own[:1], own]
    assert (lm.unread(0), lm.unread(1)) == (None, 0)
    assert not bool(rows_of(lm, 0, models.CONTEXT).any())
    assert lm.draft(asked) == [[], own]


@pytest.mark.parametrize("name", ["read", "follow"])
def test_behind_a_draft_that_lacked_memory_it_drafts_what_a_plain_loop_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head, where, beside = built(tmp_path, seed=4)
    lm, text = headed(where, beside), [3, 17, 8, 29, 11]
    lm.forward([Feed(0, 0, text[:4], 1)])

    def short(*_: object) -> HeadStep:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(lm._head, name, short)
        with pytest.raises(MemoryError):
            lm.draft([HeadRequest(0, text, GREEDY, 3)])
    assert lm.draft([HeadRequest(0, text, GREEDY, 3)]) == [expected(target, head, text, 3)]
    lm.forward([Feed(0, 4, [*text[4:], 23], 1)])
    longer = [*text, 23, 7]
    assert lm.draft([HeadRequest(0, longer, GREEDY, 3)]) == [expected(target, head, longer, 3)]


@RUNTIMES
def test_logits_that_are_not_finite_are_a_failure(runtime: str, tmp_path: Path) -> None:
    _, head, where, _ = built(tmp_path)
    with torch.no_grad():
        head.norm.weight.fill_(1e30)
        head.lm_head.weight[3] = 1e30
    save(head, tmp_path / "broken", where, with_embedding=True)
    lm = headed(where, str(tmp_path / "broken"), runtime)
    lm.forward([Feed(0, 0, [3, 17, 8], 1)])
    with pytest.raises(HeadFailed, match="not finite"):
        lm.draft([HeadRequest(0, [3, 17, 8, 29], GREEDY, 3)])
