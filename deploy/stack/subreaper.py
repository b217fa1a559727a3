"""Replace this process by a command that gets a signal when its parent ends, and that adopts the orphans below it.

Run by path: ``python -I subreaper.py PARENT_PID SIGNAL COMMAND [ARGUMENT ...]``, SIGNAL 0 for none. A program of its
own, because the child itself must make both settings, and code between fork and exec in a parent with threads may
deadlock. Both survive the exec.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if os.getppid() != parent:  # it died before the first call
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
