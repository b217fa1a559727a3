"""Writes docs/API.md from the sources of the wire and the docstrings of the Python client.

python -m scripts.api --write    write it
python -m scripts.api --check    exit 1 if the one that is there differs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts import api_client, api_wire

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "API.md"
PROTOCOL = ROOT / "proto" / "PROTOCOL.md"
HEAD = """\
<!-- Written by scripts/api.py from proto/specwire/v1 and the docstrings of specwire.client; do not edit. -->
# API reference

Two ways in, beside [HTTP](HTTP.md): gRPC, from any language ([the wire](#the-wire), [statuses](#statuses)), and
[Python](#the-python-client). What the messages mean together, their order and arithmetic, is in
[PROTOCOL.md](../proto/PROTOCOL.md); clients that run, and calls by server reflection, without any of these files,
are in [examples/](../examples/README.md). A client needs
`GenerationService` alone, an operator's program `StatusService`; the rest is for those who write a drafter, a verifier
or an orchestrator.
"""


def page() -> str:
    """The whole page."""
    wire = f"## The wire\n\nPackage `specwire.v1`.\n\n{api_wire.reference()}"
    statuses = f"## Statuses\n\n{statuses_of(PROTOCOL.read_text())}"
    client = f"## The Python client\n\n{api_client.reference()}"
    return "\n\n".join([HEAD.rstrip(), wire, statuses, client]) + "\n"


def statuses_of(protocol: str) -> str:
    """The section Statuses of PROTOCOL.md; raises ValueError where there is none."""
    _, found, rest = protocol.partition(". Statuses\n")
    if not found:
        raise ValueError("PROTOCOL.md: has no section Statuses")
    return rest.partition("\n## ")[0].strip().replace("(section ", "(PROTOCOL.md, section ")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the page")
    mode.add_argument("--check", action="store_true", help="write nothing; exit 1 on a difference")
    arguments = parser.parse_args()
    if arguments.write:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        print("docs/API.md differs from proto/ or the client's docstrings: run python -m scripts.api --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
