"""The command blocks of README and docs, and the marks that excuse one from being run.

A block of commands is fenced and says what it is: `sh` (commands), `console` (commands behind `$ `, each with exactly
what it prints), `python` (a program). It is run by tests/integration/test_documents.py, unless the line before it is
a mark with the reason:

    <!-- needs: what a machine that runs tests lacks -->
    <!-- runs: how long -->
    <!-- shown: why it is no block of its own -->

Other languages, and blocks that are indented, are no commands, and a command in one is a mistake.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "$ "
RUN = ("sh", "console", "python")
NOT_RUN = ("yaml", "json", "text", "mermaid")
MARK = re.compile(r"<!-- (needs|runs|shown): (\S.*) -->")
# What an indented line or one of another language must not begin with.
COMMAND = re.compile(
    r"\s*(?:\$ )?(?:specwire|make|curl|pip|openssl|python3?|\.venv/bin/\w+|grpcurl|npm|docker) [\w'\"./-]"
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. line: of its fence, from 1. kind: of the mark that excuses it, "" where it is to be run."""

    page: str
    line: int
    language: str
    text: str
    kind: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language in RUN and not self.kind

    def commands(self) -> list[str]:
        """Each of a shell's commands, on a line of its own."""
        if self.language == "python":
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]
        return [line for line in lines if line.strip() and not line.startswith("#")]


def pages() -> list[Path]:
    """Every page that people read."""
    places = (
        "*.md",
        "docs/*.md",
        "examples/**/*.md",
        "demo_pair/*.md",
        "proto/*.md",
        "deploy/**/*.md",
        "bench/**/*.md",
    )
    found = {path for place in places for path in ROOT.glob(place) if "node_modules" not in path.parts}
    return sorted(found - {ROOT / "CHANGELOG.md"})


def blocks_of(page: Path) -> list[Block]:
    """A page's fenced blocks; ValueError names the line of one that does not end."""
    name, found = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name, list[Block]()
    lines = page.read_text().splitlines()
    begun: tuple[int, str] | None = None
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if begun is None:
            begun = number, line.removeprefix("```")
            continue
        first, language = begun
        mark = MARK.fullmatch(_before(lines, first))
        text = "\n".join(lines[first : number - 1]) + "\n"
        found.append(Block(name, first, language, text, *(mark.groups() if mark else ("", ""))))
        begun = None
    if begun is not None:
        raise ValueError(f"{name}:{begun[0]}: this block does not end")
    return found


def _before(lines: list[str], fence: int) -> str:
    """The last line with something on it before the fence of that number."""
    return next((line for line in reversed(lines[: fence - 1]) if line.strip()), "")


def stray_commands(page: Path) -> list[str]:
    """Lines of commands that stand in no block which would be run."""
    found, language = list[str](), ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            language = "" if language else line.removeprefix("```") or "none"
        elif language not in RUN and (language or line.startswith("    ")) and COMMAND.match(line):
            found.append(f"{page.name}:{number}: {line.strip()}")
    return found


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks_of(page)]


def summary(blocks: list[Block]) -> str:
    """How many are run, and each that is not, with its reason."""
    excused = [block for block in blocks if block.kind]
    lines = [f"{len([block for block in blocks if block.is_run])} blocks of commands run, {len(excused)} excused"]
    return "\n".join([*lines, *(f"  {block.name}: {block.kind}: {block.reason}" for block in excused)])


if __name__ == "__main__":
    print(summary(all_blocks()))
