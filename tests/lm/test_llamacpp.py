"""llama.cpp behind the same interface: the same logits, the same refusals of what it cannot serve."""

from __future__ import annotations

import ctypes
import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from demo_pair import DRAFT
from specwire.core.model import LLAMACPP, TreeFeed
from specwire.lm import Feed, ModelError, load_model
from specwire.lm.gguf_file import StoredTensor, read_gguf
from specwire.lm.kv_cache import CachedLM, Sizes
from specwire.lm.runners.llamacpp import runner as llamacpp
from specwire.lm.runners.llamacpp.deterministic import DeterministicLlamaRunner
from specwire.lm.runners.llamacpp.runner import GgufWeights, LlamaBatch, LlamaCppRunner, LlamaMemory, gguf_trial
from specwire.lm.runners.llamacpp.sequences import SequenceRun, SequenceTable
from tests.lm.gguf_files import rounded, rounds_alike, write, written
from tests.lm.models import CONTEXT, EMBEDDING, VOCABULARY, build, config, plain, save
from tests.lm.walk import Texts, Trees, last_rows
from tests.real_models import GEMMA, NAMES, real_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not there: make setup-llamacpp"
)

KINDS = ["llama", "llama-biased-tied", "mistral", "qwen2", "qwen3"]
SLOTS = 3
# Of logits of a few units: activations are rounded to 8 bits, too, before they are multiplied with such weights.
QUANTISED_TOLERANCE = 0.25


def load(model: PreTrainedModel, folder: Path, kind: Type = Type.F32, slots: int = SLOTS, **options: Any) -> CachedLM:
    lm = load_model(write(model, folder / "model.gguf", kind), slots=slots, runtime=LLAMACPP, **options)
    assert isinstance(lm, CachedLM)
    assert isinstance(lm.runner, LlamaCppRunner)
    return lm


@pytest.mark.parametrize("kind", KINDS)
def test_any_interleaving_of_extend_and_rollback_gives_the_plain_forward(kind: str, tmp_path: Path) -> None:
    model = build(config(kind))
    texts = Texts(model, load(model, tmp_path), seed=len(kind))
    for _ in range(60):
        texts.step()


@pytest.mark.parametrize(("kind", "for_branches"), [("llama", 32), ("llama", 2), ("qwen3", 3)])
def test_any_growing_and_pruning_gives_each_node_the_logits_of_its_line(
    kind: str, for_branches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few sequences branches give theirs up to others, and their rows are fed again."""
    monkeypatch.setattr(LlamaCppRunner, "for_branches", for_branches)
    model = build(config(kind))
    lm = load(model, tmp_path)
    assert lm.branches
    walk = Trees(model, lm, seed=len(kind))
    for _ in range(60):
        walk.step()
    assert walk.aside > 60
    assert walk.moved > 30


@pytest.mark.parametrize("what", ["texts", "trees"])
def test_cells_are_taken_as_texts_grow(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held moves to a context with more; branches are fed again."""
    monkeypatch.setattr(LlamaCppRunner, "cells", 8)
    made: list[int] = []
    right = LlamaCppRunner._made

    def counted(runner: LlamaCppRunner, cells: int) -> Any:
        made.append(cells)
        return right(runner, cells)

    monkeypatch.setattr(LlamaCppRunner, "_made", counted)
    model = build(config("llama"))
    lm = load(model, tmp_path)
    assert made[0] == 8  # in truth one for each sequence
    walk = Texts(model, lm, seed=5) if what == "texts" else Trees(model, lm, seed=5)
    for _ in range(40):
        walk.step()
    assert len(made) > 2
    assert made == sorted(made)
    assert made[-1] <= SLOTS * CONTEXT


def test_a_context_that_cannot_grow_is_told_as_a_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaCppRunner, "cells", 48)
    model = build(config("llama"))
    lm = load(model, tmp_path)
    text = list(range(1, 31))
    lm.forward([Feed(0, 0, text[:20], 0)])
    with monkeypatch.context() as patch:
        patch.setattr(llamacpp.library().functions, "llama_init_from_model", lambda *_: None)
        with pytest.raises(MemoryError, match="no cells for 112 positions"):
            lm.forward([Feed(1, 0, [5] * 46, 1), Feed(2, 0, [5] * 46, 1)])
    (row,) = lm.forward([Feed(0, 20, text[20:], 1)])
    torch.testing.assert_close(row, plain(model, text)[-1], atol=1e-4, rtol=1e-4)


