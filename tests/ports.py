"""Ports for what must be told one, or come back at its own: nobody else gets them, neither by chance nor on purpose.

A port that was bound as 0 and let go may be given to any connection of the machine a moment later. These lie below
those that the kernel gives away (32768 to 60999 by default), and no two processes of these tests own the same.
"""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterator

# A node of a Redis cluster also listens on its port + 10000, which none of these is.
FIRST, LAST, BLOCK = 12_000, 22_000, 50
# Of a process's own ports, before the first are used again.
MOST = 1000


def _claimed() -> Iterator[range]:
    """Blocks of ports that are this process's for as long as it lives: the kernel forgets their names with it."""
    for first in random.SystemRandom().sample(range(FIRST, LAST, BLOCK), (LAST - FIRST) // BLOCK):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0specwire-tests-ports-{first}")
        except OSError:
            name.close()
        else:
            _names.append(name)
            yield range(first, first + BLOCK)
    raise RuntimeError("other tests own all ports")


def _listens(port: int) -> bool:
    """Whether somebody is there who is no test of ours, or one of ours still."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


_names: list[socket.socket] = []
_own = itertools.cycle(itertools.islice(itertools.chain.from_iterable(_claimed()), MOST))


def free_port(row: int = 1) -> str:
    """A port that nobody listens on, nor will but by this process; the first of `row` such ones."""
    fits = (port for port in _own if port % BLOCK + row <= BLOCK and not any(map(_listens, range(port, port + row))))
    first = next(fits)
    for _ in range(row - 1):
        next(_own)
    return str(first)


def free_address() -> str:
    """As HOST:PORT."""
    return f"127.0.0.1:{free_port()}"
