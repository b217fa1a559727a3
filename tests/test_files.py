"""Files that are served are replaced, never changed: whoever has an old one open, or mapped, keeps it whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specwire.files import replaced, replaced_in, write_text
from specwire.lm.heads import eagle3
from specwire.lm.training.loop import Trained, write_record
from tests.lm.heads.by_hand import CONFIG, head_of

Write = Callable[[Path], object]


WRITERS: dict[str, Write] = {
    "EAGLE-3": lambda folder: eagle3.save(head_of(CONFIG), folder, "a target"),
    "a record of a training": lambda folder: write_record(folder, 0, {}, Trained([], [])),
}


@contextmanager
def held(folder: Path) -> Iterator[dict[Path, tuple[int, bytes]]]:
    """What is in the files of a folder, each held open."""
    files = {path: os.open(path, os.O_RDONLY) for path in folder.rglob("*") if path.is_file()}
    try:
        yield {path: (opened, path.read_bytes()) for path, opened in files.items()}
    finally:
        for opened in files.values():
            os.close(opened)


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_again_stays_whole_for_whoever_has_it(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    WRITERS[name](folder)
    with held(folder) as files:
        WRITERS[name](folder)
        assert files
        for path, (opened, content) in files.items():
            assert os.pread(opened, len(content) + 1, 0) == content, path
            assert path.stat().st_ino != os.fstat(opened).st_ino, f"{path} was written in place"
        assert set(folder.rglob("*")) == set(files)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o640)

    with pytest.raises(OSError, match="full"), replaced(path) as beside:
        beside.write_text("half")
        raise OSError("the disk is full")
    with pytest.raises(OSError, match="full"), replaced_in(tmp_path) as folder:
        (folder / "file").write_text("half")
        raise OSError("the disk is full")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
    write_text(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)


def test_a_link_stays_one_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "deep" / "file").read_text() == "text"
    reading, writing = os.pipe()
    write_text(Path(f"/dev/fd/{writing}"), "text")
    os.close(writing)
    assert os.read(reading, 10) == b"text"
    os.close(reading)
