"""deploy.stack.stack: what a start tells its user, and how many bytes of models have come into the hub's cache."""

from __future__ import annotations

import io
import json
import runpy
from pathlib import Path

import pytest
from huggingface_hub import constants

from deploy.stack.stack import FetchProgress, StartProgress, hub_cache
from specwire.progress import LastLine, ProgressBar

MODEL = "maker/large"


def kept(cache: Path, model: str, name: str, size: int) -> Path:
    """A file of the model's, as the hub's library keeps it, or begins to."""
    blob = cache / f"models--{model.replace('/', '--')}" / "blobs" / name
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(b"\1" * size)
    return blob


def index(cache: Path, model: str, content: object) -> None:
    file = cache / f"models--{model.replace('/', '--')}" / "snapshots" / "1234" / "model.safetensors.index.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(content))


def test_what_comes_is_counted(tmp_path: Path) -> None:
    kept(tmp_path, MODEL, "before", 1_000_000)
    fetching = FetchProgress([MODEL, MODEL, "scripted:7", "/a/folder", "maker/here"], tmp_path)
    assert fetching.text() == ""
    coming = kept(tmp_path, MODEL, "0a1b.5c.incomplete", 2_500_000)
    assert fetching.text() == "2.5 MB fetched"
    coming.rename(coming.with_name("0a1b"))
    kept(tmp_path, "maker/other", "ffff", 9_000_000)
    assert fetching.text() == "2.5 MB fetched"


def test_of_so_much_where_a_list_says_it(tmp_path: Path) -> None:
    fetching = FetchProgress([MODEL, "maker/small"], tmp_path)
    kept(tmp_path, MODEL, "first.incomplete", 1_500_000)
    index(tmp_path, MODEL, {"metadata": {"total_size": 4_000_000_000}})
    assert fetching.text() == "1.5 MB of 4.00 GB fetched"
    kept(tmp_path, "maker/small", "weights", 1_000_000)
    assert fetching.text() == "2.5 MB fetched"


@pytest.mark.parametrize("content", [[], {"metadata": None}, {"metadata": {"total_size": "much"}}])
def test_a_list_that_says_nothing(content: object, tmp_path: Path) -> None:
    fetching = FetchProgress([MODEL], tmp_path)
    kept(tmp_path, MODEL, "first", 1_500_000)
    index(tmp_path, MODEL, content)
    assert fetching.text() == "1.5 MB fetched"


def test_a_file_written_in_several_places_counts_as_what_is_there(tmp_path: Path) -> None:
    fetching = FetchProgress([MODEL], tmp_path)
    with kept(tmp_path, MODEL, "sparse.incomplete", 1_000_000).open("r+b") as blob:
        blob.truncate(1 << 40)
    assert float(fetching.text().removesuffix(" MB fetched")) < 2


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"XDG_CACHE_HOME": "/x"},
        {"HF_HOME": "$HOME/h"},
        {"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/old"},
        {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HUB_CACHE": "~/new"},
    ],
)
def test_the_cache_is_where_the_library_has_it(named: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert str(hub_cache()) == runpy.run_path(constants.__file__)["HF_HUB_CACHE"]


def test_the_bar_tells_it(tmp_path: Path) -> None:
    bar = ProgressBar("starting", 2, line=LastLine(io.StringIO))
    told = StartProgress(bar, FetchProgress([MODEL], tmp_path))
    told("verifier: loading maker/large")
    kept(tmp_path, MODEL, "weights", 3_000_000)
    told.tick()
    assert bar.text(3.0).endswith("] 0/2  0:03  loading verifier, 3.0 MB fetched")
    told("verifier: ready")
    assert bar.text(4.0).endswith("] 1/2  0:04, 0:04 left")


def test_lines_are_said_and_move_the_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar("starting", 2, line=LastLine(io.StringIO))
    told = StartProgress(bar, FetchProgress([], tmp_path))
    told("starting Ray")
    told("verifier: loading models/large")
    told("drafter-2: loading models/small")
    assert bar.text(3.0).endswith("] 0/2  0:03  loading drafter-2, verifier")
    told("drafter-2: ready after 1.0 s")
    told("drafter-2: ready")
    assert bar.text(4.0).endswith("] 1/2  0:04, 0:04 left  loading verifier")
    assert capsys.readouterr().err.splitlines()[:2] == [
        "specwire: starting Ray",
        "specwire: verifier: loading models/large",
    ]
