"""`make bench-client` weighs what is installed and nothing else, and times processes that end well."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

from bench import client
from bench.client import PAIR, report, seconds_of, weighed
from bench.harness.interval import estimate
from bench.harness.runs import BenchError


def with_package(folder: Path, name: str, **files: int) -> Path:
    """The interpreter of an environment that has one package more: its files and their bytes."""
    venv.create(folder, symlinks=True)
    (place,) = folder.glob("lib/python*/site-packages")
    told = place / f"{name}-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (told / "RECORD").write_text("".join(f"{file}/part.py,,\n" for file in (*files, "gone")))
    for file, size in files.items():
        (place / file).mkdir()
        (place / file / "part.py").write_bytes(b"#" * size)
    return folder / "bin" / "python"


def test_what_is_installed_is_weighed_and_the_demo_pair_apart(tmp_path: Path) -> None:
    python = with_package(tmp_path, "specwire", specwire=100, demo_pair=2000)
    assert weighed(python) == {"specwire": 2100, PAIR: 2000}


def test_a_part_of_a_service_is_named(tmp_path: Path) -> None:
    python = with_package(tmp_path, "torch", torch=1)
    with pytest.raises(BenchError, match="a client brings along torch"):
        weighed(python)


def test_a_process_that_fails_is_no_time() -> None:
    python = Path(sys.executable)
    assert seconds_of(python, "import sys; assert sys.argv[1] == 'x'", "x") > 0
    with pytest.raises(BenchError, match="no address"):
        seconds_of(python, "raise SystemExit('no address')")


def test_its_table_adds_packages_up() -> None:
    told = report({PAIR: 1_000_000, "specwire": 2_000_000, "grpcio": 5_000_000}, {"can call": estimate([0.25] * 6)})
    assert "2 packages" in told
    assert [line.split()[-1] for line in told.splitlines()[1:5]] == ["7.0", "5.0", "2.0", "1.0"]


def test_what_cannot_be_measured_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert client.main(["--runs", "0"]) == 2
    assert "runs: must be at least 1, not 0" in capsys.readouterr().err
