"""`python -m specwire.text.nursery CONTROL TOKENIZER VOCABULARY EOS...`: where constraints are compiled, and answer.

The library's own limits do not notice all that a constraint may cost, at the start or at any later token. So each
constrained session has a process of its own (`specwire.text.forkserver`), forked where library and tokenizer are.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import numpy as np

from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.text.constrained import Grammars, Matching
from specwire.text.forkserver import limit, serve
from specwire.text.frames import receive, send

# Seconds of processor time: for compiling with what there is of the output; for the masks of one window.
COMPILE_S = 2.0
ANSWER_S = 1.0
MOST_MEMORY = 2 << 30


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    vocabulary, *eos_ids = map(int, sys.argv[3:])
    with os.fdopen(int(sys.argv[2]), "rb") as file:
        grammars = Grammars(file.read(), vocabulary, eos_ids)
    grammars.load()
    serve(control, lambda fd: _session(grammars, fd), MOST_MEMORY)


def _session(grammars: Grammars, fd: int) -> None:
    """One, until its service closes it. Raises Lost."""
    asked, _ = receive(fd)
    limit(COMPILE_S)
    matching = _begun(grammars, asked, fd)
    while matching is not None:
        limit(0.0)
        asked, _ = receive(fd)
        limit(ANSWER_S)
        _answer(matching, asked, fd)


def _begun(grammars: Grammars, asked: dict[str, Any], fd: int) -> Matching | None:
    constraint = Constraint(ConstraintKind(asked["kind"]), tuple(asked["texts"]))
    try:
        matching = grammars.begin(constraint)
    except InvalidParameter as error:
        send(fd, {"error": str(error).removeprefix(f"{error.field}: ")})
        return None
    send(fd, {"taken": matching.take(asked["output"])})
    return matching


def _answer(matching: Matching, asked: dict[str, Any], fd: int) -> None:
    matching.rollback(asked["back"])
    taken = matching.take(asked["take"])
    masks = [mask for mask in matching.masks(asked["window"]) if mask is not None]
    data = np.packbits(np.stack(masks), axis=1).tobytes() if masks else b""
    send(fd, {"taken": taken, "rows": len(masks), "trouble": matching.trouble}, data)


if __name__ == "__main__":
    main()
