"""A terminal taken as a whole, for a command that shows the same again and again."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

ALTERNATE, NORMAL = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
QUIT = b"qQ"


@contextmanager
def whole_screen() -> Iterator[None]:
    """A screen of our own, without a cursor; afterwards there is the one from before."""
    try:
        sys.stdout.write(ALTERNATE)
        yield
    finally:
        sys.stdout.write(NORMAL)
        sys.stdout.flush()


@contextmanager
def quit_key(stop: asyncio.Event) -> Iterator[None]:
    """Where there is a keyboard, q sets `stop`; what else is typed meanwhile is not shown."""
    if not sys.stdin.isatty():
        yield
        return
    keyboard, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def on_key() -> None:
        typed = os.read(keyboard, 64)
        if not typed or any(key in QUIT for key in typed):  # nothing: the terminal is gone
            stop.set()

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, on_key)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