def test_a_text_with_branches_is_not_harmed_by_another_that_is_not_finite(tmp_path: Path) -> None:
    model = spoilt(build(config("llama")))
    lm = load(model, tmp_path)
    text = [1, 2, 3, 4, 5]
    lm.forward([Feed(0, 0, text, 0)])
    lm.forward([Feed(0, 5, [10, 11], 2, TreeFeed(5, ((), ())))])
    lm.forward([Feed(1, 0, [9, 7, 9], 1), Feed(0, 7, [12], 1, TreeFeed(5, ((6,),)))])
    assert lm.failed == {1}
    rows = lm.forward([Feed(0, 8, [13, 14], 2, TreeFeed(5, ((5,), (6, 7))))])
    expected = last_rows(model, [[*text, 10, 13], [*text, 11, 12, 14]])
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("hindrance", ["slots", "trial"])
def test_a_drafter_without_sequences_for_branches_drafts_chains(
    hindrance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does one that the trial at load finds to compute something else in a tree."""
    model = build(config("llama"))
    if hindrance == "slots":
        assert not load(model, tmp_path, slots=255).branches
        assert load(model, tmp_path, slots=254).branches
        return
    monkeypatch.setattr(SequenceTable, "keep", lambda *_: None)
    lm = load(model, tmp_path)
    assert not lm.branches
    with pytest.raises(ValueError, match="tree: this model takes none"):
        lm.forward([Feed(0, 0, [1], 1, TreeFeed(0, ((),)))])


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.F16])
def test_rounded_weights_give_what_they_stand_for(kind: Type, tmp_path: Path) -> None:
    model = build(config("llama"))
    lm = load(model, tmp_path, kind)
    whole = plain(model, range(1, 30))
    rounded(model, kind)
    texts = Texts(model, lm, seed=4, tolerance=QUANTISED_TOLERANCE)
    for _ in range(40):
        texts.step()
    assert lm.info.dtype == kind.name.lower()
    assert float((whole - plain(model, range(1, 30))).abs().max()) > 1e-3  # it was rounded


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_keys_and_values_may_be_kept_in_less(kv_type: str, tmp_path: Path) -> None:
    wide = config("mistral")
    wide.head_dim = 32
    model = build(wide)
    lm = load(model, tmp_path, kv_type=kv_type)
    assert lm.kv_bytes < load(model, tmp_path).kv_bytes
    text = list(range(1, 30))
    lm.forward([Feed(1, 0, text[:20], 0)])
    lm.copy(1, 0, 12)
    rows = lm.forward([Feed(0, 12, text[12:], 17)])
    off = (rows - plain(model, text)[12:]).abs().max() / plain(model, text).abs().max()
    assert float(off) < {"f16": 0.01, "q8_0": 0.03, "q4_0": 0.5}[kv_type]


# ----------------------------------------------------------------------------------------------------------------------
# `--deterministic`: a row has the bits of its text fed token by token, whatever is computed with it.


def load_alike(model: PreTrainedModel, folder: Path, kind: Type = Type.F32, **options: Any) -> CachedLM:
    """Skips where llama.cpp itself gives a text's rows other bits in blocks of 16 than in blocks of 32."""
    write(model, folder / "model.gguf", kind)
    if not rounds_alike(GgufWeights(read_gguf(str(folder / "model.gguf")))):
        pytest.skip("this build of llama.cpp rounds a row by how many are computed with it")
    return load(model, folder, kind, deterministic=True, **options)


def steps(lm: CachedLM, slot: int, text: Sequence[int], start: int = 0) -> torch.Tensor:
    """Rows of the text from `start` on, a token a forward. The slot holds what is before."""
    return torch.cat([lm.forward([Feed(slot, at, text[at : at + 1], 1)]) for at in range(start, len(text))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [Type.F32, Type.Q8_0, Type.Q4_0])
def test_any_interleaving_gives_the_bits_of_single_steps(kind: str, weights: Type, tmp_path: Path) -> None:
    """Prompts in parts of any size, windows, rollbacks, prefixes of others, beside any others; cells grow meanwhile."""
    lm = load_alike(build(config(kind)), tmp_path, weights, slots=4, context=CONTEXT)
    assert (lm.info.deterministic, lm.branches) == (True, False)
    texts = [[7 * at * (slot + 2) % VOCABULARY for at in range(CONTEXT)] for slot in range(2)]
    alone = [steps(lm, 0, text) for text in texts]
    source, held = random.Random(len(kind)), [0] * lm.slots
    of = [0] * lm.slots
    for _ in range(60):
        slot, other = source.sample(range(lm.slots), 2)
        match source.randrange(3):
            case 0:
                held[slot] = source.randint(0, held[slot])
                lm.rollback(slot, held[slot])
            case 1:
                of[slot], held[slot] = of[other], source.randint(0, held[other])
                lm.copy(other, slot, held[slot])
            case 2:
                lm.discard(slot)
                of[slot], held[slot] = source.randrange(2), 0
        feeds = [
            Feed(slot, held[slot], texts[of[slot]][held[slot] : held[slot] + source.choice((1, 1, 2, 5, 40))], 1)
            for slot in source.sample(range(lm.slots), source.randint(1, lm.slots))
            if held[slot] < CONTEXT
        ]
        feeds = [feed._replace(wanted=source.randint(1, len(feed.tokens))) for feed in feeds]
        if not feeds:
            continue
        rows = lm.forward(feeds)
        expected = [alone[of[feed.slot]][feed.stop - feed.wanted : feed.stop] for feed in feeds]
        assert torch.equal(rows, torch.cat(expected))
        for feed in feeds:
            held[feed.slot] = feed.stop


def test_a_text_keeps_its_bits_as_others_grow_and_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells move to a context with more; another's NaN, and a forward that computes nothing, leave it whole."""
    made: list[int] = []
    right = DeterministicLlamaRunner._made

    def counted(runner: DeterministicLlamaRunner, cells: int) -> Any:
        made.append(cells)
        return right(runner, cells)

    monkeypatch.setattr(DeterministicLlamaRunner, "cells", 8)
    monkeypatch.setattr(DeterministicLlamaRunner, "_made", counted)
    lm = load_alike(spoilt(build(config("llama"))), tmp_path)
    text = [1 + at % 6 for at in range(40)]
    alone = steps(lm, 2, text)
    lm.discard(2)
    assert torch.equal(lm.forward([Feed(0, 0, text[:3], 3)]), alone[:3])
    lm.forward([Feed(1, 0, [9] * 20, 1)])
    lm.forward([Feed(1, 20, [9, 7, 9], 1), Feed(0, 3, text[3:5], 2)])
    assert lm.failed == {1}
    with monkeypatch.context() as patch:
        patch.setattr(llamacpp.library().functions, "llama_decode", lambda *_: -3)
        with pytest.raises(RuntimeError, match="computed nothing"):
            lm.forward([Feed(0, 5, text[5:9], 1), Feed(1, 0, [9], 1)])
    lm.discard(1)
    lm.forward([Feed(1, 0, [9] * 45, 1)])
    assert len(made) > 2
    assert torch.equal(lm.forward([Feed(0, lm.cached(0), text[lm.cached(0) :], 20)]), alone[-20:])


def test_forwards_have_as_many_rows_as_equal_bits_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: products of fewer than eight rows, and of those behind the last four; and of rows beside a text's."""
    right = DeterministicLlamaRunner._computed

    def by_fours(runner: DeterministicLlamaRunner, parts: Sequence[SequenceRun]) -> torch.Tensor:
        rows = right(runner, parts)
        whole = len(rows) // 4 * 4 if len(rows) >= 8 else 0
        return torch.cat((rows[:whole], rows[whole:] * 1.001))

    monkeypatch.setattr(DeterministicLlamaRunner, "_computed", by_fours)
    lm = load_alike(build(config("llama")), tmp_path)
    assert lm.info.deterministic
    text = [1 + at % 9 for at in range(30)]
    assert torch.equal(lm.forward([Feed(0, 0, text, 25)]), steps(lm, 1, text)[5:])


@pytest.mark.parametrize("fault", ["beside", "32 rows", "64 rows"])
def test_rows_that_are_never_alike_are_refused(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: those beside another text's, and those of products that a library for long ones takes."""
    right = DeterministicLlamaRunner._computed

    def otherwise(runner: DeterministicLlamaRunner, parts: Sequence[SequenceRun]) -> torch.Tensor:
        rows, count = right(runner, parts), sum(len(part.tokens) for part in parts)
        differ = len(parts) > 1 if fault == "beside" else count >= int(fault[:2])
        return rows * 1.001 if differ else rows

    monkeypatch.setattr(DeterministicLlamaRunner, "_computed", otherwise)
    made = config("llama")
    made.max_position_embeddings = 400
    with pytest.raises(ModelError, match=r"deterministic: this build of llama.cpp rounds a row of model\.gguf by what"):
        load(build(made), tmp_path, deterministic=True)


def test_a_prefix_that_cannot_be_copied_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load_alike(build(config("llama")), tmp_path)
    text = [1 + at % 9 for at in range(30)]
    alone = steps(lm, 0, text)
    with monkeypatch.context() as patch:
        patch.setattr(llamacpp.library().functions, "llama_state_seq_set_data", lambda *_: 0)
        with pytest.raises(RuntimeError, match="cannot put back what sequence 1 held"):
            lm.copy(0, 1, 20)
    assert lm.cached(1) == 0
    assert torch.equal(lm.forward([Feed(1, 0, text, 30)]), alone)


@torch.no_grad()
def spoilt(model: PreTrainedModel) -> PreTrainedModel:
    """Behind the first layer token 7, and only that, is beyond float32."""
    model.get_parameter(EMBEDDING)[:, 31] = torch.arange(VOCABULARY) == 7
    model.get_parameter("model.layers.0.self_attn.o_proj.weight")[31] = 0
    for name in ("gate", "up"):
        model.get_parameter(f"model.layers.0.mlp.{name}_proj.weight")[0, 31] = 1e25
    return model


def test_a_text_whose_logits_are_not_finite_harms_no_other(tmp_path: Path) -> None:
    model = spoilt(build(config("llama")))
    lm = load(model, tmp_path)
    text = [1, 2, 3, 4, 5]
    lm.forward([Feed(0, 0, text, 0)])
    rows = lm.forward([Feed(1, 0, [9, 7, 9], 1), Feed(0, 5, [6], 1)])
    assert lm.failed == {1}
    assert (lm.cached(0), lm.cached(1)) == (6, 0)
    torch.testing.assert_close(rows[1], plain(model, [*text, 6])[-1], atol=1e-4, rtol=1e-4)
    # The cells that held it are taken by others, and masked for some.
    for slot, tokens in ((2, [10, 11, 12, 13]), (1, [20, 21]), (0, [*text, 6, 8])):
        start = lm.cached(slot)
        (row,) = lm.forward([Feed(slot, start, tokens[start:], 1)])
        assert lm.failed == frozenset()
        torch.testing.assert_close(row, plain(model, tokens)[-1], atol=1e-4, rtol=1e-4)


def test_what_the_demo_pair_is_told_by_its_file(tmp_path: Path) -> None:
    path = written(DRAFT, tmp_path / "demo.gguf")
    info, own = (
        load_model(path, slots=1, context=64, runtime=LLAMACPP).info,
        load_model(str(DRAFT), slots=1, context=64).info,
    )
    assert info.vocabulary_fingerprint == own.vocabulary_fingerprint
    assert (info.vocabulary, info.eos_ids, info.context) == (own.vocabulary, own.eos_ids, 64)
    assert (info.name, info.runtime, info.architecture, info.dtype) == ("demo", "llamacpp", "llama", "f32")
    assert info.weights_fingerprint != own.weights_fingerprint


def test_a_tokenizer_that_makes_other_tokens_than_llama_cpp_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, right = written(DRAFT, tmp_path / "demo.gguf"), GgufWeights.tokens
    monkeypatch.setattr(GgufWeights, "tokens", lambda weights, text: [*right(weights, text), 0])
    assert load_model(path, slots=1, context=64, runtime=LLAMACPP).info.tokenizer_json == b""


def test_ids_without_a_token_are_masked(tmp_path: Path) -> None:
    made = config("llama")
    made.vocab_size = 4096 + 64
    path = write(build(made), tmp_path / "a.gguf", tokenizer=DRAFT / "tokenizer.json", padding=64)
    lm = load_model(path, slots=1, runtime=LLAMACPP)
    assert lm.info.vocabulary == 4096
    assert lm.forward([Feed(0, 0, [5], 1)]).shape == (1, 4096)
    with pytest.raises(ValueError, match="tokens: id 4100 is outside"):
        lm.forward([Feed(0, 0, [4100], 1)])


def test_slots_are_as_many_as_fit_into_the_memory(tmp_path: Path) -> None:
    model = build(config("llama"))
    slot = CONTEXT * 2 * 2 * 2 * 8 * 4
    assert load(model, tmp_path, kv_memory=3 * slot).slots == 3
    with pytest.raises(ModelError, match="kv_memory: "):
        load(model, tmp_path, kv_memory=slot - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:0"}, "device: is not served with llamacpp; a file's layers go to a GPU by --gpu-layers"),
        ({"quantization": "int8"}, "quantization: is not served"),
        ({"deterministic": True, "gpu_layers": 3}, "deterministic: is not served by llamacpp with gpu-layers 3"),
        ({"deterministic": True, "kv_type": "f32"}, "deterministic: is not served by llamacpp with kv-type f32"),
        ({"compiled": True}, "compile: is not served"),
        ({"heads": "self:exit=1"}, "heads: is not served"),
        ({"engine": "vllm"}, "engine: is not served"),
        ({"gpu_layers": 3}, "gpu-layers: this build of llama.cpp has no GPU to take 3 layers"),
        ({"slots": 300}, "slots: llama.cpp holds 256 texts at most, not 300"),
        ({"kv_type": "q8_0"}, "kv-type: q8_0 needs heads of a multiple of 32 elements, not of 8"),
        ({"context": 49}, "context: the model was made for 48 positions, not 49"),
    ],
)
def test_what_it_is_not_served_with_is_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(write(build(config("llama")), tmp_path / "a.gguf"), **{"slots": 1, "runtime": LLAMACPP, **options})


@pytest.mark.parametrize("named", ["position_embd.weight", "rope_factors_long.weight"])
def test_rows_behind_a_text_need_positions_behind_it(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a table of them lacks, and cells turn otherwise."""
    path = write(build(config("llama")), tmp_path / "a.gguf")
    file = read_gguf(path)
    told = replace(file, tensors={**file.tensors, named: StoredTensor((4,), 0, 0)})
    monkeypatch.setattr("specwire.lm.pretrained.read_gguf", lambda _: told)
    with pytest.raises(ModelError, match=r"deterministic: is not served by llamacpp with the positions of a\.gguf"):
        load_model(path, slots=1, runtime=LLAMACPP, deterministic=True)


@pytest.mark.parametrize("options", [{"runtime": "llamacpp"}, {"kv_type": "f16"}, {"gpu_layers": 1}])
def test_its_options_are_for_its_files(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is for \.gguf files"):
        load_model(save(build(config("llama")), tmp_path), slots=1, **options)


def test_a_runner_that_disagrees_with_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = llamacpp.LlamaBatch.filled

    def wrong(batch: llamacpp.LlamaBatch, runs: Sequence[SequenceRun], count: int) -> Any:
        return right(
            batch, [run._replace(tokens=[1] * len(run.tokens)) if run.position else run for run in runs], count
        )

    monkeypatch.setattr(llamacpp.LlamaBatch, "filled", wrong)
    with pytest.raises(ModelError, match=r"model\.gguf gives other logits in pieces than llama\.cpp gives at once"):
        load(build(config("llama")), tmp_path)


def test_a_forward_that_fails_in_the_trial_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp.library().functions, "llama_decode", lambda *_: -3)
    with pytest.raises(ModelError, match=r"model\.gguf cannot be served: llama\.cpp computed nothing \(status -3\)"):
        load(build(config("llama")), tmp_path)


@pytest.mark.parametrize(
    ("told", "answer", "message"),
    [
        ("llama_model_is_recurrent", True, "this llama model has recurrent layers, whose state cannot be rolled back"),
        ("llama_model_is_hybrid", True, "this llama model has recurrent layers"),
        ("llama_model_is_diffusion", True, "this llama model writes by diffusion"),
        ("llama_model_has_encoder", True, "llama models have an encoder"),
    ],
)
def test_models_without_positions_to_go_back_to_are_refused(
    told: str, answer: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llamacpp.library().functions, told, lambda _: answer)
    with pytest.raises(ModelError, match=message):
        load(build(config("llama")), tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# On real files the trial takes them as they are, and refuses what would be computed otherwise.

POSITIONS, KV = 768, "f16"
Change = Callable[[pytest.MonkeyPatch], None]


class RealFile:
    """A real model's weights, and its trial: of one text at once, and a runner in pieces."""

    def __init__(self, name: str) -> None:
        self.file = read_gguf(real_model(name))
        self.weights = GgufWeights(self.file)
        self.sizes = Sizes(2, POSITIONS, self.weights.width)
        self.trial = gguf_trial(self.weights, self.file, self.sizes, KV)

    def deviation(self, weights: GgufWeights | None = None) -> float:
        threads = torch.get_num_threads()
        return self.trial.deviation(self.runner(weights or self.weights, threads), 2)

    def runner(self, weights: GgufWeights, threads: int) -> LlamaCppRunner:
        return LlamaCppRunner(weights, self.file, self.sizes, KV, threads)


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest) -> Iterator[RealFile]:
    """Give each real file, with a trial of one thread: two would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield RealFile(request.param)
    torch.set_num_threads(before)


def test_a_real_file_is_taken_and_takes_trees(real: RealFile) -> None:
    runner = real.runner(real.weights, 1)
    assert 0 <= real.trial.deviation(runner, 2) < 0.8
    assert 0 <= real.trial.tree_deviation(runner, 2) < 0.8


def wrong_base(patch: pytest.MonkeyPatch) -> None:
    """Positions are turned by the usual base, not by the model's."""
    right = LlamaCppRunner._parameters

    def parameters(runner: LlamaCppRunner, *args: Any) -> Any:
        made = right(runner, *args)
        made.rope_freq_base = 10_000.0
        return made

    patch.setattr(LlamaCppRunner, "_parameters", parameters)


def stale_row(patch: pytest.MonkeyPatch) -> None:
    """A rollback leaves one row too many, and what follows stands one position too late."""
    remove = LlamaMemory.remove
    one_position_later(patch)
    patch.setattr(LlamaMemory, "remove", lambda memory, slot, start: remove(memory, slot, start + (start > 0)))


@pytest.mark.parametrize("fault", [wrong_base, stale_row])
def test_a_fault_is_beyond_the_tolerance(real: RealFile, fault: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert real.deviation() > 1


def one_position_later(patch: pytest.MonkeyPatch) -> None:
    filled = LlamaBatch.filled

    def later(batch: LlamaBatch, runs: Sequence[SequenceRun], count: int) -> Any:
        return filled(batch, [run._replace(position=run.position + (run.position > 0)) for run in runs], count)

    patch.setattr(LlamaBatch, "filled", later)


def test_a_window_that_is_ignored_is_beyond_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RealFile(GEMMA)
    assert real.weights.window == 512
    llama = real.weights.library.functions
    changed = (llama.llama_model_kv_override * 2)()
    changed[0].key, changed[0].tag, changed[0].value.val_i64 = b"gemma3.attention.sliding_window", 0, POSITIONS
    default = llama.llama_model_default_params

    def parameters() -> Any:
        made = default()
        made.kv_overrides = ctypes.cast(changed, type(made.kv_overrides))
        return made

    with monkeypatch.context() as patch:
        patch.setattr(llama, "llama_model_default_params", parameters)
        whole = GgufWeights(real.file)
    assert whole.window == POSITIONS
    assert real.deviation(whole) > 1
