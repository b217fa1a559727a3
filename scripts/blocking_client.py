"""Writes specwire/client/blocking.py from aio.py: without `async` and `await`, and with other names in a few places.

python -m scripts.blocking_client --write    write it
python -m scripts.blocking_client --check    exit 1 where it is not what aio.py gives
"""

from __future__ import annotations

import re
import subprocess
import sys

from scripts.pages import ROOT, asked_to_write

SOURCE = ROOT / "specwire/client/aio.py"
WRITTEN = ROOT / "specwire/client/blocking.py"
NOTE = "# Written by scripts/blocking_client.py from aio.py; do not edit.\n"
# Each stands in aio.py; one that is part of another comes later.
INSTEAD = {
    "The client for asyncio, from which scripts/blocking_client.py writes the blocking one.": "The blocking client.",
    "Make it in a running event loop; close it": "Usable from several threads; close it",
    "AsyncGenerator[Event, None]": "Generator[Event, None, None]",
    "AsyncGenerator": "Generator",
    "aclosing": "closing",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "AsyncClient": "Client",
    "_AsyncEndpoint": "_Endpoint",
    "AsyncStream": "Stream",
    "AsyncUnary": "Unary",
    "EventLoop": "Threads",
    "_loop": "_threads",
    "open_channel": "open_blocking_channel",
    "channel.close(None)": "channel.close()",
}


def blocking(source: str) -> str:
    """The blocking client's text. Raises ValueError where the source lacks a word that is to be replaced."""
    text = re.sub(r"\b(async|await) ", "", source)
    for word, instead in INSTEAD.items():
        text, found = re.subn(rf"(?<!\w){re.escape(word)}(?!\w)", instead, text)
        if not found:
            raise ValueError(f"{SOURCE.name} lacks {word!r}")
    sort = ["check", "--select=I", "--fix-only"]
    return NOTE + _ruff(["format"], _ruff(sort, text))


def _ruff(command: list[str], text: str) -> str:
    """What ruff makes of a file that would stand where the blocking client does."""
    call = [sys.executable, "-m", "ruff", *command, "--quiet", f"--stdin-filename={WRITTEN}", "-"]
    return subprocess.run(call, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    text = blocking(SOURCE.read_text())
    if asked_to_write(__doc__):
        WRITTEN.write_text(text)
        return 0
    if WRITTEN.read_text() == text:
        return 0
    print(f"{WRITTEN.relative_to(ROOT)}: is not what aio.py gives (run python -m scripts.blocking_client --write)")
    return 1


if __name__ == "__main__":
    sys.exit(main())
