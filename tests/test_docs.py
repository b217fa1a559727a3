"""README and docs say what is there: files exist, command lines parse, the Python example runs."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

import pytest

from deploy import cli
from tests.orchestrator.stack import TARGET, stack

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def command_lines() -> list[str]:
    """Every `specwire ...` line of the README's and the other pages' indented blocks, without its comment."""
    found = [line for page in PAGES for line in re.findall(r"^    (specwire .*)$", page.read_text(), re.MULTILINE)]
    return [line.partition("#")[0].strip() for line in found]


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_parse(line: str) -> None:
    """As far as argparse: unknown options and missing arguments exit with 2 before anything is started."""
    words = shlex.split(line)[1:]
    assert cli.parse(words).command == words[0]


def test_the_readme_has_commands() -> None:
    assert len(command_lines()) >= 6


async def test_the_python_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    async with stack(TARGET) as running:
        source = code.group(1).replace("127.0.0.1:7000", running.client.address)
        await asyncio.to_thread(exec, compile(source, "README.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    """Links to files, and paths in backticks that begin with one of our folders."""
    text = page.read_text()
    folders = "proto|specwire|draft_service|verify_service|orchestrator|deploy|demo_pair|bench|scripts|docs|tests"
    paths = set(re.findall(rf"`((?:{folders})/[\w/.]*)`", text))
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    missing = {p for p in paths if not (ROOT / p).exists()} | {k for k in links if not (page.parent / k).exists()}
    assert not missing


def test_the_file_tree_is_true() -> None:
    tree = README.partition("## Where things are")[2]
    parent = ""
    for indent, name in re.findall(r"^(    (?:  )?)([\w]+)/\s", tree, re.MULTILINE):
        parent = name if len(indent) == 4 else parent
        path = ROOT / name if len(indent) == 4 else ROOT / parent / name
        assert path.is_dir(), path
