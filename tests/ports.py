"""Ports for services that must be told one, or come back at their own: nothing else gets them.

A port that was bound as 0 and let go may be given to any connection of the machine a moment later. These lie below
those that the kernel gives away (32768 to 60999 by default), and no two processes of these tests own the same.
"""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterator

# Ray has 10002 to 19999 for its workers, as far as nobody says otherwise.
BLOCK = 50
ANY = range(23_000, 30_000, BLOCK)
# A node of a Redis cluster also listens on its port + 10000: those ports are nobody else's, either.
PAIRED, BUS = range(20_000, 22_500, BLOCK), 10_000
# Of a process's own ports, before the first are used again.
MOST = 1000


def _claimed(blocks: range) -> Iterator[range]:
    """Blocks of ports that are this process's for as long as it lives: the kernel forgets their names with it."""
    for first in random.SystemRandom().sample(blocks, len(blocks)):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0specwire-tests-ports-{first}")
        except OSError:
            name.close()
        else:
            _names.append(name)
            yield range(first, first + BLOCK)
    raise RuntimeError("other tests own all ports")


def _owned(blocks: range) -> Iterator[int]:
    return itertools.cycle(itertools.islice(itertools.chain.from_iterable(_claimed(blocks)), MOST))


def _listens(port: int) -> bool:
    """Whether something listens there, a foreign process or an old one of ours."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


_names: list[socket.socket] = []
_any, _paired = _owned(ANY), _owned(PAIRED)


def free_port(row: int = 1) -> str:
    """A port that nobody listens on, nor will but by this process; the first of `row` such ones."""
    fits = (port for port in _any if port % BLOCK + row <= BLOCK and not any(map(_listens, range(port, port + row))))
    first = next(fits)
    for _ in range(row - 1):
        next(_any)
    return str(first)


def free_cluster_port() -> str:
    """Likewise, with the one that a node of a Redis cluster takes beside it."""
    return str(next(port for port in _paired if not _listens(port) and not _listens(port + BUS)))


def free_address() -> str:
    """As HOST:PORT."""
    return f"127.0.0.1:{free_port()}"
