"""OpenVINO behind the same interface: the same logits, the same refusals of what it cannot serve."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.core.messages import MOST_WINDOW
from specwire.lm import Feed, LanguageModel, ModelError, load_model
from specwire.lm.kv_cache import CachedLM, Sizes, position_bytes
from specwire.lm.runners.openvino.graph import (
    GRAIN,
    MOST_PRICE,
    CompiledGraph,
    PagedGraph,
    SteadyRows,
    compile_options,
    computed_in,
    name_ports,
    price_of_change,
    traced,
)
from specwire.lm.runners.openvino.runner import OpenvinoRunner, rounds_activations
from specwire.lm.runners.select import How, runner_for
from tests.lm.models import CONTEXT, ROTARY, TOLERANCE, VOCABULARY, build, config, plain, save
from tests.lm.walk import Texts

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["llama", "llama-biased-tied", "mistral", "qwen2", "qwen3"]
SLOTS = 3
# Of logits of a few units, as `specwire.lm.model_config` has it.
BFLOAT16_TOLERANCE = 1 / 16


def _load(model: PreTrainedModel, folder: Path, slots: int = SLOTS, dtype: str = "float32") -> LanguageModel:
    lm = load_model(save(model, folder), slots=slots, dtype=dtype, runtime="openvino")
    assert isinstance(lm, CachedLM)
    assert isinstance(lm.runner, OpenvinoRunner)
    return lm


@pytest.mark.parametrize(("padding", "twice"), [(0, True), (20, True), (20, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_interleaving_of_extend_and_rollback_gives_the_plain_forward(
    kind: str, padding: int, twice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled twice, and once, as large graphs are."""
    monkeypatch.setattr("specwire.lm.runners.openvino.graph.price_of_change", lambda _: padding)
    if not twice:
        monkeypatch.setattr("specwire.lm.runners.openvino.graph.MOST_COPIED_BYTES", 0)
    model = build(config(kind))
    texts = Texts(model, _load(model, tmp_path), seed=len(kind))
    for _ in range(60):
        texts.step()


