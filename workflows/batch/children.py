"""Processes that end with the one that starts them, also where that one is killed.

Slurm kills the processes of a job whose script has ended only where it tracks them by control groups. By the tree of
processes it loses those whose parent has gone: a scheduler and a command would go on for good, with the lock of C.

A process asks for that itself, before it becomes the command: whatever Python runs between a fork and an exec, as
``preexec_fn`` of `subprocess`, may collect garbage there, and what is collected may be of a library with threads, or of
a GPU's driver, which a forked process must not call.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
"""Linux's call for it, as prctl(2) numbers it."""


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """A command as this process is to start it, so that the system kills it when this process ends.

    On systems without such a call it is started as it is; Slurm has none of them.
    """
    # Of itself, in 20 ms: without the package, without what the environment adds to Python's paths.
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended just now
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
