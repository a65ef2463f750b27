"""What Dask preloads in each worker process that is started here: none outlives the process that started it.

Dask's own watch, a thread at the end of a pipe, ends a worker whose nanny is gone, within milliseconds. It cannot where
no thread runs: in a process that is stopped, or one in which a library holds Python's lock for good.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
from typing import Any

logger = logging.getLogger(__name__)

NAME = __name__
"""What it is preloaded by."""

PR_SET_PDEATHSIG = 1


def dask_setup(worker: Any) -> None:
    """Have Linux kill this process once the thread that started it has ended, in whatever state it is then.

    That thread is one of the nanny's, and ends behind the process that it watches, or with the nanny's own process. A
    nanny that was gone before this call is for Dask's watch, which has begun by then.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0):
        logger.debug("a stopped worker may outlive this one's nanny: error %d", ctypes.get_errno())
