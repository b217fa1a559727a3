"""Which row runs when: each prompt goes through all rows before the next one, and every row gets every turn.

Slow drift of the machine (heat, neighbours) then falls on all rows alike, as do after-effects of the row before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from specwire.progress import LAST_LINE, LastLine, ProgressBar

Turn = TypeVar("Turn")


def schedule(repeats: int, prompts: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield (repeat, prompt, row); the order of the rows rotates from prompt to prompt and from repeat to repeat."""
    for repeat in range(repeats):
        for prompt in range(prompts):
            for turn in range(rows):
                yield repeat, prompt, (turn + prompt + repeat) % rows


def tracked(turns: Iterable[Turn], total: int, what: str = "measuring", line: LastLine = LAST_LINE) -> Iterator[Turn]:
    """The same turns, with a bar in a terminal's last line (`specwire.progress`).

    Each is done once the next one is asked for, so nothing is drawn while one is measured.
    """
    with ProgressBar(what, total, line=line) as bar:
        for turn in turns:
            yield turn
            bar.update()
