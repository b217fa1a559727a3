"""Writes build/docs/API.md from the sources of the wire and the docstrings of the Python client.

python -m scripts.api --write    write it
python -m scripts.api --check    write nothing; fail where it cannot be written
"""

from __future__ import annotations

import sys

from scripts import api_client, api_wire
from scripts.pages import BUILT, ROOT, asked_to_write, build

PAGE = BUILT / "API.md"
PROTOCOL = ROOT / "proto" / "PROTOCOL.md"
HEAD = """\
<!-- Written by scripts/api.py from proto/specwire/v1 and the docstrings of specwire.client; do not edit. -->
# API reference

Two ways in, beside [HTTP](../../docs/HTTP.md): gRPC, from any language ([the wire](#the-wire),
[statuses](#statuses)), and [Python](#the-python-client). [PROTOCOL.md](../../proto/PROTOCOL.md) says what the messages
mean together, their order and arithmetic. [examples/](../../examples/README.md) has clients that run, and calls by
server reflection, which need none of these files. A client needs `GenerationService` alone, an operator's program
`StatusService`; the rest is for those who write a drafter, a verifier or an orchestrator.
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
    build(PAGE, page(), write=asked_to_write(__doc__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
