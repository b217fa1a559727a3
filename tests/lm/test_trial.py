"""A passed trial is remembered for exactly what was tried; one that failed is not."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from demo_pair import HEAD, TARGET
from specwire.core.model import LLAMACPP, OPENVINO
from specwire.lm import Feed, ModelError, load_model, remembered
from specwire.lm.gguf_weights import cache_folder
from specwire.lm.kv_cache import CachedLM, Runner
from specwire.lm.runners import trial
from specwire.lm.runners.trial import Trial
from tests.lm.gguf_files import write
from tests.lm.models import build, config
from verify_service.engine import calibration
from verify_service.engine.calibration import step_costs

TEXT = [3, 17, 44, 8, 29]
RUNTIMES = [name for name, module in ((OPENVINO, "openvino"), (LLAMACPP, "llama_cpp")) if find_spec(module)]


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Trials that were made; each is worth to be remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "WORTH_BYTES", 0)
    made, held = list[Trial](), Trial.held

    def counted(self: Trial, *args: Any) -> float:
        made.append(self)
        return held(self, *args)

    monkeypatch.setattr(Trial, "held", counted)
    return made


def load(path: str, runtime: str, **options: Any) -> CachedLM:
    lm = load_model(path, runtime=runtime, **{"slots": 2, **options})
    assert isinstance(lm, CachedLM)
    return lm


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def files() -> list[Path]:
    return sorted((cache_folder() / remembered.FOLDER).glob("*"))


def test_the_second_start_tries_nothing_and_is_the_first_one_s_equal(
    tmp_path: Path, tried: list[Trial], runtime: str
) -> None:
    path = write(build(config("llama")), tmp_path / "a.gguf")
    first, second = load(path, runtime), load(path, runtime)
    assert (len(tried), len(files())) == (1, 1)
    assert (second.runner.branches, second.runner.invariant) == (first.runner.branches, first.runner.invariant)
    feed = Feed(1, 0, TEXT, len(TEXT))  # nothing of a trial is in the slots, whether it was made or not
    assert torch.equal(first.forward([feed]).clone(), second.forward([feed]))


def test_the_second_start_has_the_first_one_s_forward_times(
    tmp_path: Path, tried: list[Trial], runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(build(config("llama")), tmp_path / "a.gguf")
    first = load(path, runtime)
    points = step_costs(first).forward.points
    assert len(files()) == 2
    monkeypatch.setattr(calibration, "CHECKED_FACTOR", math.inf)
    monkeypatch.setattr(calibration, "_measured", None)
    found = step_costs(load(path, runtime)).forward.points
    assert [*found] == [*points]
    assert [us / found[1] for us in found.values()] == pytest.approx([us / points[1] for us in points.values()])


@pytest.mark.parametrize("invariant", [True, False])
def test_what_a_trial_found_of_rows_is_remembered(
    tmp_path: Path, tried: list[Trial], runtime: str, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(build(config("llama")), tmp_path / "a.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(Trial, "is_invariant", lambda *_: invariant)
        patch.setattr(Runner, "alike", True)
        load(path, runtime)
    assert load(path, runtime).runner.invariant is invariant
    assert len(tried) == 1


def test_a_runner_that_took_no_trees_is_tried_again(
    tmp_path: Path, tried: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why it took none may have been a matter of the moment."""
    pytest.importorskip("llama_cpp")
    path = write(build(config("llama")), tmp_path / "a.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(Trial, "tree_deviation", lambda *_: 1 / 0)
        assert not load(path, LLAMACPP).runner.branches
    assert load(path, LLAMACPP).runner.branches
    assert (len(tried), len(files())) == (2, 1)


def test_a_head_beside_the_target_has_it_tried_each_time(tried: list[Trial]) -> None:
    """What its first matrix makes of states is in no fingerprint of the model."""
    pytest.importorskip("openvino")
    for _ in range(2):
        load_model(str(TARGET), slots=1, context=64, runtime=OPENVINO, heads=str(HEAD))
    assert (len(tried), files()) == (2, [])


def test_whatever_decides_a_trial_has_it_made_anew(
    tmp_path: Path, tried: list[Trial], runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(build(config("llama")), tmp_path / "a.gguf")
    load(path, runtime)
    load(write(build(config("llama-biased-tied")), tmp_path / "b.gguf"), runtime)
    load(path, runtime, slots=3)
    load(path, runtime, context=40)
    load(path, runtime, **({"kv_type": "f16"} if runtime == LLAMACPP else {"dtype": "bfloat16"}))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    load(path, runtime)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    load(path, runtime)
    monkeypatch.setattr(remembered, "_surroundings", lambda: "another processor")
    load(path, runtime)
    assert len(tried) == len(files()) == 8


def test_code_libraries_and_processor_decide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = remembered._surroundings.__wrapped__
    before = told()
    assert told() == before
    with monkeypatch.context() as patch:
        patch.setattr(remembered, "version", lambda name: f"{name} 99")
        assert told() != before
    (tmp_path / "code.py").write_text("")
    (tmp_path / ".#code.py").symlink_to(tmp_path / "gone")  # an editor's lock
    monkeypatch.setattr(remembered, "CODE", [tmp_path])
    assert told() not in ("", before)
    monkeypatch.setattr(remembered, "CODE", [tmp_path / "gone"])
    with pytest.raises(FileNotFoundError, match="has no code to tell by"):
        told()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_can_only_be_read_is_enough(tmp_path: Path, tried: list[Trial], runtime: str) -> None:
    path = write(build(config("llama")), tmp_path / "a.gguf")
    load(path, runtime)
    files()[0].parent.chmod(0o555)
    load(path, runtime)
    assert len(tried) == 1


def test_a_trial_that_failed_is_made_again(
    tmp_path: Path, tried: list[Trial], runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(build(config("llama")), tmp_path / "a.gguf")
    monkeypatch.setattr(Trial, "deviation", lambda *_: 3.0)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"other logits .*\(3\.0 times the tolerance\)"):
            load(path, runtime)
    assert (len(tried), files()) == (2, [])


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[1]", b"{}", b'{"off": 0.5}'),
        *(b'{"off": %s, "invariant": true}' % off for off in (b"null", b"NaN", b"5")),
    ],
)
def test_what_cannot_be_read_is_no_passed_trial(
    tmp_path: Path, tried: list[Trial], runtime: str, content: bytes
) -> None:
    path = write(build(config("llama")), tmp_path / "a.gguf")
    load(path, runtime)
    (kept,) = files()
    whole = kept.read_bytes()
    kept.write_bytes(content)
    load(path, runtime)
    assert len(tried) == 2
    assert kept.read_bytes() == whole


def test_those_unused_for_longest_go(
    tmp_path: Path, tried: list[Trial], runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "MOST_REMEMBERED", 2)
    path = write(build(config("llama")), tmp_path / "a.gguf")
    load(path, runtime)
    (first,) = files()
    os.utime(first, (1000, 1000))
    load(path, runtime, slots=3)
    load(path, runtime)  # used again, so the other is the older one
    os.utime(next(each for each in files() if each != first), (2000, 2000))
    load(path, runtime, slots=4)
    assert first in files()
    assert (len(tried), len(files())) == (3, 2)


def test_a_small_model_and_one_without_a_folder_are_tried_each_time(
    tmp_path: Path, tried: list[Trial], runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(build(config("llama")), tmp_path / "a.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", path)  # a file, in which nothing can be made
    load(path, runtime)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME")
    load(path, runtime)
    assert len(tried) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "WORTH_BYTES", 64 << 20)
    load(path, runtime)
    assert (len(tried), files()) == (3, [])
