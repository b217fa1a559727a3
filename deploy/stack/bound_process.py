"""Replace this process by a command that gets a signal when its parent ends, however that ends.

Run by path: ``python -I bound_process.py PARENT_PID SIGNAL COMMAND [ARGUMENT ...]``. A program of its own, because the
child itself must make the setting, and code between fork and exec in a parent with threads may deadlock. It survives
the exec.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it died before that
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
