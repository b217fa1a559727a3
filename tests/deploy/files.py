"""The files below deploy/ that other programs read: where they are, and the commands of ours that stand in them."""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
# What begins a command of ours, where a container's image begins it itself.
NAMES = ("verify", "draft", "orchestrate", "edge", "deploy")


def documents(file: Path) -> list[dict[str, Any]]:
    """Of a YAML file, each a mapping."""
    found = list(yaml.safe_load_all(file.read_text()))
    assert found, file
    assert all(isinstance(each, dict) for each in found), file
    return found


def manifests() -> list[Path]:
    """What is applied on Kubernetes; not what kustomize or specwire itself reads."""
    return sorted(each for each in KUBERNETES.rglob("*.yaml") if each.name not in ("kustomization.yaml", "config.yaml"))


def units() -> list[Path]:
    return sorted((DEPLOY / "systemd").glob("*.service"))


def unit(file: Path) -> configparser.ConfigParser:
    """Options keep their case; one that stands there several times has its last value."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(file.read_text())
    return parser


def mappings(value: object) -> Iterator[dict[str, Any]]:
    """All mappings in a document, however deep."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from mappings(each)


def commands() -> Iterator[tuple[Path, list[str]]]:
    """Each of our command lines after `specwire`, with the file that has it."""
    for file in [*manifests(), DEPLOY / "compose/compose.yaml"]:
        for document in documents(file):
            for each in mappings(document):
                words = each.get("args") or each.get("command")
                if isinstance(words, list) and words and words[0] in NAMES:
                    yield file, words
    for file in units():
        words = unit(file)["Service"]["ExecStart"].split()
        assert words[0].endswith("/specwire"), file
        yield file, words[1:]
    for file in sorted((DEPLOY / "docker").iterdir()):
        entry, default = (json.loads(found) for found in instructions(file, "ENTRYPOINT") + instructions(file, "CMD"))
        assert entry == ["specwire"], file
        yield file, default


def instructions(file: Path, name: str) -> list[str]:
    """The arguments of each such instruction of a Dockerfile, lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", file.read_text()))
    return re.findall(rf"(?m)^{name} (.*)$", text)
