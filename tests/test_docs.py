"""README and docs say what is there: blocks are marked or run, command lines parse, files exist.

What blocks of commands do is asked by tests/integration/test_documents.py, what stands in tables that scripts write by
`make lint`.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from deploy.cli import main as cli
from deploy.settings import COMMANDS, actions_of
from scripts import api, cli_reference
from scripts.cli_reference import parser_of
from tests.documents import NOT_RUN, RUN, all_blocks, blocks_of, pages, stray_commands, summary

ROOT = Path(__file__).resolve().parent.parent
PAGES = pages()
BLOCKS = all_blocks()
# Pages of `make docs`, which are under no version control: what it would write now.
GENERATED = {api.PAGE: api.page(), cli_reference.PAGE: cli_reference.page()}
MOST_COLUMNS = 120
SOURCES = (".py", ".proto", ".yaml", ".yml", ".service", ".json")
FOLDERS = "proto|specwire|draft_service|verify_service|orchestrator|deploy|demo_pair|bench|scripts|docs|tests|examples"


def text_of(page: Path) -> str:
    return GENERATED[page] if page in GENERATED else page.read_text()


def command_lines() -> list[str]:
    """Every `specwire ...` line, those of blocks too that are not run."""
    return [line for block in BLOCKS for line in block.commands() if line.startswith("specwire ")]


@pytest.mark.parametrize("line", sorted(set(command_lines())))
def test_command_lines_parse(line: str) -> None:
    """As far as argparse: unknown options and missing arguments exit with 2 before anything is started."""
    words = shlex.split(line, comments=True)[1:]
    assert cli.parse(words).command == words[0]


def test_the_readme_has_commands() -> None:
    assert len([block for block in BLOCKS if block.page == "README.md" and block.is_run]) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    assert stray_commands(page) == []
    for block in blocks_of(page):
        assert block.language in (*RUN, *NOT_RUN), f"{block.name}: a block says what it is"
        assert not block.kind or block.language in RUN, f"{block.name}: there is nothing to excuse"


def test_few_blocks_are_excused() -> None:
    """More than half, and the pages would be promises."""
    excused = [block for block in BLOCKS if block.kind]
    assert 2 * len(excused) <= len([block for block in BLOCKS if block.language in RUN])
    told = summary(BLOCKS)
    assert f"{len(excused)} excused" in told
    assert all(f"{block.name}: {block.kind}: {block.reason}" in told for block in excused)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("    specwire up\n", ["page.md:1: specwire up"]),
        ("```text\n$ make test\n```\n", ["page.md:2: $ make test"]),
        ("```\ncurl http://x\n```\n", ["page.md:2: curl http://x"]),
        ("```sh\nspecwire up\n```\n", []),
        ("specwire up is a command\n    specwire: ready\n", []),
    ],
)
def test_commands_that_nothing_would_run_are_found(text: str, found: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert stray_commands(page) == found


def test_a_mark_belongs_to_the_block_behind_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- needs: a GPU -->\n\n```sh\na\n```\n\n```console\n$ b \\\n  c\nd\n```\n\n```sh\n")
    with pytest.raises(ValueError, match=r"page.md:13: this block does not end"):
        blocks_of(page)
    page.write_text(page.read_text().removesuffix("```sh\n"))
    first, second = blocks_of(page)
    assert (first.kind, first.reason, first.is_run, first.commands()) == ("needs", "a GPU", False, ["a"])
    assert (second.kind, second.is_run, second.commands()) == ("", True, ["b    c"])


@pytest.mark.parametrize("page", [*PAGES, *GENERATED], ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """Links to files, and paths in backticks that begin with one of our folders."""
    text = text_of(page)
    paths = set(re.findall(rf"`((?:{FOLDERS})/[\w/.]*)`", text))
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    missing = {p for p in paths if not (ROOT / p).exists()}
    missing |= {link for link in links if not Path(os.path.normpath(page.parent / link)).exists()}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)", page.read_text())
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """What a link into the page may name behind its #: headings, as they are written there by whoever shows pages."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *GENERATED], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", text_of(page))
    local = [(link, anchor) for link, anchor in links if "://" not in link]
    missing = [
        f"{link}#{anchor}" for link, anchor in local if anchor not in anchors(page.parent / link if link else page)
    ]
    assert not missing


def test_pages_that_sources_name_exist() -> None:
    sources = [path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    own = [path for path in sources if "node_modules" not in path.parts and path != Path(__file__)]
    named = {(path, page) for path in own for page in re.findall(r"\b(?:docs/)?[A-Z][A-Z_]+\.md\b", path.read_text())}
    there = {page.name for page in [*PAGES, *GENERATED, ROOT / "CHANGELOG.md"]}
    assert not [(path, page) for path, page in named if page.removeprefix("docs/") not in there]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    """Rows of tables are left out, because they cannot be broken."""
    lines = enumerate(page.read_text().splitlines(), 1)
    assert [number for number, line in lines if len(line) > MOST_COLUMNS and not line.startswith("|")] == []


def known_options() -> set[str]:
    """Of the command line, and of the programs of bench/, tests/ and demo_pair/ as their sources have them."""
    found = {option for each in COMMANDS for action in actions_of(parser_of(each)) for option in action.option_strings}
    programs = [path for place in ("bench", "demo_pair", "tests") for path in (ROOT / place).rglob("*.py")]
    return found.union(*(re.findall(r'"(--[a-z][a-z-]+)"', path.read_text()) for path in programs))


def test_named_options_exist() -> None:
    known, wrong = known_options(), []
    for page in PAGES:
        if page.name != "LOG.md":  # it tells of what was given up, too
            named = re.findall(r"`(?:specwire [a-z]+ )?(--[a-z][a-z-]+)", page.read_text())
            wrong += [f"{page.name}: {option}" for option in named if option not in known]
    assert not wrong


def test_the_file_tree_is_true() -> None:
    tree = (ROOT / "README.md").read_text().partition("## Where things are")[2]
    parent = ""
    for indent, name in re.findall(r"^(    (?:  )?)([\w]+)/\s", tree, re.MULTILINE):
        parent = name if len(indent) == 4 else parent
        path = ROOT / name if len(indent) == 4 else ROOT / parent / name
        assert path.is_dir(), path


def test_every_page_is_found_from_the_readme() -> None:
    """By links, over any number of pages."""
    seen, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        waiting += [page.parent / link for link in links if "://" not in link]
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= {page.name for page in seen}
