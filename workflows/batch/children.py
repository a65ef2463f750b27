"""Processes that end with the one that starts them, also where that one is killed.

Slurm kills the processes of a job whose script has ended only where it tracks them by control groups. By the tree of
processes it loses those whose parent has gone: a scheduler and a command would go on for good, with the lock of C.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
"""Linux's call for it, as prctl(2) numbers it."""


def ending_with_parent() -> Callable[[], None]:
    """What `subprocess.Popen` is to call in a child of this process: the system kills that when this process ends.

    On systems without such a call it does nothing; Slurm has none of them.
    """
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up before the fork

    def tie() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has ended just now
            os._exit(1)

    return tie