@pytest.fixture(params=["as this processor computes it", "without bfloat16"])
def tolerance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of a model in bfloat16 against its rounded weights in float32: float32's, where that is what is computed in."""
    if request.param == "without bfloat16":
        monkeypatch.setattr("specwire.lm.runners.openvino.graph.computed_in", lambda _: torch.float32)
        return TOLERANCE
    return BFLOAT16_TOLERANCE if computed_in(torch.bfloat16) == torch.bfloat16 else TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_bfloat16_too_within_its_tolerance(kind: str, tolerance: float, tmp_path: Path) -> None:
    model = build(config(kind))
    lm = _load(model, tmp_path, dtype="bfloat16")
    with torch.no_grad():
        for weight in model.parameters():  # not the rotations, which stay in float32
            weight.copy_(weight.bfloat16())
    texts = Texts(model, lm, seed=len(kind), tolerance=tolerance, copies=False)
    for _ in range(30):
        texts.step()
    assert lm.info.dtype == "bfloat16"


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32])
def test_memory_for_keys_and_values_is_counted_in_what_they_are_kept_in(
    kv_dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bfloat16 is not computed half as many slots fit, on torch too if OpenVINO has been given the choice."""
    monkeypatch.setattr("specwire.lm.runners.openvino.graph.computed_in", lambda _: kv_dtype)
    folder, slot = save(build(config("gpt2")), tmp_path), CONTEXT * position_bytes(config("gpt2"), torch.float32)
    lm = load_model(folder, slots=1, dtype="bfloat16", runtime="auto", kv_memory=2 * slot)
    assert lm.slots == (4 if kv_dtype == torch.bfloat16 else 2)
    assert load_model(folder, slots=1, dtype="bfloat16", kv_memory=2 * slot).slots == 4


@pytest.mark.skipif(platform.machine() != "x86_64", reason="OV_CPU_MAX_ISA is of x86-64")
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE"])
def test_processors_without_bfloat16_serve_its_weights_in_float32(instructions: str, tmp_path: Path) -> None:
    """OpenVINO held to such a processor, in a process of its own: loading compares the logits with the model's."""
    folder = save(build(config("qwen3")), tmp_path)
    code = (
        "import torch; from specwire.lm import load_model; from specwire.lm.runners.openvino.graph import computed_in\n"
        "from specwire.lm.runners.openvino.runner import rounds_activations\n"
        "assert computed_in(torch.bfloat16) == torch.float32, computed_in(torch.bfloat16)\n"
        "assert not rounds_activations()  # that takes VNNI\n"
        "for quantization in ('none', 'int8'):\n"
        f"    lm = load_model({folder!r}, slots=1, dtype='bfloat16', runtime='openvino', quantization=quantization)\n"
        "    told = lm.info.dtype, lm.info.runtime, lm.info.quantization\n"
        "    assert told == ('bfloat16', 'openvino', quantization), lm.info"
    )
    _run(code, OV_CPU_MAX_ISA=instructions)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ONEDNN_MAX_CPU_ISA is of x86-64")
def test_bfloat16_is_native_where_the_processor_has_instructions_for_it() -> None:
    own = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
    code = "from specwire.lm import native_dtype; assert native_dtype() == '{}'"
    _run(code.format(own), ONEDNN_MAX_CPU_ISA="ALL")
    _run(code.format("float32"), ONEDNN_MAX_CPU_ISA="AVX2")


def _run(code: str, **environment: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=ROOT, env={**os.environ, **environment})


@pytest.mark.parametrize(("copied", "rows"), [(1 << 20, [4, 4, 1, 4, 1, 2, 1]), (0, [4, 4, 4, 2, 2, 2, 2])])
def test_padding_is_computed_beside_what_was_asked_for(
    copied: int, rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows, then windows of two: they keep to four until a change is cheaper. Where a plain step has a compilation
    of its own it is not padded.
    """
    monkeypatch.setattr("specwire.lm.runners.openvino.graph.price_of_change", lambda _: 5)
    monkeypatch.setattr("specwire.lm.runners.openvino.graph.MOST_COPIED_BYTES", copied)
    seen: list[int] = []
    place = PagedGraph._place

    def watched(self: PagedGraph, sequences: Sequence[Feed], feeds: Sequence[Feed]) -> None:
        seen.append(sum(len(each.tokens) for each in sequences))
        place(self, sequences, feeds)

    model = build(config("llama"))
    lm = _load(model, tmp_path)
    text = [1, 3, 9, 4]
    for _ in range(8):  # until the trial's rows are forgotten
        lm.forward([Feed(1, 0, text, 1)])
    monkeypatch.setattr(PagedGraph, "_place", watched)
    lm.forward([Feed(0, 0, text, 1)])
    for tokens in ([6, 2], [6], [6, 5], [7], [6, 9], [2]):
        logits = lm.forward([Feed(0, len(text), tokens, len(tokens))])
        text += tokens
        torch.testing.assert_close(logits, plain(model, text)[-len(tokens) :], atol=TOLERANCE, rtol=TOLERANCE)
    assert seen == rows


@pytest.mark.parametrize("window", [2, 4])
def test_tokens_of_a_window_are_sequences_of_their_own(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's stay together; logits are the plain forward's, beside another session."""
    given: list[list[int]] = []
    place = PagedGraph._place

    def watched(self: PagedGraph, sequences: Sequence[Feed], feeds: Sequence[Feed]) -> None:
        given.append([len(each.tokens) for each in sequences if each.slot != self._padding])
        place(self, sequences, feeds)

    model = build(config("llama"))
    lm = _load(model, tmp_path)
    monkeypatch.setattr(PagedGraph, "_place", watched)
    text, other = [1, 3, 9, 4], [7, 2]
    lm.forward([Feed(0, 0, text, 1), Feed(1, 0, other, 1)])
    fresh = [6, 2, 8, 5][:window]
    logits = lm.forward([Feed(0, len(text), fresh, window), Feed(1, len(other), [3], 1)])
    assert given == [[4, 2], [1] * (window + 1)]
    wanted = torch.cat([plain(model, text + fresh)[-window:], plain(model, [*other, 3])[-1:]])
    torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_shortest_context_has_no_room_for_padding(tmp_path: Path) -> None:
    model = build(config("llama"))
    lm = load_model(save(model, tmp_path), slots=1, context=2, runtime="openvino")
    logits = lm.forward([Feed(0, 0, [4, 7], 2)])
    torch.testing.assert_close(logits, plain(model, [4, 7]), atol=TOLERANCE, rtol=TOLERANCE)
    assert not lm.branches


def check_products(dtype: str, quantization: str) -> None:
    """Skips where the processor's kernels do not multiply a row beside others as they do it alone."""
    if quantization == "int8-dynamic":
        if not rounds_activations():
            pytest.skip("needs VNNI, without which int8-dynamic is refused (test_int8.py)")
        return
    layer, x = nn.Linear(256, 320, bias=False), torch.randn(40, 256)
    graph = traced(layer, (x,))
    name_ports(graph, [("x", (-1, 256))], ["y"])
    compiled = CompiledGraph(graph, compile_options(computed_in(getattr(torch, dtype)), 1))

    def product(rows: torch.Tensor) -> torch.Tensor:
        compiled.give("x", rows.numpy())
        compiled.request.infer()
        return torch.tensor(compiled.request.get_tensor("y").data)

    together = product(x)
    if not all(torch.equal(together, torch.cat([*map(product, x.split(count))])) for count in (1, 2, 5, MOST_WINDOW)):
        pytest.skip(f"this processor multiplies several rows of {dtype} otherwise than one")


def test_weights_of_16_bits_are_multiplied_in_float32(tmp_path: Path) -> None:
    model = build(config("qwen3"))
    how: Any = {"runtime": "openvino", "quantization": "bfloat16"}
    lm = load_model(save(model, tmp_path), slots=2, **how)
    assert (lm.info.dtype, lm.info.quantization) == ("float32", "bfloat16")
    assert lm.kv_bytes == load_model(str(tmp_path), slots=2, dtype="float32", runtime="openvino").kv_bytes
    for weights in model.parameters():
        weights.data = weights.data.bfloat16().float()
    texts = Texts(model, lm, seed=3)
    for _ in range(20):
        texts.step()
    with pytest.raises(ModelError, match="quantization: bfloat16 keeps weights of float32's arithmetic, not of bfloat"):
        load_model(str(tmp_path), slots=2, dtype="bfloat16", **how)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(dtype, kept) for dtype in ("float32", "bfloat16") for kept in ("none", "int8-dynamic")]
    + [("float32", "bfloat16")],
)
def test_windows_and_other_sessions_change_no_bit(dtype: str, quantization: str, threads: int) -> None:
    """So a text is the same with drafting as without, whoever else is served, and however long it is."""
    check_products(dtype, quantization)
    how: Any = {"dtype": dtype, "quantization": quantization, "runtime": "openvino", "threads": threads}
    lm = load_model(str(DRAFT), slots=3, context=256, **how)
    text = [(7 * index * index + 3) % lm.info.vocabulary for index in range(200)]
    for begin in (5, 60, 130):  # of one page of keys and values, of two, of several
        lm.discard(0)
        lm.forward([Feed(0, 0, text[:begin], 1)])
        plain = torch.cat([lm.forward([Feed(0, at, [text[at]], 1)]).clone() for at in range(begin, begin + 34)])
        for window in (2, 3, 4, 8, MOST_WINDOW + 1):
            lm.rollback(0, begin)
            found = []
            for at in range(begin, begin + 34, window):
                part = text[at : min(at + window, begin + 34)]
                beside = [Feed(1, lm.cached(1), text[at : at + 1], 1)]
                lm.discard(2)
                prompt = [Feed(2, 0, text[: at // 2], 1)]
                feeds = [Feed(0, at, part, len(part)), *beside * (at % 2), *prompt * (at % 3 == 0)]
                found.append(lm.forward(feeds)[: len(part)].clone())
            assert torch.equal(torch.cat(found), plain), window


@pytest.mark.parametrize("taps", [False, True])
def test_a_window_behind_a_prompt_s_last_tokens_has_its_own_rows(taps: bool, tmp_path: Path) -> None:
    """Where one token of a prompt was left: its row is wanted, and those of the window; others feed beside it."""
    model, text, other = build(config("llama")), [1, 3, 9, 4, 7, 2, 6, 5, 8, 1, 4], [7, 2, 9]
    folder = save(model, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(folder)
    runner = OpenvinoRunner(whole, 3, 32, VOCABULARY, torch.float32, 1, taps=(0, 1) if taps else ())
    expected = runner.run([Feed(2, 0, text, len(text))]).clone()
    states = runner.tapped.clone()
    for prompt, wanted in ((6, 6), (6, 5), (6, 1), (5, 8), (2, 10)):
        runner.run([Feed(0, 0, text[: prompt - 2], 1), Feed(1, 0, other[:-1], 1)])
        feeds = [Feed(1, 2, other[2:], 1), Feed(0, prompt - 2, text[prompt - 2 :], wanted, rows=len(text) - prompt)]
        got = runner.run(feeds)
        torch.testing.assert_close(got[1:], expected[-wanted:], atol=TOLERANCE, rtol=TOLERANCE)
        assert len(got) == 1 + wanted
        if taps:
            torch.testing.assert_close(runner.tapped[1:], states[prompt - 2 :], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("quantization", ["none", "int8-dynamic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_fed_anew_is_computed_to_the_bit_however_its_prompt_is_cut(dtype: str, quantization: str) -> None:
    """As by a verifier that takes over from one that was lost, or behind a beginning that another text left."""
    check_products(dtype, quantization)
    how: Any = {"dtype": dtype, "quantization": quantization, "runtime": "openvino", "threads": 2}
    lm = load_model(str(DRAFT), slots=1, context=256, **how)
    text = [(7 * index * index + 3) % lm.info.vocabulary for index in range(200)]
    for prompt in (1, 2, 40, 100):
        found = []
        for cuts in ([200], [prompt, 200], [2, 37, 99, 150, 200], [prompt // 2 + 1, 200], [*range(1, 200, 7), 200]):
            lm.discard(0)
            start, last = 0, torch.empty(0)
            for stop in cuts:
                rows = max(0, stop - max(start, prompt))
                begin = start - (stop - start - rows == 1 and start > 0)
                last = lm.forward([Feed(0, begin, text[begin:stop], 1, rows=rows)]).clone()
                start = stop
            found.append(last)
        lm.rollback(0, prompt)
        steps = [lm.forward([Feed(0, at, text[at : at + 1], 1)]).clone() for at in range(prompt, 200)]
        assert all(torch.equal(steps[-1], each) for each in found), prompt


def test_the_weights_fingerprint_is_that_of_torch_and_the_runtime_is_named(tmp_path: Path) -> None:
    folder = save(build(config("llama")), tmp_path)
    for dtype in ("float32", "bfloat16"):
        ours = load_model(folder, slots=1, dtype=dtype, runtime="openvino").info
        torchs = load_model(folder, slots=1, dtype=dtype).info
        assert ours.weights_fingerprint == torchs.weights_fingerprint
        assert (ours.runtime, torchs.runtime) == ("openvino", "torch")


def test_far_positions_are_told_apart_in_bfloat16() -> None:
    """Their angles are more than bfloat16 can hold; rounded to it, logits are off by as much as they are large.

    Torch in bfloat16 comes as near to float32 as what is asked for here.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    lm = load_model(str(TARGET), slots=1, dtype="bfloat16", runtime="openvino")
    text = [id_ for prompt in held_out_prompts()[:12] for id_ in _encoded(lm, prompt.text)][:1200]
    lm.forward([Feed(0, 0, text[:-8], 0)])
    logits, expected = lm.forward([Feed(0, len(text) - 8, text[-8:], 8)]), plain(model, text)[-8:]
    assert len(text) == 1200
    assert float((logits - expected).abs().max()) <= 2 * BFLOAT16_TOLERANCE * float(expected.abs().max())


def _encoded(lm: LanguageModel, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_str(lm.info.tokenizer_json.decode()).encode(text).ids
    return ids[-128:]


def test_what_openvino_cannot_serve_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = save(build(config("llama")), tmp_path)
    with pytest.raises(ModelError, match="runtime: openvino computes in float32 or bfloat16, not in float16"):
        load_model(folder, slots=1, dtype="float16", runtime="openvino")
    with pytest.raises(ModelError, match="runtime: openvino computes on cpu here, not on meta"):
        with torch.device("meta"):
            unplaced = build(config("llama"))
        runner_for(unplaced, Sizes(1, 48, VOCABULARY), How("openvino"))
    with pytest.raises(ModelError, match=r"openvino serves the Llama family \(.*\), not GPT2LMHeadModel"):
        load_model(save(build(config("gpt2")), tmp_path / "gpt2"), slots=1, runtime="openvino")
    with pytest.raises(ModelError, match="runtime: must be one of torch, openvino, llamacpp, auto, not 'onnx'"):
        load_model(folder, slots=1, runtime="onnx")


def test_a_rotation_that_depends_on_the_length_is_refused(tmp_path: Path) -> None:
    rotation = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    folder = save(build(LlamaConfig(**ROTARY, rope_parameters=rotation)), tmp_path)
    with pytest.raises(ModelError, match="openvino cannot run this LlamaForCausalLM: rotation dynamic"):
        load_model(folder, slots=1, runtime="openvino")
    assert load_model(folder, slots=1, runtime="auto").info.runtime == "torch"


def test_it_is_imported_only_where_it_was_asked_for(tmp_path: Path) -> None:
    folder = save(build(config("llama")), tmp_path)
    code = (
        "import sys; from specwire.lm import load_model\n"
        f"load_model({folder!r}, slots=1); assert 'openvino' not in sys.modules\n"
        f"load_model({folder!r}, slots=1, runtime='openvino'); assert 'openvino' in sys.modules"
    )
    _run(code)


def test_auto_takes_torch_where_openvino_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(build(config("llama")), tmp_path)
    assert load_model(folder, slots=1, runtime="auto").info.runtime == "openvino"
    monkeypatch.setitem(sys.modules, "specwire.lm.runners.openvino.runner", None)
    assert load_model(folder, slots=1, runtime="auto").info.runtime == "torch"
    with pytest.raises(ModelError, match=r"openvino is not installed \(pip install 'specwire\[openvino\]'\)"):
        load_model(folder, slots=1, runtime="openvino")


class Broken(ModuleType):
    """A module of an installation that does not fit: what is asked of it fails as the library that it lacks."""

    def __getattr__(self, name: str) -> object:
        raise OSError(f"{self.__name__}.so.1: cannot open shared object file")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_takes_torch_where_openvino_is_broken(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("runner", "graph"):
        monkeypatch.setitem(sys.modules, f"specwire.lm.runners.openvino.{name}", Broken("openvino"))
    folder = save(build(config("llama")), tmp_path)
    assert load_model(folder, slots=1, dtype=dtype, runtime="auto").info.runtime == "torch"
    with pytest.raises(ModelError, match=r"runtime: openvino cannot be imported: openvino\.so\.1: cannot open"):
        load_model(folder, slots=1, dtype=dtype, runtime="openvino")


def test_a_model_on_which_they_disagree_is_refused_and_served_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(build(config("llama")), tmp_path)
    right = OpenvinoRunner.run
    monkeypatch.setattr(OpenvinoRunner, "run", lambda self, feeds: 1.01 * right(self, feeds))
    with pytest.raises(ModelError, match="runtime: openvino gives other logits than this LlamaForCausalLM"):
        load_model(folder, slots=1, runtime="openvino")
    assert load_model(folder, slots=1, runtime="auto").info.runtime == "torch"


def test_a_signal_is_survived_when_another_thread_has_dropped_the_last_model(tmp_path: Path) -> None:
    """In a process of its own: signals are a whole process's, and without this it dies of one."""
    script = """
        import gc, os, signal, sys, threading
        from specwire.lm import load_model

        held = [load_model(sys.argv[1], slots=1, dtype="float32", runtime="openvino")]

        def drop():
            held.clear()
            gc.collect()

        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
        signal.signal(signal.SIGTERM, lambda *_: print("handled"))
        os.kill(os.getpid(), signal.SIGTERM)
    """
    folder = save(build(config("llama")), tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), folder],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "handled\n"), ended.stderr


# ----------------------------------------------------------------------------------------------------------------------
# Rows of padding against changes of shape, by numbers.


@pytest.mark.parametrize(
    ("price", "needed", "computed"),
    [
        (8, (4, 1, 1, 1, 1, 4, 4, 3, 3), [4, 4, 4, 1, 1, 4, 4, 4, 4]),  # until it has cost what a change costs
        (8, (8, 1, 8, 1, 8, 1, 8, 1), [8] * 8),  # a full forward begins the count anew
        (8, (9, 9, 9, 9, 9, 9), [12, 12, 9, 9, 9, 9]),  # who is needed all the time has nothing from padding
        (0, (7, 1, 512, 3, 3), [7, 1, 512, 3, 3]),
    ],
)
def test_padding_is_kept_while_it_is_cheaper_than_a_change(
    price: int, needed: Sequence[int], computed: list[int]
) -> None:
    steady = SteadyRows(price)
    assert [steady.shape(rows) for rows in needed] == computed


@pytest.mark.parametrize(
    ("price", "needed", "computed"),
    [(GRAIN, (1, 3, 4, 5, 17, 512), [1, 3, 4, 8, 20, 512]), (GRAIN - 1, (5, 17), [5, 17])],
)
def test_a_growth_is_to_a_multiple_where_a_change_costs_as_much(
    price: int, needed: Sequence[int], computed: list[int]
) -> None:
    assert [SteadyRows(price).shape(rows) for rows in needed] == computed


@pytest.mark.parametrize("price", [0, 3, 16])
def test_never_fewer_rows_than_needed_nor_more_padding_than_the_price(price: int) -> None:
    chance, steady = random.Random(price), SteadyRows(price)
    for _ in range(500):
        needed = chance.randint(1, 40)
        assert needed <= steady.shape(needed) <= needed + price


class Runtime:
    """Seconds of a forward: so much per row, so much where the shape is another than before."""

    def __init__(self, row: float, change: float) -> None:
        self.row, self.change, self.last = row, change, 0

    def time(self, rows: int) -> float:
        seconds = 1.0 + self.row * rows + (self.change if rows != self.last else 0.0)
        self.last = rows
        return seconds


@pytest.mark.parametrize(
    ("row", "change", "price"),
    [(0.125, 1.0, 8), (0.125, 0.0, 0), (4.0, 1.0, 0), (0.0, 1.0, MOST_PRICE), (0.0, 0.0, 0), (0.001, 10.0, MOST_PRICE)],
)
def test_the_price_is_measured_in_rows(row: float, change: float, price: int) -> None:
    assert price_of_change(Runtime(row, change).time) == price
