"""`python -m specwire.text.nursery CONTROL TOKENIZER VOCABULARY EOS...`: where constraints are compiled, and answer.

What a caller sends as a constraint may ask for hours of computing, at the start or at any later token, and the
library's own limits do not notice all of it. So each constrained session has a process of its own, forked from this
one, with a limit for the processor time of every answer and one for memory, which the kernel enforces. This one has the
library and the tokenizer loaded, so that a fork costs milliseconds. CONTROL and TOKENIZER are descriptors: a socket
that brings one for each session, and a file. All end when the service's ends of their sockets are closed.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from typing import Any

import numpy as np

from specwire.core.constraint import Constraint, ConstraintKind
from specwire.core.invalid import InvalidParameter
from specwire.text.constrained import Grammars, Matching
from specwire.text.frames import Lost, receive, send

# Seconds of processor time: for compiling with what there is of the output; for the masks of one window.
COMPILE_S = 2.0
ANSWER_S = 1.0
MOST_MEMORY = 2 << 30


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    vocabulary, *eos_ids = map(int, sys.argv[3:])
    with os.fdopen(int(sys.argv[2]), "rb") as file:
        grammars = Grammars(file.read(), vocabulary, eos_ids)
    grammars.load()
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:  # the service has ended: so do all that were forked
            os.killpg(0, signal.SIGKILL)
        if os.fork() == 0:
            control.close()
            _serve(grammars, fds[0])
            os._exit(0)
        os.close(fds[0])


def _serve(grammars: Grammars, fd: int) -> None:
    """One session, until its service closes it."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        asked, _ = receive(fd)
        _limit(COMPILE_S)
        matching = _begun(grammars, asked, fd)
        while matching is not None:
            _limit(0.0)
            asked, _ = receive(fd)
            _limit(ANSWER_S)
            _answer(matching, asked, fd)
    except Lost:
        return


def _limit(seconds: float) -> None:
    """The kernel ends this process when it has computed for so long; 0: no more."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


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
