"""specwire.corpus: the texts of files, and which files of a folder are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specwire.core.model import ModelError
from specwire.corpus import files_of, texts_of

READ = (
    "README.rst NOTES.MD app.js app.tsx main.go Main.java list.c list.h list.cpp lib.rs Program.cs task.rb index.php "
    "run.sh schema.sql deploy.yaml Cargo.toml package.json index.html style.css src/deep/deadlock.py"
)
LEFT_OUT = (
    "package-lock.json deep/pnpm-lock.yaml Cargo.lock app.min.js style.min.css data.csv model.bin notebook.ipynb "
    "LICENSE node_modules/left/index.js .venv/lib/module.py deep/.cache/page.html .secrets.yaml"
)


def test_texts_come_from_files_lines_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "two"}) + "\n\n" + json.dumps({"text": "three"}) + "\n")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert list(texts_of([tmp_path, tmp_path / "a.txt"])) == ["one", "two", "three", "one"]
    (tmp_path / "d.jsonl").write_text("{}")
    with pytest.raises(ModelError, match="d.jsonl: cannot be read"):
        list(texts_of([tmp_path]))


def test_what_people_write_in_a_repository_is_read_and_what_programs_write_there_is_not(tmp_path: Path) -> None:
    """Unless it is named."""
    for number, name in enumerate([*READ.split(), *LEFT_OUT.split()]):
        folder = tmp_path / str(number)
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("text")
        assert files_of(folder) == ([folder / name] if name in READ.split() else []), name
        assert list(texts_of([folder / name])) == ["text"], name


def test_a_folder_may_be_named_like_a_file_or_lie_in_a_hidden_one(tmp_path: Path) -> None:
    inside = tmp_path / ".work" / "three.js"
    inside.mkdir(parents=True)
    (inside / "scene.js").write_text("text")
    assert files_of(tmp_path / ".work") == [inside / "scene.js"]


def test_what_links_have_lie_outside_of_a_folder_is_not_read(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "shared", tmp_path / "secret"
    for each in (folder / "deep", elsewhere):
        each.mkdir(parents=True)
        (each / "text.txt").write_text(each.name)
    (folder / "file.txt").symlink_to(elsewhere / "text.txt")
    (folder / "relative.txt").symlink_to(Path("../secret/text.txt"))
    (folder / "folder.txt").symlink_to(elsewhere)
    (folder / "inside.txt").symlink_to(Path("deep/text.txt"))
    (tmp_path / "named").symlink_to(folder)
    for named in (folder, tmp_path / "named"):
        assert list(texts_of([named])) == ["deep", "deep"]
    assert list(texts_of([folder / "file.txt"])) == ["secret"]
