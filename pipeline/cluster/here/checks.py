"""What a process must be, and have, for any work to be done in it or given to processes that it starts."""

from __future__ import annotations

import multiprocessing
import os
import resource

from tilewright.pipeline.cluster.here.worker import dask_is_there
from tilewright.pipeline.errors import ClusterError

FILES_A_WORKER, OTHER_FILES = 12, 32
"""Open files that a worker process takes in the process that starts it, at most, and that the rest of a cluster and its
work do. Measured with 1 to 16 workers: 11.2 of each worker and 24 others."""

UNGUARDED = (
    "worker processes import the script that starts them, so its work has to stand under"
    ' `if __name__ == "__main__":`'
)

_used_by: set[int] = set()
"""Processes that have opened a cluster: this one, and those that it was forked from."""


def check_not_forked() -> None:
    """Raise ClusterError in a process that was forked from one that had used Dask, or worked. Its threads are not here:
    Dask waits for good for the one that unpacks large messages, as do we for one that was just importing Numba, and
    Zarr for that which reads."""
    lost = False
    if dask_is_there():
        from distributed import utils

        lost = any(not thread.is_alive() for thread in utils._offload_executor._threads)
    if lost or _used_by - {os.getpid()}:
        raise ClusterError(
            f"process {os.getpid()} was forked from one that had used Dask, whose threads a fork leaves behind; start"
            ' it by spawn or forkserver, as in multiprocessing.get_context("spawn"), or before Dask is used'
        )
    _used_by.add(os.getpid())


def check_not_started_by_workers(called: str) -> None:
    """Raise ClusterError in a process that imports the script which started it: its own workers would import it once
    more, and so on; the first process would wait for all of them."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ClusterError(f"{called}: {UNGUARDED}")


def check_folder(called: str) -> None:
    """Raise ClusterError where no process can be started, and no loop compiled: Dask hangs for good there, and Numba
    fails."""
    try:
        os.getcwd()
    except OSError as error:
        raise ClusterError(
            f"{called}: its workers cannot start in the working directory, which was removed or may not be read"
            f" ({error.strerror}); change to another one (cd), and run it again"
        ) from error


def allow_open_files(workers: int) -> None:
    """Let this process have as many files open as so many worker processes take: their pipes and connections, where
    Dask hangs for good once there are no more. Python gives each process what it was started with, often 1,024.

    workers: 0 where the one worker is in this process.

    Raises
    ------
    ClusterError
        The system allows fewer.
    """
    needed = _open_files() + OTHER_FILES + FILES_A_WORKER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        who = f"{workers} worker process{'es' * (workers > 1)}" if workers else "a worker in this process"
        fewer = ", or set n_workers, in a profile, to fewer" if workers else ""
        raise ClusterError(
            f"{who} would need about {needed} open files, and the system allows {hard}; raise that (ulimit -Hn){fewer}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))
